"""Tables of completions as parquet files: whatever functions logged becomes a column, and files appear whole."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["merge_parquet", "read_rows", "write_rows"]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of one file."""
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows; a column that only some rows have is padded with None, and NaN (not scored) is None."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    part = path.with_name(path.name + ".part")
    pq.write_table(table, part)
    os.replace(part, path)


def merge_parquet(parts: Sequence[Path], target: Path) -> None:
    """One file of many, a row group each, without holding them all in memory.

    Columns that only some parts have are padded with None; a column whose type changed becomes text.
    """
    import pyarrow.parquet as pq

    if not parts:
        return
    schema = _common([pq.read_schema(path) for path in parts])
    temporary = target.with_name(target.name + ".part")
    with pq.ParquetWriter(temporary, schema) as writer:
        for path in parts:
            writer.write_table(_cast(pq.read_table(path), schema))
    os.replace(temporary, target)


def _column(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    plain = [
        None if isinstance(v, float) and math.isnan(v) else v.item() if getattr(v, "shape", None) == () else v
        for v in values
    ]
    try:
        return pa.array(plain)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeEncodeError):
        return pa.array([_text(v) for v in plain], pa.string())


def _text(value: Any) -> str | None:
    """A text that UTF-8 can hold: half a character of a pair (a surrogate) is written as its code."""
    return None if value is None else str(value).encode("utf-8", "backslashreplace").decode()


def _common(schemas: Sequence[pa.Schema]) -> pa.Schema:
    import pyarrow as pa

    kinds: dict[str, pa.DataType] = {}
    for schema in schemas:
        for item in schema:
            kinds[item.name] = _wider(kinds.get(item.name, pa.null()), item.type)
    return pa.schema(list(kinds.items()))


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    numeric = [pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (one, other)]
    return pa.float64() if all(numeric) else pa.string()


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns = []
    for item in schema:
        if item.name not in table.column_names:
            columns.append(pa.nulls(len(table), item.type))
            continue
        column = table.column(item.name)
        if pa.types.is_string(item.type) and not pa.types.is_string(column.type):
            column = pa.array([_text(value) for value in column.to_pylist()], item.type)
        columns.append(column.cast(item.type))
    return pa.table(columns, schema=schema)
