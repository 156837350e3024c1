"""Built-in reward functions, and `RewardRunner`. The runner calls the reward functions of a run.

Names are imported lazily: a module is loaded when one of its names is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain import plugins

# Names of each module that can be imported from `posttrain.rewards`.
_PUBLIC = {
    "extensions.rewards.code": ("CodeTestsReward", "Limits", "get_code_tests_reward", "run_tests"),
    "rewards.call": ("RewardTable", "parallel"),
    "rewards.format": (
        "get_cosine_scaled_reward",
        "get_repetition_penalty_reward",
        "get_soft_overlong_punishment",
        "think_format_reward",
    ),
    "rewards.math": (
        "accuracy_reward",
        "answers_match",
        "reasoning_accuracy_reward",
    ),
    "rewards.model": ("ModelReward",),
    "rewards.runner": ("RewardRunner",),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(["REWARDS", *_MODULES])


def __getattr__(name: str) -> Any:
    if name == "REWARDS":
        value: Any = _rewards()
    elif name in _MODULES:
        value = getattr(plugins.module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _rewards() -> dict[str, Callable[[], Callable]]:
    """Return functions that create the built-in rewards. The key is the name of the reward on the command line."""
    from posttrain.rewards import format, math

    return {
        "accuracy_reward": lambda: math.accuracy_reward,
        "code_tests_reward": lambda: plugins.module("extensions.rewards.code").get_code_tests_reward(),
        "get_soft_overlong_punishment": lambda: format.get_soft_overlong_punishment(1280, 256),
        "reasoning_accuracy_reward": lambda: math.reasoning_accuracy_reward,
        "repetition_penalty_reward": format.get_repetition_penalty_reward,
        "think_format_reward": lambda: format.think_format_reward,
    }
