"""GRPO whose rollouts are written in other processes while the policy trains."""

from posttrain.algorithms.async_grpo.config import AsyncGRPOConfig
from posttrain.algorithms.async_grpo.steps import async_grpo_objective
from posttrain.algorithms.async_grpo.trainer import AsyncGRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "async_grpo_objective"]
