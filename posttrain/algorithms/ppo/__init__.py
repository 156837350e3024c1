"""PPO with a learned value function."""

from posttrain.algorithms.ppo.config import PPOConfig
from posttrain.algorithms.ppo.objective import ppo_objective
from posttrain.algorithms.ppo.trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer", "ppo_objective"]
