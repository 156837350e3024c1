"""Small pieces of HTML; every text goes through `text`, which leaves nothing that a browser could act on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from posttrain.report.inspect.pieces import visible

__all__ = ["block", "cell", "chip", "details", "number", "table", "text"]


def text(value: object) -> str:
    """Escaped, with characters that would not show written as their codes (as are broken halves of characters)."""
    return escape(visible(str(value)))


def number(value: float) -> str:
    """Four digits, thousands apart.

    >>> number(1234567.0), number(0.000012345), number(3.0)
    ('1,234,567', '1.234e-05', '3')
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10_000 and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def cell(value: object, kind: str = "") -> str:
    """A table cell."""
    return f"<td{_class(kind)}>{text(value)}</td>"


def chip(value: object, kind: str = "") -> str:
    """A small label."""
    return f'<span class="chip {text(kind)}">{text(value)}</span>'


def block(value: object, kind: str = "") -> str:
    """Text as it is, line by line."""
    return f"<pre{_class(kind)}>{text(value)}</pre>"


def details(title: str, body: str, *, open_: bool = False, key: str = "") -> str:
    """Something that opens; ``key`` lets a live page keep it open."""
    shown = " open" if open_ else ""
    return (
        f'<details{shown} data-keep="{text(key or title)}"><summary>{text(title)}</summary><div>{body}</div></details>'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str, numbers_from: int | None = None) -> str:
    """Cells are HTML already; the table scrolls on its own and can be reached by keyboard."""
    far = len(head) if numbers_from is None else numbers_from
    names = "".join(f"<th scope=col{_class('number' if at >= far else '')}>{text(h)}</th>" for at, h in enumerate(head))
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _class(kind: str) -> str:
    return f' class="{text(kind)}"' if kind else ""
