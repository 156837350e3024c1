"""Jinja templates of the model card and of the notebook display. All inserted values are escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from posttrain.values import visible

TEMPLATES = Path(__file__).parent


@cache
def environment(folder: Path = TEMPLATES) -> jinja2.Environment:
    """Return the Jinja environment of a folder of templates. The environment escapes inserted values and replaces invisible
    characters with their codes.
    """

    def escaped(value: object) -> Any:
        return value if isinstance(value, Markup) else visible(str(value))

    return jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, finalize=escaped)
