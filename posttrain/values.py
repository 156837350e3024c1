"""Conversion and validation of external values: numbers, bools and token ids from server replies and user functions, and
messages of dataset rows.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from posttrain.errors import ROUNDING, RolloutError
from posttrain.redaction import visible as visible

# Columns with lists and dicts, e.g. messages and tools, in which Arrow fills missing keys with None.
NESTED_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "chat_template_kwargs")


class BadValue(RolloutError, ValueError):
    """Raised for an invalid value from outside the library, e.g. from a server reply."""


def scalar(value: object) -> Any:
    """Return the element of an array or tensor with one element. Other values are returned unchanged.

    >>> import torch
    >>> scalar(torch.tensor([0.5])), scalar("a")
    (0.5, 'a')
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and math.prod(shape) == 1 and hasattr(value, "item"):
        return value.item()
    return value


def is_number(value: object) -> bool:
    """Return whether a value is a single real number, of a type of Python or any library. Return False for text and for
    arrays with dimensions.
    """
    return isinstance(value, SupportsFloat) and not isinstance(value, complex) and not getattr(value, "shape", ())


def listed(value: object, where: str) -> list[Any]:
    """Convert a sequence, array or tensor to a list.

    Raises:
        RolloutError: The value cannot be converted, e.g. because it is None, text, a dict, a number or an array without
            dimensions.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise BadValue(f"{where} is {value!r:.80} ({type(value).__name__}). Fix: give a list.")
    return list(items)


def given_number(value: object, where: str) -> float:
    """Convert a value to a finite float.

    Raises:
        RolloutError: The value is not a finite number.
    """
    number = scalar(value)
    if not is_number(number):
        raise BadValue(f"{where} is {value!r:.80} ({type(value).__name__}). Fix: give a number.")
    if not math.isfinite(number):
        raise BadValue(f"{where} is {float(number)}. Fix: give a finite number.")
    return float(number)


def given_integer(value: object, where: str) -> int:
    """Convert a value to an int. Floats with an integer value, such as 5.0, are accepted.

    Raises:
        RolloutError: The value is invalid. The message contains the value.
    """
    number = given_number(value, where)
    if number != int(number):
        raise BadValue(f"{where} is {number}. Fix: give an integer.")
    return int(scalar(value))


def given_truth(value: object, where: str) -> bool:
    """Convert a bool or the number 0 or 1 of any library to a bool.

    Raises:
        RolloutError: The value is invalid. The message contains the value.
    """
    number = scalar(value)
    if not is_number(number) or number not in (0, 1):
        raise BadValue(f"{where} is {value!r:.80} ({type(value).__name__}). Fix: give True or False.")
    return bool(number)


def token_ids(values: Any, where: str, vocabulary: int | None = None) -> list[int]:
    """Convert values to a list of at least one token id, each in ``[0, vocabulary)``.

    Raises:
        RolloutError: A value is invalid. The message contains the value and its position.
    """
    ids = [given_integer(value, f"{where}, position {t},") for t, value in enumerate(listed(values, where))]
    if not ids:
        raise BadValue(f"{where} is an empty list. Fix: give at least one token id.")
    for position, token in enumerate(ids):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            most = "" if vocabulary is None else f" in [0, {vocabulary})"
            raise BadValue(f"{where}, position {position}, is {token}. Fix: give token ids{most or ' of 0 and above'}.")
    return ids


def token_logps(values: Sequence[Any], mask: Sequence[Any], where: str) -> list[float]:
    """Convert log-probs to a list. Where ``mask`` is 1, log-probs must be finite and at most 0. Where ``mask`` is 0, the
    result is 0.0.

    Raises:
        RolloutError: A value is invalid. The message contains the value and its position.

    >>> token_logps([-1.0, None, 1e-9], [1, 0, 1], "here")
    [-1.0, 0.0, 0.0]
    """
    checked = []
    for position, (value, included) in enumerate(zip(values, mask, strict=True)):
        at = f"{where}, position {position},"
        logp = given_number(value, at) if included else 0.0
        if logp > ROUNDING:
            raise BadValue(f"{at} is {logp}. Fix: give log-probs, which are at most 0.")
        checked.append(min(logp, 0.0))
    return checked


def is_messages(value: object) -> bool:
    """Return whether a value is a list of messages, which are dicts with a role."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def without_none(value: object) -> Any:
    """Remove keys with the value None from mappings, at any depth. List items that are None are kept."""
    # Compare exact types first, because most values are text, and isinstance with Mapping is the slowest check.
    kind = type(value)
    if kind is str:
        return value
    if kind is list or isinstance(value, list):
        return [without_none(item) for item in value]
    if kind is dict or isinstance(value, Mapping):
        return {
            key: item if type(item) is str else without_none(item) for key, item in value.items() if item is not None
        }
    return value


def strip_none(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the keys with the value None that Arrow adds to messages, tools and template arguments if rows have different
    keys.
    """
    return {
        name: without_none(value) if name in NESTED_COLUMNS and isinstance(value, list | dict) else value
        for name, value in row.items()
    }


def gib(count: float) -> str:
    """Format a number of bytes as text with a binary unit.

    >>> gib(3 * 2**29), gib(5 * 2**20)
    ('1.5 GiB', '5 MiB')
    """
    unit, name = next(((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB")) if count >= unit), (1024, "KiB"))
    return f"{count / unit:.{1 if name == 'GiB' else 0}f} {name}"


def accept_any_character() -> None:
    """Make standard output print "?" for characters that its encoding lacks (cp1252, LC_ALL=C), instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
