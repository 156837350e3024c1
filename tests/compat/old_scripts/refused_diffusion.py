# refused: DDPOConfig.*diffusion models are not trained here
from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
