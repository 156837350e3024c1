"""For mkdocstrings: the text of ``option(default, text)`` is the docstring of a config's field, and its default the value."""

import ast

import griffe


class Options(griffe.Extension):
    """Reads the fields of configs."""

    def on_attribute_instance(self, *, node, attr, **kwargs):
        """Give the attribute the text of its option."""
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "option" or len(call.args) != 2:
            return
        default, text = call.args
        if isinstance(text, ast.Constant):
            attr.docstring = griffe.Docstring(text.value, parent=attr)
            attr.value = ast.unparse(default)
