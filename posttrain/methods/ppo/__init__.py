"""PPO with a learned value function."""

from posttrain.methods.ppo.config import PPOConfig
from posttrain.methods.ppo.objective import ppo_objective
from posttrain.methods.ppo.trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer", "ppo_objective"]
