"""GRPO whose rollouts are written in other processes while the policy trains."""

from posttrain.methods.async_grpo.config import AsyncGRPOConfig
from posttrain.methods.async_grpo.objective import AsyncGRPO, async_grpo_objective

__all__ = ["AsyncGRPO", "AsyncGRPOConfig", "async_grpo_objective"]
