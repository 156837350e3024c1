"""Conversion of option values of older releases (`converted`). A value is converted or ignored with a warning, or raises an
error.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from posttrain.compat.trl_names import value_row, values
from posttrain.errors import ConfigError


def converted(cls: type, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Replace option values of older releases in the keyword arguments of a config, including values inside lists. Return
    None if no value is replaced.

    Raises:
        ConfigError: A value has no equivalent. The message contains the replacement.
    """
    new = dict(given)
    for name in values().keys() & given.keys():
        value = given[name]
        items = [_converted(cls, name, item) for item in (value if isinstance(value, list) else [value])]
        new[name] = items if isinstance(value, list) else items[0]
    return None if new == given else new


def _converted(cls: type, name: str, value: object) -> object:
    row = value_row(cls, name, value)
    if row is None or value is None:
        return value
    if row.action == "refuse":
        raise ConfigError(f"{name}={value!r} is a value of older releases. Fix: {row.replacement}.")
    ignored = row.action == "ignore"
    what = f"ignored: {row.replacement}" if ignored else f"now {row.replacement!r}"
    warnings.warn(f"{cls.__name__}: {name}={value!r} of older releases is {what}.", FutureWarning, stacklevel=5)
    return None if ignored else row.replacement
