"""GRPO whose rollouts are written in other processes while the policy trains."""

from posttrain.algorithms.async_grpo.config import AsyncGRPOConfig
from posttrain.algorithms.async_grpo.trainer import AsyncGRPOTrainer, async_grpo_objective

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "async_grpo_objective"]
