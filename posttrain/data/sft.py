"""Datasets of supervised fine-tuning: one batched pass, and a report of what that did to the rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from posttrain.data.chat import has_generation_markers, render, with_template
from posttrain.data.formats import (
    ROW,
    check_ids,
    check_stream,
    describe_dataset,
    first_row,
    get_dataset_column_names,
    listed,
    maybe_convert_to_chatml,
    strip_none,
)
from posttrain.data.labels import COUNTERS, IGNORED, SupervisedOptions, label_batch
from posttrain.data.packing import LENGTHS, pack_dataset, split_trained
from posttrain.data.templates import check_template, get_training_chat_template
from posttrain.errors import DataError, ModelError
from posttrain.types import Row

__all__ = [
    "IGNORED",
    "PreparationReport",
    "SupervisedOptions",
    "check_prepared",
    "document_rows",
    "prepare_sft_dataset",
    "unbatched",
    "unbatched_pairs",
    "with_training_template",
]

logger = logging.getLogger(__name__)


DEFAULTS = SupervisedOptions()
DIVERGED_MOST = (
    0.5  # More rows than this that lose half of their prompt at the boundary: the template is not understood.
)


LOSSES = (
    "PT-K116", "PT-K119", "PT-K111",
)  # fmt: skip
PEEKED = 32  # Rows that the template is tried on.
SHOWN = 200  # Characters of a row in a message.
HINT = "Check completion_only_loss, assistant_only_loss, max_length and the masks; posttrain inspect shows the rows."


@dataclass
class PreparationReport:
    """What preparing a dataset did to it.

    Attributes:
        name: Which set.
        rows_in, rows_out: Before and after (before packing).
        dropped: Rows left out, by reason.
        truncated: Rows that were cut at ``max_length``.
        cut_tokens: Trained tokens lost by that.
        diverged: Rows whose prompt tokenises differently once the completion follows.
        no_end: Rows that do not train a token that ends a sequence.
        double_bos: Texts that began with the bos token already.
        nested_none: Rows with a ``None`` in tool schemas, tool calls or content blocks.
        untrained_pieces: With ``bfd_split``: pieces of long rows that train nothing, and are left out.
        trained_tokens, tokens: What is left: tokens that carry loss, and all tokens.
    """

    name: str
    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    cut_tokens: int = 0
    diverged: int = 0
    no_end: int = 0
    double_bos: int = 0
    nested_none: int = 0
    untrained_pieces: int = 0
    trained_tokens: int = 0
    tokens: int = 0


def with_training_template(options: SupervisedOptions, tokenizer: Any) -> SupervisedOptions:
    """Options that tokenise with a template that marks the assistant's words, where it is needed and the own one does not.

    It is for tokenising alone: what is saved with the model stays its own template.
    """
    if not options.assistant_only_loss or has_generation_markers(tokenizer.chat_template):
        return options
    with suppress(
        DataError
    ):  # That a template refuses this message is no reason to; that it is no Jinja is told first.
        render(tokenizer, [{"role": "user", "content": "q"}])
    return replace(options, chat_template=get_training_chat_template(tokenizer))


def prepare_sft_dataset(
    dataset: Any,
    tokenizer: Any,
    options: SupervisedOptions = DEFAULTS,
    *,
    name: str = "train",
    formatting_func: Callable[[dict], str] | None = None,
    num_proc: int | None = None,
    seed: int = 42,
) -> tuple[Any, PreparationReport]:
    """Tokenise a dataset for supervised fine-tuning and say what that did to it.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``; one that was packed before comes back as it is.
        tokenizer: With a chat template where rows are conversational.
        options: See `SupervisedOptions`.
        name: Of the set, for messages.
        formatting_func: Makes one text of a row; its other columns are dropped.
        num_proc: Processes.
        seed: Of the packed rows' order.

    Returns:
        The dataset with columns ``input_ids`` and ``labels`` (and ``seq_lengths`` if packed), and a report (counted for
        map-style datasets).

    Raises:
        DataError: A row that cannot be tokenised, options that contradict the rows, or no row left, with the reasons.
    """
    first = first_row(dataset, name, images=formatting_func is not None)
    if LENGTHS in first:
        return dataset, PreparationReport(name)
    _check_options(dataset, first, name, options, formatting_func)
    if formatting_func is None and "input_ids" not in first:
        _check_rendering(dataset, tokenizer, options, name)
    streaming = isinstance(dataset, datasets.IterableDataset)
    columns = [column for column in get_dataset_column_names(dataset) if column != ROW]
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    if formatting_func is not None and "input_ids" not in first:
        arguments = {"function": formatting_func, "column": options.dataset_text_field}
        dataset = dataset.map(_format, with_indices=True, remove_columns=columns, fn_kwargs=arguments, **extra)
        columns = [options.dataset_text_field]
    elif formatting_func is not None:
        logger.warning("the %s rows are tokenised already: formatting_func is ignored.", name)
    report = PreparationReport(name, rows_in=0 if streaming else len(dataset))
    steps = {"columns": columns, "tokenizer": tokenizer, "options": options, "extra": extra, "name": name}
    if streaming:
        check_stream((row["_reason"] for row in _labelled(dataset, **steps, batch_size=PEEKED)[0]), name, HINT)
    mapped, kept = _labelled(dataset, **steps)
    if not streaming:
        _count(report, mapped, kept)
        _tell(report, mapped, kept, options, tokenizer)
    kept = kept.remove_columns(list(COUNTERS))
    if options.packing:
        assert options.max_length is not None
        if options.packing == "bfd_split":
            kept = _split(kept, options.max_length, report, extra)
        kept = pack_dataset(kept, options.max_length, options.packing, map_kwargs=extra, seed=seed)
        if options.packing == "wrapped":  # It cuts anywhere: a row may hold nothing but the middle of a prompt.
            kept = kept.filter(_trains_something, batched=True, input_columns=["labels"], **extra)
    return kept, report


def _labelled(
    dataset: Any,
    *,
    columns: list[str],
    tokenizer: Any,
    options: SupervisedOptions,
    extra: dict,
    name: str,
    **batches: int,
) -> tuple[Any, Any]:
    """All rows as ids and labels, and those of them that train something."""
    described = {} if isinstance(dataset, datasets.IterableDataset) else {"desc": f"Tokenizing {name} dataset"}
    mapped = dataset.map(
        label_batch,
        batched=True,
        with_indices=True,
        remove_columns=columns,
        fn_kwargs={"tokenizer": tokenizer, "options": options},
        **extra,
        **described,
        **batches,
    )
    return mapped, mapped.filter(_is_kept, batched=True, input_columns=["_reason"], **extra)


def _split(kept: Any, size: int, report: PreparationReport, extra: dict[str, Any]) -> Any:
    """Long documents in pieces, without those that train nothing; how many these are is told."""
    pieces = split_trained(kept, size, extra)
    if isinstance(kept, datasets.Dataset):
        lengths = pc.list_value_length(kept.select_columns("input_ids").with_format("arrow")[:]["input_ids"])
        report.untrained_pieces = int((-(-np.asarray(lengths) // size)).sum()) - len(pieces)
        if report.untrained_pieces:
            logger.info(
                "%s dataset: %d pieces of split rows train no token and are left out.",
                report.name,
                report.untrained_pieces,
            )
    return pieces


def check_prepared(dataset: Any, name: str, vocabulary: int) -> None:
    """Refuse rows that skipped preparation and would silently train on everything.

    Args:
        dataset: With ids and labels.
        name: Of the set, for messages.
        vocabulary: Tokens of the tokenizer.

    Raises:
        DataError: No ``input_ids``, mask columns without ``labels``, or ids that are none of this vocabulary.
    """
    first_row(dataset, name)
    columns = get_dataset_column_names(dataset)
    masks = sorted({"assistant_masks", "completion_mask"} & set(columns))
    if "input_ids" not in columns or (masks and "labels" not in columns):
        why = f"columns {masks} but no labels, so every token would be trained" if masks else f"columns {columns}"
        raise DataError(f"skip_prepare_dataset is set and the {name} rows have {why}. Add input_ids and labels.")
    for index, row in enumerate(islice(dataset, PEEKED)):
        try:
            check_ids(row["input_ids"], "input_ids", vocabulary)
        except DataError as error:
            raise DataError(f"{name} row {index}: {error}") from None
    if "labels" not in columns:
        return
    seen = [_trains_something([row["labels"]])[0] for row in islice(dataset, PEEKED)]
    if seen and not any(seen):
        raise DataError(
            f"skip_prepare_dataset is set and none of the first {len(seen)} {name} rows trains a token: their labels are all "
            f"{IGNORED}, so the loss would be 0. Labels are token ids at the positions to learn; they are not shifted."
        )


def _is_kept(reasons: list[str]) -> list[bool]:
    return [not reason for reason in reasons]


def _trains_something(labels: list[list[int]]) -> list[bool]:
    # The first token of a row has no predecessor, so a label there trains nothing.
    return [len(row) - 1 > row[1:].count(IGNORED) for row in labels]


def _format(example: dict[str, Any], index: int, function: Callable[[dict], str], column: str) -> dict[str, str]:
    try:
        text = function(example)
    except Exception as error:
        raise DataError(
            f"row {index}: formatting_func raised {type(error).__name__}: {error}. The row's columns are {sorted(example)}."
        ) from error
    if not isinstance(text, str):
        raise DataError(f"row {index}: formatting_func must return one string a row, and it returned {text!r:.80}.")
    return {column: text}


def _check_options(dataset: Any, first: dict, name: str, options: SupervisedOptions, formatting: Any) -> None:
    if options.completion_only_loss and formatting is not None:
        raise DataError("completion_only_loss=True with formatting_func: formatted rows have no prompt. Leave one out.")
    parted = ("prompt" in first and "completion" in first) or "completion_mask" in first or "labels" in first
    if options.completion_only_loss and not parted:
        raise DataError(
            f"completion_only_loss=True, but the {name} rows have no completion (columns {sorted(first)}): everything would "
            "be trained. Give prompt and completion columns, or a completion_mask."
        )
    if "messages" in first and not first["messages"]:
        raise DataError(f"{name} row 0, column 'messages': it is empty. Every conversation needs at least one message.")
    chat = "assistant_masks" in first
    if formatting is None and "input_ids" not in first and {"messages", "conversations", "prompt"} & set(first):
        chat = describe_dataset(dataset)["format"] == "conversational"
    if options.assistant_only_loss and not chat:
        raise DataError(
            f"assistant_only_loss=True needs conversational rows, and the {name} rows have columns {sorted(first)} without "
            "messages."
        )


def _count(report: PreparationReport, mapped: Any, kept: Any) -> None:
    report.rows_out = len(kept)
    if report.rows_out < report.rows_in:
        report.dropped = dict(Counter(filter(None, mapped["_reason"][:])))
    if report.rows_out == 0:
        raise DataError(
            f"no row of the {report.name} dataset is left: of {report.rows_in}, {listed(report.dropped)}. {HINT}"
        )
    report.truncated, report.cut_tokens = sum(mapped["_truncated"][:]), sum(mapped["_cut"][:])
    report.diverged, report.no_end = sum(mapped["_diverged"][:]), sum(kept["_no_end"][:])
    report.double_bos, report.nested_none = sum(mapped["_double_bos"][:]), sum(mapped["_nested_none"][:])
    report.trained_tokens, report.tokens = sum(kept["_trained"][:]), sum(kept["_tokens"][:])


def _tell(report: PreparationReport, mapped: Any, kept: Any, options: SupervisedOptions, tokenizer: Any) -> None:
    """One warning a kind, with numbers."""
    name, n = report.name, report.rows_in
    logger.info(
        "%s dataset: %d of %d tokens are trained (%.1f %%).",
        name, report.trained_tokens, report.tokens, 100 * report.trained_tokens / max(1, report.tokens),
    )  # fmt: skip
    if report.dropped:
        logger.warning("%s dataset: dropped %d of %d rows: %s.", name, n - report.rows_out, n, listed(report.dropped))
    if report.truncated:
        logger.warning(
            "%s dataset: %d of %d rows were cut at max_length=%s and lost %d trained tokens (%.1f %% of all).",
            name, report.truncated, n, options.max_length, report.cut_tokens,
            100 * report.cut_tokens / max(1, sum(mapped["_trained"][:]) + report.cut_tokens),
        )  # fmt: skip
    if report.double_bos:
        row = mapped["_double_bos"][:].index(1)
        logger.warning(
            "%s dataset: %d of %d texts began with the bos token already; one was kept. Row %d is now %r.",
            name, report.double_bos, n, row, tokenizer.decode(mapped[row]["input_ids"])[:SHOWN],
        )  # fmt: skip
    if report.nested_none:
        logger.warning(
            "%s dataset: %d of %d rows held None inside tool schemas, tool calls or content blocks, as Arrow fills in keys that "
            "other rows have. They were left out, so that the chat template does not print them.",
            name, report.nested_none, n,
        )  # fmt: skip
    if report.diverged:
        _tell_divergence(report, mapped)
    if report.no_end == report.rows_out:
        message = f"{name} dataset: no row trains a token that ends a turn, so the model would never learn to stop"
        if options.assistant_only_loss and not options.allow_untrained_stop:
            raise DataError(
                f"{message}. The chat template ends the turn outside of what it marks as the assistant's; use another "
                "(chat_template_path), or set allow_untrained_stop=True."
            )
        logger.warning("%s.", message)


def _check_rendering(dataset: Any, tokenizer: Any, options: SupervisedOptions, name: str) -> None:
    """Refuse what the chat template would leave out of the first rows, and what it would write twice."""
    template = options.chat_template or getattr(tokenizer, "chat_template", None)
    if not template:
        return  # Conversational rows without a template are refused by number when they are rendered.
    rows = [strip_none(maybe_convert_to_chatml(row)) for row in islice(dataset, PEEKED)]
    report = check_template(with_template(tokenizer, template), rows, limit=PEEKED)
    report.findings = [finding for finding in report.findings if finding.code in LOSSES]
    try:
        report.raise_fatal()
    except ModelError as error:
        raise ModelError(f"{name} dataset: {error}") from None


def _tell_divergence(report: PreparationReport, mapped: Any) -> None:
    lost = sum(mapped["_half_lost"][:])
    tail = next(text for text in mapped["_tail"][:] if text)
    if lost > DIVERGED_MOST * report.rows_in:
        raise DataError(
            f"{report.name} dataset: in {lost} of {report.rows_in} rows more than half of the prompt tokenises differently once "
            f"its completion follows (for example {tail[:200]!r}), so prompt and completion cannot be told apart. Give rows as "
            "messages with assistant_only_loss=True, or another chat template."
        )
    logger.warning(
        "%s dataset: in %d of %d rows the end of the prompt (for example %r) tokenises differently once its completion "
        "follows; the boundary is where the tokens part.",
        report.name, report.diverged, report.rows_in, tail[-80:],
    )  # fmt: skip


def document_rows(examples: Iterable[dict[str, Any]]) -> list[Row]:
    """Tokenised examples as rows without a shared prompt; packed examples come apart into their documents.

    Raises:
        DataError: A label that is neither its token nor -100, by the number of its example.
    """
    rows = []
    for index, example in enumerate(examples):
        ids = example["input_ids"]
        labels = example.get("labels") or ids
        if any(label not in (IGNORED, token) for token, label in zip(ids, labels, strict=True)):
            raise DataError(f"row {index}: a label is neither its token nor {IGNORED}; labels are not shifted.")
        start = 0
        for length in example.get(LENGTHS) or [len(ids)]:
            mask = [int(label != IGNORED) for label in labels[start : start + length]]
            rows.append(Row([], [ids[start : start + length]], [mask]))
            start += length
    return rows


def unbatched(batch: Any) -> list[dict[str, Any]]:
    """Rows with ``input_ids`` (and ``labels``) of a padded or concatenated batch; padding is told by position.

    Args:
        batch: ``input_ids (B, L)``, and ``attention_mask (B, L)`` or ``position_ids (1, T)`` that begin at 0 in every document;
            ``labels`` likewise where there are any.

    Raises:
        DataError: It is no such batch; without mask and positions, padding could not be told from text.

    >>> unbatched({"input_ids": torch.tensor([[1, 2], [3, 9]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])})
    [{'input_ids': [1, 2]}, {'input_ids': [3]}]
    """
    names = [name for name in ("input_ids", "labels") if _has(batch, name)]
    if "input_ids" not in names or not (_has(batch, "attention_mask") or _has(batch, "position_ids")):
        keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(
            f"data_collator gave {keys}; it must give input_ids with an attention_mask (or position_ids that begin at 0 in "
            "every document), and labels where not everything is trained."
        )
    if _has(batch, "attention_mask"):
        real = batch["attention_mask"].bool()
        return [{name: batch[name][row][mask].tolist() for name in names} for row, mask in enumerate(real)]
    rows = []
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
        for start, end in pairwise(starts):
            rows.append({name: batch[name][row, start:end].tolist() for name in names})
    return rows


def unbatched_pairs(batch: Any) -> list[dict[str, Any]]:
    """Pairs with ``chosen_ids`` and ``rejected_ids`` (and ``margin``) of a batch whose first half is chosen.

    Raises:
        DataError: It is no such batch.
    """
    ids = [row["input_ids"] for row in unbatched(batch)]
    if len(ids) % 2:
        raise DataError(f"data_collator gave {len(ids)} rows; pairs are all chosen rows, then as many rejected ones.")
    half = len(ids) // 2
    pairs: list[dict[str, Any]] = [
        {"chosen_ids": chosen, "rejected_ids": rejected}
        for chosen, rejected in zip(ids[:half], ids[half:], strict=True)
    ]
    if _has(batch, "margin"):
        for pair, margin in zip(pairs, batch["margin"].tolist(), strict=True):
            pair["margin"] = margin
    return pairs


def _has(batch: Any, name: str) -> bool:
    return isinstance(batch, Mapping) and isinstance(batch.get(name), Tensor)
