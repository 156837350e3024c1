"""GRPO and its family."""

from posttrain.algorithms.grpo.config import GRPOConfig
from posttrain.algorithms.grpo.trainer import GRPOTrainer, grpo_objective

__all__ = ["GRPOConfig", "GRPOTrainer", "grpo_objective"]
