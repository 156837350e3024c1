"""Arguments of tool calls, typed by the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.data.responses.wire import Bare

__all__ = ["parameter_schemas", "typed_arguments"]

WORDS = {"true": True, "false": False, "none": None, "null": None}


def parameter_schemas(tools: Sequence[dict[str, Any] | Callable[..., Any]] | None) -> dict[str, dict[str, Any]]:
    """Parameter schemas by tool name; functions are read as transformers reads them."""
    schemas = {}
    for tool in tools or ():
        if callable(tool):
            from transformers.utils import get_json_schema

            tool = get_json_schema(tool)
        function = tool.get("function", tool)
        schemas[function["name"]] = (function.get("parameters") or {}).get("properties") or {}
    return schemas


def _types(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type") or []
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found |= _types(option)
    return found


def _read(text: str) -> Any:
    """JSON, a Python constant, or the text itself."""
    if text.strip().lower() in WORDS:
        return WORDS[text.strip().lower()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return str(text)


def _typed(value: Any, schema: dict[str, Any] | None) -> Any:
    kinds = _types(schema or {})
    if isinstance(value, Bare):
        read = _read(value)
        if not kinds:
            return read
        if "string" in kinds and not (read is None and "null" in kinds):
            return str(value)
        return read
    if kinds == {"string"} and isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)  # An unquoted postcode is still a string.
    return value


def typed_arguments(name: str, arguments: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Arguments with the types their schema asks for; without one, bare text is read as JSON where it is JSON.

    >>> typed_arguments("f", {"zip": Bare("75001")}, {"f": {"zip": {"type": "string"}}})
    {'zip': '75001'}
    """
    schema = schemas.get(name, {})
    return {key: _typed(value, schema.get(key)) for key, value in arguments.items()}
