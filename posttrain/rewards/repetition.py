"""A reward against repeating oneself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.errors import ConfigError

__all__ = ["RepetitionPenalty", "get_repetition_penalty_reward"]


class RepetitionPenalty:
    """``(1 - distinct / all) * max_penalty`` over token n-grams; 0 for texts shorter than one n-gram.

    Args:
        ngram_size: Tokens of an n-gram, at least 1.
        max_penalty: What endless repetition tends to; 0 or below.

    Reference: Demystifying long chain-of-thought reasoning, arXiv:2502.03373, appendix.
    """

    __name__ = "repetition_penalty_reward"

    def __init__(self, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        if ngram_size < 1:
            raise ConfigError(f"ngram_size={ngram_size} must be at least 1.")
        if max_penalty > 0:
            raise ConfigError(f"max_penalty={max_penalty} must not be positive: it is a penalty.")
        self.size, self.penalty = ngram_size, max_penalty

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """One number a completion."""
        return [self._one(ids) for ids in completion_ids]

    def _one(self, ids: Sequence[int]) -> float:
        grams = [tuple(ids[i : i + self.size]) for i in range(len(ids) - self.size + 1)]
        repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
        return repeated * self.penalty if repeated else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """See `RepetitionPenalty`.

    >>> get_repetition_penalty_reward(2)(completion_ids=[[5, 5, 5, 5, 5], [1]])
    [-0.75, 0.0]
    """
    return RepetitionPenalty(ngram_size, max_penalty)
