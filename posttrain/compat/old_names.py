"""Options and arguments of older TRL and transformers releases: converted with a warning, or refused with what replaces them.

The table in `posttrain.compat.trl_names` has rows of kind ``option`` for options of configs, and of kind ``argument`` for
arguments of trainers. ``Config.NAME`` and ``Trainer.NAME`` apply to every config and trainer.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from posttrain.compat.trl_names import TRLName, rows
from posttrain.errors import ArgumentTypeError, ConfigError, refuse_unknown_arguments, unknown_arguments


@functools.cache
def _table() -> dict[str, TRLName]:
    return {row.name: row for row in rows() if row.kind in ("option", "argument")}


def row_of(cls: type, name: str) -> TRLName | None:
    """Return the row of an old option of a config, or of an old argument of a trainer; None for other names."""
    owners = [*(base.__name__ for base in cls.__mro__), "Trainer" if hasattr(cls, "config_class") else "Config"]
    return next((row for owner in owners if (row := _table().get(f"{owner}.{name}"))), None)


def fix_of(cls: type, name: str) -> str:
    """Return what to write instead of an old name, or "" for other names."""
    row = row_of(cls, name)
    if row is None:
        return ""
    return f"{row.replacement}=..." if row.action == "rename" else row.replacement


def check_arguments(cls: type, given: Iterable[str]) -> None:
    """Refuse keywords that a constructor neither has nor converts, all of them in one error.

    Raises:
        ArgumentTypeError: Names them, with what replaces them. A `ConfigError` if they are old options of a config.
    """
    unknown = [name for name in unknown_arguments(cls, given) if not is_accepted(cls, name)]
    fixes = {name: fix for name in unknown if (fix := fix_of(cls, name))}
    of_config = fixes and not hasattr(cls, "config_class")
    refuse_unknown_arguments(cls, unknown, fixes, ConfigError if of_config else None)


def is_accepted(cls: type, name: str) -> bool:
    """Return whether a constructor accepts an old name, or a trainer an option of its config."""
    row, config = row_of(cls, name), vars(cls).get("config_class") or getattr(cls, "config_class", None)
    if row is None and config is not None:
        return name in {item.name for item in fields(config)} or is_accepted(config, name)
    return row is not None and row.action != "refuse"


def convert(
    obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert the old names among a constructor's keywords.

    Args:
        obj: Config or trainer that is constructed.
        args: Positional arguments of its constructor.
        kwargs: Keywords.
        known: Names of the constructor's parameters after ``self``.

    Returns:
        All arguments as keywords, and attributes for the finished object.
    """
    cls, old = type(obj), {name: value for name, value in kwargs.items() if name not in known}
    check_arguments(cls, old)
    kwargs = dict(zip(known, args, strict=False)) | {name: value for name, value in kwargs.items() if name in known}
    moved, kept = _convert(cls, old, kwargs)
    if moved:
        kwargs["args"] = _with_options(cls.config_class, kwargs.get("args"), moved)  # type: ignore[attr-defined]
    return kwargs, kept


# Values of old options that the present option cannot express, and what to do instead.
REFUSED_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "warmup_ratio": (
        lambda value: value >= 1,
        "give warmup_steps as a number of steps; only shares below 1 are ratios",
    ),
    "save_safetensors": (lambda value: not value, "leave it out: weights are always saved as safetensors"),
}


def _convert(cls: type, old: Mapping[str, Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put old names into ``kwargs``. Return options for a trainer's config, and attributes for the finished object."""
    moved, kept = {}, {}
    for name, value in old.items():
        row = row_of(cls, name)
        if name in REFUSED_VALUES and REFUSED_VALUES[name][0](value):
            raise ConfigError(f"{cls.__name__}: {name}={value!r} has no equivalent. Fix: {REFUSED_VALUES[name][1]}.")
        if (
            name == "warmup_ratio" and kwargs.get("warmup_steps") == 0
        ):  # Its old default, which left the ratio in force.
            del kwargs["warmup_steps"]
        if row is None:
            config: Any = cls.config_class  # type: ignore[attr-defined]
            of_config = row_of(config, name)
            target = name if of_config is None or of_config.action != "rename" else of_config.replacement
            moved[target] = value
            _warn(cls, name, f"an option: args={config.__name__}({target}=...)")
        elif row.action == "rename":
            _warn(cls, name, f"now {row.replacement}")
            _put(cls, name, value, row.replacement, kwargs)
        elif row.action == "convert":
            target, _, literal = row.replacement.partition("=")
            _warn(cls, name, f"now {row.replacement}")
            if value:
                _put(cls, name, ast.literal_eval(literal), target, kwargs)
        elif row.action == "keep":
            kept[name] = value
        else:
            _warn(cls, name, f"ignored: {row.replacement}")
    return moved, kept


def _put(cls: type, name: str, value: Any, target: str, kwargs: dict[str, Any]) -> None:
    if target in kwargs and kwargs[target] != value:
        raise ArgumentTypeError(
            f"{cls.__name__} got {target}={kwargs[target]!r:.60} and {name}={value!r:.60}, its name in older releases. Fix: give "
            f"{target} only."
        )
    kwargs[target] = value


def _with_options(kind: type, config: Any, options: Mapping[str, Any]) -> Any:
    """Return a config with further options. Its constructor runs again, so that derived fields follow."""
    if config is None or isinstance(config, str):
        return kind(*([] if config is None else [config]), **options)
    kind, names = type(config), {item.name for item in fields(config) if item.init}
    given = {name: getattr(config, name) for name in vars(config).get("_given", ()) if name in names}
    for name in options.keys() & given.keys():
        if given[name] != options[name]:
            raise ConfigError(
                f"{name} is given twice: {given[name]!r} in args and {options[name]!r} as an argument of the trainer. Fix: "
                "leave the argument out, which older releases had."
            )
    changed = kind(config.output_dir, **given)
    later = {f.name: value for f in fields(kind) if (value := getattr(config, f.name)) != getattr(changed, f.name)}
    made = kind(config.output_dir, **given | dict(options))
    vars(made).update({name: value for name, value in later.items() if name not in options})
    return made


def _warn(cls: type, name: str, text: str) -> None:
    warnings.warn(f"{cls.__name__}: {name} of older releases is {text}.", FutureWarning, stacklevel=5)
