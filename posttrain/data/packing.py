"""Packing: short documents share a row, so that a batch holds tokens instead of padding."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.data.arrow import Lists, as_rows, check_list, gather, list_column, list_columns, segment_sum
from posttrain.data.bins import best_fit_decreasing, shuffle_bins, split_lengths
from posttrain.errors import ConfigError, DataError, check_choice

__all__ = ["STRATEGIES", "pack_dataset", "split_trained", "truncate_dataset"]

logger = logging.getLogger(__name__)

STRATEGIES = ("bfd", "bfd_split", "wrapped")
LENGTHS = "seq_lengths"
IGNORED = -100
LOW_FILL = 0.9  # A fill factor below this is worth a warning.
WINDOW_ROWS, WINDOW_TOKENS = 10_000, 2**25  # A window holds this many rows, unless they have more tokens than that.
PEEK = 1000  # Rows whose lengths are looked at to choose the window.


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to pack; it travels to worker processes and into the cache's fingerprint."""

    size: int
    strategy: str
    cross_document: bool = False
    shuffle: bool = True
    seed: int = 42


def _pack_window(table: pa.Table, rows: list[int] | None = None, *, plan: _Plan) -> pa.Table:
    pack = _wrap if plan.strategy == "wrapped" else _best_fit
    packed = pack(list_columns(table, rows), plan, rows[0] if rows else 0)
    return pa.table(packed)


def _best_fit(columns: dict[str, Lists], plan: _Plan, first_row: int) -> dict[str, pa.Array]:
    lengths = next(iter(columns.values())).lengths
    if plan.strategy == "bfd_split":
        source, skip, pieces = split_lengths(lengths, plan.size)
    else:
        source = np.flatnonzero(lengths)
        skip, pieces = np.zeros(len(source), dtype=np.int64), np.minimum(lengths[source], plan.size)
    order, counts = best_fit_decreasing(pieces, plan.size)
    if plan.shuffle:  # Otherwise long documents come first, and training sees lengths in order.
        order, counts = shuffle_bins(order, counts, np.random.default_rng((plan.seed, first_row)))
    sizes = pieces[order]
    row_lengths = np.add.reduceat(sizes, np.cumsum(counts) - counts) if len(counts) else np.zeros(0, dtype=np.int64)
    packed = {
        name: as_rows(gather(lists.values, (lists.starts[source] + skip)[order], sizes), row_lengths)
        for name, lists in columns.items()
    }
    return packed | {LENGTHS: as_rows(pa.array(sizes, type=pa.int64()), counts)}


def _wrap(columns: dict[str, Lists], plan: _Plan, first_row: int) -> dict[str, pa.Array]:
    """One stream of items, cut every ``size``; `seq_lengths` are the pieces of documents between cuts."""
    lengths = next(iter(columns.values())).lengths
    total = int(lengths.sum())
    row_lengths = np.diff(np.append(np.arange(0, total, plan.size), total)) if total else np.zeros(0, dtype=np.int64)
    packed = {
        name: as_rows(gather(lists.values, lists.starts, lists.lengths), row_lengths) for name, lists in columns.items()
    }
    if plan.cross_document:
        return packed
    cuts = np.cumsum(row_lengths)
    ends = np.union1d(np.cumsum(lengths[lengths > 0]), cuts)
    pieces = np.diff(ends, prepend=0)
    counts = np.bincount(np.searchsorted(cuts, ends), minlength=len(cuts))
    return packed | {LENGTHS: as_rows(pa.array(pieces, type=pa.int64()), counts)}


# Datasets ------------------------------------------------------------------------------------------------------------


def pack_dataset(
    dataset: Any,
    seq_length: int,
    strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd",
    map_kwargs: dict[str, Any] | None = None,
    *,
    cross_document: bool = False,
    preserve_order: bool = False,
    seed: int = 42,
) -> Any:
    """Pack documents into rows of at most ``seq_length`` items, window by window.

    Args:
        dataset: ``Dataset``, ``DatasetDict`` or an iterable twin; every column a list, of one length in each row.
        seq_length: Items of a row, at least 1.
        strategy: ``bfd`` cuts longer documents to ``seq_length`` and keeps the others whole; ``bfd_split`` splits longer
            ones into unrelated pieces; ``wrapped`` concatenates everything and cuts every ``seq_length`` items.
        map_kwargs: For ``dataset.map`` (``num_proc``, ``batch_size`` to set the window, ...).
        cross_document: With ``wrapped``, leave out ``seq_lengths``, so that documents of a row attend to each other.
        preserve_order: Keep the order of placement, long documents first, instead of shuffling the rows of a window.
        seed: Of that shuffling.

    Returns:
        The same kind of dataset in the same format, with a column ``seq_lengths``: the lengths of a row's documents.

    Raises:
        ConfigError: ``seq_length`` below 1, or an unknown strategy.
        ArgumentTypeError: A column that is not a list.
        DataError: Rows whose columns differ in length, or a dataset that is packed already.

    >>> rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
    >>> pack_dataset(rows, 4, preserve_order=True).to_list()
    [{'input_ids': [1, 2, 3, 6], 'seq_lengths': [3, 1]}, {'input_ids': [4, 5], 'seq_lengths': [2]}]
    """
    check_choice("strategy", strategy, STRATEGIES)
    _check_size("seq_length", seq_length)
    plan = _Plan(seq_length, strategy, cross_document, not preserve_order, seed)
    if isinstance(dataset, dict):
        return type(dataset)({key: _pack(value, plan, map_kwargs or {}, key) for key, value in dataset.items()})
    return _pack(dataset, plan, map_kwargs or {}, None)


def truncate_dataset(dataset: Any, max_length: int, map_kwargs: dict[str, Any] | None = None) -> Any:
    """Cut every list column to its first ``max_length`` items; other columns are untouched.

    Args:
        dataset: ``Dataset``, ``DatasetDict`` or an iterable twin.
        max_length: Items to keep, at least 1.
        map_kwargs: For ``dataset.map``.

    Returns:
        The same kind of dataset in the same format.

    Raises:
        ConfigError: ``max_length`` below 1.
        DataError: A packed dataset, whose ``seq_lengths`` would no longer be true.
    """
    _check_size("max_length", max_length)
    if isinstance(dataset, dict):
        return type(dataset)({key: truncate_dataset(value, max_length, map_kwargs) for key, value in dataset.items()})
    _refuse_packed(dataset, "truncate it before packing")
    cut = partial(_truncate_window, size=max_length)
    return _map(dataset, cut, None, map_kwargs or {}, None)


def _truncate_window(table: pa.Table, rows: list[int] | None = None, *, size: int) -> pa.Table:
    def cut(column: pa.ChunkedArray) -> Any:
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return column
        return pc.list_slice(column, 0, size, return_fixed_size_list=False)

    return pa.table({name: cut(table.column(name)) for name in table.column_names})


def split_trained(dataset: Any, size: int, map_kwargs: dict[str, Any] | None = None) -> Any:
    """Split documents as ``bfd_split`` does, and leave out the pieces whose labels train nothing.

    A piece sees nothing of the document it is from, so one that holds only ignored labels (a long prompt's beginning) would
    cost time and teach nothing. The first token of a piece is never trained: nothing predicts it.

    Args:
        dataset: ``Dataset`` or ``IterableDataset`` of list columns, ``labels`` among them.
        size: Most items of a piece.
        map_kwargs: For ``dataset.map``.
    """
    return _map(dataset, partial(_trained_pieces, size=size), None, map_kwargs or {}, "Splitting")


def _trained_pieces(table: pa.Table, rows: list[int] | None = None, *, size: int) -> pa.Table:
    columns = list_columns(table, rows)
    labels = columns["labels"]
    source, skip, pieces = split_lengths(labels.lengths, size)
    before = np.append(0, np.cumsum(np.asarray(labels.values) != IGNORED))  # Trained labels before each position.
    starts = labels.starts[source] + skip
    kept = before[starts + pieces] > before[starts + 1]
    sizes = pieces[kept]
    return pa.table({
        name: as_rows(gather(lists.values, (lists.starts[source] + skip)[kept], sizes), sizes)
        for name, lists in columns.items()
    })  # fmt: skip


def _check_size(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{field}={value!r} must be an integer of at least 1.")


def _refuse_packed(dataset: Any, advice: str) -> None:
    if LENGTHS in (dataset.column_names or ()):
        raise DataError(f"the dataset is already packed: it has a column {LENGTHS!r}. Use it as it is, or {advice}.")


def _pack(dataset: Any, plan: _Plan, map_kwargs: dict[str, Any], name: str | None) -> Any:
    _refuse_packed(dataset, f"pack the unpacked rows, or remove the column {LENGTHS!r} to pack rows as documents")
    for column, feature in (dataset.features or {}).items():
        check_list(column, datasets.Features({column: feature}).arrow_schema.field(column).type)
    added = None if plan.strategy == "wrapped" and plan.cross_document else LENGTHS
    window = {"batch_size": _window(dataset, plan.size)}
    packed = _map(dataset, partial(_pack_window, plan=plan), added, window | map_kwargs, "Packing")
    if isinstance(packed, datasets.Dataset):
        _report(dataset, packed, plan, name)
    return packed


def _window(dataset: Any, size: int) -> int:
    """Rows packed together: enough that little room is left over, few enough for memory."""
    if isinstance(dataset, datasets.Dataset):
        count = len(dataset)
        peek = dataset.with_format("arrow").select(np.linspace(0, count - 1, min(PEEK, count)).astype(int))
        column = peek[:].column(0) if count and peek.column_names else pa.chunked_array([[]])
        mean = float(pc.mean(pc.list_value_length(column)).as_py() or 1) if len(column) else 1.0
    else:
        firsts = [next(iter(row.values())) for row in dataset.with_format(None).take(PEEK // 10)]
        sizes = [len(value) for value in firsts if isinstance(value, list)]
        mean = sum(sizes) / max(1, len(sizes))
    mean = max(mean, 1.0)
    return max(1000, math.ceil(64 * size / mean), min(WINDOW_ROWS, int(WINDOW_TOKENS / mean)))


def _map(
    dataset: Any, function: Callable[..., pa.Table], added: str | None, map_kwargs: dict[str, Any], desc: str | None
) -> Any:
    """Run an Arrow function over windows of a dataset, and give the result the features and format the dataset had."""
    stream = isinstance(dataset, datasets.IterableDataset)
    features = None if dataset.features is None else _packed_features(dataset.features, added)
    options = {"batched": True, "with_indices": True, "features": features} | map_kwargs
    if stream:
        options = {key: value for key, value in options.items() if key not in ("num_proc", "desc")}
    elif len(dataset) == 0:
        return datasets.Dataset.from_dict({name: [] for name in features}, features=features)
    else:
        options = {"desc": desc} | options
    mapped = dataset.with_format("arrow").map(function, **options)
    if stream:
        before = dataset._formatting  # A stream has no public reader of its format.
        return mapped.with_format(before.format_type if before else None)
    before = dataset.format
    columns = before["columns"] + ([added] if added else [])
    return mapped.with_format(
        before["type"],
        columns=[name for name in columns if name in mapped.column_names],
        output_all_columns=before["output_all_columns"],
        **before["format_kwargs"],
    )


def _packed_features(features: datasets.Features, added: str | None) -> datasets.Features:
    def free(feature: Any) -> Any:
        fixed = isinstance(feature, datasets.List) and feature.length != -1
        return datasets.List(feature.feature) if fixed else feature

    extra = {added: datasets.List(datasets.Value("int64"))} if added else {}
    return datasets.Features({name: free(feature) for name, feature in features.items()} | extra)


def _report(dataset: datasets.Dataset, packed: datasets.Dataset, plan: _Plan, name: str | None) -> None:
    """Prove that no item was lost or doubled, and log how full the rows are."""
    if not len(packed):
        logger.warning("packing%s: no row is left, every document is empty.", f" {name}" if name else "")
        return
    cut = plan.size if plan.strategy == "bfd" else None
    before, after = _tally(dataset, cut), _tally(packed, None)
    if (before.kept, before.checksum) != (after.total, after.checksum):
        raise DataError(
            f"packing lost or doubled items: {before.kept} went in and {after.total} came out (checksums {before.checksum} "
            f"and {after.checksum}). This is a defect of packing, or of a cache file; pass load_from_cache_file=False in "
            "map_kwargs and report it."
        )
    fill = after.total / (len(packed) * plan.size)
    lost = before.total - before.kept
    logger.log(
        logging.WARNING if fill < LOW_FILL and len(packed) > 1 else logging.INFO,
        "packed%s with %s: %d documents into %d rows of %d, %.2f %% full; %d of %d items cut off (%.2f %%).",
        f" {name}" if name else "", plan.strategy, len(dataset), len(packed), plan.size, 100 * fill, lost, before.total,
        100 * lost / max(1, before.total),
    )  # fmt: skip


@dataclass(slots=True)
class _Tally:
    """Items of the first column: all, those within the cut, and the wrapped-around sum of the latter (if integers)."""

    total: int = 0
    kept: int = 0
    checksum: int = 0


def _tally(dataset: datasets.Dataset, cut: int | None) -> _Tally:
    tally = _Tally()
    column = dataset.column_names[0]
    for table in dataset.select_columns([column]).with_format("arrow").iter(WINDOW_ROWS):
        found = list_column(table.column(0), column, None)
        kept = found.lengths if cut is None else np.minimum(found.lengths, cut)
        tally.total += int(found.lengths.sum())
        tally.kept += int(kept.sum())
        if pa.types.is_integer(found.values.type) and not found.values.null_count:
            tally.checksum += segment_sum(np.asarray(found.values), found.starts, kept)
    tally.checksum %= 2**64
    return tally
