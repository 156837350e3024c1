"""Datasets to token ids: what every preparation refuses, one pass that leaves rows out with a reason, and its report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import datasets
import torch
from torch import Tensor

from posttrain.data.formats import get_dataset_column_names
from posttrain.errors import ArgumentTypeError, DataError

__all__ = [
    "PreparationReport",
    "check_ids",
    "first_row",
    "listed",
    "one_eos",
    "refuse_images",
    "tokenized",
    "unbatched",
    "unbatched_pairs",
]

logger = logging.getLogger(__name__)


FIRST_BATCH = 32  # Rows of a stream that are prepared at once while the first one to train is looked for.
PEEKED = 1000  # Rows of a stream of which at least one must be trainable.
IMAGES = ("image", "images", "pixel_values")


def first_row(dataset: Any, name: str, *, images: bool = False) -> dict[str, Any]:
    """The first row of a set that can be prepared.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``.
        name: Of the set, for messages.
        images: Whether columns of images are fine, because something makes text of the rows.

    Raises:
        ArgumentTypeError: It is no dataset.
        DataError: It is empty, has a transform attached, or has images, which are not trained on.
    """
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        hint = " Make one of a list of rows with datasets.Dataset.from_list(rows)." if isinstance(dataset, list) else ""
        raise ArgumentTypeError(f"the {name} dataset must be a datasets.Dataset, not {type(dataset).__name__}.{hint}")
    format_of = getattr(dataset, "format", None)
    if isinstance(format_of, dict) and format_of.get("type") == "custom":
        raise DataError(
            f"the {name} dataset has a transform attached (with_transform), which tokenising would freeze. Apply it with "
            "map, or give rows that hold token ids already (SFT: input_ids and labels with "
            'dataset_kwargs={"skip_prepare_dataset": True}).'
        )
    first = next(iter(dataset), None)
    if first is None:
        raise DataError(f"the {name} dataset is empty.")
    if not images:
        refuse_images(dataset, name)
    return first


def refuse_images(dataset: Any, name: str) -> None:
    """Columns of images are a mistake where only text is read.

    Raises:
        DataError: Names the columns, and how to leave them out.
    """
    pictures = [column for column in get_dataset_column_names(dataset) if column in IMAGES]
    if pictures:
        raise DataError(
            f"the {name} rows have images (columns {pictures}), and this trainer reads text alone: it would train on answers to "
            f"pictures that the model never saw. Remove the columns with dataset.remove_columns({pictures}) if the text "
            "stands by itself."
        )


def check_ids(ids: Any, column: str, vocabulary: int) -> list[int]:
    """Token ids that were given, as a list.

    Raises:
        DataError: They are no list of whole numbers, or not of this vocabulary.
    """
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not set(map(type, ids)) <= {int}:
        odd = next((i for i in ids if type(i) is not int), ids) if isinstance(ids, list) else ids
        raise DataError(
            f"column {column!r} must be a list of token ids (whole numbers), and it holds {str(odd)[:40]!r}."
        )
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        odd = min(ids) if min(ids) < 0 else max(ids)
        raise DataError(
            f"column {column!r} holds the id {odd}, and the tokenizer has ids from 0 to {vocabulary - 1}. Tokenise the rows "
            "with this model's tokenizer."
        )
    return list(ids)


def _check_stream(reasons: Iterable[str], name: str, hint: str) -> None:
    """Refuse a stream whose first rows are all left out: it would train nothing and report success.

    Args:
        reasons: Of each row, why it is left out; "" for one that is kept. Read up to the first of these.
        name: Of the set, for messages.
        hint: What to look at.

    Raises:
        DataError: None of the first rows is kept.
    """
    counts: Counter[str] = Counter()
    for reason in islice(reasons, PEEKED):
        if not reason:
            return
        counts[reason] += 1
    raise DataError(f"no row of the {name} dataset is left: of its first {counts.total()}, {listed(counts)}. {hint}")


def listed(reasons: Mapping[str, int]) -> str:
    """Reasons with their counts, the most frequent first.

    >>> listed({"empty": 1, "too long": 2})
    '2 too long, 1 empty'
    """
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))


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
        inner: Rows with an answer that holds turns of others than the assistant.
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
    inner: int = 0
    no_end: int = 0
    double_bos: int = 0
    nested_none: int = 0
    untrained_pieces: int = 0
    trained_tokens: int = 0
    tokens: int = 0


OF_KEPT = ("_no_end", "_trained_tokens", "_tokens")  # Counted over the rows that are left, the others over all.


def tokenized(
    dataset: Any,
    name: str,
    function: Callable[..., dict[str, list]],
    arguments: dict[str, Any],
    *,
    drop: list[str],
    counters: Sequence[str] = (),
    num_proc: int | None = None,
    hint: str,
) -> tuple[Any, Any, PreparationReport]:
    """Map a dataset batch by batch to ids, and leave out the rows that the function gives a reason for.

    Args:
        dataset: ``Dataset`` or ``IterableDataset``.
        name: Of the set, for messages.
        function: ``f(batch, indices, **arguments)`` gives columns of ids, ``_reason`` (why a row is left out, or ``""``) and the
            counters.
        arguments: Of the function; part of the cache's fingerprint.
        drop: Columns of the dataset that are not kept.
        counters: Columns of numbers; those named like a field of the report are summed into it.
        num_proc: Processes.
        hint: What to look at where no row is left.

    Returns:
        All rows with reasons and counters, the rows that are left without them, and the report (counted for map-style
        datasets).

    Raises:
        DataError: No row is left (of a stream, none of its first rows).
    """
    streaming = isinstance(dataset, datasets.IterableDataset)
    extra: dict[str, Any] = {} if streaming else {"num_proc": num_proc}
    described = {} if streaming else {"desc": f"Tokenizing {name} dataset"}
    options = {"batched": True, "with_indices": True, "remove_columns": drop, "fn_kwargs": arguments}
    if streaming:
        first = dataset.map(function, **options, batch_size=FIRST_BATCH)
        _check_stream((row["_reason"] for row in first), name, hint)
    mapped = dataset.map(function, **options, **extra, **described)
    kept = mapped.filter(_is_kept, batched=True, input_columns=["_reason"], **extra)
    report = PreparationReport(name)
    if not streaming:
        report.rows_in, report.rows_out = len(mapped), len(kept)
        if report.rows_out < report.rows_in:
            report.dropped = dict(Counter(filter(None, mapped["_reason"][:])))
        if not report.rows_out:
            raise DataError(
                f"no row of the {name} dataset is left: of {report.rows_in}, {listed(report.dropped)}. {hint}"
            )
        for counter in (counter for counter in counters if hasattr(report, counter[1:])):
            setattr(report, counter[1:], sum((kept if counter in OF_KEPT else mapped)[counter][:]))
        if report.dropped:
            lost, why = report.rows_in - report.rows_out, listed(report.dropped)
            logger.warning("%s dataset: dropped %d of %d rows (%s).", name, lost, report.rows_in, why)
    return mapped, kept.remove_columns([*counters, "_reason"]), report


def _is_kept(reasons: list[str]) -> list[bool]:
    return [not reason for reason in reasons]


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
