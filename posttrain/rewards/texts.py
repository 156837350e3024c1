"""Extract the text of a completion for reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.data.chat import REASONING
from posttrain.data.responses import ParsedMessage


def completion_text(completion: Any) -> str:
    """Return the scored text of a completion. A string is returned unchanged. For messages, this is the last assistant
    message with content.

    >>> completion_text([{"role": "assistant", "content": "42"}, {"role": "tool", "content": "ok"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    text = _content(_answer(completion))
    return text if text.strip() else ""


def text_with_reasoning(completion: Any) -> str:
    """Return `completion_text`, with the model's reasoning before it. Some tokenizers store the reasoning in a separate
    field.

    >>> text_with_reasoning([{"role": "assistant", "reasoning_content": "why", "content": "42"}])
    '<think>why</think>42'
    """
    if isinstance(completion, str):
        return completion
    message = _answer(completion)
    if isinstance(message, ParsedMessage):
        return message.raw
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    return _content(message) if reasoning is None else f"{OPEN}{reasoning}{CLOSE}{_content(message)}"


OPEN, CLOSE = "<think>", "</think>"


def _answer(messages: Sequence[Any]) -> Any:
    """Return the last assistant message with content. If no assistant message has content, return the last assistant
    message. If there is no assistant message, return an empty dict.
    """
    turns = [message for message in messages if message.get("role", "assistant") == "assistant"]
    return next((turn for turn in reversed(turns) if _content(turn).strip()), turns[-1] if turns else {})


def _content(message: Any) -> str:
    """Return the text of a message. If its content is a list of content blocks, join the text blocks."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if part.get("type", "text") == "text")
