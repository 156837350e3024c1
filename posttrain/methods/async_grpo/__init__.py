"""GRPO whose rollouts are written in other processes while the policy trains."""

from posttrain.methods.async_grpo.config import AsyncGRPOConfig
from posttrain.methods.async_grpo.trainer import AsyncGRPOTrainer, async_grpo_objective

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "async_grpo_objective"]
