"""Preparation of datasets for supervised fine-tuning: rendering, tokenization, and labels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc

from posttrain.data.chat import (
    assistant_mask,
    common_prefix,
    encode_rows,
    has_generation_markers,
    one_bos,
    open_end,
    prompt_text,
    render,
    template_arguments,
    terminal_token_ids,
    with_template,
)
from posttrain.data.formats import (
    ROW,
    PreparationReport,
    check_ids,
    describe_dataset,
    first_row,
    first_rows,
    get_dataset_column_names,
    given_rows,
    has_nested_none,
    is_conversational_from_value,
    is_messages,
    maybe_convert_to_chatml,
    naming,
    one_eos,
    read_columns,
    tokenized,
)
from posttrain.data.packing import LENGTHS, pack_dataset, split_trained
from posttrain.data.templates import check_template, get_training_chat_template
from posttrain.errors import DataError, ModelError
from posttrain.types import Row
from posttrain.values import strip_none

if TYPE_CHECKING:
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)


IGNORED = -100
COUNTERS = (
    "_truncated", "_cut_tokens", "_diverged", "_half_lost", "_no_end", "_double_bos", "_nested_none", "_trained_tokens",
    "_tokens",
)  # fmt: skip
# Reasons for dropping a row.
CUT = "truncated at max_length before their first trained token"
EMPTY = "empty"
EMPTY_COMPLETION = "with an empty completion"
NO_ASSISTANT = "without an assistant turn"
MASKED = "without a trained token"


@dataclass(frozen=True)
class SupervisedOptions:
    """Options for tokenizing SFT rows. The hash of this object depends only on the values of its fields, so that cache
    fingerprints are reproducible.

    Attributes:
        dataset_text_field: Name of the column with plain text.
        completion_only_loss: Whether only completion tokens contribute to the loss. None: True if the rows have a
            completion.
        assistant_only_loss: Whether only the tokens of assistant turns contribute to the loss.
        max_length: Maximum number of tokens per row. None: rows are not truncated.
        truncation_mode: ``keep_start`` or ``keep_end``.
        packing: Strategy of `pack_dataset`, or None.
        chat_template: Template for tokenizing that renders the same text as the tokenizer's template and marks assistant
            turns. None: the tokenizer's template is used.
        allow_untrained_stop: Whether to accept that end-of-turn tokens do not contribute to the loss with
            ``assistant_only_loss``.
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
        """Number of tokens to which rows are truncated. None if the packing strategy splits long rows instead."""
        return None if self.packing in ("bfd_split", "wrapped") else self.max_length


@dataclass(slots=True)
class _Plan:
    """Intermediate form of a row, after rendering and before tokenizing."""

    text: str | None = None
    head: str | None = None
    plain: bool = False
    ids: list[int] | None = None
    mask: list[int] | None = None
    nested_none: bool = False
    nothing: str = ""  # Reason for dropping the row if none of its tokens contributes to the loss.

    @property
    def texts(self) -> list[str]:
        """Texts of the row that must be tokenized."""
        return [text for text in (self.text, self.head) if text is not None]


def label_batch(
    batch: dict[str, list], indices: list[int], tokenizer: Tokenizer, options: SupervisedOptions
) -> dict[str, list]:
    """Compute the columns ``input_ids`` and ``labels`` and the counters for the report. The label of a token is its id, or
    -100 if the token does not contribute to the loss.
    """
    rows, plans = [], []
    for index, example in given_rows(batch, indices):
        none = sorted(set(batch) - {ROW, *example})
        with naming(f"row {index}", f" Columns {none} are None in this row." if none else ""):
            rows.append(strip_none(example))
            plans.append(_plan(rows[-1], tokenizer, options))
        plans[-1].nested_none = has_nested_none(example)
    ids_of_rows = encode_rows(tokenizer, [(plan.plain, plan.texts) for plan in plans], indices)
    labelled, ends = [], set(terminal_token_ids(tokenizer))
    for row, plan, texts, index in zip(rows, plans, ids_of_rows, indices, strict=True):
        with naming(f"row {index}"):
            labelled.append(_labelled(row, plan, texts, tokenizer, options, ends))
    return {name: [encoded[name] for encoded in labelled] for name in labelled[0]}


def _plan(row: dict[str, Any], tokenizer: Tokenizer, options: SupervisedOptions) -> _Plan:
    if "input_ids" in row:
        return _given(row, options, len(tokenizer))
    if is_conversational_from_value(row):
        row.update(maybe_convert_to_chatml({"conversations": row.pop("conversations")}))
    if "messages" in row:
        return _conversation(row, row["messages"], tokenizer, options)
    if "prompt" in row and "completion" in row:
        return _prompt_completion(row, tokenizer, options)
    text = row.get(options.dataset_text_field)
    if text is None:
        raise DataError(
            f"the row needs one of: input_ids; messages; prompt and completion; {options.dataset_text_field!r} (a string). "
            f"Its columns are {sorted(row)}. Fix: set dataset_text_field, or rename the columns."
        )
    if not isinstance(text, str):
        raise DataError(
            f"column {options.dataset_text_field!r} must be a string, not {type(text).__name__}: {str(text)[:80]!r}."
        )
    return _Plan(text=text, plain=True, nothing="" if text else EMPTY)


def _given(row: dict[str, Any], options: SupervisedOptions, vocabulary: int) -> _Plan:
    ids = check_ids(row["input_ids"], "input_ids", vocabulary)
    mask = [1] * len(ids)
    names = ["assistant_masks"] + (["completion_mask"] if options.completion_only_loss is not False else [])
    for name in (*names, "labels"):
        if name in row and len(row[name]) != len(ids):
            raise DataError(f"column {name!r} has {len(row[name])} entries, but there are {len(ids)} input_ids.")
    for name in names:
        if name in row:
            mask = [a and b for a, b in zip(mask, row[name], strict=True)]
    wrong = next((i for i, label in enumerate(row.get("labels", ())) if label not in (IGNORED, ids[i])), None)
    if wrong is not None:
        raise DataError(
            f"column 'labels' has {row['labels'][wrong]} at position {wrong}, but the token there is {ids[wrong]}. A label must "
            f"equal its token, or be {IGNORED} for tokens that are not trained. Fix: do not shift the labels."
        )
    return _Plan(ids=ids, mask=mask, nothing="" if ids else EMPTY)


def _conversation(row: dict[str, Any], messages: Any, tokenizer: Tokenizer, options: SupervisedOptions) -> _Plan:
    if not is_messages(messages):
        raise DataError(
            f"column 'messages' must be a list of messages with a role and content, not {str(messages)[:80]!r}."
        )
    kwargs = template_arguments(row)
    spoken = any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages)
    nothing = NO_ASSISTANT if options.assistant_only_loss and not spoken else ""
    if options.chat_template is not None:
        kwargs.setdefault("chat_template", options.chat_template)
    if not options.assistant_only_loss:
        return _Plan(text=render(tokenizer, messages, **kwargs))
    ids, mask = assistant_mask(tokenizer, messages, **kwargs)
    return _Plan(ids=ids, mask=mask, nothing=nothing)


def _prompt_completion(row: dict[str, Any], tokenizer: Tokenizer, options: SupervisedOptions) -> _Plan:
    prompt, completion = row["prompt"], row["completion"]
    if completion in (None, "", []):
        return _Plan(ids=[], mask=[], nothing=EMPTY_COMPLETION)
    if prompt == []:
        raise DataError(
            "column 'prompt' is an empty list, but a conversational completion needs at least one prompt message. Fix: remove "
            "the row, or store the whole conversation as 'messages' and set assistant_only_loss=True."
        )
    chat = is_messages(prompt)
    if not all(isinstance(value, list if chat else str) for value in (prompt, completion)):
        raise DataError(
            "prompt and completion must both be strings or both be lists of messages, but they are "
            f"{type(prompt).__name__} and {type(completion).__name__}: {str(prompt)[:60]!r} and {str(completion)[:60]!r}."
        )
    if not chat:
        return _Plan(text=prompt + completion, head=prompt, plain=True)
    plan = _conversation(row, prompt + completion, tokenizer, options)
    template = {"chat_template": options.chat_template} if options.chat_template else {}
    plan.head = prompt_text(tokenizer, row, template, answered=True)
    return plan


def _labelled(
    row: dict[str, Any],
    plan: _Plan,
    texts: list[list[int]],
    tokenizer: Tokenizer,
    options: SupervisedOptions,
    ends: set[int],
) -> dict[str, Any]:
    """Create the columns of a tokenized row. Plain text gets exactly one eos token and no second bos token, the prompt is
    excluded from labels, and long rows are truncated.
    """
    ids, head, double_bos = plan.ids or [], [], False
    if plan.text is not None:
        ids, *texts = texts
    if plan.head is not None:
        (head,) = texts
    if plan.plain:
        single, head = one_bos(ids, tokenizer.bos_token_id), one_bos(head, tokenizer.bos_token_id)
        double_bos, ids, head = (
            len(single) < len(ids),
            one_eos(single, tokenizer),
            open_end(head, plan.head or "", tokenizer),
        )
    mask = [1] * len(ids) if plan.mask is None else plan.mask
    # The last tokens of the prompt can depend on whether a completion follows. Tokens can merge across the boundary, or the
    # template can render the prompt differently.
    boundary = common_prefix(head, ids)
    if options.completion_only_loss is not False:
        mask = [0] * boundary + mask[boundary:]
    labels = list(row["labels"]) if "labels" in row and "input_ids" in row else list(ids)
    if 0 in mask:
        labels = [label if m else IGNORED for label, m in zip(labels, mask, strict=True)]
    diverged, no_end = len(head) - boundary, ends.isdisjoint(labels)
    cut = options.cut is not None and len(ids) > options.cut
    window = slice(options.cut) if options.truncation_mode == "keep_start" else slice(-(options.cut or 0), None)
    trained = len(labels) - labels.count(IGNORED)
    ids, labels = (ids[window], labels[window]) if cut else (ids, labels)
    left = len(labels) - labels.count(IGNORED)
    # Exclude the first token of a row from the loss, because no token precedes it.
    learnt = left - (labels[:1] not in ([], [IGNORED]))
    counts = (cut, trained - left, diverged > 0, diverged > len(head) / 2, no_end, double_bos, plan.nested_none, learnt)
    return {
        "input_ids": ids,
        "labels": labels,
        "_reason": "" if learnt > 0 else plan.nothing or (CUT if cut and trained > left else MASKED),
        **dict(zip(COUNTERS, map(int, (*counts, len(ids))), strict=True)),
        "_tail": tokenizer.decode(head[boundary:]) if diverged else "",
    }


DEFAULTS = SupervisedOptions()
# Maximum fraction of rows in which more than half of the prompt's tokens change when the completion is appended.
DIVERGED_MOST = 0.5


LOSSES = ("PT-K116", "PT-K119", "PT-K121", "PT-K111")
PEEKED = 32  # Number of rows on which the template is tested.
SHOWN = 200  # Maximum number of characters of a row's text in a message.
HINT = "Check completion_only_loss, assistant_only_loss, max_length and the masks. `posttrain inspect` shows the rows."


def with_training_template(options: SupervisedOptions, tokenizer: Tokenizer) -> SupervisedOptions:
    """Add a chat template that marks assistant turns to the options. Nothing is added without ``assistant_only_loss``, or if
    the tokenizer's template already marks assistant turns.

    The added template is used only for tokenizing. The tokenizer that is saved with the model keeps its own template.
    """
    if not options.assistant_only_loss or has_generation_markers(tokenizer.chat_template):
        return options
    # Ignore an error if the template rejects this message, but raise an error if the template is not valid Jinja.
    with suppress(DataError):
        render(tokenizer, [{"role": "user", "content": "q"}])
    return replace(options, chat_template=get_training_chat_template(tokenizer))


def prepare_sft_dataset(
    dataset: AnyDataset,
    tokenizer: Tokenizer,
    options: SupervisedOptions = DEFAULTS,
    *,
    name: str = "train",
    formatting_func: Callable[[dict], str] | None = None,
    num_proc: int | None = None,
    seed: int = 42,
) -> tuple[Any, PreparationReport]:
    """Tokenize a dataset for supervised fine-tuning, and log how many rows were truncated or dropped.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``. A packed dataset is returned unchanged.
        tokenizer: Tokenizer. The tokenizer needs a chat template if rows are conversational.
        options: Options for tokenizing.
        name: Name of the dataset in messages.
        formatting_func: Function that converts a row to a text. The columns of the row are then dropped. Functions that
            expect batches of rows, as in TRL before 0.20, are detected and called with batches of one row.
        num_proc: Number of processes.
        seed: Random seed for shuffling packed rows.

    Returns:
        The dataset with the columns ``input_ids`` and ``labels`` (and ``seq_lengths`` if packed), and a report. The report
        does not count the rows of a stream.

    Raises:
        DataError: A row is invalid, options contradict the rows, or no row remains. The error contains the reasons.
    """
    first = first_row(dataset, name, images=formatting_func is not None)
    if LENGTHS in first:
        return dataset, PreparationReport(name)
    _check_options(dataset, first, name, options, formatting_func)
    _log_form(first, name, options, formatting_func)
    if formatting_func is None and "input_ids" not in first:
        _check_rendering(dataset, tokenizer, options, name)
    streaming = isinstance(dataset, datasets.IterableDataset)
    columns = [column for column in get_dataset_column_names(dataset) if column != ROW]
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    if formatting_func is not None and "input_ids" not in first:
        function = _one_of_batch(formatting_func) if _takes_batches(formatting_func, first) else formatting_func
        arguments = {"function": function, "column": options.dataset_text_field}
        dataset = dataset.map(_format, with_indices=True, remove_columns=columns, fn_kwargs=arguments, **extra)
        columns = [options.dataset_text_field]
    elif formatting_func is not None:
        logger.warning("formatting_func is ignored, because the %s rows are already tokenized.", name)
    fixed = {"tokenizer": tokenizer, "options": options}
    about: dict[str, Any] = {"drop": columns, "counters": COUNTERS, "notes": ["_tail"], "num_proc": num_proc}
    mapped, counts, rows, report = tokenized(dataset, name, label_batch, fixed, hint=HINT, **about)
    if not streaming:
        _report_dropped(report, mapped, counts, options, tokenizer)
    if options.packing:
        assert options.max_length is not None
        if options.packing == "bfd_split":
            rows = _split(rows, options.max_length, report, extra)
        rows = pack_dataset(rows, options.max_length, options.packing, map_kwargs=extra, seed=seed)
        # "wrapped" splits rows at any position, so a packed row may contain only prompt tokens.
        if options.packing == "wrapped":
            rows = rows.filter(_trains_something, batched=True, input_columns=["labels"], **extra)
    return rows, report


def _log_form(
    first: dict[str, Any], name: str, options: SupervisedOptions, formatting: Callable[[dict], str] | None
) -> None:
    """Warn if rows contain columns of several dataset types, e.g. ``messages`` and ``text``. Only one of the types is used."""
    forms = [("input_ids",), ("messages",), ("prompt", "completion"), (options.dataset_text_field,)]
    if is_conversational_from_value(first):
        forms.insert(1, ("conversations",))
    used, *others = [form for form in forms if all(first.get(column) is not None for column in form)] or [()]
    if others and (used == ("input_ids",) or formatting is None):
        logger.warning(
            "%s dataset: rows have %s and %s. Only %s is trained and the rest is ignored. Fix: remove the other columns.",
            name, " + ".join(used), ", ".join(" + ".join(form) for form in others), " + ".join(used),
        )  # fmt: skip


def _split(kept: Any, size: int, report: PreparationReport, extra: dict[str, Any]) -> Any:
    """Split long documents into segments, drop segments without tokens in the loss, and log how many segments were dropped."""
    pieces = split_trained(kept, size, extra)
    if isinstance(kept, datasets.Dataset):
        lengths = pc.list_value_length(kept.select_columns("input_ids").with_format("arrow")[:]["input_ids"])
        report.untrained_pieces = int((-(-np.asarray(lengths) // size)).sum()) - len(pieces)
        if report.untrained_pieces:
            logger.info(
                "%s dataset: %d pieces of split rows are dropped, because they have no trained token.",
                report.name,
                report.untrained_pieces,
            )
    return pieces


def check_prepared(dataset: AnyDataset, name: str, vocabulary: int) -> None:
    """Check rows that skipped preparation (``skip_prepare_dataset``). Without this check, it could go unnoticed that all
    tokens or no tokens of these rows contribute to the loss.

    Args:
        dataset: Dataset with ids and labels.
        name: Name of the dataset in messages.
        vocabulary: Number of tokens in the tokenizer's vocabulary.

    Raises:
        DataError: ``input_ids`` is missing, the rows have masks but no ``labels``, an id is invalid, or no token contributes
            to the loss. The error is also raised if ``input_ids`` is empty, or if ``labels`` has another length.
    """
    first_row(dataset, name)
    columns = get_dataset_column_names(dataset)
    masks = sorted({"assistant_masks", "completion_mask"} & set(columns))
    if "input_ids" not in columns or (masks and "labels" not in columns):
        why = f"columns {masks} but no labels, so every token would be trained" if masks else f"columns {columns}"
        raise DataError(f"skip_prepare_dataset is set, but the {name} rows have {why}. Fix: add input_ids and labels.")
    seen = []
    for index, row in enumerate(islice(dataset, PEEKED)):
        with naming(f"{name} row {index}"):
            check_ids(row["input_ids"], "input_ids", vocabulary)
        seen += _trains_something([row["labels"] or []]) if "labels" in columns else [True]
    if seen and not any(seen):
        raise DataError(
            f"skip_prepare_dataset is set, but none of the first {len(seen)} {name} rows trains a token. All labels are "
            f"{IGNORED}, so the loss would be 0. Fix: set the labels of trained positions to the token ids. Do not shift them."
        )
    if not isinstance(dataset, datasets.Dataset):
        return
    table = read_columns(dataset, [column for column in columns if column in ("input_ids", "labels")], kind="arrow")
    sizes = [pc.fill_null(pc.list_value_length(column), 0).to_pylist() for column in table.columns]
    numbers = dataset[ROW] if ROW in columns else range(len(dataset))
    for index, *lengths in zip(numbers, *sizes, strict=True):
        if 0 in lengths or len(set(lengths)) > 1:
            raise DataError(
                f"{name} row {index}: the columns {table.column_names} have {lengths} entries. Every row needs at least "
                "one token id, and as many labels as token ids. Fix: correct the row, or remove it."
            )
    with naming(f"{name} rows"):
        check_ids(list(pc.min_max(pc.list_flatten(table["input_ids"])).as_py().values()), "input_ids", vocabulary)


def _trains_something(labels: list[list[int]]) -> list[bool]:
    # The label of the first token has no effect, because the first token of a row is not predicted.
    return [len(row) - 1 > row[1:].count(IGNORED) for row in labels]


def _batch_of(row: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [value] for name, value in row.items()}


def _one_of_batch(function: Callable[[dict], Any]) -> Callable[[dict], str]:
    return lambda row: function(_batch_of(row))[0]


def _takes_batches(function: Callable[[dict], Any], row: dict[str, Any]) -> bool:
    # Try a single row first. For a batch, a function for single rows such as ``row["text"][:9]`` would silently return a
    # list with one text.
    with suppress(Exception):
        if isinstance(function(dict(row)), str):
            return False
    with suppress(Exception):
        texts = function(_batch_of(row))
        return isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str)
    return False


def _format(example: dict[str, Any], index: int, function: Callable[[dict], str], column: str) -> dict[str, str]:
    try:
        text = function(example)
    except Exception as error:
        raise DataError(
            f"row {index}: formatting_func raised {type(error).__name__}: {error}. The row has the columns {sorted(example)}."
        ) from error
    if not isinstance(text, str):
        raise DataError(f"row {index}: formatting_func must return a string for a row, but it returned {text!r:.80}.")
    return {column: text}


def _check_options(dataset: AnyDataset, first: dict, name: str, options: SupervisedOptions, formatting: Any) -> None:
    if options.completion_only_loss and formatting is not None:
        raise DataError(
            "completion_only_loss=True needs a prompt, but rows of formatting_func have none. Fix: remove one of the two options."
        )
    parted = ("prompt" in first and "completion" in first) or "completion_mask" in first or "labels" in first
    if options.completion_only_loss and not parted:
        raise DataError(
            f"completion_only_loss=True, but the {name} rows have no completion (columns {sorted({*first} - {ROW})}), so every "
            "token would be trained. Fix: add prompt and completion columns, or a completion_mask."
        )
    if "messages" in first and not first["messages"]:
        raise DataError(f"{name} row 0, column 'messages': it is empty. Fix: add a message, or remove the row.")
    chat = "assistant_masks" in first
    if formatting is None and "input_ids" not in first and {"messages", "conversations", "prompt"} & set(first):
        chat = describe_dataset(dataset)["format"] == "conversational"
    if options.assistant_only_loss and not chat:
        raise DataError(
            f"assistant_only_loss=True needs conversational rows, but the {name} rows have columns {sorted({*first} - {ROW})} "
            "without messages."
        )


def _report_dropped(
    report: PreparationReport, mapped: Any, counts: dict[str, Any], options: SupervisedOptions, tokenizer: Tokenizer
) -> None:
    """Log the statistics of preparation, with one warning per kind of problem."""
    name, n = report.name, report.rows_in
    logger.info(
        "%s dataset: %d of %d tokens are trained (%.1f %%).",
        name, report.trained_tokens, report.tokens, 100 * report.trained_tokens / max(1, report.tokens),
    )  # fmt: skip
    if report.truncated:
        logger.warning(
            "%s dataset: %d of %d rows were truncated to max_length=%s. They lost %d trained tokens (%.1f %% of all).",
            name, report.truncated, n, options.max_length, report.cut_tokens,
            100 * report.cut_tokens / max(1, counts["_trained_tokens"].sum() + report.cut_tokens),
        )  # fmt: skip
    if report.double_bos:
        row = int(counts["_double_bos"].argmax())
        logger.warning(
            "%s dataset: %d of %d texts already began with the bos token, so no second one was added. Row %d is now %r.",
            name, report.double_bos, n, row, tokenizer.decode(mapped[row]["input_ids"])[:SHOWN],
        )  # fmt: skip
    if report.nested_none:
        logger.warning(
            "%s dataset: in %d of %d rows, tool schemas, tool calls or content blocks contained None, because Arrow gives all "
            "rows the same keys. The None values were removed, so that the chat template does not print them.",
            name, report.nested_none, n,
        )  # fmt: skip
    if report.diverged:
        tails = read_columns(mapped, ["_tail"])["_tail"]
        _warn_divergence(report, int(counts["_half_lost"].sum()), next(filter(None, tails)))
    if report.no_end == report.rows_out:
        message = f"{name} dataset: no row has a trained end-of-turn token, so the model would not learn to stop"
        if options.assistant_only_loss and not options.allow_untrained_stop:
            raise DataError(
                f"{message}. The chat template writes the end-of-turn token outside the part that is marked as the assistant's. "
                "Fix: use another template (chat_template_path), or allow this with allow_untrained_stop=True."
            )
        logger.warning("%s.", message)


def _check_rendering(dataset: AnyDataset, tokenizer: Tokenizer, options: SupervisedOptions, name: str) -> None:
    """Raise an error if the chat template omits content of the first rows, or writes the bos token twice."""
    template = options.chat_template or tokenizer.chat_template
    if not template:
        return  # `render` raises an error later if the rows are conversations without a template.
    rows = [strip_none(maybe_convert_to_chatml(row)) for row in first_rows(dataset, PEEKED)]
    report = check_template(with_template(tokenizer, template), rows, turns=False, limit=PEEKED)
    report.findings = [finding for finding in report.findings if finding.code in LOSSES]
    try:
        report.raise_fatal()
    except ModelError as error:
        raise ModelError(f"{name} dataset: {error}") from None


def _warn_divergence(report: PreparationReport, lost: int, tail: str) -> None:
    if lost > DIVERGED_MOST * report.rows_in:
        raise DataError(
            f"{report.name} dataset: in {lost} of {report.rows_in} rows, more than half of the prompt is tokenized differently "
            f"when the completion follows (for example {tail[:200]!r}). Prompt and completion cannot be separated. Fix: use rows "
            "with messages and assistant_only_loss=True, or another chat template."
        )
    logger.warning(
        "%s dataset: in %d of %d rows, the end of the prompt (for example %r) is tokenized differently when the completion "
        "follows. The loss begins at the first token that differs.",
        report.name, report.diverged, report.rows_in, tail[-80:],
    )  # fmt: skip


def document_rows(examples: Iterable[dict[str, Any]]) -> list[Row]:
    """Convert each tokenized example to a row without a prompt. Packed examples are split into documents, one per row.

    Raises:
        DataError: An example has no token ids, the number of its labels differs, or a label is neither the id of its token
            nor -100. The error contains the number of the example.
    """
    rows = []
    for index, example in enumerate(examples):
        ids = example["input_ids"]
        labels = ids if example.get("labels") is None else example["labels"]
        wrong = not ids or len(labels) != len(ids)
        if wrong or any(label not in (IGNORED, token) for token, label in zip(ids, labels, strict=True)):
            raise DataError(f"row {index}: labels must be token ids or {IGNORED}. Fix: do not shift the labels.")
        start = 0
        for length in example.get(LENGTHS) or [len(ids)]:
            mask = [int(label != IGNORED) for label in labels[start : start + length]]
            rows.append(Row([], [ids[start : start + length]], [mask]))
            start += length
    return rows
