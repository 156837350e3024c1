"""Rewards for the shape of a completion."""

from __future__ import annotations

from typing import Any

__all__ = ["completion_text", "think_format_reward"]


def completion_text(completion: Any) -> str:
    """The text to judge: a string, or the last assistant message that says something."""
    if isinstance(completion, str):
        return completion
    said = [m.get("content") or "" for m in completion if m.get("role") == "assistant"]
    return next((text for text in reversed(said) if text), "")


def think_format_reward(completions: list[Any], **_: Any) -> list[float]:
    """1 where the text begins with ``<think>``, closes it later, and opens no second one; else 0.

    >>> think_format_reward(["<think>why</think>42", "42", " <think>a</think>"])
    [1.0, 0.0, 0.0]
    """
    texts = [completion_text(c) for c in completions]
    return [float(t.startswith("<think>") and "</think>" in t and t.count("<think>") == 1) for t in texts]
