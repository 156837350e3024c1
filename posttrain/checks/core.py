"""The register of checks: every finding has a stable code, a name, the moment it is looked for, and a page about it.

A check is three things: a line in the register (`register`), a function that looks (`probe` says at which moment), and what
it says when it found something (`finding`). A new module in this package joins by being there: `load` imports them all.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import posttrain.checks
from posttrain.errors import ConfigError, check_choice, did_you_mean
from posttrain.types import Finding

if TYPE_CHECKING:
    from posttrain.types import Row

__all__ = [
    "AREAS",
    "MOMENTS",
    "PROBES",
    "REGISTRY",
    "Check",
    "Context",
    "Moment",
    "Probe",
    "Severity",
    "codes_of",
    "finding",
    "load",
    "lookup",
    "probe",
    "register",
]

Moment = Literal["config", "data", "first_batch", "log_step"]
Severity = Literal["info", "warning", "error"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
CODE = re.compile(r"PT-([A-Z])\d{3}")

# The letter of a code says what it is about.
AREAS = {
    "C": "configuration",
    "D": "data: rows and pairs",
    "B": "first batch",
    "T": "signs of training",
    "P": "signs of preference training",
    "R": "rollouts and rewards",
    "S": "rollout server",
    "M": "memory",
    "V": "versions",
    "K": "tokenizers and templates",
    "L": "locks, disks and ports",
    "G": "images",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the register.

    Attributes:
        code: ``PT-`` with a letter of `AREAS` and three digits; never used again for something else.
        name: A few words with hyphens; silencing takes it in place of the code.
        moment: When it is looked for.
        title: What is wrong when it fires, in a few words.
        page: Page of the documentation below ``assumptions/``, such as ``"f"``.
    """

    code: str
    name: str
    moment: Moment
    title: str
    page: str = ""


@dataclass
class Context:
    """What is known of a run at a moment; None (or empty) where it is not known yet.

    Attributes:
        trainer: The trainer's command name, such as ``"grpo"``.
        args: The trainer's config.
        model_config: Configuration of the policy.
        model: The policy, where it is loaded.
        tokenizer: Tokenizer or processor.
        train_dataset, eval_dataset: As they were given.
        rows: A sample of the training set, tokenised.
        limit: Tokens at which those rows were cut.
        peft_config: Of an adapter that is trained.
        processes: Ranks of the run.
        parts: What else the trainer was given, by argument name (``reward_funcs``, ``teacher_model``, ...).
    """

    trainer: str
    args: Any
    model_config: Any = None
    model: Any = None
    tokenizer: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    rows: Sequence[Row] = ()
    limit: int | None = None
    peft_config: Any = None
    processes: int = 1
    parts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """A function that looks for some findings at a moment, on the main process."""

    name: str
    moment: Moment
    codes: tuple[str, ...]
    function: Callable[[Context], Iterable[Finding | None]]


REGISTRY: dict[str, Check] = {}
PROBES: dict[str, Probe] = {}


def register(code: str, name: str, *, moment: Moment, title: str, page: str = "") -> Check:
    """Add a line to the register.

    Raises:
        ConfigError: The code is not of the form ``PT-D012``, or code or name are taken.
    """
    match = CODE.fullmatch(code)
    if match is None or match[1] not in AREAS:
        raise ConfigError(f"code={code!r} must be PT-, a letter of {''.join(AREAS)} and three digits, as PT-D012 is.")
    check_choice("moment", moment, MOMENTS)
    taken = next((check for check in REGISTRY.values() if check.code == code or check.name == name), None)
    if taken is not None:
        raise ConfigError(
            f"a check {code} {name!r} cannot be registered: {taken.code} {taken.name!r} is ({taken.title}). Codes and names "
            "are never used twice."
        )
    REGISTRY[code] = Check(code, name, moment, title, page)
    return REGISTRY[code]


def finding(code: str, severity: Severity, what: str, where: str, why: str, fix: str) -> Finding:
    """What a registered check saw.

    Args:
        code: Of the register.
        severity: ``error`` stops a run (only for what cannot be meant), ``warning`` and ``info`` are told.
        what: What is wrong, with the values.
        where: Rows, fields, a step.
        why: What comes of it.
        fix: What to do.

    Raises:
        ConfigError: The code is not registered.
    """
    if code not in REGISTRY:
        raise ConfigError(f"code={code!r} is not registered{did_you_mean(code, REGISTRY)}: register it first.")
    return Finding(code, severity, what, where, why, fix)


def probe(moment: Moment, *codes: str) -> Callable[[Callable], Callable]:
    """Have a function called at a moment, by every trainer and by ``posttrain check``.

    Args:
        moment: ``config`` (before the model is loaded), ``data`` (the training set is prepared), ``first_batch``.
        codes: All that it may find.

    >>> @probe("config", "PT-V001")  # doctest: +SKIP
    ... def versions(context: Context) -> Iterable[Finding]: ...
    """

    def add(function: Callable[[Context], Iterable[Finding | None]]) -> Callable:
        check_choice("moment", moment, MOMENTS)
        name = f"{function.__module__.removeprefix('posttrain.checks.')}.{function.__name__}"
        PROBES[name] = Probe(name, moment, codes, function)
        return function

    return add


def codes_of(area: str, moment: Moment) -> tuple[str, ...]:
    """Codes of one letter of `AREAS` that are looked for at a moment.

    >>> load()["PT-M003"].moment, codes_of("M", "first_batch")
    ('first_batch', ('PT-M003',))
    """
    return tuple(check.code for check in REGISTRY.values() if check.moment == moment and check.code[3] == area)


def load() -> dict[str, Check]:
    """Import every module of this package, so that the register is whole; returns it in the order of codes."""
    for module in pkgutil.iter_modules(posttrain.checks.__path__, "posttrain.checks."):
        importlib.import_module(module.name)
    return dict(sorted(REGISTRY.items()))


def lookup(key: str) -> Check:
    """The check with this code or name, in any case.

    Raises:
        ConfigError: There is none; the closest is named.
    """
    checks = load().values()
    for check in checks:
        if key.casefold() in (check.code.casefold(), check.name.casefold()):
            return check
    known = [text for check in checks for text in (check.code, check.name)]
    raise ConfigError(
        f"{key!r} is neither code nor name of a check{did_you_mean(key, known)}. docs/assumptions.md lists all."
    )
