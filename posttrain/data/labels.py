"""Ids and labels of one batch of rows: rendered row by row, tokenised in two calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.data.chat import (
    AssistantSpans,
    common_prefix,
    encode,
    has_generation_markers,
    one_bos,
    open_end,
    prompt_text,
    render,
    template_arguments,
    terminal_token_ids,
)
from posttrain.data.formats import (
    ROW,
    check_ids,
    has_nested_none,
    is_conversational_from_value,
    is_messages,
    maybe_convert_to_chatml,
    strip_none,
)
from posttrain.errors import DataError

__all__ = ["COUNTERS", "IGNORED", "SupervisedOptions", "label_batch", "one_eos"]

IGNORED = -100
COUNTERS = (
    "_truncated", "_cut", "_diverged", "_half_lost", "_no_end", "_double_bos", "_nested_none", "_trained", "_tokens", "_tail",
    "_reason",
)  # fmt: skip
# Why a row trains nothing.
CUT = "cut at max_length before their first trained token"
EMPTY = "empty"
EMPTY_COMPLETION = "with an empty completion"
NO_ASSISTANT = "without a turn of the assistant"
MASKED = "without a trained token"


@dataclass(frozen=True)
class SupervisedOptions:
    """How rows become ids and labels; hashable by value, so that the dataset's fingerprint is stable from run to run.

    Attributes:
        dataset_text_field: Column of plain text.
        completion_only_loss: Train the completion alone; None where rows have one.
        assistant_only_loss: Train what the assistant says.
        max_length: Tokens a row may have; None never cuts.
        truncation_mode: ``keep_start`` or ``keep_end``.
        packing: Strategy of `pack_dataset`, or None.
        chat_template: Used for tokenising instead of the tokenizer's own: the same text, with the assistant's words marked.
        allow_untrained_stop: Go on when ``assistant_only_loss`` trains no token that ends a turn.
    """

    dataset_text_field: str = "text"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    packing: Literal["bfd", "bfd_split", "wrapped"] | None = None
    allow_untrained_stop: bool = False
    chat_template: str | None = None

    @property
    def cut(self) -> int | None:
        """Tokens to cut rows to; strategies that split long rows get them whole."""
        return None if self.packing in ("bfd_split", "wrapped") else self.max_length


@dataclass(slots=True)
class _Plan:
    """One row between rendering and tokenising."""

    text: str | None = None
    head: str | None = None
    plain: bool = False
    spans: list[tuple[int, int]] | None = None
    ids: list[int] | None = None
    mask: list[int] | None = None
    diverged: int = 0
    double_bos: bool = False
    nested_none: bool = False
    head_ids: list[int] = field(default_factory=list)
    nothing: str = ""  # Why the row itself has nothing to train.


def label_batch(
    batch: dict[str, list], indices: list[int], tokenizer: Any, options: SupervisedOptions
) -> dict[str, list]:
    """``input_ids``, ``labels`` (the token, or -100 where it is not trained) and counters for the report."""
    plans: list[_Plan] = []
    rows = []
    finder = AssistantSpans(tokenizer)
    for position, index in enumerate(indices):
        given = {
            name: column[position] for name, column in batch.items() if name != ROW and column[position] is not None
        }
        row = strip_none(given)
        rows.append(row)
        try:
            plans.append(_plan(row, tokenizer, options, finder))
        except DataError as error:
            none = sorted(set(batch) - set(given))
            raise DataError(f"row {index}: {error}{f' Columns {none} are None here.' if none else ''}") from error
        plans[-1].nested_none = has_nested_none(given)
    _tokenize(plans, indices, tokenizer)
    out: dict[str, list] = {name: [] for name in ("input_ids", "labels", *COUNTERS)}
    ends = set(terminal_token_ids(tokenizer))
    for row, plan, index in zip(rows, plans, indices, strict=True):
        try:
            _finish(plan, tokenizer, options)
        except DataError as error:
            raise DataError(f"row {index}: {error}") from error
        _write(out, row, plan, options, ends)
        tail = plan.head_ids[len(plan.head_ids) - plan.diverged :] if plan.diverged else []
        out["_tail"].append(tokenizer.decode(tail) if tail else "")
    return out


def _plan(row: dict[str, Any], tokenizer: Any, options: SupervisedOptions, finder: AssistantSpans) -> _Plan:
    if "input_ids" in row:
        return _given(row, options, len(tokenizer))
    if is_conversational_from_value(row):
        row.update(maybe_convert_to_chatml({"conversations": row.pop("conversations")}))
    if "messages" in row:
        return _conversation(row, row["messages"], tokenizer, options, finder)
    if "prompt" in row and "completion" in row:
        return _prompt_completion(row, tokenizer, options, finder)
    text = row.get(options.dataset_text_field)
    if text is None:
        raise DataError(
            f"found none of input_ids, messages, prompt with completion, or {options.dataset_text_field!r} (a string); its "
            f"columns are {sorted(row)}. Set dataset_text_field, or rename the columns."
        )
    if not isinstance(text, str):
        raise DataError(
            f"column {options.dataset_text_field!r} must be a string, and it is {type(text).__name__}: {str(text)[:80]!r}."
        )
    return _Plan(text=text, plain=True, nothing="" if text else EMPTY)


def _given(row: dict[str, Any], options: SupervisedOptions, vocabulary: int) -> _Plan:
    ids = check_ids(row["input_ids"], "input_ids", vocabulary)
    mask = [1] * len(ids)
    names = ["assistant_masks"] + (["completion_mask"] if options.completion_only_loss is not False else [])
    for name in (*names, "labels"):
        if name in row and len(row[name]) != len(ids):
            raise DataError(f"column {name!r} has {len(row[name])} entries for {len(ids)} input_ids.")
    for name in names:
        if name in row:
            mask = [a and b for a, b in zip(mask, row[name], strict=True)]
    wrong = next((i for i, label in enumerate(row.get("labels", ())) if label not in (IGNORED, ids[i])), None)
    if wrong is not None:
        raise DataError(
            f"column 'labels' has {row['labels'][wrong]} at position {wrong}, where the token is {ids[wrong]}: a label is its "
            f"token, or {IGNORED} where nothing is learnt. Labels are not shifted."
        )
    return _Plan(ids=ids, mask=mask, nothing="" if ids else EMPTY)


def _conversation(
    row: dict[str, Any], messages: Any, tokenizer: Any, options: SupervisedOptions, finder: AssistantSpans
) -> _Plan:
    if not is_messages(messages):
        raise DataError(
            f"column 'messages' must be a list of messages with a role and content, and it is {str(messages)[:80]!r}."
        )
    kwargs = template_arguments(row)
    spoken = any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages)
    nothing = NO_ASSISTANT if options.assistant_only_loss and not spoken else ""
    if options.chat_template is not None:
        kwargs.setdefault("chat_template", options.chat_template)
    if not options.assistant_only_loss:
        return _Plan(text=render(tokenizer, messages, **kwargs))
    if has_generation_markers(kwargs.get("chat_template") or tokenizer.chat_template):
        ids, mask = finder.by_markers(messages, **kwargs)
        return _Plan(ids=ids, mask=mask, nothing=nothing)
    text, spans = finder.by_rendering(messages, **kwargs)
    return _Plan(text=text, spans=spans, nothing=nothing)


def _prompt_completion(
    row: dict[str, Any], tokenizer: Any, options: SupervisedOptions, finder: AssistantSpans
) -> _Plan:
    prompt, completion = row["prompt"], row["completion"]
    if not completion:
        return _Plan(ids=[], mask=[], nothing=EMPTY_COMPLETION)
    chat = is_messages(prompt)
    if not all(isinstance(value, list if chat else str) for value in (prompt, completion)):
        raise DataError(
            "prompt and completion must both be strings or both be lists of messages, and they are "
            f"{type(prompt).__name__} and {type(completion).__name__}: {str(prompt)[:60]!r} and {str(completion)[:60]!r}."
        )
    if not chat:
        return _Plan(text=prompt + completion, head=prompt, plain=True)
    plan = _conversation(row, prompt + completion, tokenizer, options, finder)
    plan.head = prompt_text(tokenizer, row, {"chat_template": options.chat_template} if options.chat_template else {})
    return plan


def _tokenize(plans: list[_Plan], indices: list[int], tokenizer: Any) -> None:
    """Two calls for the whole batch: texts with the tokenizer's special tokens, and rendered ones without."""
    place = {id(plan): index for plan, index in zip(plans, indices, strict=True)}
    for plain in (True, False):
        wanted = [p for p in plans if p.plain == plain]
        texts = [p for p in wanted if p.text is not None]
        heads = [p for p in wanted if p.head is not None]
        rows = [place[id(plan)] for plan in (*texts, *heads)]
        found_in = [str(p.text) for p in texts] + [str(p.head) for p in heads]
        ids = encode(tokenizer, found_in, special=plain, where=lambda at, rows=rows: f"row {rows[at]}")
        for plan, found in zip(texts, ids[: len(texts)], strict=True):
            plan.ids = found
        for plan, found in zip(heads, ids[len(texts) :], strict=True):
            plan.head_ids = found
            if plain:
                plan.head_ids = open_end(one_bos(found, tokenizer.bos_token_id), str(plan.head), tokenizer)


def _finish(plan: _Plan, tokenizer: Any, options: SupervisedOptions) -> None:
    """Ids and mask of a tokenised row: one bos, one eos, the prompt masked where the tokens part."""
    ids = plan.ids or []
    if plan.plain:
        single = one_bos(ids, tokenizer.bos_token_id)
        plan.double_bos, ids = len(single) < len(ids), one_eos(single, tokenizer)
    mask = plan.mask if plan.mask is not None else [1] * len(ids)
    if plan.spans is not None:
        mask = AssistantSpans.mask(tokenizer, str(plan.text), ids, plan.spans)
    if plan.head is not None:
        # A tokenizer may merge over the boundary, and a template may render the prompt differently.
        boundary = common_prefix(plan.head_ids, ids)
        plan.diverged = len(plan.head_ids) - boundary
        if options.completion_only_loss is not False:
            mask = [0] * boundary + mask[boundary:]
    plan.ids, plan.mask = ids, mask


def one_eos(ids: list[int], tokenizer: Any) -> list[int]:
    """Exactly one eos at the end of a plain text, also where a line end follows it."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError("the tokenizer has no eos token, so a plain text cannot be ended. Set eos_token.")
    if ids == [eos]:
        return ids
    kept = len(ids)
    while kept > 1:  # The text may end with eos and white space, and the tokenizer may have added an eos of its own.
        blank = ids[kept - 2] == eos and not tokenizer.decode(ids[kept - 1 : kept]).strip()
        if ids[kept - 1] != eos and not blank:
            break
        kept -= 1
    return [*ids[:kept], eos]


def _write(out: dict[str, list], row: dict[str, Any], plan: _Plan, options: SupervisedOptions, ends: set[int]) -> None:
    ids, mask = plan.ids or [], plan.mask or []
    if "labels" in row and "input_ids" in row:
        labels = list(row["labels"])
    else:
        whole = len(mask) == len(ids) and 0 not in mask
        labels = list(ids) if whole else [token if m else IGNORED for token, m in zip(ids, mask, strict=True)]
    trained = len(labels) - labels.count(IGNORED)
    no_end = ends.isdisjoint(labels)
    limit = options.cut
    truncated = limit is not None and len(ids) > limit
    if limit is not None and truncated:
        part = slice(limit) if options.truncation_mode == "keep_start" else slice(-limit, None)
        ids, labels = ids[part], labels[part]
    left = len(labels) - labels.count(IGNORED)
    learnt = left - (labels[:1] not in ([], [IGNORED]))  # Nothing predicts a row's first token.
    half = plan.diverged > len(plan.head_ids) / 2
    values = (
        truncated,
        trained - left,
        plan.diverged > 0,
        half,
        no_end,
        plan.double_bos,
        plan.nested_none,
        learnt,
        len(ids),
    )
    out["input_ids"].append(ids)
    out["labels"].append(labels)
    for name, value in zip(COUNTERS, values, strict=False):
        out[name].append(int(value))
    out["_reason"].append("" if learnt > 0 else plan.nothing or (CUT if truncated and trained > left else MASKED))
