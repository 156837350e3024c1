"""Jinja templates of the model card, the report page and inspected rows. All values are escaped."""

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
    """Return the environment, which escapes values and writes invisible characters as codes."""

    def escaped(value: object) -> Any:
        return value if isinstance(value, Markup) else visible(str(value))

    return jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, finalize=escaped)
