"""Exceptions of the package. A message describes the problem, its location, the actual and the expected value, and the fix.

Each class also inherits from a standard exception such as ValueError, so that ``except ValueError`` catches it.
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
    """Base class of all exceptions of this package. Messages contain neither secrets nor control characters.

    Attributes:
        exit_code: Exit code of the ``posttrain`` command for this error.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object, **kwargs: object) -> None:
        shown = (visible(arg) if isinstance(arg, str) else arg for arg in map(hide_secrets, args))
        super().__init__(*shown, **kwargs)


class ConfigError(PosttrainError, ValueError):
    """Raised for an invalid value of a config field, or an invalid combination of fields."""


class PreflightError(ConfigError):
    """Raised if a check stops a run.

    Attributes:
        findings: Findings of the checks.
    """

    exit_code = 78  # Exit code EX_CONFIG of sysexits.h.
    findings: Sequence[Finding] = ()


class DataError(PosttrainError, ValueError):
    """Raised for a dataset, row or column that cannot be used for training."""


class ArgumentTypeError(PosttrainError, TypeError):
    """Raised for an argument of the wrong type. The message contains the argument's type."""


class ModelError(PosttrainError, ValueError):
    """Raised for a model, tokenizer or adapter that does not support what was requested."""


class RewardError(PosttrainError, ValueError):
    """Raised for a reward function that failed, or that did not return one finite number (or None) per row."""


class RolloutError(PosttrainError, RuntimeError):
    """Raised if a rollout engine could not return the requested completions."""


class RolloutInterrupted(KeyboardInterrupt):
    """Raised by Ctrl-C during generation.

    Attributes:
        rollouts: All requested completions in order. Unfinished completions have the finish reason ``abort``.
    """

    def __init__(self, message: str, rollouts: list[Rollout]) -> None:
        super().__init__(message)
        self.rollouts = rollouts


class RolloutServerError(RolloutError):
    """Raised if a rollout server failed, or if its reply cannot be used for training.

    Attributes:
        url: URL of the server.
        log_tail: End of the server's log, if the server sent it.
    """

    # Exit code EX_TEMPFAIL of sysexits.h. After this exit code, a scheduler may restart the run.
    exit_code = 75
    timed_out = held = False  # `ServerUnreachable` and `ServerBusy` document these attributes.

    def __init__(self, message: str, *, url: str = "", log_tail: str = "") -> None:
        super().__init__(f"{message}\nThe end of the server's log:\n{log_tail}" if log_tail else message)
        self.url, self.log_tail = url, log_tail

    # Ranks exchange pickled errors. Without this method, unpickling would lose keyword arguments.
    def __reduce__(self) -> Any:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[RolloutServerError], args: tuple, state: dict[str, Any]) -> RolloutServerError:
    # Call `__new__` of the base class. Python rejects `__new__` of other classes, because `ServerUnreachable` has the memory
    # layout of `OSError`.
    base: Any = kind.__base__
    error = base.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ServerUnreachable(RolloutServerError, ConnectionError):
    """Raised if a rollout server does not reply, or its reply is incomplete.

    Attributes:
        timed_out: Whether the request arrived and timed out. A retry would time out too.
    """

    def __init__(self, message: str, *, timed_out: bool = False, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.timed_out = timed_out


class ServerBusy(RolloutServerError):
    """Raised if a rollout server temporarily rejects requests, because it is full, asleep, or used by another trainer.

    Attributes:
        held: Whether another trainer uses the server. A retry does not help.
    """

    def __init__(self, message: str, *, held: bool = False, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.held = held


class BadRequest(RolloutServerError, ValueError):
    """Raised for an invalid request to a rollout server. A retry would fail too.

    Attributes:
        index: Index of the prompt that caused the error. None if no single prompt caused the error.
    """

    def __init__(self, message: str, *, index: int | None = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.index = index


class WeightSyncError(RolloutServerError):
    """Raised if a rollout server does not have the trainer's current weights.

    Attributes:
        phase: Phase of the weight update in which the error occurred: ``begin``, ``bucket``, ``adapter``, ``end``, ``reply``
            (a completion was sampled with other weights) or ``generate``.
        version: Version of the weights that was sent or expected.
    """

    def __init__(self, message: str, *, phase: str, version: int | None = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.phase, self.version = phase, version


class CheckpointError(PosttrainError, RuntimeError):
    """Raised for a checkpoint that is missing, incomplete, or from another run."""


class MissingDependencyError(PosttrainError, ImportError):
    """Raised if a feature needs an optional package that is not installed."""


def did_you_mean(value: object, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a hint ``" (did you mean 'grpo'?)"`` with the choice that is most similar to ``value``. Return ``""`` if no
    choice is similar.

    >>> did_you_mean("gpro", ["grpo", "dapo"])
    " (did you mean 'grpo'?)"
    """
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=cutoff)
    return f" (did you mean '{close[0]}'?)" if close else ""


@functools.cache
def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.__init__).parameters


def raised_at(error: BaseException, besides: str = "") -> str:
    """Return the file and line of the last stack frame of an error in the user's code. Frames in the file ``besides`` are
    ignored. Frames in libraries are returned only if there are no other frames. Return "" if no frame remains.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != besides]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<frozen")] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def unknown_arguments(cls: type, given: Iterable[str]) -> list[str]:
    """Return the names in ``given`` that a class's constructor does not accept as keywords."""
    parameters = _parameters(cls)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in given if name not in parameters]


def refuse_unknown_arguments(
    cls: type, names: Sequence[str], fixes: Mapping[str, str], error: type[PosttrainError] | None = None
) -> None:
    """Raise an error that lists unknown keyword arguments with their replacements.

    Args:
        cls: Class whose constructor was called.
        names: Unknown keywords.
        fixes: Text with the replacement for some of the unknown keywords. The key is the keyword.
        error: Class of the error. None: `ArgumentTypeError`.

    Raises:
        ArgumentTypeError: ``names`` is not empty. The message contains each keyword with its replacement or the most similar
            argument.
    """
    arguments = [parameter for parameter in _parameters(cls) if parameter != "self"]
    texts = []
    for name in names:
        meant = "" if name in fixes else did_you_mean(name, arguments)
        fix = fixes.get(name, f"one of its {len(arguments)} arguments, which help({cls.__name__}) lists")
        texts.append(f"{cls.__name__} has no argument {name!r}{meant}. Fix: {fix}.")
    if texts:
        raise (error or ArgumentTypeError)("\n".join(texts))


def check_rules(config: object, rules: Iterable[tuple[str, bool, str]]) -> None:
    """Raise an error for the first field of a config that violates its rule.

    Args:
        config: Config object with the fields.
        rules: Tuples of the name of a field, whether the field's value is valid, and the rule in words, for example "must be
            above 0".

    Raises:
        ConfigError: A rule is violated. The message contains the field, its value and the rule.
    """
    for name, holds, rule in rules:
        if not holds:
            raise ConfigError(f"{name}={getattr(config, name)!r} {rule}.")


def exact_div(a: int, b: int, custom_error_message: str = "") -> int:
    """Return ``a / b`` as an integer.

    Raises:
        ConfigError: b does not divide a. The message ends with ``custom_error_message``.

    >>> exact_div(12, 4)
    3
    """
    if b == 0 or a % b != 0:
        detail = f": {custom_error_message}" if custom_error_message else "."
        raise ConfigError(f"{a} cannot be divided by {b} without a remainder{detail}")
    return a // b


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ConfigError` if ``value`` is not one of ``choices``. The message contains the field, the value, the
    closest choice and all choices.
    """
    options = list(choices)
    if value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ConfigError(f"{field}={value!r} is not known{did_you_mean(value, options)}. Choose one of: {listed}.")


ROUNDING = 1e-6  # Tolerance of log-probs in nats. A log-softmax in float32 can be slightly above 0.
