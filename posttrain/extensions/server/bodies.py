"""`read_json` parses the body of a request. `first_errors` formats validation errors of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from posttrain.errors import BadRequest

# Maximum number of validation errors in a message, and maximum number of characters of the message.
SHOWN, MOST_CHARACTERS = 3, 1000


def read_json(raw: bytes) -> Any:
    """Parse the body of a request.

    Raises:
        BadRequest: The body is not valid JSON, is nested too deeply, or contains a lone surrogate, which cannot be
            tokenized.
    """
    try:
        return from_json(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}.") from error


def first_errors(errors: Sequence[Mapping[str, Any]]) -> str:
    """Format the first validation errors of pydantic, in up to 1,000 characters.

    >>> first_errors([{"loc": ("n",), "msg": "Input should be greater than 0", "input": -1}])
    'n: Input should be greater than 0 (-1)'
    """
    shown = [_line(error) for error in errors[:SHOWN]]
    more = len(errors) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])[:MOST_CHARACTERS]


def _line(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part)[:100] for part in error["loc"])
    value = error.get("input")
    # If a field is missing, pydantic's input is the whole body, so do not show it.
    came = f" ({value!r:.60})" if isinstance(value, str | int | float) else ""
    return f"{place + ': ' if place else ''}{error['msg'][:500]}{came}"
