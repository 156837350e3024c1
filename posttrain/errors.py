"""The one exception tree: every error says what is wrong, where, both values, and how to fix it.

Each class is also the standard-library type a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.types import Rollout

__all__ = [
    "ArgumentTypeError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MissingDependencyError",
    "ModelError",
    "PosttrainError",
    "RewardError",
    "RolloutError",
    "RolloutInterrupted",
    "check_choice",
    "did_you_mean",
]


class PosttrainError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(PosttrainError, ValueError):
    """A config field, or a combination of fields, that cannot work."""


class DataError(PosttrainError, ValueError):
    """A dataset, row or column that cannot be trained on."""


class ArgumentTypeError(PosttrainError, TypeError):
    """An argument of the wrong type; the message shows the type that came."""


class ModelError(PosttrainError, ValueError):
    """A model, tokenizer or adapter that cannot do what was asked of it."""


class RewardError(PosttrainError, ValueError):
    """A reward function that raised, or returned something that is not one finite number (or None) a row."""


class RolloutError(PosttrainError, RuntimeError):
    """A rollout engine that could not produce what was requested."""


class RolloutInterrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a generation.

    Attributes:
        rollouts: All completions that were asked for, in order; those that were not finished say ``abort``.
    """

    def __init__(self, message: str, rollouts: list[Rollout]) -> None:
        super().__init__(message)
        self.rollouts = rollouts


class CheckpointError(PosttrainError, RuntimeError):
    """A checkpoint that is missing, incomplete, or belongs to another run."""


class MissingDependencyError(PosttrainError, ImportError):
    """An optional package that is needed for what was asked and is not installed."""


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """Return ``" (did you mean 'grpo'?)"`` for the closest of ``choices``, or ``""`` when nothing is close.

    >>> did_you_mean("gpro", ["grpo", "dapo"])
    " (did you mean 'grpo'?)"
    """
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ConfigError` naming ``field``, the value, the closest choice and all choices when ``value`` is none of them."""
    options = list(choices)
    if value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ConfigError(f"{field}={value!r} is not known{did_you_mean(value, options)}. Choose one of: {listed}.")
