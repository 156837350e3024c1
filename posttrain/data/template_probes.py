"""The conversations by which a chat template is recognised."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = [
    "FAMILIES",
    "PROBES",
    "Family",
    "Match",
    "Probe",
    "best_match",
    "dummy_call",
    "inner_tokenizer",
    "recognise_family",
    "template_text",
    "tool_call",
    "training_template",
    "with_template",
]


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


FOLDER = Path(__file__).parent / "chat_templates"
SENTINEL = "zq7 setting zq8"  # Stands for a setting while its place in the rendering is found.
THINK_BLOCK = re.compile(r"<think>\n.*?\n</think>\n\n", re.DOTALL)
GLM_MARKERS = ("<|user|>", "<|observation|>")


def _exact(ours: str, theirs: str, history: bool) -> bool:
    return ours == theirs


def _qwen3(ours: str, theirs: str, history: bool) -> bool:
    """The published template leaves the think block of earlier turns out; ours always writes it."""
    return ours == theirs or (history and THINK_BLOCK.sub("", ours) == THINK_BLOCK.sub("", theirs))


def _glm(ours: str, theirs: str, history: bool) -> bool:
    """Ours closes a final assistant turn with the marker that opens the next one."""
    return ours == theirs or any(ours == theirs + marker for marker in GLM_MARKERS)


@dataclass(frozen=True)
class Family:
    """A wire format with a training template of ours.

    Attributes:
        name: As users know it.
        file: The template, without its ending, in ``chat_templates``.
        setting: A variable of the template whose value is the checkpoint's own (its default system text, the date it
            states) and is read from the tokenizer's template.
        fixed: Variables of the template that make this family out of a file that several share.
        same: Whether our rendering and the published one say the same; the third argument tells that the conversation
            has an assistant turn before its last.
    """

    name: str
    file: str
    setting: str | None = None
    fixed: tuple[tuple[str, bool], ...] = ()
    same: Callable[[str, str, bool], bool] = _exact


# Simple formats first: one whose template ignores tools agrees with everything that ignores them in the same way.
FAMILIES = (
    Family("ChatML", "chatml", "default_system"),
    Family("Qwen2.5", "qwen2_5", "default_system"),
    Family("Qwen3-Instruct-2507", "qwen3_instruct_2507"),
    Family("Qwen3", "qwen3", same=_qwen3),
    Family("Qwen3.5", "qwen3_5", same=_qwen3),
    Family("Qwen3.5 without thinking", "qwen3_5", fixed=(("think_by_default", False),), same=_qwen3),
    Family("Qwen3.6", "qwen3_5", fixed=(("json_constants", True),), same=_qwen3),
    Family("Nemotron 3", "nemotron3"),
    Family("Nemotron 3 Ultra", "nemotron3", fixed=(("tight_think", True),)),
    Family("Llama 3", "llama3"),
    Family("Llama 3.1", "llama3_1", "date_string"),
    Family("Gemma", "gemma"),
    Family("Gemma 3", "gemma3"),
    Family("Phi-3", "phi3"),
    Family("Phi-3.5", "phi3_5"),
    Family("Cohere", "cohere", "default_system"),
    Family("Cohere2", "cohere2", "default_system"),
    Family("GLM-4-MoE", "glm4moe", same=_glm),
    Family("DeepSeek-V3", "deepseekv3"),
    Family("gpt-oss", "gptoss"),
    Family("LFM2", "lfm2"),
)


def template_text(processing_class: Any) -> str | None:
    """The chat template as one text: of named variants, ``default``."""
    template = getattr(processing_class, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


def inner_tokenizer(processing_class: Any) -> Any:
    """The tokenizer of a processor, or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", None) or processing_class


def with_template(processing_class: Any, template: str | None) -> Any:
    """A shallow copy of the (inner) tokenizer that carries ``template``."""
    shadow = copy.copy(inner_tokenizer(processing_class))
    shadow.chat_template = template
    return shadow


def training_template(family: Family, settings: dict[str, str] | None = None) -> str:
    """The family's training template, with the checkpoint's own settings written into it."""
    text = (FOLDER / f"{family.file}.jinja").read_text(encoding="utf-8")
    lines = [
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}{{%- endif -%}}\n"
        for name, value in (dict(family.fixed) | (settings or {})).items()
    ]
    return "".join(lines) + text


def _rendered(tokenizer: Any, template: str, probe: Probe, **settings: str) -> str | None:
    try:
        return tokenizer.apply_chat_template(
            probe.messages,
            chat_template=template,
            tokenize=False,
            tools=probe.tools,
            add_generation_prompt=probe.ask,
            **probe.kwargs,
            **settings,
        )
    except Exception:
        return None  # A template refuses what its format has no words for.


def _setting(family: Family, tokenizer: Any, theirs: list[str | None]) -> dict[str, str]:
    """Read the checkpoint's own value of the family's setting out of the rendering of the first probe."""
    text = training_template(family)
    if family.setting is None or theirs[0] is None or _rendered(tokenizer, text, PROBES[0]) == theirs[0]:
        return {}
    marked = _rendered(tokenizer, text, PROBES[0], **{family.setting: SENTINEL})
    before, _, after = (marked or "").partition(SENTINEL)
    # What is read here from a template of another family is nonsense, and the probes that follow disagree.
    return {family.setting: theirs[0][len(before) : len(theirs[0]) - len(after)]}


@dataclass(frozen=True)
class Match:
    """How well a family fits a template: how many probes agree, and the first that does not (ours, theirs)."""

    family: Family
    template: str
    agreed: int
    difference: tuple[str, str, str] | None

    @property
    def exact(self) -> bool:
        """Whether every probe that could be compared agrees."""
        return self.difference is None and self.agreed > 0


def _match(family: Family, tokenizer: Any, theirs: list[str | None]) -> Match:
    template = training_template(family, _setting(family, tokenizer, theirs))
    agreed, difference = 0, None
    for probe, said in zip(PROBES, theirs, strict=True):
        if said is None or not probe.is_shown(said):
            if probe.required:
                return Match(family, template, agreed, (probe.name, "", said or "(refused)"))
            continue  # What the published template drops or refuses cannot be compared.
        ours = _rendered(tokenizer, template, probe)
        if ours is not None and family.same(ours, said, probe.history):
            agreed += 1
        elif difference is None:
            difference = (probe.name, ours or "(refused)", said)
    return Match(family, template, agreed, difference)


def best_match(tokenizer: Any, template: str) -> Match:
    """The first family that agrees on every probe, else the one that agrees on most."""
    theirs = [_rendered(tokenizer, template, probe) for probe in PROBES]
    if theirs[PROBES.index(dummy_call)] is None:  # Templates that concatenate arguments take them as a JSON string.
        theirs = [_rendered(tokenizer, template, probe.with_json_arguments()) for probe in PROBES]
    best: Match | None = None
    for family in FAMILIES:
        match = _match(family, tokenizer, theirs)
        if match.exact:
            return match
        if best is None or match.agreed > best.agreed:
            best = match
    assert best is not None
    return best


def recognise_family(processing_class: Any) -> tuple[Family, str] | None:
    """The family whose renderings agree with the tokenizer's template, and its training template; None without one."""
    template = template_text(processing_class)
    if not template:
        return None
    match = best_match(inner_tokenizer(processing_class), template)
    return (match.family, match.template) if match.exact else None
