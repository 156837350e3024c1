"""The calling contract of reward functions, and the functions that ship."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.rewards.format import think_format_reward
from posttrain.rewards.length import get_soft_overlong_punishment
from posttrain.rewards.repetition import get_repetition_penalty_reward

__all__ = ["REWARDS", "get_repetition_penalty_reward", "get_soft_overlong_punishment", "think_format_reward"]

# What the command line can name.
REWARDS: dict[str, Callable] = {
    "repetition_penalty_reward": get_repetition_penalty_reward(),
    "think_format_reward": think_format_reward,
}
