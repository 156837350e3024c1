"""Templates of the model card, of the page of a run and of the inspected rows; every value is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from posttrain.values import visible

TEMPLATES = Path(__file__).parent


@cache
def environment() -> jinja2.Environment:
    """Templates whose values are escaped, with characters that would not show written as their codes."""

    def escaped(value: object) -> Any:
        return value if isinstance(value, Markup) else visible(str(value))

    return jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, finalize=escaped)
