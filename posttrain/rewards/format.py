"""Rewards for the format and the length of a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posttrain.errors import ConfigError
from posttrain.rewards.texts import CLOSE, OPEN, text_with_reasoning


def think_format_reward(
    completions: Sequence[Any], prompt_suffixes: Sequence[str] | None = None, **_: Any
) -> list[float]:
    """Return 1.0 for a text that begins with ``<think>``, contains ``</think>``, and has no second ``<think>``. Otherwise
    return 0.0.

    Args:
        completions: Strings or lists of messages.
        prompt_suffixes: End of each rendered prompt. Some chat templates for reasoning models end with an open ``<think>``.
            The completion then does not need the tag.

    >>> think_format_reward(["<think>why</think>42", "42", " <think>a</think>"])
    [1.0, 0.0, 0.0]
    >>> think_format_reward(["why</think>42"], prompt_suffixes=["<|assistant|><think>"])
    [1.0]
    """
    texts = [text_with_reasoning(completion) for completion in completions]
    if prompt_suffixes is not None:
        texts = [_opened(suffix) + text for suffix, text in zip(prompt_suffixes, texts, strict=True)]
    return [float(text.startswith(OPEN) and CLOSE in text and text.count(OPEN) == 1) for text in texts]


def _opened(suffix: str) -> str:
    """Return the part of ``suffix`` from an unclosed ``<think>``. If ``suffix`` has no unclosed ``<think>``, return an empty
    string.
    """
    start = suffix.rfind(OPEN)
    return suffix[start:] if start >= 0 and CLOSE not in suffix[start:] else ""


class SoftOverlongPunishment:
    """Penalty for long completions.

    The penalty is 0 for up to ``max_completion_len - soft_punish_cache`` tokens. Then it falls linearly to -1 at
    ``max_completion_len`` tokens. It is -1 for longer completions.

    Args:
        max_completion_len: Number of tokens at which the penalty reaches -1. It should be at most the trainer's
            ``max_completion_length``. Otherwise, no completion would get the full penalty.
        soft_punish_cache: Number of tokens in which the penalty falls from 0 to -1. With 0, the penalty is a step function.

    Reference: DAPO, arXiv:2503.14476, equation 13.
    """

    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, max_completion_len: int, soft_punish_cache: int) -> None:
        if not 0 <= soft_punish_cache <= max_completion_len:
            raise ConfigError(
                f"soft_punish_cache={soft_punish_cache} must be between 0 and max_completion_len={max_completion_len}."
            )
        self.limit, self.cache = max_completion_len, soft_punish_cache

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Return the penalty of each completion. It depends on the number of tokens."""
        return [self._punish(len(ids)) for ids in completion_ids]

    def _punish(self, length: int) -> float:
        free = self.limit - self.cache
        if length <= free:
            return 0.0
        return (free - length) / self.cache if length <= self.limit and self.cache else -1.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """Return a `SoftOverlongPunishment`.

    >>> get_soft_overlong_punishment(100, 20)(completion_ids=[[0] * n for n in (80, 90, 100, 101)])
    [0.0, -0.5, -1.0, -1.0]
    """
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


class CosineScaledReward:
    """Accuracy reward that depends on the length of a completion. Short correct answers get a larger reward than long
    correct answers. Short wrong answers get a smaller reward than long wrong answers.

    The reward is ``lo + (hi - lo) / 2 * (1 + cos(pi * p))`` with ``p = min(tokens / max_len, 1)``. For a correct answer,
    ``lo, hi = min_value_correct, max_value_correct``. For a wrong answer, ``lo, hi = max_value_wrong, min_value_wrong``. If
    `accuracy_reward` returns None, this reward is None too.

    With the defaults and ``max_len=100``, correct answers of 0, 25, 50, 75, 100 and 200 tokens get 1, 0.92678, 0.75,
    0.57322, 0.5 and 0.5. Wrong answers get the negatives of these values.

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
            raise ConfigError(f"max_len={max_len} must be above 0 tokens, because the reward divides lengths by it.")
        self.max_len = max_len
        self.wrong = (max_value_wrong, min_value_wrong)
        self.correct = (min_value_correct, max_value_correct)

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], solution: Sequence[Any], **_: Any
    ) -> list[float | None]:
        """Return a number or None for each completion."""
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
    """Return a `CosineScaledReward`."""
    return CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


class RepetitionPenalty:
    """Penalty ``(1 - distinct / all) * max_penalty`` for repeated n-grams of tokens. Texts shorter than an n-gram get 0.

    Args:
        ngram_size: Number of tokens of an n-gram, at least 1.
        max_penalty: Limit of the penalty for a completion that repeats an n-gram endlessly. It must be 0 or negative.

    Reference: Demystifying long chain-of-thought reasoning, arXiv:2502.03373, appendix.
    """

    __name__ = "repetition_penalty_reward"

    def __init__(self, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        if ngram_size < 1:
            raise ConfigError(f"ngram_size={ngram_size} must be at least 1.")
        if max_penalty > 0:
            raise ConfigError(f"max_penalty={max_penalty} must be 0 or negative, because the reward is a penalty.")
        self.size, self.penalty = ngram_size, max_penalty

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Return one penalty per completion."""
        rewards = []
        for ids in completion_ids:
            grams = [tuple(ids[i : i + self.size]) for i in range(len(ids) - self.size + 1)]
            repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
            rewards.append(repeated * self.penalty if repeated else 0.0)
        return rewards


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """Return a `RepetitionPenalty`.

    >>> get_repetition_penalty_reward(2)(completion_ids=[[5, 5, 5, 5, 5], [1]])
    [-0.75, 0.0]
    """
    return RepetitionPenalty(ngram_size, max_penalty)
