"""The one exception tree: every error says what is wrong, where, both values, and how to fix it.

Each class is also the standard-library type a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.redaction import hide_secrets, visible

if TYPE_CHECKING:
    from posttrain.types import Finding, Rollout

__all__ = [
    "ROUNDING",
    "ArgumentTypeError",
    "BadRequest",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MissingDependencyError",
    "ModelError",
    "PosttrainError",
    "PreflightError",
    "RewardError",
    "RolloutError",
    "RolloutInterrupted",
    "RolloutServerError",
    "ServerBusy",
    "ServerUnreachable",
    "WeightSyncError",
    "check_choice",
    "check_rules",
    "did_you_mean",
    "exact_div",
]


class PosttrainError(Exception):
    """Base of everything this package raises on purpose. Its message holds no secret and no control character.

    Attributes:
        exit_code: What the ``posttrain`` command returns for it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object, **kwargs: object) -> None:
        shown = (visible(arg) if isinstance(arg, str) else arg for arg in map(hide_secrets, args))
        super().__init__(*shown, **kwargs)


class ConfigError(PosttrainError, ValueError):
    """A config field, or a combination of fields, that cannot work."""


class PreflightError(ConfigError):
    """A run that a check refused.

    Attributes:
        findings: Why.
    """

    exit_code = 78  # EX_CONFIG of sysexits.h.
    findings: Sequence[Finding] = ()


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


class RolloutServerError(RolloutError):
    """A rollout server that failed, or answered something that cannot be trained on.

    Attributes:
        url: Of the server.
        log_tail: The end of its log, where it sent it.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may start the run again.
    timed_out = held = False  # See `ServerUnreachable` and `ServerBusy`.

    def __init__(self, message: str, *, url: str = "", log_tail: str = "") -> None:
        super().__init__(f"{message}\nThe end of the server's log:\n{log_tail}" if log_tail else message)
        self.url, self.log_tail = url, log_tail

    def __reduce__(self) -> Any:  # Ranks send their errors to each other, and arguments by name would be lost.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[RolloutServerError], args: tuple, state: dict[str, Any]) -> RolloutServerError:
    # `ServerUnreachable` has the memory layout of `OSError`, and `__new__` of another base is refused.
    base: Any = kind.__base__
    error = base.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ServerUnreachable(RolloutServerError, ConnectionError):
    """No answer from a rollout server, or half of one.

    Attributes:
        timed_out: The request arrived, and nothing came back in time: asking again would wait as long again.
    """

    def __init__(self, message: str, *, timed_out: bool = False, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.timed_out = timed_out


class ServerBusy(RolloutServerError):
    """A rollout server that refuses work for now: it is full, asleep, or belongs to another trainer.

    Attributes:
        held: It belongs to another trainer: asking again does not help.
    """

    def __init__(self, message: str, *, held: bool = False, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.held = held


class BadRequest(RolloutServerError, ValueError):
    """A request that a rollout server will never serve.

    Attributes:
        index: Of the prompt at fault; None where it is not one prompt.
    """

    def __init__(self, message: str, *, index: int | None = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.index = index


class WeightSyncError(RolloutServerError):
    """New weights did not arrive: the server holds others than the trainer.

    Attributes:
        phase: ``begin``, ``bucket``, ``adapter``, ``end``, ``reply`` (a completion came from other weights) or ``generate``.
        version: That was sent or expected.
    """

    def __init__(self, message: str, *, phase: str, version: int | None = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.phase, self.version = phase, version


class CheckpointError(PosttrainError, RuntimeError):
    """A checkpoint that is missing, incomplete, or belongs to another run."""


class MissingDependencyError(PosttrainError, ImportError):
    """An optional package that is needed for what was asked and is not installed."""


def did_you_mean(value: object, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``" (did you mean 'grpo'?)"`` for the closest of ``choices``, or ``""`` when nothing is close.

    >>> did_you_mean("gpro", ["grpo", "dapo"])
    " (did you mean 'grpo'?)"
    """
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=cutoff)
    return f" (did you mean '{close[0]}'?)" if close else ""


@functools.cache
def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.__init__).parameters


def raised_at(error: BaseException, besides: str = "") -> str:
    """File and line of the last frame that is no library's, nor of the file ``besides``: the user's; ``""`` without frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != besides]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<frozen")] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


# Of older versions of transformers and TRL.
def unknown_arguments(cls: type, given: Iterable[str]) -> list[str]:
    """Return the keywords that a class's constructor does not accept."""
    known = _parameters(cls)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return []
    return [name for name in given if name not in known]


def refuse_unknown_arguments(
    cls: type, names: Sequence[str], fixes: Mapping[str, str], error: type[PosttrainError] | None = None
) -> None:
    """Refuse keywords, all of them in one error.

    Args:
        cls: The class.
        names: The keywords.
        fixes: What to write instead, of some of them.
        error: Class of the error. None: `ArgumentTypeError`.

    Raises:
        ArgumentTypeError: Names each of them, with its replacement or the most similar argument.
    """
    known = [parameter for parameter in _parameters(cls) if parameter != "self"]
    texts = []
    for name in names:
        meant = "" if name in fixes else did_you_mean(name, known)
        fix = fixes.get(name, f"one of its {len(known)} arguments, which help({cls.__name__}) lists")
        texts.append(f"{cls.__name__} has no argument {name!r}{meant}. Fix: {fix}.")
    if texts:
        raise (error or ArgumentTypeError)("\n".join(texts))


def check_rules(config: object, rules: Iterable[tuple[str, bool, str]]) -> None:
    """Refuse the first field of a config whose rule does not hold.

    Args:
        config: Has the fields.
        rules: Name of a field, whether its rule holds, and the rule in words: "must be above 0".

    Raises:
        ConfigError: Names the field, its value and the rule.
    """
    for name, holds, rule in rules:
        if not holds:
            raise ConfigError(f"{name}={getattr(config, name)!r} {rule}.")


def exact_div(a: int, b: int, custom_error_message: str = "") -> int:
    """``a / b`` as an integer.

    Raises:
        ConfigError: b does not divide a; the message ends with ``custom_error_message``.

    >>> exact_div(12, 4)
    3
    """
    if b == 0 or a % b != 0:
        detail = f": {custom_error_message}" if custom_error_message else "."
        raise ConfigError(f"{a} cannot be divided by {b} without a remainder{detail}")
    return a // b


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ConfigError` naming ``field``, the value, the closest choice and all choices when ``value`` is none of them."""
    options = list(choices)
    if value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ConfigError(f"{field}={value!r} is not known{did_you_mean(value, options)}. Choose one of: {listed}.")


ROUNDING = 1e-6  # Nats above 0 that a log-softmax in float32 may come out at.
