"""The calling contract of reward functions, and the functions that ship."""

from __future__ import annotations

from collections.abc import Callable

import posttrain
from posttrain.rewards.call import environment_rewards, parallel
from posttrain.rewards.code import CodeTestsReward, Limits, get_code_tests_reward, run_tests
from posttrain.rewards.format import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)
from posttrain.rewards.math import (
    accuracy_reward,
    answers_match,
    normalize_answer,
    reasoning_accuracy_reward,
    string_match_reward,
)
from posttrain.rewards.model import ModelReward
from posttrain.rewards.pool import pooled
from posttrain.rewards.runner import RewardRunner, RewardTable

# TRL's `rewards.accuracy_rewards` and its like: see `posttrain.compat.paths`.
__path__.append(posttrain.__path__[-1])

__all__ = [
    "REWARDS",
    "CodeTestsReward",
    "Limits",
    "ModelReward",
    "RewardRunner",
    "RewardTable",
    "accuracy_reward",
    "answers_match",
    "environment_rewards",
    "get_code_tests_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "normalize_answer",
    "parallel",
    "pooled",
    "reasoning_accuracy_reward",
    "run_tests",
    "string_match_reward",
    "think_format_reward",
]

# What the command line can name. A name that begins with `get_` is that factory's reward with the constants given here.
REWARDS: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "code_tests_reward": get_code_tests_reward(),
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "repetition_penalty_reward": get_repetition_penalty_reward(),
    "string_match_reward": string_match_reward(),
    "think_format_reward": think_format_reward,
}
