"""Conversion of options and arguments of older TRL and transformers releases. A name without an equivalent raises an error
with the replacement.

The table in `posttrain.compat.trl_names` has rows of kind ``option`` (options of configs) and of kind ``argument``
(arguments of trainers). ``Config.NAME`` and ``Trainer.NAME`` apply to all configs and all trainers.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from posttrain.compat.trl_names import ANY, TRLName, rows
from posttrain.errors import ArgumentTypeError, ConfigError, refuse_unknown_arguments, unknown_arguments
from posttrain.fields import read_mapping
from posttrain.loop.build import as_config


@functools.cache
def _table() -> dict[str, list[TRLName]]:
    table: dict[str, list[TRLName]] = {}
    # Table rows that apply only to some values of an option come before table rows that apply to all values.
    for row in sorted(rows(), key=lambda row: row.name == row.plain):
        if row.kind in ("option", "argument"):
            table.setdefault(row.plain, []).append(row)
    return table


def _config_of(cls: type) -> Any:
    """Return the config class of a trainer class. Return None if ``cls`` is itself a config class."""
    return getattr(cls, "config_class", None)


def _owners(cls: type) -> list[str]:
    names = [base.__name__ for base in cls.__mro__]
    if _config_of(cls) is not None:
        names.append("Trainer")
    elif "PostTrainingConfig" in names:
        names.append("Config")
    return names


def row_of(cls: type, name: str, value: object = ANY) -> TRLName | None:
    """Return the table row of an option or argument of older releases. Return None for names that are not in the table."""
    candidates = (row for owner in _owners(cls) for row in _table().get(f"{owner}.{name}", ()))
    row = next((row for row in candidates if row.holds(value)), None)
    if row is not None and row.action == "refuse" and row.name == row.plain and (value is None or value is False):
        return row._replace(action="ignore", replacement=f"{value} is the only setting")
    return row


def options() -> frozenset[str]:
    """Return the names of all old options of configs."""
    return frozenset(plain.partition(".")[2] for plain in _table())


def owner(kinds: Sequence[type], name: str) -> type | None:
    """Return the dataclass to which an option of older releases belongs. If there are several such dataclasses, prefer a
    dataclass with a separate row in the table.
    """
    owners = {row.plain.startswith("Config."): kind for kind in reversed(kinds) if (row := row_of(kind, name))}
    return owners.get(False) or owners.get(True)


def convert_option(cls: type, name: str, options: dict[str, Any], kept: dict[str, Any]) -> None:
    """Replace an option of older releases in the mapping ``options`` with its current name. Attributes that must be set on
    the config are added to ``kept``.

    Raises:
        ConfigError: The option has no equivalent. The message contains the replacement.
    """
    value = options.pop(name)
    check_arguments(cls, {name: value})
    row: Any = row_of(cls, name, value)
    new = apply(cls, row, name, value, options, kept)
    if row.action != "keep":
        _warn(cls, name, f"now {new}" if new else f"ignored: {row.replacement}")


def fix_of(cls: type, name: str) -> str:
    """Return the replacement of an option or argument of older releases as text. Return "" for names that are not in the
    table.
    """
    row = row_of(cls, name)
    return "" if row is None else _fix(row)


def _fix(row: TRLName) -> str:
    return f"{row.replacement}=..." if row.action == "rename" else row.replacement


def check_arguments(cls: type, given: Mapping[str, Any]) -> None:
    """Raise one error for all keyword arguments that a constructor neither accepts nor converts.

    Raises:
        ArgumentTypeError: A keyword is rejected. The message contains all rejected keywords with their replacements. If a
            config rejects options of older releases, the error is a `ConfigError`.
    """
    config = _config_of(cls)
    unknown, fixes = [], {}
    for name in unknown_arguments(cls, given):
        if is_accepted(cls, name, given[name]):
            continue
        rows = (row_of(owner, name, given[name]) for owner in (cls, config) if owner)
        row = next((row for row in rows if row), None)
        unknown.append(name if row is None or row.name == row.plain else f"{name}={given[name]!r}")
        if row is not None:
            fixes[unknown[-1]] = _fix(row)
    refuse_unknown_arguments(cls, unknown, fixes, ConfigError if fixes and config is None else None)


def is_accepted(cls: type, name: str, value: object = ANY) -> bool:
    """Return whether a constructor accepts a keyword of older releases. Trainers also accept options of their config."""
    row, config = row_of(cls, name, value), _config_of(cls)
    if row is None and config is not None:
        return name in {item.name for item in fields(config)} or is_accepted(config, name, value)
    return row is not None and row.action != "refuse"


def is_unknown(cls: type, name: str) -> bool:
    """Return whether a keyword is neither a parameter of a class's constructor nor a name in the table."""
    config = _config_of(cls)
    return bool(unknown_arguments(cls, [name])) and not (
        is_accepted(cls, name) or any(row_of(kind, name) for kind in (cls, config) if kind)
    )


def attribute(config: object, name: str) -> Any:
    """Return the value of a config's option under its name in older releases.

    Raises:
        AttributeError: The config has no such option. If a replacement exists, the message contains it.
    """
    row = row_of(type(config), name)
    if row is not None and row.action in ("rename", "convert"):
        target, _, literal = row.replacement.partition("=")
        value: Any = config
        for part in target.split("."):
            value = (value or {}).get(part) if isinstance(value, dict | None) else getattr(value, part)
        warnings.warn(_text(type(config), name, f"now {row.replacement}"), FutureWarning, stacklevel=3)
        return value == ast.literal_eval(literal) if literal else value
    fix = "" if row is None else f": an option of older releases. Instead: {row.replacement}"
    raise AttributeError(f"{type(config).__name__!r} object has no attribute {name!r}{fix}", name=name)


def convert(
    obj: object, args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert the keyword arguments of a constructor that have names of older releases.

    Args:
        obj: Config or trainer whose constructor is called.
        args: Positional arguments of the constructor.
        kwargs: Keyword arguments of the constructor.
        known: Names of the constructor's parameters after ``self``.

    Returns:
        All arguments as keyword arguments, and attributes to set on the finished object.
    """
    cls, old = type(obj), {name: value for name, value in kwargs.items() if name not in known}
    check_arguments(cls, old)
    kwargs = dict(zip(known, args, strict=False)) | {name: value for name, value in kwargs.items() if name in known}
    moved, attributes = _convert(cls, old, kwargs)
    if moved:
        kwargs["args"] = _with_options(cls.config_class, kwargs.get("args"), moved)  # type: ignore[attr-defined]
    return kwargs, attributes


def _convert(cls: type, old: Mapping[str, Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert names of older releases, and add the results to ``kwargs``. Return the options for a trainer's config,
    and the attributes to set on the finished object.
    """
    moved: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for name, value in old.items():
        row = row_of(cls, name, value)
        # If the trainer has no argument with this name, the name is an option of the trainer's config.
        if row is None:
            config: Any = cls.config_class  # type: ignore[attr-defined]
            of_config = row_of(config, name, value) or TRLName(name, "option", "", "rename", name)
            new = apply(config, of_config, name, value, moved, moved)
            _warn(cls, name, f"an option: args={config.__name__}({new or name}=...)")
        else:
            new = apply(cls, row, name, value, kwargs, attributes)
            if row.action != "keep":
                _warn(cls, name, f"now {new}" if new else f"ignored: {row.replacement}")
    return moved, attributes


def apply(cls: type, row: TRLName, name: str, value: object, kwargs: dict[str, Any], kept: dict[str, Any]) -> str:
    """Add the value of an old name to ``kwargs`` under the current name. Return the current name, or "" if the old name
    has no effect now.

    In older releases, a value of None meant that the option was not set.
    """
    if row.action == "keep":
        kept[name] = value
    elif row.action == "loss":
        if value is not None:
            _add_loss(cls, row.replacement, value, kwargs)
        return "loss_type and loss_weights"
    elif row.action in ("rename", "convert"):
        target, _, literal = row.replacement.partition("=")
        # In older releases, the default warmup_steps=0 meant that warmup_ratio was used.
        if target == "warmup_steps" and kwargs.get(target) == 0:
            del kwargs[target]
        if value is not None and (value or not literal):
            _put(cls, name, ast.literal_eval(literal) if literal else value, target, kwargs)
        return row.replacement
    return ""


def _add_loss(cls: type, loss: str, weight: object, kwargs: dict[str, Any]) -> None:
    losses = kwargs.get("loss_type", default_losses(cls))
    losses = [losses] if isinstance(losses, str) else list(losses)
    weights = kwargs.get("loss_weights") or [1.0] * len(losses)
    kwargs |= {"loss_type": [*losses, loss], "loss_weights": [*weights, weight]}


def default_losses(cls: type) -> list[str]:
    """Return the default value of ``loss_type`` in a config class."""
    return next(item.default_factory() for item in fields(cls) if item.name == "loss_type")


def _put(cls: type, name: str, value: object, target: str, kwargs: dict[str, Any]) -> None:
    option, _, key = target.partition(".")
    options = read_mapping(option, kwargs.get(option)) or {} if key else kwargs
    if options.get(key or option) not in (None, value):
        raise ArgumentTypeError(
            f"{cls.__name__} got {target}={options[key or option]!r:.60} and {name}={value!r:.60}, the older name of {target}. "
            f"Fix: set only {target}."
        )
    kwargs[option] = {**options, key: value} if key else value


def _with_options(kind: type, config: Any, options: Mapping[str, Any]) -> Any:
    """Return a copy of a config with additional options. The constructor runs a second time, so that derived fields are
    recomputed.
    """
    if config is None or isinstance(config, str):
        return kind(*([] if config is None else [config]), **options)
    # If the config is a transformers.TrainingArguments, its defaults may be replaced with the defaults of the trainer's
    # config.
    plain = not isinstance(config, kind)
    config = as_config(kind, config)
    kind, names = type(config), {item.name for item in fields(config) if item.init}
    arguments = {name: vars(config)[name] for name in vars(config).get("_given", ()) if name in names}
    if plain:
        arguments = {name: value for name, value in arguments.items() if name not in options}
    for name in options.keys() & arguments.keys():
        if arguments[name] != options[name]:
            raise ConfigError(
                f"{name} is given twice: {arguments[name]!r} in args and {options[name]!r} as an argument of the trainer. Fix: "
                "remove the trainer's argument, which only older releases accepted."
            )
    changed = kind(config.output_dir, **arguments)
    later = {f.name: value for f in fields(kind) if (value := getattr(config, f.name)) != getattr(changed, f.name)}
    made = kind(config.output_dir, **arguments | dict(options))
    vars(made).update({name: value for name, value in later.items() if name not in options})
    return made


def _text(cls: type, name: str, text: str) -> str:
    return f"{cls.__name__}: {name} of older releases is {text}."


def _warn(cls: type, name: str, text: str) -> None:
    warnings.warn(_text(cls, name, text), FutureWarning, stacklevel=5)
