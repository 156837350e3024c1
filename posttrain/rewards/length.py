"""Rewards for the length of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.errors import ConfigError

__all__ = ["SoftOverlongPunishment", "get_soft_overlong_punishment"]


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
