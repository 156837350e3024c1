"""Access to the files of a run: atomic writes, and reads that tolerate missing and truncated files."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.values import scalar

if TYPE_CHECKING:
    import pyarrow as pa


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. On exit, the temporary file replaces ``path``. After an error, the temporary file
    is removed. The folder of ``path`` is created if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON mapping from a file. Return an empty mapping if the file is missing or was truncated by a crash."""
    try:
        return read_line(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError):  # Invalid UTF-8 raises a ValueError.
        return {}


def read_line(line: str) -> dict[str, Any] | None:
    """Parse a line as a JSON mapping. Return None if the line contains no mapping or was truncated by a crash."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of one parquet file."""
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a parquet file. Missing values become None, and so does NaN, which means that a completion was not
    scored.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    with whole_file(path) as part:
        pq.write_table(table, part)


def merge_parquet(parts: Sequence[Path], target: Path) -> None:
    """Merge parquet files into one file. Missing columns become None. If a column has different types in two files, it is
    converted to text.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not parts:
        return
    try:
        whole = pa.concat_tables([pq.read_table(path) for path in parts], promote_options="permissive")
    except pa.ArrowTypeError:
        write_rows(target, [row for path in parts for row in read_rows(path)])
        return
    with whole_file(target) as part:
        pq.write_table(whole, part)


def _column(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    numbers = [scalar(v) for v in values]
    plain = [None if isinstance(v, float) and math.isnan(v) else v for v in numbers]
    try:
        return pa.array(plain)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeEncodeError):
        # Replace a lone surrogate with its escape sequence, because UTF-8 cannot represent it.
        texts = [None if v is None else str(v).encode("utf-8", "backslashreplace").decode() for v in plain]
        return pa.array(texts, pa.string())
