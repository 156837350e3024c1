"""Parsers that convert generated token ids to messages. The response format of the chat template determines the parser."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.data.chat import inner_tokenizer, json_arguments, template_text, tool_call, turn_end, with_template
from posttrain.data.templates import supports_tool_calling
from posttrain.errors import ModelError

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

Parser = Callable[[str, bool], dict[str, Any]]


class Bare(str):
    """Argument value that the model wrote without quotes. The tool's schema determines whether the value is text or JSON."""


def _think(text: str, opened: bool) -> tuple[str, str]:
    """Split generated text into reasoning and answer. If ``opened`` is True, the prompt has opened the think block. If the
    block is never closed, the whole text is reasoning.
    """
    head, tag, rest = text.partition("<think>")
    if tag and not head.strip():
        opened, text = True, rest
    reasoning, closed, rest = text.partition("</think>")
    if closed:
        return reasoning.strip("\n"), rest.lstrip("\n")
    return (text.strip("\n"), "") if opened else ("", text)


def _between(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Split text at blocks that start with ``begin`` and end with ``end``. Return the text outside of all blocks, and the
    contents of the blocks.
    """
    start = text.find(begin)
    if start < 0:
        return text, []
    # Remove line breaks before a tool call, because the format adds them and they are not part of the text.
    outside, bodies = [text[:start].rstrip("\n")], []
    while start >= 0:
        stop = text.find(end, start + len(begin))
        if stop < 0:
            raise ValueError(f"a tool call begins with {begin!r} but does not end with {end!r}")
        bodies.append(text[start + len(begin) : stop])
        start = text.find(begin, stop + len(end))
        after = text[stop + len(end) : start if start >= 0 else None]
        outside += [after] if after.strip() else []
    return "".join(outside), bodies


def _wire_message(content: str, calls: list[dict[str, Any]], **reasoning: str) -> dict[str, Any]:
    message: dict[str, Any] = {"content": content} | {name: text for name, text in reasoning.items() if text}
    return message | ({"tool_calls": calls} if calls else {})


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"a tool call must be a JSON object, not {text.strip()[:60]!r}")
    return value


def _framed(begin: str, end: str, read: Callable[[str], list[dict[str, Any]]], thought: str) -> Parser:
    """Build a parser for reasoning in ``<think>..</think>``, text, and tool calls between two markers. The argument ``read``
    is the function that parses the text between two markers.
    """

    def parse(text: str, opened: bool) -> dict[str, Any]:
        reasoning, text = _think(text, opened)
        content, bodies = _between(text, begin, end)
        return _wire_message(content, [call for body in bodies for call in read(body)], **{thought: reasoning})

    return parse


def _json_call(body: str) -> list[dict[str, Any]]:
    """Parse a tool call of the form ``{"name": .., "arguments": {..}}``."""
    call = _json_object(body)
    return [tool_call(call.get("name"), call.get("arguments"))]


FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
# A key cannot contain "<", so the pattern excludes "<" from keys. Otherwise, a search could take quadratic time.
PAIR = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _pairs(pattern: re.Pattern[str], body: str) -> dict[str, Any]:
    """Parse the key-value pairs of a tool call with ``pattern``. The pairs must cover the whole body."""
    arguments: dict[str, Any] = {}
    at = 0
    while match := pattern.match(body, at):
        arguments[match[1].strip()] = Bare(match[2])
        at = match.end()
    if body[at:].strip():
        raise ValueError(f"the arguments of a call end in {body[at:].strip()[:60]!r}, which is not a key-value pair")
    return arguments


def _xml_call(body: str) -> list[dict[str, Any]]:
    """Parse a tool call ``<function=NAME>..</function>`` whose arguments have the form ``<parameter=KEY>VALUE</parameter>``."""
    match = FUNCTION.fullmatch(body)
    if match is None:
        raise ValueError(f"a tool call must be <function=NAME>..</function>, not {body.strip()[:60]!r}")
    return [tool_call(match[1], _pairs(PARAMETER, match[2]))]


def _paired_call(body: str) -> list[dict[str, Any]]:
    """Parse a tool call that consists of its name and ``<arg_key>``/``<arg_value>`` pairs."""
    name, _, pairs = body.strip().partition("<arg_key>")
    return [tool_call(name.strip(), _pairs(PAIR, "<arg_key>" + pairs if pairs else ""))]


def glm(text: str, opened: bool) -> dict[str, Any]:
    """Parse GLM's format, which is Qwen's format with tool calls for `_paired_call`. A turn ends with the marker of the next
    turn.
    """
    text = re.sub(r"<\|(user|observation)\|>\s*$", "", text)
    message = _framed("<tool_call>", "</tool_call>", _paired_call, "reasoning_content")(text, opened)
    return message | {"content": message["content"].strip()}


def llama_json(text: str, opened: bool) -> dict[str, Any]:
    """Parse Llama's format: a tool call is a bare JSON object ``{"name": .., "parameters": {..}}``, and other output is plain
    text.
    """
    bare = text.strip().removeprefix("<|python_tag|>")
    if not bare.startswith('{"name"'):
        return _wire_message(text, [])
    call = _json_object(bare)
    return _wire_message("", [tool_call(call.get("name"), call.get("parameters", call.get("arguments")))])


HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<before>[^<]*+)<\|channel\|>(?P<channel>\w++)(?P<after>[^<]*+)(?:<\|constrain\|>\w+)?<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def harmony(text: str, opened: bool) -> dict[str, Any]:
    """Parse harmony channels. ``analysis`` is reasoning, ``final`` is the answer, and ``to=functions.NAME`` is a JSON tool
    call.
    """
    at = 0
    parts: dict[str, list[str]] = {"analysis": [], "final": []}
    calls = []
    while match := HARMONY.match(text, at):
        at = match.end()
        recipient = re.search(r"to=functions\.(\S+)", match["before"] + " " + match["after"])
        if recipient:
            calls.append(tool_call(recipient[1], json.loads(match["body"])))
        else:
            parts["analysis" if match["channel"] == "analysis" else "final"].append(match["body"])
    if text[at:].strip():
        raise ValueError(f"{text[at:].strip()[:60]!r} is not a message on a channel")
    return _wire_message("\n".join(parts["final"]), calls, thinking="\n".join(parts["analysis"]))


CONSTANTS = {"true": True, "false": False, "null": None}


class _JsonConstants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node


# Pattern of a string literal, even without its closing quote.
LITERAL = re.compile(r"""'(?:[^'\\]|\\.?)*+(?:'|\Z)|"(?:[^"\\]|\\.?)*+(?:"|\Z)""", re.DOTALL)
# Maximum number of characters of a tool call in Python syntax, outside of string literals. Python's parser takes
# microseconds per character.
LONGEST_CODE = 16_384


def _expression(text: str) -> ast.expr:
    """Parse a Python expression that a model wrote. String literals may contain line breaks, and JSON constants are allowed."""
    if len(text) > LONGEST_CODE and (size := len(LITERAL.sub("", text))) > LONGEST_CODE:
        raise ValueError(f"a call has {size} characters outside string literals; the maximum is {LONGEST_CODE}")
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        if "\n" not in text:
            raise
        tree = ast.parse(text.replace("\n", "\\n"), mode="eval")
    return tree.body


def _python_calls(body: str) -> list[dict[str, Any]]:
    """Parse tool calls in Python syntax, such as ``[f(a='x', n=3), g()]``."""
    calls, listed = [], _expression(body.strip())
    for node in listed.elts if isinstance(listed, ast.List) else [listed]:
        if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
            raise ValueError(f"a tool call must have the form NAME(KEY=VALUE, ..), but it is {body.strip()[:60]!r}")
        calls.append(
            tool_call(
                ast.unparse(node.func),
                {k.arg: ast.literal_eval(_JsonConstants().visit(k.value)) for k in node.keywords},
            )
        )
    return calls


DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>(\S+)\s*```json\n(.*?)\n```<｜tool▁call▁end｜>\s*", re.DOTALL
)


def _fenced_calls(body: str) -> list[dict[str, Any]]:
    """Parse consecutive tool calls in DeepSeek's format. Each call is a name followed by JSON in a code fence."""
    calls, at = [], 0
    while match := DEEPSEEK.match(body, at):
        calls.append(tool_call(match[1], _json_object(match[2])))
        at = match.end()
    if body[at:].strip():
        raise ValueError(f"{body[at:].strip()[:60]!r} is not a tool call")
    return calls


FORMATS: dict[str, Parser] = {
    "qwen_json": _framed("<tool_call>", "</tool_call>", _json_call, "reasoning_content"),
    "qwen_xml": _framed("<tool_call>", "</tool_call>", _xml_call, "reasoning_content"),
    "glm": glm,
    "llama_json": llama_json,
    "harmony": harmony,
    "pythonic": _framed("<|tool_call_start|>", "<|tool_call_end|>", _python_calls, "thinking"),
    "deepseek": _framed("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _fenced_calls, "reasoning_content"),
}


WORDS = {"true": True, "false": False, "none": None, "null": None}


def parameter_schemas(tools: Sequence[dict[str, Any] | Callable[..., Any]] | None) -> dict[str, dict[str, Any]]:
    """Return the parameter schemas of tools by tool name. For a Python function, the schema comes from transformers'
    ``get_json_schema``.
    """
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
    types = {kinds} if isinstance(kinds, str) else set(kinds)
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(option)
    return types


def _read(text: str) -> Any:
    """Parse text as JSON or as a Python constant. Return other text unchanged."""
    if text.strip().lower() in WORDS:
        return WORDS[text.strip().lower()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return str(text)


def _typed(value: object, schema: dict[str, Any] | None) -> Any:
    kinds = _types(schema or {})
    if isinstance(value, Bare):
        read = _read(value)
        if not kinds:
            return read
        if "string" in kinds and not (read is None and "null" in kinds):
            return str(value)
        return read
    if kinds == {"string"} and isinstance(value, int | float) and not isinstance(value, bool):
        # The schema requires a string, so quote the value (e.g. a zip code that the model wrote without quotes).
        return json.dumps(value)
    return value


def typed_arguments(name: str, arguments: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Convert the arguments of a tool call to the types of their schema. Without a schema, unquoted text is parsed as JSON if
    possible.

    >>> typed_arguments("f", {"zip": Bare("75001")}, {"f": {"zip": {"type": "string"}}})
    {'zip': '75001'}
    """
    schema = schemas.get(name, {})
    return {key: _typed(value, schema.get(key)) for key, value in arguments.items()}


ATTRIBUTE = "posttrain_response_format"
# Exceptions that parsers can raise for a text that is truncated at an arbitrary position.
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, SyntaxError, RecursionError, MemoryError)

ASK = {"role": "user", "content": "zq ask"}
CALL = tool_call("zq_find", {"zq_a": "zq thing", "zq_n": 3})


def _written(tokenizer: Tokenizer, message: dict[str, Any]) -> tuple[str, str]:
    """Render a message with the chat template. Return the prompt before the message, and the text that the model would
    generate.
    """

    def rendered(message: dict[str, Any]) -> tuple[str, str]:
        head = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
        return head, tokenizer.apply_chat_template([ASK, message], tokenize=False)

    try:
        head, text = rendered(message)
    except TypeError:
        head, text = rendered(json_arguments([message])[0])
    # If the generation prompt opens a think block that the rendered message does not have, remove the block.
    if not text.startswith(head):
        head = head.rpartition("<think>")[0]
    return head, text[len(head) :]


def _reads_back(tokenizer: Tokenizer, parser: Parser) -> bool:
    """Return whether a parser recovers a plain text message and a tool call with its arguments from the template's
    rendering.
    """
    for message in ({"content": "zq say"}, {"content": "", "tool_calls": [CALL]}):
        head, text = _written(tokenizer, {"role": "assistant", **message})
        try:
            read = _parsed(tokenizer, text, parser, head, {})
        except UNREADABLE:
            return False
        if {name: value for name, value in read.items() if name != "role"} != message:
            return False
    return True


class ParsedMessage(dict):
    """Parsed message as a dict. ``raw`` is the generated text including markers, which format rewards need."""

    raw: str = ""


def add_response_schema(processing_class: Tokenizer) -> Any:
    """Detect the response format of a tokenizer's chat template, and store it on the tokenizer for `parse_response`.

    A tool call is rendered with the chat template. The first parser that recovers the call defines the format. A tokenizer
    with its own ``response_template`` is not changed.

    Args:
        processing_class: Tokenizer or processor. The format of a processor is stored on its tokenizer.

    Returns:
        ``processing_class``.

    Raises:
        ModelError: No parser recovers the tool calls rendered by the template.
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
        what = "and no parser can read the tool calls that it renders"
    else:
        what = "and it does not render tool calls"
    raise ModelError(
        f"the chat template has no known response format, {what}. The known formats are {', '.join(FORMATS)}. Fix: use a "
        "template with one of these formats (chat_template_path), or set tokenizer.response_template."
    )


def _text(tokenizer: Tokenizer, ids: Any) -> str:
    if ids is None or isinstance(ids, str):
        return ids or ""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _without_end(tokenizer: Tokenizer, text: str) -> str:
    """Remove one end-of-turn token from the end of a text, including the whitespace after the token."""
    for end in (tokenizer.eos_token, turn_end(tokenizer)):
        if end and text.rstrip().endswith(end):
            return text.rstrip()[: -len(end)]
    return text


def _checked(calls: Any, schemas: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Check tool calls and convert them to OpenAI's form. Flat calls ``{"name", "arguments"}`` are accepted too."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, not {type(calls).__name__}")
    checked = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"a tool call must be a dict with a name, not {str(call)[:80]}")
        arguments = function.get("arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise ValueError(f"arguments must be a JSON object, not {str(arguments)[:80]}")
        typed = typed_arguments(function["name"], arguments, schemas)
        checked.append({"type": "function", "function": {"name": function["name"], "arguments": typed}})
    return checked


def _parsed(
    tokenizer: Tokenizer, text: str, parser: Parser, prefix: str, schemas: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    opened = prefix.rfind("<think>") > prefix.rfind("</think>")
    return _message(parser(_without_end(tokenizer, text), opened), schemas)


def _message(read: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    message = {"role": "assistant", **read, "content": read.get("content") or ""}
    if message.get("tool_calls"):
        message["tool_calls"] = _checked(message["tool_calls"], schemas)
    return message


def parse_response(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    prefix: Sequence[int] | str | None = None,
    tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """Parse a completion into a message with ``role``, ``content`` and, if present, reasoning and ``tool_calls``.

    Invalid model output does not raise an error. If a completion cannot be parsed, e.g. because a tool call is incomplete, the
    message has plain content without special tokens, and ``parse_error`` contains the reason. A tokenizer without a response
    format (see `add_response_schema`) returns plain content without ``parse_error``.

    Args:
        tokenizer: Tokenizer or processor.
        ids: Completion tokens, with or without the end-of-turn token.
        prefix: Tokens or text of the prompt. Required if the generation prompt opens a think block.
        tools: Schemas or functions of the tools. Unquoted arguments are converted to the types in the schema.

    Returns:
        The message, which is a `ParsedMessage` if the tokenizer has a response format. Every tool call has the form
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


def _own_parser(tokenizer: Tokenizer, text: str, prefix: str, tools: Any) -> dict[str, Any]:
    """Parse a response with the tokenizer's own response template, which transformers implements."""
    read = tokenizer.parse_response(text, prefix=prefix, tools=list(tools) if tools else None)
    if not isinstance(read, dict):
        raise ValueError(f"the tokenizer's response template returned {type(read).__name__} instead of a message")
    message = _message(read, parameter_schemas(tools))
    if isinstance(message["content"], str) and tokenizer.eos_token:
        message["content"] = message["content"].removesuffix(tokenizer.eos_token)
    return message
