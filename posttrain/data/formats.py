"""Dataset formats: the only place that knows column names."""

from __future__ import annotations

from typing import Any

__all__ = ["MESSAGE_COLUMNS", "is_conversational", "is_messages"]

MESSAGE_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")  # In this order: never a set's.


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages: dicts with a role and content or tool calls."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return isinstance(first, dict) and "role" in first and ("content" in first or "tool_calls" in first)


def is_conversational(example: dict[str, Any]) -> bool:
    """Whether a row is conversational: one of its text columns holds a list of messages.

    >>> is_conversational({"prompt": [{"role": "user", "content": "2+2?"}]})
    True
    >>> is_conversational({"prompt": "2+2="})
    False
    """
    return any(is_messages(example.get(name)) for name in MESSAGE_COLUMNS)
