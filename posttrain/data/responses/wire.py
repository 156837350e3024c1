"""Wire formats: how a model writes reasoning, text and tool calls; one small parser each.

A parser takes the text of one assistant turn without its end-of-turn token, and whether the prompt left a think block
open. It returns a message, or raises `ValueError` where the text begins a call that is malformed or cut off. Values that
the format writes as bare text are `Bare`, so that a tool's schema can type them later.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from posttrain.data.template_probes import tool_call

__all__ = ["FORMATS", "Bare", "Parser"]

Parser = Callable[[str, bool], dict[str, Any]]


class Bare(str):
    """An argument the format writes without quotes: text or JSON, only the tool's schema can tell."""


def _think(text: str, opened: bool) -> tuple[str, str]:
    """Reasoning and the rest. The opening tag may be the prompt's, and a block that is cut off is all reasoning."""
    head, tag, rest = text.partition("<think>")
    if tag and not head.strip():
        opened, text = True, rest
    reasoning, closed, rest = text.partition("</think>")
    if closed:
        return reasoning.strip("\n"), rest.lstrip("\n")
    return (text.strip("\n"), "") if opened else ("", text)


def _between(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """The text outside all ``begin ... end`` blocks, and their bodies."""
    outside, first, rest = text.partition(begin)
    if first and outside.endswith("\n"):
        outside = outside.rstrip("\n")  # Line breaks before a call belong to the format.
    bodies = []
    while first:
        body, closed, rest = rest.partition(end)
        if not closed:
            raise ValueError(f"a call begins with {begin!r} and {end!r} never comes")
        bodies.append(body)
        after, first, rest = rest.partition(begin)
        outside += after if after.strip() else ""
    return outside, bodies


def _message(content: str, calls: list[dict[str, Any]], **reasoning: str) -> dict[str, Any]:
    message: dict[str, Any] = {"content": content} | {name: text for name, text in reasoning.items() if text}
    return message | ({"tool_calls": calls} if calls else {})


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"a call must be a JSON object, and it is {text.strip()[:60]!r}")
    return value


def qwen_json(text: str, opened: bool) -> dict[str, Any]:
    """``<think>..</think>``, text, then ``<tool_call>{"name": .., "arguments": {..}}</tool_call>`` repeated."""
    reasoning, text = _think(text, opened)
    content, bodies = _between(text, "<tool_call>", "</tool_call>")
    calls = [_json_object(body) for body in bodies]
    return _message(content, [tool_call(c.get("name"), c.get("arguments")) for c in calls], reasoning_content=reasoning)


FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _pairs(pattern: re.Pattern[str], body: str) -> dict[str, Any]:
    """Key and value pairs that cover a body to its end."""
    arguments: dict[str, Any] = {}
    at = 0
    while found := pattern.match(body, at):
        arguments[found[1].strip()] = Bare(found[2])
        at = found.end()
    if body[at:].strip():
        raise ValueError(
            f"the arguments of a call end in {body[at:].strip()[:60]!r}, which is no pair of key and value"
        )
    return arguments


def qwen_xml(text: str, opened: bool) -> dict[str, Any]:
    """The same frame; a call is ``<function=NAME>`` with ``<parameter=KEY>`` value ``</parameter>`` inside."""
    reasoning, text = _think(text, opened)
    content, bodies = _between(text, "<tool_call>", "</tool_call>")
    calls = []
    for body in bodies:
        found = FUNCTION.fullmatch(body)
        if found is None:
            raise ValueError(f"a call must be <function=NAME>..</function>, and it is {body.strip()[:60]!r}")
        calls.append(tool_call(found[1], _pairs(PARAMETER, found[2])))
    return _message(content, calls, reasoning_content=reasoning)


def glm(text: str, opened: bool) -> dict[str, Any]:
    """``<think>..</think>``, text, then ``<tool_call>NAME`` with ``<arg_key>``/``<arg_value>`` pairs."""
    text = re.sub(r"<\|(user|observation)\|>\s*$", "", text)  # What ends a turn is what opens the next.
    reasoning, text = _think(text, opened)
    content, bodies = _between(text, "<tool_call>", "</tool_call>")
    calls = []
    for body in bodies:
        name, _, pairs = body.strip().partition("<arg_key>")
        calls.append(tool_call(name.strip(), _pairs(PAIR, "<arg_key>" + pairs if pairs else "")))
    return _message(content.strip(), calls, reasoning_content=reasoning)


def llama_json(text: str, opened: bool) -> dict[str, Any]:
    """A bare JSON object ``{"name": .., "parameters": {..}}``, or plain text."""
    bare = text.strip().removeprefix("<|python_tag|>")
    if not bare.startswith('{"name"'):
        return _message(text, [])
    call = _json_object(bare)
    return _message("", [tool_call(call.get("name"), call.get("parameters", call.get("arguments")))])


HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<before>[^<]*)<\|channel\|>(?P<channel>\w+)(?P<after>[^<]*)(?:<\|constrain\|>\w+)?<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def harmony(text: str, opened: bool) -> dict[str, Any]:
    """Channels: ``analysis`` is reasoning, ``final`` the answer, ``to=functions.NAME`` a call in JSON."""
    at = 0
    parts: dict[str, list[str]] = {"analysis": [], "final": []}
    calls = []
    while found := HARMONY.match(text, at):
        at = found.end()
        recipient = re.search(r"to=functions\.(\S+)", found["before"] + " " + found["after"])
        if recipient:
            calls.append(tool_call(recipient[1], json.loads(found["body"])))
        else:
            parts["analysis" if found["channel"] == "analysis" else "final"].append(found["body"])
    if text[at:].strip():
        raise ValueError(f"{text[at:].strip()[:60]!r} is not a message on a channel")
    return _message("\n".join(parts["final"]), calls, thinking="\n".join(parts["analysis"]))


CONSTANTS = {"true": True, "false": False, "null": None}


class _JsonConstants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node


def _expression(text: str) -> ast.expr:
    """A Python expression; line breaks may stand unescaped in its strings, and constants may be JSON's."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        tree = ast.parse(text.replace("\n", "\\n"), mode="eval")
    return tree.body


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonConstants().visit(node))


def pythonic(text: str, opened: bool) -> dict[str, Any]:
    """``<|tool_call_start|>[f(a='x', n=3), g()]<|tool_call_end|>``."""
    reasoning, text = _think(text, opened)
    content, bodies = _between(text, "<|tool_call_start|>", "<|tool_call_end|>")
    calls = []
    for body in bodies:
        listed = _expression(body.strip())
        for node in listed.elts if isinstance(listed, ast.List) else [listed]:
            if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
                raise ValueError(f"a call must be NAME(KEY=VALUE, ..), and it is {ast.unparse(node)[:60]!r}")
            calls.append(tool_call(ast.unparse(node.func), {k.arg: _literal(k.value) for k in node.keywords}))
    return _message(content, calls, thinking=reasoning)


DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>(\S+)\s*```json\n(.*?)\n```<｜tool▁call▁end｜>\s*", re.DOTALL
)


def deepseek(text: str, opened: bool) -> dict[str, Any]:
    """Calls between ``tool▁calls`` marks, each a name and JSON in a code fence."""
    reasoning, text = _think(text, opened)
    content, bodies = _between(text, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    calls = []
    for body in bodies:
        at = 0
        while found := DEEPSEEK.match(body, at):
            calls.append(tool_call(found[1], _json_object(found[2])))
            at = found.end()
        if body[at:].strip():
            raise ValueError(f"{body[at:].strip()[:60]!r} is not a call")
    return _message(content, calls, reasoning_content=reasoning)


FORMATS: dict[str, Parser] = {
    "qwen_json": qwen_json,
    "qwen_xml": qwen_xml,
    "glm": glm,
    "llama_json": llama_json,
    "harmony": harmony,
    "pythonic": pythonic,
    "deepseek": deepseek,
}
