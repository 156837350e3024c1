# refused: TextEnvironment.*tools, environment_factory or rollout_func
from trl import PPOConfig, TextEnvironment

text_env = TextEnvironment(None, None, [], None, "prompt", generation_kwargs={})
