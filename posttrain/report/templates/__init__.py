"""Templates of the model card, of the page of a run and of the inspected rows; every value is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

TEMPLATES = Path(__file__).parent
JOINER = "\u200d"  # Holds the parts of an emoji together; shown as a code it would take them apart.


@cache
def environment() -> jinja2.Environment:
    """Templates whose values are escaped, with characters that would not show written as their codes."""

    def escaped(value: object) -> Any:
        return value if isinstance(value, Markup) else visible(str(value))

    return jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, finalize=escaped)


def visible(text: str) -> str:
    r"""Text with every character that would not show, or would act on a terminal, written as its code.

    >>> visible("a\x1b[31m\u200bb")
    'a\\x1b[31m\\u200bb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" or c == JOINER else _code(c) for c in text)


def _code(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
