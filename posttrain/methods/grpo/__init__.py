"""GRPO and related losses, such as DAPO, Dr. GRPO, GSPO and CISPO."""

from posttrain.methods.grpo.config import GRPOConfig
from posttrain.methods.grpo.objective import GRPO, grpo_objective

__all__ = ["GRPO", "GRPOConfig", "grpo_objective"]
