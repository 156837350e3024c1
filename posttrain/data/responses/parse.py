"""From token ids to a message, with the wire format of the tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.data.chat import turn_end
from posttrain.data.responses.arguments import parameter_schemas, typed_arguments
from posttrain.data.responses.wire import FORMATS, Parser
from posttrain.data.template_abilities import supports_tool_calling
from posttrain.data.template_families import inner_tokenizer, template_text, with_template
from posttrain.errors import ModelError

__all__ = ["ParsedMessage", "add_response_schema", "parse_response", "reasoning_policy"]

ATTRIBUTE = "posttrain_response_format"
# What a text that breaks off anywhere can make a parser raise.
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, SyntaxError, RecursionError, MemoryError)

ASK = {"role": "user", "content": "zq ask"}
CALLS = [
    {"type": "function", "function": {"name": "zq_find", "arguments": {"zq_a": "zq thing", "zq_n": 3}}},
    {"type": "function", "function": {"name": "zq_find", "arguments": {"zq_a": "zq [other]", "zq_n": 4}}},
]


def _written(tokenizer: Any, message: dict[str, Any]) -> tuple[str, str]:
    """What the model writes for a message, and the prompt it goes on from, both as the template renders them."""

    def rendered(said: dict[str, Any]) -> tuple[str, str]:
        head = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
        return head, tokenizer.apply_chat_template([ASK, said], tokenize=False)

    try:
        head, text = rendered(message)
    except TypeError:  # Templates that concatenate arguments take them as a JSON string.
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        head, text = rendered(message | {"tool_calls": calls})
    if not text.startswith(head):  # The prompt opens a think block that this message does not have.
        head = head.rpartition("<think>")[0]
    return head, text[len(head) :]


def _reads_back(tokenizer: Any, parser: Parser) -> bool:
    """Whether a parser returns text, one call, and its arguments as they went into the template."""
    for message in ({"content": "zq say"}, {"content": "", "tool_calls": CALLS[:1]}):
        head, text = _written(tokenizer, {"role": "assistant", **message})
        try:
            read = _parsed(tokenizer, text, parser, head, {})
        except UNREADABLE:
            return False
        if {name: value for name, value in read.items() if name != "role"} != message:
            return False
    return True


class ParsedMessage(dict):
    """A message as a dict, and ``raw``: what the model wrote, with its marks, as a reward of the format judges it."""

    raw: str = ""


def add_response_schema(processing_class: Any) -> Any:
    """Find the wire format of a tokenizer's chat template and note it, so that `parse_response` can use it.

    The format is found by behaviour: a tool call is rendered with the template, and the parser that reads it back is the
    one. A tokenizer that ships a ``response_template`` of its own keeps it.

    Args:
        processing_class: Tokenizer or processor; of a processor, its tokenizer is marked.

    Returns:
        The same object.

    Raises:
        ModelError: No parser reads the template's tool calls back.
    """
    tokenizer = inner_tokenizer(processing_class)
    if getattr(tokenizer, "response_template", None) is not None:
        return processing_class
    shadow = with_template(processing_class, template_text(processing_class))
    if supports_tool_calling(shadow):
        for name, parser in FORMATS.items():
            if _reads_back(shadow, parser):
                setattr(tokenizer, ATTRIBUTE, name)
                return processing_class
        what = "and none of the parsers reads back the tool calls it renders"
    else:
        what = "and it renders no tool calls, so there is nothing to parse"
    raise ModelError(
        f"the chat template belongs to no known response format, {what}. Known formats: {', '.join(FORMATS)}. Use a "
        "template of one of them (chat_template_path), or set tokenizer.response_template."
    )


def _text(tokenizer: Any, ids: Any) -> str:
    if ids is None or isinstance(ids, str):
        return ids or ""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _without_end(tokenizer: Any, text: str) -> str:
    """Strip one end-of-turn token, and what the template writes after it."""
    for end in (tokenizer.eos_token, turn_end(tokenizer)):
        if end and text.rstrip().endswith(end):
            return text.rstrip()[: -len(end)]
    return text


def _checked(calls: Any, schemas: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls in one shape, flat ``{"name", "arguments"}`` allowed."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, and they are a {type(calls).__name__}")
    checked = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"a tool call must be a dict with a name, and it is {str(call)[:80]}")
        arguments = function.get("arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise ValueError(f"arguments must be a JSON object, and they are {str(arguments)[:80]}")
        typed = typed_arguments(function["name"], arguments, schemas)
        checked.append({"type": "function", "function": {"name": function["name"], "arguments": typed}})
    return checked


def _parsed(
    tokenizer: Any, text: str, parser: Parser, prefix: str, schemas: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    opened = prefix.rfind("<think>") > prefix.rfind("</think>")
    return _message(parser(_without_end(tokenizer, text), opened), schemas)


def _message(read: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    message = {"role": "assistant", **read, "content": read.get("content") or ""}
    if message.get("tool_calls"):
        message["tool_calls"] = _checked(message["tool_calls"], schemas)
    return message


def parse_response(
    tokenizer: Any,
    ids: Sequence[int],
    prefix: Sequence[int] | str | None = None,
    tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """One answer as a message: ``role``, ``content``, and where present reasoning and ``tool_calls``.

    Never raises on what a model may write: an answer that cannot be read (a call that breaks off) becomes plain content
    with the special tokens left out, and ``parse_error`` says why. A tokenizer without a response format (see
    `add_response_schema`) gives plain content and no ``parse_error``.

    Args:
        tokenizer: Tokenizer or processor.
        ids: Completion tokens, end of turn included or not.
        prefix: Prompt tokens; needed where the generation prompt already opens a think block.
        tools: Schemas or functions; arguments that the format writes as bare text get the types they ask for.

    Returns:
        The message, a `ParsedMessage` where there is a format; every call is
        ``{"type": "function", "function": {"name": str, "arguments": dict}}``.
    """
    tokenizer = inner_tokenizer(tokenizer)
    name = getattr(tokenizer, ATTRIBUTE, None)
    own = getattr(tokenizer, "response_template", None) is not None
    plain = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    if name is None and not own:
        return plain
    text, before = _text(tokenizer, ids), _text(tokenizer, prefix)
    try:
        if own:
            message = ParsedMessage(_own_parser(tokenizer, text, before, tools))
        else:
            message = ParsedMessage(_parsed(tokenizer, text, FORMATS[name], before, parameter_schemas(tools)))
        message.raw = _without_end(tokenizer, text)
        return message
    except UNREADABLE as error:
        return plain | {"parse_error": str(error)}


def _own_parser(tokenizer: Any, text: str, prefix: str, tools: Any) -> dict[str, Any]:
    """The response template that the checkpoint ships, through transformers."""
    read = tokenizer.parse_response(text, prefix=prefix, tools=list(tools) if tools else None)
    if not isinstance(read, dict):
        raise ValueError(f"the tokenizer's response template gave {type(read).__name__} instead of a message")
    message = _message(read, parameter_schemas(tools))
    if isinstance(message["content"], str) and tokenizer.eos_token:
        message["content"] = message["content"].removesuffix(tokenizer.eos_token)
    return message


def reasoning_policy(tokenizer: Any) -> str:
    """Where the reasoning of a parsed response is: what a reward function that reads ``content`` gets to see.

    Returns:
        ``"field"``: in a field of its own, not in content. ``"content"``: in content, as ordinary text. ``"dropped"``:
        nowhere, because ``<think>`` is a special token and special tokens are left out (the text between them stays).
    """
    tokenizer = inner_tokenizer(tokenizer)
    if getattr(tokenizer, ATTRIBUTE, None) is not None or getattr(tokenizer, "response_template", None) is not None:
        return "field"
    ids = tokenizer("<think>", add_special_tokens=False)["input_ids"]
    return "content" if "<think>" in tokenizer.decode(ids, skip_special_tokens=True) else "dropped"
