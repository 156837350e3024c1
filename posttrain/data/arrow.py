"""Arrow list columns as flat values with the start and length of each row: what packing moves instead of Python lists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from posttrain.errors import ArgumentTypeError, DataError

__all__ = ["Lists", "as_rows", "check_list", "gather", "list_column", "list_columns", "segment_sum"]


@dataclass(frozen=True, slots=True)
class Lists:
    """A list column as flat values with the start and length of each row; slices keep their offsets."""

    values: pa.Array
    starts: np.ndarray
    lengths: np.ndarray


def list_column(column: pa.ChunkedArray, name: str, rows: list[int] | None) -> Lists:
    """A column of a table, its slice respected; ``rows`` are the numbers of its rows, for messages."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # What an empty column combines to in some versions.
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=column.type)
    if array.null_count:
        first = int(np.flatnonzero(np.asarray(array.is_null()))[0])
        raise DataError(f"row {rows[first] if rows else first}, column {name!r}: it is None. Every row needs a list.")
    if pa.types.is_fixed_size_list(array.type):
        n, width = len(array), array.type.list_size
        return Lists(array.flatten(), np.arange(n, dtype=np.int64) * width, np.full(n, width, dtype=np.int64))
    offsets = np.asarray(array.offsets).astype(np.int64)
    return Lists(array.values, offsets[:-1], np.diff(offsets))


def gather(values: pa.Array, starts: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Concatenate the pieces ``values[start : start + length]`` in order."""
    ends = np.cumsum(lengths)
    index = np.repeat(starts - (ends - lengths), lengths)
    index += np.arange(len(index), dtype=index.dtype)
    return values.take(pa.array(index))


def as_rows(values: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Flat values as a list column with rows of these lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] < 2**31:
        return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values)
    return pa.LargeListArray.from_arrays(pa.array(offsets, type=pa.int64()), values)


def list_columns(table: pa.Table, rows: list[int] | None) -> dict[str, Lists]:
    """The columns of a window, checked: lists only, of one length in each row."""
    found: dict[str, Lists] = {}
    for name in table.column_names:
        check_list(name, table.schema.field(name).type)
        found[name] = list_column(table.column(name), name, rows)
    first_name, first = next(iter(found.items()))
    for name, other in found.items():
        differing = np.flatnonzero(other.lengths != first.lengths)
        if len(differing):
            at = int(differing[0])
            raise DataError(
                f"row {rows[at] if rows else at}: column {first_name!r} has {first.lengths[at]} items and column {name!r} "
                f"has {other.lengths[at]}. Packed columns must have one length in each row; drop the other columns."
            )
    return found


def check_list(name: str, kind: pa.DataType) -> None:
    """Refuse a column that does not hold lists, by its type."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise ArgumentTypeError(
            f"column {name!r} holds {kind}, and packing works on lists only. Tokenise first, and keep only list columns "
            "(input_ids, labels, masks) with select_columns."
        )


def segment_sum(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
    """Sum of ``values[start : start + length]`` over the segments, modulo 2^64."""
    if not lengths.any():
        return 0
    low, high = int(starts[0]), int((starts + lengths).max())
    running = np.concatenate([[0], np.cumsum(values[low:high], dtype=np.int64)])
    starts = starts - low
    return int((running[starts + lengths] - running[starts]).sum()) % 2**64
