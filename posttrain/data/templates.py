"""Chat templates for training: families known by what they render, a template's abilities, and what it does to rows."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.data.chat import (
    assistant_mask,
    common_prefix,
    encode,
    has_generation_markers,
    inner_tokenizer,
    is_processor,
    json_arguments,
    render,
    template_arguments,
    template_text,
    tool_call,
    turn_end,
    with_template,
)
from posttrain.data.formats import is_messages, naming
from posttrain.errors import ArgumentTypeError, ModelError
from posttrain.types import Finding

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


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
    shown: Sequence[str] = ()
    history: bool = False
    required: bool = False

    def is_shown(self, text: str) -> bool:
        """Whether a rendering contains what was said, as text and not as a printed list of blocks."""
        as_text = '"type": "text"' not in text and "'type': 'text'" not in text
        return as_text and all(word in text for word in self.shown)


FOLDER = Path(__file__).parent / "chat_templates"
PROBES = tuple(Probe(**probe) for probe in json.loads((FOLDER / "probes.json").read_text(encoding="utf-8")))
TWO_TURNS = next(probe.messages for probe in PROBES if probe.name == "two turns")
TOOL_CALL = next(i for i, probe in enumerate(PROBES) if probe.name == "a tool call")
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


def training_template(family: Family, settings: dict[str, str] | None = None) -> str:
    """The family's training template, with the checkpoint's own settings written into it."""
    text = (FOLDER / f"{family.file}.jinja").read_text(encoding="utf-8")
    lines = [
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}{{%- endif -%}}\n"
        for name, value in (dict(family.fixed) | (settings or {})).items()
    ]
    return "".join(lines) + text


def _rendered(tokenizer: Tokenizer, template: str, probe: Probe, **settings: str) -> str | None:
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


def _setting(family: Family, tokenizer: Tokenizer, theirs: list[str | None]) -> dict[str, str]:
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


def _match(family: Family, tokenizer: Tokenizer, theirs: list[str | None]) -> Match:
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


def best_match(tokenizer: Tokenizer, template: str) -> Match:
    """The first family that agrees on every probe, else the one that agrees on most."""
    theirs = [_rendered(tokenizer, template, probe) for probe in PROBES]
    if theirs[TOOL_CALL] is None:  # Templates that concatenate arguments take them as a JSON string.
        theirs = [
            _rendered(tokenizer, template, replace(probe, messages=json_arguments(probe.messages))) for probe in PROBES
        ]
    matches = []
    for family in FAMILIES:
        matches.append(_match(family, tokenizer, theirs))
        if matches[-1].exact:
            return matches[-1]
    return max(matches, key=lambda match: match.agreed)


def _trained(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """Tokens that the assistant says; none where they cannot be found."""
    try:
        ids, mask = assistant_mask(tokenizer, messages)
    except Exception:
        return []
    return [token for token, said in zip(ids, mask, strict=True) if said]


DIALOGUE = (
    {"role": "user", "content": "zq question"},
    {"role": "assistant", "content": "", "tool_calls": [tool_call("zq_lookup", {"zq_key": "zq_value"})]},
    {"role": "tool", "name": "zq_lookup", "content": "zq_result_text"},
)


def _structured(processing_class: Tokenizer, messages: list[dict[str, Any]], image: Any = None) -> list[dict[str, Any]]:
    """Messages as a processor takes them: content as blocks; ``image`` opens the first."""
    if inner_tokenizer(processing_class) is processing_class:
        return messages
    blocks = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    if image is not None:
        blocks[0]["content"].insert(0, {"type": "image", "image": image})
    return blocks


def _holds_for_dialogue(holds: Callable[[list[dict[str, Any]]], bool]) -> bool:
    """Ask about `DIALOGUE`, with arguments as JSON text where a template concatenates strings; False where it refuses both."""
    try:
        try:
            return holds(list(DIALOGUE))
        except TypeError:
            return holds(json_arguments(DIALOGUE))
    except Exception:
        return False  # A template that refuses the conversation has no words for tools.


def supports_tool_calling(processing_class: Tokenizer) -> bool:
    """Whether the chat template shows a tool call and its result: name, argument key, argument value and result."""
    template = template_text(processing_class)
    if not template:
        return False

    def shown(dialogue: list[dict[str, Any]]) -> bool:
        messages = _structured(processing_class, dialogue)
        text = processing_class.apply_chat_template(messages, chat_template=template, tokenize=False)
        return all(word in text for word in ("zq_lookup", "zq_key", "zq_value", "zq_result_text"))

    return _holds_for_dialogue(shown)


def is_chat_template_prefix_preserving(processing_class: Tokenizer) -> bool:
    """Whether the tokens of a tool call stay the same once the tool's result follows.

    Multi-turn training with tools builds its sequences by concatenation: what the model wrote must not change when the
    conversation goes on.
    """
    template = template_text(processing_class)
    if not template:
        return False
    image = None
    if is_processor(processing_class):
        from posttrain.integrations import require

        image = require("PIL.Image", "probing a processor's chat template").new("RGB", (8, 8))

    def preserved(dialogue: list[dict[str, Any]]) -> bool:
        messages = _structured(processing_class, dialogue, image)
        options = {"chat_template": template, "tokenize": True, "return_dict": True}
        shorter = processing_class.apply_chat_template(messages[:2], **options)["input_ids"]
        longer = processing_class.apply_chat_template(messages, add_generation_prompt=True, **options)["input_ids"]
        if shorter and isinstance(shorter[0], list):
            shorter, longer = shorter[0], longer[0]
        return common_prefix(shorter, longer) == len(shorter)

    return _holds_for_dialogue(preserved)


def is_chat_template_stop_token_trained(processing_class: Tokenizer, chat_template: str | None = None) -> bool:
    """Whether the last thing trained in an assistant turn is a token of the added vocabulary, such as ``<|im_end|>``.

    A model trained on turns without it never learns to stop.

    Args:
        processing_class: Tokenizer or processor; images are not probed.
        chat_template: Looked at instead of the tokenizer's own.
    """
    tokenizer = with_template(processing_class, chat_template or template_text(processing_class))
    trained = _trained(tokenizer, TWO_TURNS[:3])
    while trained and not tokenizer.decode([trained[-1]]).strip():
        trained.pop()
    return bool(trained) and trained[-1] in set(tokenizer.get_added_vocab().values())


def get_training_chat_template(
    processing_class: Tokenizer | None = None, tokenizer: Tokenizer | None = None
) -> str | None:
    """The chat template to train with, or None when the tokenizer's own needs no change.

    Nothing needs changing where the template marks what the assistant says and, if it knows tools, a conversation stays a
    prefix of what follows it; or where it has no markers and belongs to no known family, but the assistant's words can be
    found from rendered offsets (`posttrain.data.chat.assistant_mask` does that without touching the template).

    A training template renders as the published one does, except that reasoning is never left out of earlier turns and
    that the token which ends a turn always stands in the assistant's span.

    Args:
        processing_class: Tokenizer or processor.
        tokenizer: Deprecated name of the same argument.

    Raises:
        ArgumentTypeError: Neither or both arguments. ModelError: No template, or one that belongs to no known family and
            whose assistant turns cannot be found; the nearest family and the first difference are named.
    """
    if (processing_class is None) == (tokenizer is None):
        raise ArgumentTypeError(
            f"get_training_chat_template takes one tokenizer or processor as processing_class, and got "
            f"{'neither argument' if tokenizer is None else 'processing_class and its old name tokenizer together'}."
        )
    if tokenizer is not None:
        warnings.warn("tokenizer is deprecated, use processing_class.", FutureWarning, stacklevel=2)
        processing_class = tokenizer
    template = template_text(processing_class)
    if not template:
        raise ModelError(
            "the tokenizer has no chat template, so none can be made ready for training. Set chat_template."
        )
    marked = has_generation_markers(template)
    tools_fit = not supports_tool_calling(processing_class) or is_chat_template_prefix_preserving(processing_class)
    if marked and tools_fit:
        return None
    match = best_match(inner_tokenizer(processing_class), template)
    if match.exact:
        return match.template
    shadow = with_template(processing_class, template)
    said = shadow.decode(_trained(shadow, TWO_TURNS)) if not marked and tools_fit else ""
    # Offsets alone may find both assistant turns of a conversation, their ends included.
    if said and all((m["content"] in said) == (m["role"] == "assistant") for m in TWO_TURNS):
        logger.info("chat template of no known family: what the assistant says is found from rendered offsets")
        return None
    raise ModelError(_unknown(match, marked, tools_fit))


def _unknown(match: Match, marked: bool, tools_fit: bool) -> str:
    assert match.difference is not None
    probe, ours, theirs = match.difference
    at = common_prefix(ours, theirs)
    lacks = [] if tools_fit else ["a conversation with a tool call changes once the tool's result follows"]
    if not marked:
        lacks.append("it has no {% generation %} markers and its assistant turns cannot be found by rendering")
    return (
        f"the chat template cannot be trained with as it is: {'; '.join(lacks)}. It belongs to no family known here. "
        f"Nearest is {match.family.name} ({match.agreed} of {len(PROBES)} probes agree); on {probe!r} it renders "
        f"{theirs[max(0, at - 20) : at + 40]!r} where that family renders {ours[max(0, at - 20) : at + 40]!r}. Mark what the "
        "assistant says with {% generation %} in the template, or give a template file (chat_template_path)."
    )


@dataclass
class TemplateReport:
    """What a chat template does to the first rows of a dataset.

    Attributes:
        rows: Conversational rows that were looked at.
        findings: What is wrong, worst first.
    """

    rows: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def fatal(self) -> list[Finding]:
        """The findings that make training silently wrong."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def raise_fatal(self) -> None:
        """Raise `ModelError` with every fatal finding, if there is one."""
        if self.fatal:
            raise ModelError("the chat template cannot be trained with:\n" + _listed(self.fatal))

    def __str__(self) -> str:
        if not self.findings:
            return f"chat template: {self.rows} rows looked at, nothing found"
        return f"chat template, {self.rows} rows looked at:\n" + _listed(self.findings)


def _listed(findings: list[Finding]) -> str:
    return "\n".join(f"- [{f.code}] {f.what} ({f.where}). {f.why} {f.fix}" for f in findings)


Severity = Literal["info", "warning", "error"]
# Code: how bad it is (where only what the assistant says is trained, else), what was seen, why it matters, how to fix it.
PROBLEMS: dict[str, tuple[Severity, Severity, str, str, str]] = {
    "PT-K111": (
        "error",
        "error",
        "rendered conversations begin with two bos tokens",
        "A model has never seen two.",
        "Take one out of the template.",
    ),
    "PT-K116": (
        "error",
        "error",
        "reasoning of trained turns is missing from the rendering",
        "It would never be learnt.",
        "Use the template of get_training_chat_template, or name the field as the template does (reasoning_content).",
    ),
    "PT-K119": (
        "error",
        "error",
        "tool calls are missing from the rendering",
        "The turns that call tools would be trained as if they said nothing.",
        "Use a chat template that renders tool calls (chat_template_path).",
    ),
    "PT-K114": (
        "error",
        "warning",
        "what the assistant says cannot be found",
        "Training on the assistant's turns alone would train nothing or the wrong tokens.",
        "Use the template of get_training_chat_template, or mark the turns with {% generation %}.",
    ),
    "PT-K118": (
        "error",
        "warning",
        "the token that ends an assistant turn is outside what is marked as the assistant's",
        "Trained on the assistant's turns alone, the model would never learn to stop.",
        "Close {% generation %} after the end-of-turn token, or use the template of get_training_chat_template.",
    ),
    "PT-K117": (
        "warning",
        "info",
        "the first trained token is not the first token after the generation prompt",
        "The model is trained to write what the prompt already holds, or not trained on how an answer begins.",
        "Put the role header before {% generation %} and everything after it inside.",
    ),
    "PT-K115": (
        "warning",
        "warning",
        "the prompt's tokens change once the answer follows",
        "What is trained differs from what the model sees when it generates.",
        "Use the template of get_training_chat_template, or one whose generation prompt opens every answer.",
    ),
    "PT-K112": (
        "warning",
        "warning",
        "the tokenizer begins plain text with bos, and the template does not write it",
        "Most models answer worse without it.",
        "Begin the template with {{ bos_token }}.",
    ),
    "PT-K113": (
        "warning",
        "warning",
        "the tokenizer's eos token is not the one that ends an assistant turn",
        "Generation would not stop where training ends.",
        "Set eos_token to the end-of-turn token, or list both in generation_config.eos_token_id.",
    ),
}


def check_template(
    processing_class: Tokenizer, rows: Iterable, *, assistant_only: bool = False, turns: bool = True, limit: int = 32
) -> TemplateReport:
    """Look at what the chat template does to the first conversational rows: boundaries, marks, special tokens, losses.

    Args:
        processing_class: Tokenizer or processor.
        rows: Dataset rows with ``messages``, or ``prompt`` with ``completion`` or ``chosen``; others are passed over.
        assistant_only: Only what the assistant says is trained, so marks that fail are fatal.
        turns: Also where turns begin and end; False: only what the rendering lacks, and how it begins.
        limit: How many rows are looked at.

    Returns:
        The report; call `TemplateReport.raise_fatal` on it.

    Raises:
        DataError: The template refuses a row; the message has its index.
    """
    tokenizer = with_template(processing_class, template_text(processing_class))
    seen: dict[str, list[int]] = {}
    looked = 0
    for index, row in enumerate(islice(rows, limit)):
        conversation = _conversation(row)
        if conversation is None:
            continue
        looked += 1
        with naming(f"row {index}"):
            problems = _row_problems(tokenizer, *conversation, turns=turns)
        for code in problems:
            seen.setdefault(code, []).append(index)
    for code in _token_problems(tokenizer) if looked and turns else ():
        seen.setdefault(code, [])
    return TemplateReport(looked, [_finding(code, seen[code], assistant_only) for code in PROBLEMS if code in seen])


def _finding(code: str, rows: list[int], assistant_only: bool) -> Finding:
    strict, lenient, what, why, fix = PROBLEMS[code]
    listed = ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
    where = f"row{'s' if len(rows) > 1 else ''} {listed}" if rows else "every conversation"
    return Finding(code, strict if assistant_only else lenient, what, where, why, fix)


def _conversation(row: dict[str, Any]) -> tuple[list[dict[str, Any]], int, dict[str, Any]] | None:
    """Messages of a row, where the trained ones begin, and arguments of the template."""
    answer = row.get("completion") or row.get("chosen") or []
    prompt = row.get("messages") or row.get("prompt") or []
    if not (is_messages(prompt or answer) and (not answer or is_messages(answer))):
        return None
    return [*prompt, *answer], 0 if "messages" in row else len(prompt), template_arguments(row)


def _row_problems(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], start: int, kwargs: dict[str, Any], *, turns: bool
) -> set[str]:
    ids_of = cache(lambda text: encode(tokenizer, [text], special=False)[0])

    @cache
    def begun(count: int, asks: bool) -> str:  # Boundaries are asked for more than once.
        return render(tokenizer, messages[:count], add_generation_prompt=asks, **kwargs)

    def rendered(part: list[dict[str, Any]], add_generation_prompt: bool = False, **_: object) -> str:
        return begun(len(part), add_generation_prompt)

    text = begun(len(messages), False)
    ids, bos, codes = ids_of(text), tokenizer.bos_token_id, _losses(text, messages[start:])
    if bos is not None and ids[:2] == [bos, bos]:
        codes.add("PT-K111")
    elif bos is not None and ids[:1] != [bos] and tokenizer("a")["input_ids"][:1] == [bos]:
        codes.add("PT-K112")
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not said or not turns:
        return codes
    if said[-1] > 0 and common_prefix(head := ids_of(begun(said[-1], True)), ids) < len(head):
        codes.add("PT-K115")
    try:
        _, mask = assistant_mask(tokenizer, messages, rendered=rendered, **kwargs)
    except ModelError:
        mask = []
    if not any(mask):
        codes.add("PT-K114")
    elif said[0] > 0 and mask.index(1) != len(ids_of(begun(said[0], True))):
        codes.add("PT-K117")
    return codes


def _losses(text: str, messages: list[dict[str, Any]]) -> set[str]:
    """What trained turns hold and the rendering does not."""
    codes = set()
    for message in messages:
        if message["role"] != "assistant":
            continue
        reasoning = message.get("reasoning_content") or message.get("thinking") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning.strip() not in text:
            codes.add("PT-K116")
        names = [(call.get("function") or call).get("name") or "" for call in message.get("tool_calls") or []]
        if not all(name in text for name in names):
            codes.add("PT-K119")
    return codes


def _token_problems(tokenizer: Tokenizer) -> Iterable[str]:
    end = turn_end(tokenizer)
    if end and tokenizer.convert_tokens_to_ids(end) != tokenizer.eos_token_id:
        yield "PT-K113"
    if not is_chat_template_stop_token_trained(tokenizer):
        yield "PT-K118"
