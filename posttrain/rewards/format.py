"""Rewards for the shape of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.data.messages import REASONING
from posttrain.data.responses import ParsedMessage

__all__ = ["completion_text", "text_with_reasoning", "think_format_reward"]

OPEN, CLOSE = "<think>", "</think>"


def completion_text(completion: Any) -> str:
    """The text to judge: a string, or the last assistant message that says something.

    >>> completion_text([{"role": "assistant", "content": "42"}, {"role": "tool", "content": "ok"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    text = _content(_answer(completion))
    return text if text.strip() else ""


def _answer(messages: Sequence[Any]) -> Any:
    """The last assistant message that says something, else the last one; empty where the assistant has none."""
    turns = [message for message in messages if message.get("role", "assistant") == "assistant"]
    return next((turn for turn in reversed(turns) if _content(turn).strip()), turns[-1] if turns else {})


def _content(message: Any) -> str:
    """A message's text, also when it comes in parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if part.get("type", "text") == "text")


def text_with_reasoning(completion: Any) -> str:
    """As `completion_text`, with the reasoning that the tokenizer's response format puts into a field of its own.

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


def think_format_reward(
    completions: Sequence[Any], prompt_suffixes: Sequence[str] | None = None, **_: Any
) -> list[float]:
    """1 where the text begins with ``<think>``, closes it later, and opens no second one; else 0.

    Args:
        completions: Strings or lists of messages.
        prompt_suffixes: The end of each rendered prompt. Where it leaves a ``<think>`` open (templates of reasoning
            models do), the completion continues it and is judged with it.

    >>> think_format_reward(["<think>why</think>42", "42", " <think>a</think>"])
    [1.0, 0.0, 0.0]
    >>> think_format_reward(["why</think>42"], prompt_suffixes=["<|assistant|><think>"])
    [1.0]
    """
    texts = [text_with_reasoning(completion) for completion in completions]
    if prompt_suffixes is not None:
        texts = [_opened(suffix) + text for suffix, text in zip(prompt_suffixes, texts, strict=True)]
    return [float(_is_well_formed(text)) for text in texts]


def _opened(suffix: str) -> str:
    """The opening tag and what follows it, where a prompt leaves it open."""
    start = suffix.rfind(OPEN)
    return suffix[start:] if start >= 0 and CLOSE not in suffix[start:] else ""


def _is_well_formed(text: str) -> bool:
    return text.startswith(OPEN) and CLOSE in text and text.count(OPEN) == 1
