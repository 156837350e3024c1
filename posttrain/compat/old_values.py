"""`convert`: values that options had in older releases: converted or ignored with a warning, or refused."""

from __future__ import annotations

import warnings
from typing import Any

from posttrain.compat.trl_names import value_row, values
from posttrain.errors import ConfigError


def convert(config: Any) -> None:
    """Replace old values in a config, also within lists.

    Raises:
        ConfigError: A value has no equivalent. Names what replaces it.
    """
    for name in values():
        given = getattr(config, name, None)
        new = [_converted(config, name, item) for item in (given if isinstance(given, list) else [given])]
        new = new if isinstance(given, list) else new[0]
        if new != given:
            setattr(config, name, new)


def _converted(config: Any, name: str, value: object) -> object:
    row = value_row(type(config), name, value)
    if row is None or value is None:
        return value
    if row.action == "refuse":
        raise ConfigError(f"{name}={value!r} is a value of older releases. Fix: {row.replacement}.")
    ignored = row.action == "ignore"
    what = f"ignored: {row.replacement}" if ignored else f"now {row.replacement!r}"
    text = f"{type(config).__name__}: {name}={value!r} of older releases is {what}."
    warnings.warn(text, FutureWarning, stacklevel=6)
    return None if ignored else row.replacement
