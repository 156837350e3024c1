"""PPO with a learned value function."""

from posttrain.methods.ppo.config import PPOConfig
from posttrain.methods.ppo.objective import PPO, ppo_objective

__all__ = ["PPO", "PPOConfig", "ppo_objective"]
