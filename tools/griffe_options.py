"""Extension of griffe for mkdocstrings: documents the fields of configs with their help texts and defaults, and writes doctests
as code.
"""

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from typing import Any

import griffe

# Lines of a doctest with its output, up to the next empty line. Markdown would render `>>>` as three nested quotations.
DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.M)


def fenced(text: str) -> str:
    """Return a docstring with its doctests in blocks of code, without the directives of doctest."""
    plain = re.sub(r"[ \t]*# doctest: .*", "", text)
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", plain)


class Options(griffe.Extension):
    """Reads help texts of config fields, and writes doctests as code."""

    def on_object(self, *, obj, **kwargs):
        """Put the doctests of a docstring into blocks of code."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_attribute_instance(self, *, node, attr, **kwargs):
        """Set the docstring of ``option(default, text)`` to its text, and the value to its default."""
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "option" or len(call.args) != 2:
            return
        default, text = call.args
        if isinstance(text, ast.Constant):
            attr.docstring = griffe.Docstring(text.value, parent=attr)
            attr.value = ast.unparse(default)

    def on_package(self, *, pkg, **kwargs):
        """Add the fields whose text or default is set by a base class, a decorator or an expression."""
        for found in _configs(pkg):
            for item in own_fields(getattr(importlib.import_module(found.parent.path), found.name)):
                text, member = item.metadata["help"], found.all_members.get(item.name)
                if member is None or member.docstring is None or member.docstring.value != text:
                    made = item.default_factory is not dataclasses.MISSING
                    default: Any = item.default_factory() if made else item.default
                    value = None if default is dataclasses.MISSING else repr(default)
                    attribute = griffe.Attribute(item.name, value=value, annotation=str(item.type))
                    attribute.docstring = griffe.Docstring(text, parent=attribute)
                    found.set_member(item.name, attribute)


def own_fields(config: type) -> list[dataclasses.Field]:
    """Return the fields of a config that this package declares. The others belong to transformers."""
    bases = [base for base in config.__mro__ if base.__module__.startswith("posttrain")]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", {}))}
    return [item for item in dataclasses.fields(config) if item.name in names and item.metadata.get("help")]


def _configs(scope: Any) -> Iterator[Any]:
    for member in list(scope.members.values()):
        if member.is_alias:
            continue
        if member.is_module:
            yield from _configs(member)
        elif member.is_class and member.name.endswith("Config"):
            kind = getattr(importlib.import_module(member.parent.path), member.name)
            if dataclasses.is_dataclass(kind):
                yield member
