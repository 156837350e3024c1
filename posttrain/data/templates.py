"""Chat templates for training. This module contains known template families, tests for properties of a template, and a check
of a template on dataset rows.
"""

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
    as_blocks,
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
from posttrain.data.formats import naming
from posttrain.errors import ArgumentTypeError, ModelError
from posttrain.types import Finding
from posttrain.values import is_messages

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Probe:
    """Conversation with which a chat template is tested.

    Attributes:
        name: Name of the property that the probe tests.
        messages: Messages of the conversation.
        ask: Whether to render the generation prompt.
        tools: Tools passed to the template.
        kwargs: Additional arguments of the template.
        shown: Words that the rendering must contain. If a template omits these words, the probe is skipped for this
            template.
        history: Whether the conversation has an assistant turn before the last assistant turn.
        required: Whether a family's templates must accept this probe. If True, a template that rejects it belongs to no
            family.
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
        """Return whether a rendering contains the expected words as text. Return False for a rendering that prints content
        blocks as a list.
        """
        as_text = '"type": "text"' not in text and "'type': 'text'" not in text
        return as_text and all(word in text for word in self.shown)


FOLDER = Path(__file__).parent / "chat_templates"
PROBES = tuple(Probe(**probe) for probe in json.loads((FOLDER / "probes.json").read_text(encoding="utf-8")))
TWO_TURNS = next(probe.messages for probe in PROBES if probe.name == "two turns")
TOOL_CALL = next(i for i, probe in enumerate(PROBES) if probe.name == "a tool call")
# Placeholder value that locates a family's setting in the rendered text.
SENTINEL = "zq7 setting zq8"
THINK_BLOCK = re.compile(r"<think>\n.*?\n</think>\n\n", re.DOTALL)
GLM_MARKERS = ("<|user|>", "<|observation|>")


def _exact(ours: str, theirs: str, history: bool) -> bool:
    return ours == theirs


def _qwen3(ours: str, theirs: str, history: bool) -> bool:
    """Compare two renderings without think blocks in earlier turns. The published template omits these blocks, and the
    training template keeps them.
    """
    return ours == theirs or (history and THINK_BLOCK.sub("", ours) == THINK_BLOCK.sub("", theirs))


def _glm(ours: str, theirs: str, history: bool) -> bool:
    """Compare two renderings without a final marker. The training template ends the last assistant turn with the next turn's
    marker.
    """
    return ours == theirs or any(ours == theirs + marker for marker in GLM_MARKERS)


@dataclass(frozen=True)
class Family:
    """Group of chat templates with the same format. This package has a training template for each family.

    Attributes:
        name: Common name of the family.
        file: File name of the training template in ``chat_templates``, without extension.
        setting: Name of the template variable whose value differs between checkpoints of the family, e.g. a default system
            text or a date. The value is read from the tokenizer's template.
        fixed: Values of template variables that select this family if several families share a template file.
        same: Function that returns whether two renderings are equivalent. The arguments of ``same`` are the rendering of the
            training template, the rendering of the published template, and `Probe.history`.
    """

    name: str
    file: str
    setting: str | None = None
    fixed: tuple[tuple[str, bool], ...] = ()
    same: Callable[[str, str, bool], bool] = _exact


# Families with simple formats come first, because a template that ignores tools would match families with more complex
# formats too.
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
    """Return the family's training template, with the settings of a checkpoint inserted."""
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
        return None  # The template rejects the conversation, for example because its format has no tools.


def _setting(family: Family, tokenizer: Tokenizer, theirs: list[str | None]) -> dict[str, str]:
    """Read the checkpoint's value of the family's setting from the template's rendering of the first probe."""
    text = training_template(family)
    if family.setting is None or theirs[0] is None or _rendered(tokenizer, text, PROBES[0]) == theirs[0]:
        return {}
    marked = _rendered(tokenizer, text, PROBES[0], **{family.setting: SENTINEL})
    before, _, after = (marked or "").partition(SENTINEL)
    # If the template does not belong to the family, the value of the setting is meaningless, and later probes do not match.
    return {family.setting: theirs[0][len(before) : len(theirs[0]) - len(after)]}


@dataclass(frozen=True)
class Match:
    """Result of comparing a family with a chat template. It contains the number of matching probes and the first difference.
    The difference contains the probe's name, our rendering and the template's rendering.
    """

    family: Family
    template: str
    agreed: int
    difference: tuple[str, str, str] | None

    @property
    def exact(self) -> bool:
        """True if every comparable probe matches."""
        return self.difference is None and self.agreed > 0


def _match(family: Family, tokenizer: Tokenizer, theirs: list[str | None]) -> Match:
    template = training_template(family, _setting(family, tokenizer, theirs))
    agreed, difference = 0, None
    for probe, rendered in zip(PROBES, theirs, strict=True):
        if rendered is None or not probe.is_shown(rendered):
            if probe.required:
                return Match(family, template, agreed, (probe.name, "", rendered or "(refused)"))
            continue  # The published template rejects this probe or omits its content.
        ours = _rendered(tokenizer, template, probe)
        if ours is not None and family.same(ours, rendered, probe.history):
            agreed += 1
        elif difference is None:
            difference = (probe.name, ours or "(refused)", rendered)
    return Match(family, template, agreed, difference)


def best_match(tokenizer: Tokenizer, template: str) -> Match:
    """Compare all families with a chat template. Return the first exact match, or otherwise the match with the most matching
    probes.
    """
    theirs = [_rendered(tokenizer, template, probe) for probe in PROBES]
    # Templates that concatenate the arguments of a call with strings require JSON text.
    if theirs[TOOL_CALL] is None:
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
    """Return the tokens of all assistant turns of a conversation, or an empty list if the turns cannot be located."""
    try:
        ids, mask = assistant_mask(tokenizer, messages)
    except Exception:
        return []
    return [token for token, trained in zip(ids, mask, strict=True) if trained]


DIALOGUE = (
    {"role": "user", "content": "zq question"},
    {"role": "assistant", "content": "", "tool_calls": [tool_call("zq_lookup", {"zq_key": "zq_value"})]},
    {"role": "tool", "name": "zq_lookup", "content": "zq_result_text"},
)


def _structured(processing_class: Tokenizer, messages: list[dict[str, Any]], image: Any = None) -> list[dict[str, Any]]:
    """Convert messages to content blocks for a processor. ``image`` becomes the first block. For a tokenizer, return messages
    unchanged.
    """
    if inner_tokenizer(processing_class) is processing_class:
        return messages
    blocks = as_blocks(messages)
    if image is not None:
        blocks[0]["content"].insert(0, {"type": "image", "image": image})
    return blocks


def _holds_for_dialogue(holds: Callable[[list[dict[str, Any]]], bool]) -> bool:
    """Evaluate a predicate on `DIALOGUE`. If the template raises a TypeError, evaluate the predicate with tool arguments as
    JSON text. Return False if the template rejects both.
    """
    try:
        try:
            return holds(list(DIALOGUE))
        except TypeError:
            return holds(json_arguments(DIALOGUE))
    except Exception:
        return False  # A template that rejects this conversation does not support tools.


def supports_tool_calling(processing_class: Tokenizer) -> bool:
    """Return whether the chat template renders tool calls (name, argument names and values) and their results."""
    template = template_text(processing_class)
    if not template:
        return False

    def shown(dialogue: list[dict[str, Any]]) -> bool:
        messages = _structured(processing_class, dialogue)
        text = processing_class.apply_chat_template(messages, chat_template=template, tokenize=False)
        return all(word in text for word in ("zq_lookup", "zq_key", "zq_value", "zq_result_text"))

    return _holds_for_dialogue(shown)


def is_chat_template_prefix_preserving(processing_class: Tokenizer) -> bool:
    """Return whether the tokens of a tool call do not change when the result of the call follows.

    Multi-turn training with tools concatenates the tokens of turns. The tokens of earlier turns must therefore not change when
    the conversation continues.
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
    """Return whether the last token of an assistant turn in the loss is an added token, such as ``<|im_end|>``.

    If no end-of-turn token contributes to the loss, the model does not learn to stop.

    Args:
        processing_class: Tokenizer or processor. Templates are not tested with images.
        chat_template: Template to check. None: the tokenizer's template.
    """
    tokenizer = with_template(processing_class, chat_template or template_text(processing_class))
    trained = _trained(tokenizer, TWO_TURNS[:3])
    while trained and not tokenizer.decode([trained[-1]]).strip():
        trained.pop()
    return bool(trained) and trained[-1] in set(tokenizer.get_added_vocab().values())


def get_training_chat_template(
    processing_class: Tokenizer | None = None, tokenizer: Tokenizer | None = None
) -> str | None:
    """Return the chat template for training, or None if the tokenizer's own template can be used.

    The tokenizer's own template can be used in two cases:

    - The template marks assistant turns. If the template supports tools, the rendering of a conversation must not change
      when the conversation continues.
    - The template has no markers and belongs to no known family, but token offsets locate the assistant turns (see
      `posttrain.data.chat.assistant_mask`).

    A training template renders the same text as the published template, with two exceptions: it does not omit the reasoning of
    earlier turns, and the end-of-turn token is always part of the assistant's turn.

    Args:
        processing_class: Tokenizer or processor.
        tokenizer: Deprecated name of ``processing_class``.

    Raises:
        ArgumentTypeError: Neither or both of the two arguments are passed.
        ModelError: The tokenizer has no template, or the template belongs to no known family and its assistant turns cannot be
            located. The error contains the closest family and the first difference.
    """
    if (processing_class is None) == (tokenizer is None):
        raise ArgumentTypeError(
            f"pass exactly one of processing_class and tokenizer (its deprecated name); get_training_chat_template got "
            f"{'neither' if tokenizer is None else 'both'}."
        )
    if tokenizer is not None:
        warnings.warn("the argument tokenizer is deprecated. Use processing_class.", FutureWarning, stacklevel=2)
        processing_class = tokenizer
    template = template_text(processing_class)
    if not template:
        raise ModelError(
            "the tokenizer has no chat template from which a training template could be derived. Fix: set chat_template."
        )
    marked = has_generation_markers(template)
    tools_fit = not supports_tool_calling(processing_class) or is_chat_template_prefix_preserving(processing_class)
    if marked and tools_fit:
        return None
    match = best_match(inner_tokenizer(processing_class), template)
    if match.exact:
        return match.template
    shadow = with_template(processing_class, template)
    # Check whether token offsets locate exactly the two assistant turns of a conversation, including their end tokens.
    for messages in (TWO_TURNS, as_blocks(TWO_TURNS)) if not marked and tools_fit else ():
        shown = shadow.decode(_trained(shadow, messages))
        if all((m["content"] in shown) == (m["role"] == "assistant") for m in TWO_TURNS):
            logger.info("the chat template belongs to no known family. Assistant turns are located from token offsets")
            return None
    raise ModelError(_unknown(match, marked, tools_fit))


def _unknown(match: Match, marked: bool, tools_fit: bool) -> str:
    assert match.difference is not None
    probe, ours, theirs = match.difference
    at = common_prefix(ours, theirs)
    lacks = [] if tools_fit else ["the tokens of a tool call change when its result follows"]
    if not marked:
        lacks.append("it has no {% generation %} markers, and its assistant turns cannot be located by rendering")
    return (
        f"the chat template cannot be used for training: {'; '.join(lacks)}. It belongs to no known family. The most similar "
        f"family is {match.family.name} ({match.agreed} of {len(PROBES)} probes match). For {probe!r}, the template renders "
        f"{theirs[max(0, at - 20) : at + 40]!r}, but the family renders {ours[max(0, at - 20) : at + 40]!r}. Fix: mark "
        "assistant turns with {% generation %} in the template, or use a template file (chat_template_path)."
    )


@dataclass
class TemplateReport:
    """Problems of a chat template that `check_template` found on the first rows of a dataset.

    Attributes:
        rows: Number of conversational rows that were checked.
        findings: Problems in the order of `PROBLEMS`.
    """

    rows: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def fatal(self) -> list[Finding]:
        """Findings with severity ``error``, i.e. problems that would make training silently wrong."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def raise_fatal(self) -> None:
        """Raise a `ModelError` that lists all fatal findings, unless there are none."""
        if self.fatal:
            raise ModelError("the chat template cannot be used for training:\n" + _listed(self.fatal))

    def __str__(self) -> str:
        if not self.findings:
            return f"chat template: {self.rows} rows checked, no problems found"
        return f"chat template, {self.rows} rows checked:\n" + _listed(self.findings)


def _listed(findings: list[Finding]) -> str:
    return "\n".join(f"- [{f.code}] {f.what} ({f.where}). {f.why} {f.fix}" for f in findings)


Severity = Literal["info", "warning", "error"]
SPOKEN = ("user", "assistant")  # Roles whose text must be in every rendering.
# Problems by code. Each value contains two severities (with and without assistant-only loss), the problem, its effect, and
# the fix.
PROBLEMS: dict[str, tuple[Severity, Severity, str, str, str]] = {
    "PT-K111": (
        "error",
        "error",
        "rendered conversations begin with two bos tokens",
        "Models are trained on texts with one bos token.",
        "Remove one of them from the template.",
    ),
    "PT-K116": (
        "error",
        "error",
        "reasoning of trained turns is missing from the rendering",
        "The reasoning would not be trained.",
        "Use the template of get_training_chat_template, or rename the field to the name that the template reads.",
    ),
    "PT-K119": (
        "error",
        "error",
        "tool calls are missing from the rendering",
        "The turns that call tools would be trained as empty turns.",
        "Use a chat template that renders tool calls (chat_template_path).",
    ),
    "PT-K120": (
        "warning",
        "warning",
        "the tools of a row are missing from the rendering",
        "The model is trained without seeing the tools that the row lists.",
        "Use a chat template that renders tools (chat_template_path), or remove the column 'tools'.",
    ),
    "PT-K121": (
        "error",
        "error",
        "the text of user or assistant messages is missing from the rendering",
        "The model would be trained on turns without their text.",
        "Correct the chat template, usually the name of a role or of a field.",
    ),
    "PT-K114": (
        "error",
        "warning",
        "assistant turns cannot be located",
        "With assistant-only loss, nothing or the wrong tokens would be trained.",
        "Use the template of get_training_chat_template, or mark the turns with {% generation %}.",
    ),
    "PT-K118": (
        "error",
        "warning",
        "the end-of-turn token is outside the part that is marked as the assistant's",
        "With assistant-only loss, the model would not learn to stop.",
        "Close {% generation %} after the end-of-turn token, or use the template of get_training_chat_template.",
    ),
    "PT-K117": (
        "warning",
        "info",
        "the first trained token is not the first token after the generation prompt",
        "The model is trained to write tokens that the prompt already contains, or is not trained on the start of an answer.",
        "Put the role header before {% generation %} and everything after it inside.",
    ),
    "PT-K115": (
        "warning",
        "warning",
        "the prompt's tokens change when the answer follows",
        "The tokens in training would differ from the tokens that the model generates.",
        "Use the template of get_training_chat_template, or a template whose generation prompt opens every answer.",
    ),
    "PT-K112": (
        "warning",
        "warning",
        "the tokenizer adds bos to plain text, but the template does not write it",
        "Most models give worse answers without the bos token.",
        "Add {{ bos_token }} at the start of the template.",
    ),
    "PT-K113": (
        "warning",
        "warning",
        "the tokenizer's eos token is not the token that ends an assistant turn",
        "Generation would not stop at the token with which trained turns end.",
        "Set eos_token to the end-of-turn token, or list both tokens in generation_config.eos_token_id.",
    ),
}


def check_template(
    processing_class: Tokenizer, rows: Iterable, *, assistant_only: bool = False, turns: bool = True, limit: int = 32
) -> TemplateReport:
    """Check a chat template on the first conversational rows of a dataset. The checks cover turn boundaries, markers, special
    tokens, and omitted content.

    Args:
        processing_class: Tokenizer or processor.
        rows: Dataset rows with ``messages``, or ``prompt`` with ``completion`` or ``chosen``. Other rows are skipped.
        assistant_only: Whether only the tokens of assistant turns contribute to the loss. If True, problems with markers are
            fatal.
        turns: Whether to check where turns begin and end. If False, only omitted content and the bos token are checked.
        limit: Maximum number of rows to check.

    Returns:
        The report. `TemplateReport.raise_fatal` raises an error for fatal findings.

    Raises:
        DataError: The template rejects a row. The error contains the row's index.
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
    """Return the messages of a row, the index of the first message that can contribute to the loss, and the arguments for
    the template.
    """
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
    # Cache the result, because the same boundary is requested several times.
    def begun(count: int, asks: bool) -> str:
        return render(tokenizer, messages[:count], add_generation_prompt=asks, **kwargs)

    def rendered(part: list[dict[str, Any]], add_generation_prompt: bool = False, **_: object) -> str:
        return begun(len(part), add_generation_prompt)

    text = begun(len(messages), False)
    ids, bos, codes = ids_of(text), tokenizer.bos_token_id, _losses(text, messages[start:])
    names = [t.__name__ if callable(t) else (t.get("function") or t).get("name", "") for t in kwargs["tools"] or ()]
    if names and not any(name in text for name in names):
        codes.add("PT-K120")
    # Search only the last word of each message, because templates may trim or escape a text, or remove its reasoning.
    texts = [
        m["content"].rpartition("</think>")[2]
        for m in messages
        if m["role"] in SPOKEN and isinstance(m.get("content"), str)
    ]
    last_words = [re.findall(r"\w+", words)[-1:] for words in texts]
    if any(word not in text for words in last_words for word in words):
        codes.add("PT-K121")
    if bos is not None and ids[:2] == [bos, bos]:
        codes.add("PT-K111")
    elif bos is not None and ids[:1] != [bos] and tokenizer("a")["input_ids"][:1] == [bos]:
        codes.add("PT-K112")
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies or not turns:
        return codes
    if replies[-1] > 0 and common_prefix(head := ids_of(begun(replies[-1], True)), ids) < len(head):
        codes.add("PT-K115")
    try:
        _, mask = assistant_mask(tokenizer, messages, rendered=rendered, **kwargs)
    except ModelError:
        mask = []
    if not any(mask):
        codes.add("PT-K114")
    elif replies[0] > 0 and mask.index(1) != len(ids_of(begun(replies[0], True))):
        codes.add("PT-K117")
    return codes


def _losses(text: str, messages: list[dict[str, Any]]) -> set[str]:
    """Return the codes of problems with the turns that contribute to the loss. A problem exists if the reasoning or the tool
    calls of a turn are missing from the rendering.
    """
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
