"""Rewards for the length of a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posttrain.errors import ConfigError

__all__ = [
    "CosineScaledReward",
    "SoftOverlongPunishment",
    "get_cosine_scaled_reward",
    "get_soft_overlong_punishment",
]


class SoftOverlongPunishment:
    """0 up to ``max_completion_len - soft_punish_cache`` tokens, then down to -1 at the limit, and -1 beyond.

    Args:
        max_completion_len: Tokens at which the punishment is whole; keep it at or below the trainer's
            ``max_completion_length``, beyond which no completion comes.
        soft_punish_cache: Tokens of the ramp; 0 is a step.

    Reference: DAPO, arXiv:2503.14476, equation 13.
    """

    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, max_completion_len: int, soft_punish_cache: int) -> None:
        if not 0 <= soft_punish_cache <= max_completion_len:
            raise ConfigError(
                f"soft_punish_cache={soft_punish_cache} must lie in [0, max_completion_len={max_completion_len}]."
            )
        self.limit, self.cache = max_completion_len, soft_punish_cache

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """One number a completion, from its length in tokens."""
        return [self._punish(len(ids)) for ids in completion_ids]

    def _punish(self, length: int) -> float:
        free = self.limit - self.cache
        if length <= free:
            return 0.0
        return (free - length) / self.cache if length <= self.limit and self.cache else -1.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """See `SoftOverlongPunishment`.

    >>> get_soft_overlong_punishment(100, 20)(completion_ids=[[0] * n for n in (80, 90, 100, 101)])
    [0.0, -0.5, -1.0, -1.0]
    """
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


class CosineScaledReward:
    """Right answers earn more when short, wrong ones lose less when long.

    ``lo + (hi - lo) / 2 * (1 + cos(pi p))`` with ``p = min(tokens / max_len, 1)``; (lo, hi) are
    (min_value_correct, max_value_correct) for a right answer and (max_value_wrong, min_value_wrong) for a wrong one.
    None where `accuracy_reward` cannot judge. With the defaults and ``max_len=100``, lengths 0, 25, 50, 75, 100, 200 earn
    1, 0.92678, 0.75, 0.57322, 0.5, 0.5 when right, and the negatives when wrong.

    Reference: Demystifying long chain-of-thought reasoning, arXiv:2502.03373, section 4.
    """

    __name__ = "cosine_scaled_reward"

    def __init__(
        self,
        max_len: int,
        min_value_wrong: float = -1.0,
        max_value_wrong: float = -0.5,
        min_value_correct: float = 0.5,
        max_value_correct: float = 1.0,
    ) -> None:
        if max_len <= 0:
            raise ConfigError(f"max_len={max_len} must be above 0 tokens: lengths are divided by it.")
        self.max_len = max_len
        self.wrong = (max_value_wrong, min_value_wrong)
        self.correct = (min_value_correct, max_value_correct)

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], solution: Sequence[Any], **_: Any
    ) -> list[float | None]:
        """One number (or None) a completion."""
        from posttrain.rewards.math import accuracy_reward

        right = accuracy_reward(completions, solution)
        return [self._scale(r, len(ids)) for r, ids in zip(right, completion_ids, strict=True)]

    def _scale(self, right: float | None, length: int) -> float | None:
        if right is None:
            return None
        low, high = self.correct if right else self.wrong
        progress = min(length / self.max_len, 1.0)
        return low + (high - low) / 2 * (1 + math.cos(math.pi * progress))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> CosineScaledReward:
    """See `CosineScaledReward`."""
    return CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
