"""GRPO and its family."""

from posttrain.methods.grpo.config import GRPOConfig
from posttrain.methods.grpo.trainer import GRPOTrainer, grpo_objective

__all__ = ["GRPOConfig", "GRPOTrainer", "grpo_objective"]
