"""The conversations by which a chat template is recognised."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["PROBES", "Probe", "dummy_call", "tool_call"]


@dataclass(frozen=True, eq=False)
class Probe:
    """A conversation to render.

    Attributes:
        name: What it shows.
        messages: The conversation.
        ask: With the generation prompt.
        tools: Offered tools.
        kwargs: Further arguments of the template.
        shown: What a rendering must contain; a template that drops it has nothing to compare.
        history: An assistant turn precedes the last one.
        required: A template that refuses this one cannot be recognised at all.
    """

    name: str
    messages: list[dict[str, Any]]
    ask: bool = False
    tools: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    history: bool = False
    required: bool = False

    def is_shown(self, text: str) -> bool:
        """Whether a rendering contains what was said, as text and not as a printed list of blocks."""
        as_text = '"type": "text"' not in text and "'type': 'text'" not in text
        return as_text and all(word in text for word in self.shown)

    def with_json_arguments(self) -> Probe:
        """The same with the arguments of tool calls as JSON strings."""
        messages = []
        for message in self.messages:
            calls = [json.loads(json.dumps(call)) for call in message.get("tool_calls", ())]
            for call in calls:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            messages.append(message | ({"tool_calls": calls} if calls else {}))
        return replace(self, messages=messages)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool_call(name: Any, arguments: Any) -> dict[str, Any]:
    """A call as messages hold it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {
    "type": "function",
    "function": {
        "name": "zq_find",
        "description": "Finds it.",
        "parameters": {
            "type": "object",
            "properties": {"zq_arg": {"type": "string", "description": "What."}, "zq_n": {"type": "integer"}},
            "required": ["zq_arg"],
        },
    },
}
RESULT = {"role": "tool", "name": "zq_find", "content": "zq result"}
CALL = tool_call("zq_find", {"zq_arg": "zq thing", "zq_n": 3, "zq_b": True, "zq_l": ["zq", None]})
CALL_WORDS = ("zq_find", "zq_arg", "zq thing")

dummy_call = Probe("a tool call", [_user("zq ask"), _assistant("", tool_calls=[CALL])], shown=("zq ask", *CALL_WORDS))

PROBES = (
    Probe("a question", [_user("zq ask")], ask=True, shown=("zq ask",), required=True),
    Probe("one turn", [_user("zq ask"), _assistant("zq say")], shown=("zq ask", "zq say"), required=True),
    Probe(
        "two turns",
        [_user("zq ask"), _assistant("zq say"), _user("zq more"), _assistant("zq end")],
        shown=("zq ask", "zq say", "zq more", "zq end"),
        history=True,
        required=True,
    ),
    Probe(
        "a second question",
        [_user("zq ask"), _assistant("zq say"), _user("zq more")],
        ask=True,
        shown=("zq ask", "zq say", "zq more"),
        history=True,
        required=True,
    ),
    Probe(
        "spaces around the texts",
        [_user("  zq ask \n"), _assistant(" zq say \n")],
        shown=("zq ask", "zq say"),
    ),
    Probe(
        "a system message", [_system(" zq rule "), _user("zq ask"), _assistant("zq say")], shown=("zq rule", "zq say")
    ),
    Probe("an empty system message", [_system(""), _user("zq ask")], ask=True, shown=("zq ask",)),
    Probe(
        "reasoning",
        [_user("zq ask"), _assistant("zq say", reasoning_content="zq because")],
        shown=("zq say", "zq because"),
    ),
    Probe(
        "reasoning in the text",
        [_user("zq ask"), _assistant("<think>\nzq because\n</think>\n\nzq say")],
        shown=("zq say", "zq because"),
    ),
    Probe("no thinking", [_user("zq ask")], ask=True, kwargs={"enable_thinking": False}, shown=("zq ask",)),
    Probe("thinking", [_user("zq ask")], ask=True, kwargs={"enable_thinking": True}, shown=("zq ask",)),
    Probe("tools", [_user("zq ask")], ask=True, tools=[TOOL], shown=("zq ask", "zq_find", "zq_arg")),
    Probe(
        "tools and a system message",
        [_system("zq rule"), _user("zq ask")],
        ask=True,
        tools=[TOOL],
        shown=("zq rule", "zq ask", "zq_find"),
    ),
    dummy_call,
    Probe(
        "a tool call with text",
        [_user("zq ask"), _assistant("zq first", tool_calls=[CALL])],
        shown=("zq first", *CALL_WORDS),
    ),
    Probe(
        "two calls and their results",
        [
            _user("zq ask"),
            _assistant("", tool_calls=[CALL, tool_call("zq_other", {})]),
            RESULT,
            RESULT | {"name": "zq_other", "content": "zq second"},
        ],
        ask=True,
        shown=(*CALL_WORDS, "zq_other", "zq result", "zq second"),
        history=True,
    ),
    Probe(
        "a call, its result, an answer",
        [_user("zq ask"), _assistant("", tool_calls=[CALL]), RESULT, _assistant("zq end")],
        shown=(*CALL_WORDS, "zq result", "zq end"),
        history=True,
    ),
    Probe(
        "a tool's result without a call",
        [_user("zq ask"), _assistant("zq say"), RESULT],
        ask=True,
        shown=("zq ask", "zq say", "zq result"),
        history=True,
    ),
    Probe(
        "text and an image",
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "zq ask"}]}],
        ask=True,
        shown=("zq ask",),
    ),
)
