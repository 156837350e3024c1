"""Packing of several documents into one row, so that batches contain less padding."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.errors import ArgumentTypeError, ConfigError, DataError, check_choice

if TYPE_CHECKING:
    from posttrain.types import AnyDataset

logger = logging.getLogger(__name__)


def best_fit_decreasing(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign documents to bins with the best-fit-decreasing algorithm.

    Documents are placed in order of decreasing length. Documents of equal length keep their order. Each document is placed
    into the open bin with the smallest sufficient free space. If several bins have equal free space, the bin that reached this
    free space first is used. If no open bin has enough space, a new bin is opened.

    For speed, documents of equal length are placed in one step. A bin with free space r takes up to ``r // length`` of these
    documents in succession, because the bin remains the best fit. Each step costs one bisection over the distinct values of
    r.

    Args:
        lengths: Document lengths ``(n,)``, integers in ``1..size``.
        size: Number of tokens per bin.

    Returns:
        Two arrays, ``order (n,)`` and ``counts (bins,)``. ``order`` contains the document indices of the first bin, then of
        the second bin, and so on. ``counts`` contains the number of documents in each bin.

    >>> order, counts = best_fit_decreasing(np.array([3, 3, 2, 2, 1, 1]), 5)
    >>> order.tolist(), counts.tolist()
    ([0, 2, 1, 3, 4, 5], [2, 2, 2])
    """
    by_length = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    bins = _Bins(size)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        bins.place(length, count)
    bin_of = np.array(bins.placed, dtype=np.int64)
    return by_length[np.argsort(bin_of, kind="stable")], np.bincount(bin_of, minlength=bins.created)


class _Bins:
    """Open bins, grouped by remaining space. ``placed`` contains the bin index of each document, in the order in which
    documents were placed.
    """

    def __init__(self, size: int) -> None:
        self.size, self.created = size, 0
        self.placed: list[int] = []
        self.queues: dict[int, deque[int]] = {}
        self.rooms: list[int] = []  # Sorted list of the distinct amounts of free space in open bins.

    def place(self, length: int, count: int) -> None:
        while count:
            at = bisect_left(self.rooms, length)
            if at == len(self.rooms):
                self._open(length, count)
                return
            room = self.rooms[at]
            queue, each = self.queues[room], room // length
            while queue and count:
                taken = min(each, count)
                self._fill(queue.popleft(), room, length, taken)
                count -= taken
            if not queue:
                self.rooms.pop(bisect_left(self.rooms, room))

    def _open(self, length: int, count: int) -> None:
        each = self.size // length
        while count:
            taken = min(each, count)
            self._fill(self.created, self.size, length, taken)
            self.created += 1
            count -= taken

    def _fill(self, index: int, room: int, length: int, taken: int) -> None:
        if taken == 1:
            self.placed.append(index)
        else:
            self.placed.extend([index] * taken)
        left = room - taken * length
        if left:
            queue = self.queues.setdefault(left, deque())
            if not queue:
                insort(self.rooms, left)
            queue.append(index)


def split_lengths(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split documents into segments of up to ``size`` tokens. Return the document index, the offset and the length of each
    segment.
    """
    number = -(-lengths // size)
    source = np.repeat(np.arange(len(lengths)), number)
    rank = np.arange(len(source)) - np.repeat(np.cumsum(number) - number, number)
    skip = rank * size
    return source, skip, np.minimum(lengths[source] - skip, size)


def shuffle_bins(order: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle the bins. Return the document indices bin by bin, and the number of documents per bin."""
    permutation = rng.permutation(len(counts))
    starts = (np.cumsum(counts) - counts)[permutation]
    counts = counts[permutation]
    index = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(len(order))
    return order[index], counts


@dataclass(frozen=True, slots=True)
class Lists:
    """Column of lists, stored as flat values with the start and the length of each row's list. If the column is a slice of a
    table, ``starts`` include the slice's offset.
    """

    values: pa.Array
    starts: np.ndarray
    lengths: np.ndarray


def list_column(column: pa.ChunkedArray, name: str, rows: list[int] | None) -> Lists:
    """Convert a column of a table or of a slice of a table to `Lists`. ``rows`` are row numbers for error messages."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    # For an empty column, some versions of pyarrow return a chunked array.
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=column.type)
    if array.null_count:
        first = int(np.flatnonzero(np.asarray(array.is_null()))[0])
        raise DataError(f"row {rows[first] if rows else first}, column {name!r}: it is None. Fix: add a list.")
    if pa.types.is_fixed_size_list(array.type):
        n, width = len(array), array.type.list_size
        return Lists(array.flatten(), np.arange(n, dtype=np.int64) * width, np.full(n, width, dtype=np.int64))
    offsets = np.asarray(array.offsets).astype(np.int64)
    return Lists(array.values, offsets[:-1], np.diff(offsets))


def gather(values: pa.Array, starts: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Concatenate the slices ``values[start : start + length]`` for all ``starts`` and ``lengths``, in order."""
    ends = np.cumsum(lengths)
    index = np.repeat(starts - (ends - lengths), lengths)
    index += np.arange(len(index), dtype=index.dtype)
    return values.take(pa.array(index))


def as_rows(values: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Build a list column with rows of the given lengths from flat values."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] < 2**31:
        return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values)
    return pa.LargeListArray.from_arrays(pa.array(offsets, type=pa.int64()), values)


def list_columns(table: pa.Table, rows: list[int] | None) -> dict[str, Lists]:
    """Convert all columns of a window of rows to `Lists`, and check that all lists of a row have the same length."""
    columns: dict[str, Lists] = {}
    for name in table.column_names:
        check_list(name, table.schema.field(name).type)
        columns[name] = list_column(table.column(name), name, rows)
    first_name, first = next(iter(columns.items()))
    for name, other in columns.items():
        differing = np.flatnonzero(other.lengths != first.lengths)
        if len(differing):
            at = int(differing[0])
            raise DataError(
                f"row {rows[at] if rows else at}: column {first_name!r} has {first.lengths[at]} items, but column {name!r} "
                f"has {other.lengths[at]}. Packing needs equal lengths in each row. Fix: remove the columns that differ."
            )
    return columns


def check_list(name: str, kind: pa.DataType) -> None:
    """Raise an error if the Arrow type of a column is not a list type."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise ArgumentTypeError(
            f"column {name!r} has type {kind}, but packing needs lists. Fix: tokenize the dataset first, and select only list "
            "columns (input_ids, labels, masks) with select_columns."
        )


def segment_sum(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
    """Return the sum of all values in the segments ``values[start : start + length]``, modulo 2^64."""
    if not lengths.any():
        return 0
    low, high = int(starts[0]), int((starts + lengths).max())
    running = np.concatenate([[0], np.cumsum(values[low:high], dtype=np.int64)])
    starts = starts - low
    return int((running[starts + lengths] - running[starts]).sum()) % 2**64


STRATEGIES = ("bfd", "bfd_split", "wrapped")
LENGTHS = "seq_lengths"
IGNORED = -100
# A warning is logged if packed rows are filled to less than this fraction on average.
LOW_FILL = 0.9
WINDOW_ROWS, WINDOW_TOKENS = (
    10_000,
    2**25,
)  # Maximum number of rows, and maximum number of tokens, that are packed together (a window).
PEEK = 1000  # Number of rows that are read to estimate the mean number of tokens per row.


@dataclass(frozen=True, slots=True)
class _Plan:
    """Options of packing. The options are sent to worker processes and are part of the cache fingerprint."""

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
    # Shuffle the packed rows, because they are ordered by decreasing document length.
    if plan.shuffle:
        order, counts = shuffle_bins(order, counts, np.random.default_rng((plan.seed, first_row)))
    sizes = pieces[order]
    row_lengths = np.add.reduceat(sizes, np.cumsum(counts) - counts) if len(counts) else np.zeros(0, dtype=np.int64)
    packed = {
        name: as_rows(gather(lists.values, (lists.starts[source] + skip)[order], sizes), row_lengths)
        for name, lists in columns.items()
    }
    return packed | {LENGTHS: as_rows(pa.array(sizes, type=pa.int64()), counts)}


def _wrap(columns: dict[str, Lists], plan: _Plan, first_row: int) -> dict[str, pa.Array]:
    """Concatenate documents and split the result every ``size`` items. The column ``seq_lengths`` contains the lengths of
    the resulting segments of documents.
    """
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


def pack_dataset(
    dataset: AnyDataset,
    seq_length: int,
    strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd",
    map_kwargs: dict[str, Any] | None = None,
    *,
    cross_document: bool = False,
    preserve_order: bool = False,
    seed: int = 42,
) -> Any:
    """Pack documents into rows of up to ``seq_length`` items. The dataset is divided into windows of consecutive rows, which
    are packed separately.

    Args:
        dataset: ``Dataset``, ``DatasetDict`` or an iterable equivalent. All columns must be lists of equal length in each row.
        seq_length: Maximum number of items per row, at least 1.
        strategy: ``bfd`` truncates documents to ``seq_length`` and does not split them. ``bfd_split`` splits longer documents
            into segments that do not attend to each other. ``wrapped`` concatenates all documents and splits the result
            every ``seq_length`` items.
        map_kwargs: Additional arguments of ``dataset.map``, e.g. ``num_proc``, or ``batch_size`` for the number of rows per
            window.
        cross_document: Whether documents in a packed row attend to each other. The argument only affects the strategy
            ``wrapped``. If True, the result has no column ``seq_lengths``.
        preserve_order: Whether packed rows stay in the order in which they were filled, with the longest documents first. If
            False, packed rows are shuffled.
        seed: Random seed for shuffling.

    Returns:
        A dataset of the same class and format as ``dataset``, with a column ``seq_lengths`` that contains the lengths of the
        documents in each row.

    Raises:
        ConfigError: ``seq_length`` is below 1, or the strategy is unknown.
        ArgumentTypeError: A column is not a list.
        DataError: The lists of a row have different lengths, or the dataset is already packed.

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


def truncate_dataset(dataset: AnyDataset, max_length: int, map_kwargs: dict[str, Any] | None = None) -> Any:
    """Truncate every list column to its first ``max_length`` items. Columns that are not lists are unchanged.

    Args:
        dataset: ``Dataset``, ``DatasetDict`` or an iterable equivalent.
        max_length: Number of items to keep, at least 1.
        map_kwargs: Additional arguments of ``dataset.map``.

    Returns:
        A dataset of the same class and format as ``dataset``.

    Raises:
        ConfigError: ``max_length`` is below 1.
        DataError: The dataset is packed. Truncation would make ``seq_lengths`` incorrect.
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


def split_trained(dataset: AnyDataset, size: int, map_kwargs: dict[str, Any] | None = None) -> Any:
    """Split long documents into segments, and drop segments whose tokens have no loss.

    Segments of a document do not attend to each other. A segment without tokens in the loss, such as the start of a long
    prompt, would cost time without any effect on the weights. The first token of a segment is excluded from the loss,
    because no token precedes it.

    Args:
        dataset: ``Dataset`` or ``IterableDataset`` of list columns, including ``labels``.
        size: Maximum number of items per segment.
        map_kwargs: Additional arguments of ``dataset.map``.
    """
    return _map(dataset, partial(_trained_pieces, size=size), None, map_kwargs or {}, "Splitting")


def _trained_pieces(table: pa.Table, rows: list[int] | None = None, *, size: int) -> pa.Table:
    columns = list_columns(table, rows)
    labels = columns["labels"]
    source, skip, pieces = split_lengths(labels.lengths, size)
    # Number of tokens in the loss before each position.
    before = np.append(0, np.cumsum(np.asarray(labels.values) != IGNORED))
    starts = labels.starts[source] + skip
    trained = before[starts + pieces] > before[starts + 1]
    sizes = pieces[trained]
    return pa.table({
        name: as_rows(gather(lists.values, (lists.starts[source] + skip)[trained], sizes), sizes)
        for name, lists in columns.items()
    })  # fmt: skip


def _check_size(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{field}={value!r} must be an integer and at least 1.")


def _refuse_packed(dataset: AnyDataset, advice: str) -> None:
    if LENGTHS in (dataset.column_names or ()):
        raise DataError(
            f"the dataset is already packed, because it has a column {LENGTHS!r}. Fix: use it without packing, or {advice}."
        )


def _pack(dataset: AnyDataset, plan: _Plan, map_kwargs: dict[str, Any], name: str | None) -> Any:
    _refuse_packed(dataset, f"pack the unpacked rows, or remove the column {LENGTHS!r} to pack rows as documents")
    for column, feature in (dataset.features or {}).items():
        check_list(column, datasets.Features({column: feature}).arrow_schema.field(column).type)
    added = None if plan.strategy == "wrapped" and plan.cross_document else LENGTHS
    window = {"batch_size": _window(dataset, plan.size)}
    packed = _map(dataset, partial(_pack_window, plan=plan), added, window | map_kwargs, "Packing")
    if isinstance(packed, datasets.Dataset):
        _report(dataset, packed, plan, name)
    return packed


def _window(dataset: AnyDataset, size: int) -> int:
    """Return the number of rows that are packed together (a window). The number is limited so that a window fits into
    memory.
    """
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
    dataset: AnyDataset,
    function: Callable[..., pa.Table],
    added: str | None,
    map_kwargs: dict[str, Any],
    desc: str | None,
) -> Any:
    """Apply a function that maps Arrow tables to windows of a dataset, and restore the dataset's features and format."""
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
        # Read `_formatting`, because an IterableDataset has no public attribute for its format.
        before = dataset._formatting
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
    """Check that packing has neither lost nor duplicated an item. Log how full packed rows are on average, as a fraction of
    the maximum length.
    """
    if not len(packed):
        logger.warning("packing%s gives no rows, because every document is empty.", f" {name}" if name else "")
        return
    cut = plan.size if plan.strategy == "bfd" else None
    total, wanted, before = _tally(dataset, cut)
    packed_items, _, after = _tally(packed, None)
    if (wanted, before) != (packed_items, after):
        raise DataError(
            f"packing lost or duplicated items: {wanted} items before, {packed_items} after (checksums {before} and {after}). "
            "This is a bug or an invalid cache file. Fix: set load_from_cache_file=False in map_kwargs, and report the problem."
        )
    fill, lost = packed_items / (len(packed) * plan.size), total - wanted
    logger.log(
        logging.WARNING if fill < LOW_FILL and len(packed) > 1 else logging.INFO,
        "packed%s with %s: %d documents into %d rows of %d, %.2f %% full; %d of %d items truncated (%.2f %%).",
        f" {name}" if name else "", plan.strategy, len(dataset), len(packed), plan.size, 100 * fill, lost, total,
        100 * lost / max(1, total),
    )  # fmt: skip


def _tally(dataset: datasets.Dataset, cut: int | None) -> tuple[int, int, int]:
    """Count the items of the first column in two ways: all items, and only the first ``cut`` items of each row. Return both
    counts and a checksum of the items in the second count.
    """
    total = within = checksum = 0
    column = dataset.column_names[0]
    for table in dataset.select_columns([column]).with_format("arrow").iter(WINDOW_ROWS):
        items = list_column(table.column(0), column, None)
        lengths = items.lengths if cut is None else np.minimum(items.lengths, cut)
        total, within = total + int(items.lengths.sum()), within + int(lengths.sum())
        if pa.types.is_integer(items.values.type) and not items.values.null_count:
            checksum += segment_sum(np.asarray(items.values), items.starts, lengths)
    return total, within, checksum % 2**64
