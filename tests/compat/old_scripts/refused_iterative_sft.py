# refused: IterativeSFTTrainer.*posttrain.SFTTrainer, once per iteration
from trl import IterativeSFTTrainer

trainer = IterativeSFTTrainer("model")
trainer.step(texts=["a"])
