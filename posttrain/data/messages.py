"""Messages before they are rendered: refused where a template would print nothing, fitted to what it reads."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from posttrain.errors import DataError

__all__ = ["check_messages", "check_unicode", "fit_messages"]

logger = logging.getLogger(__name__)

# What messages call the model's reasoning; a template reads one of them, and silently leaves the others out.
REASONING = ("reasoning_content", "thinking", "reasoning")
_renamed: set[tuple[str, str]] = set()


def check_unicode(text: str, where: str) -> None:
    """Refuse text with lone surrogates, which no tokenizer reads.

    Raises:
        DataError: It cannot be written as UTF-8; names the place and shows what stands around it.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 30) : error.end + 10]
        raise DataError(
            f"{where}: text that is not valid Unicode (character {error.start}: {error.reason}): {shown!r}. Read its source as "
            "UTF-8 again, or mend it with text.encode('utf-8', 'replace').decode()."
        ) from error


def check_messages(messages: Any) -> None:
    """Refuse what many templates would render as nothing, or as the word None.

    Raises:
        DataError: A message that is no mapping with a role, or that says nothing: no content, tool call or reasoning.
    """
    for number, message in enumerate(messages):
        plain = type(message) is dict  # As nearly all are; asking whether it is a Mapping takes longer than the rest.
        if not (plain or isinstance(message, Mapping)) or not isinstance(message.get("role"), str):
            keys = sorted(message) if isinstance(message, Mapping) else type(message).__name__
            raise DataError(f"message {number} must be a mapping with a role and content, and it is {keys}.")
        said = message.get("content") is not None or message.get("tool_calls")
        if not said and not any(message.get(name) for name in REASONING):
            raise DataError(
                f"message {number} (role {message['role']!r}) has no content; its keys are {sorted(message)}. Give it a "
                "'content', or leave the message out."
            )


def fit_messages(tokenizer: Any, messages: list[dict[str, Any]], template: Any = None) -> list[dict[str, Any]]:
    """Messages as the chat template reads them; the given ones are not changed.

    Reasoning goes under the name that the template reads, and tool arguments stored as JSON text are decoded where the
    template would encode the text once more.
    """
    if not any(m.get(name) for m in messages for name in ("tool_calls", *REASONING) if name in m):
        return messages
    text = _text_of(template or tokenizer.chat_template)
    reads = [name for name in REASONING if re.search(rf"""\.{name}\b|['"]{name}['"]""", text)]
    fitted = [_under_read_name(message, reads) for message in messages]
    if any(_json_calls(message) for message in fitted) and _escapes_twice(tokenizer, text):
        fitted = [_decoded(message) for message in fitted]
    return fitted


def _text_of(template: Any) -> str:
    return str((template.get("default") if isinstance(template, dict) else template) or "")


def _under_read_name(message: dict[str, Any], reads: list[str]) -> dict[str, Any]:
    given = [name for name in REASONING if message.get(name)]
    if not given or not reads or set(given) & set(reads):
        return message
    if (given[0], reads[0]) not in _renamed:
        _renamed.add((given[0], reads[0]))
        logger.warning("messages hold %r, which the chat template does not read: taken as %r.", given[0], reads[0])
    return {**{k: v for k, v in message.items() if k != given[0]}, reads[0]: message[given[0]]}


def _arguments(call: Any) -> Any:
    """What a call's JSON text decodes to, if that is an object; else None."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return None
    try:
        value = json.loads(function["arguments"])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _json_calls(message: dict[str, Any]) -> bool:
    return any(_arguments(call) is not None for call in message.get("tool_calls") or [])


def _decoded(message: dict[str, Any]) -> dict[str, Any]:
    def decode(call: dict[str, Any]) -> dict[str, Any]:
        value = _arguments(call)
        if value is None:
            return call
        if "function" in call:
            return {**call, "function": {**call["function"], "arguments": value}}
        return {**call, "arguments": value}

    if not _json_calls(message):
        return message
    return {**message, "tool_calls": [decode(call) for call in message["tool_calls"]]}


@lru_cache(maxsize=64)
def _escapes_twice(tokenizer: Any, template: str) -> bool:
    """Whether a template takes arguments as an object, and encodes text again (or refuses it)."""

    def rendered(arguments: Any) -> str | None:
        call = {"type": "function", "function": {"name": "zq_find", "arguments": arguments}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except Exception:  # Whatever a template raises says that it does not take this form.
            return None

    as_object, as_text = rendered({"zq_key": "zq"}), rendered('{"zq_key": "zq"}')
    fits = as_object is not None and "zq_key" in as_object and "'zq_key'" not in as_object
    twice = fits and (as_text is None or '\\"zq_key\\"' in as_text)
    if twice:
        logger.warning(
            "tool arguments are stored as JSON text, which the chat template would encode once more: they are decoded first."
        )
    return twice
