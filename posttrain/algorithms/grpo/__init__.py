"""GRPO and its family."""

from posttrain.algorithms.grpo.config import GRPOConfig
from posttrain.algorithms.grpo.objective import grpo_objective
from posttrain.algorithms.grpo.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "grpo_objective"]
