# refused: generate_rollout_completions.*trainer.engine.generate
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.openenv import generate_rollout_completions


def rollout_func(prompts, trainer):
    return generate_rollout_completions(trainer, prompts)
