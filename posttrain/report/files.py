"""Files of a run: written whole or not at all, read line by line."""

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
    """A draft that takes the file's place where nothing was raised, and else is removed; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def read_json(path: Path) -> dict[str, Any]:
    """A file's mapping; empty where there is none, or it was cut off by a crash."""
    try:
        return read_line(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError):  # Bytes that are no text, too.
        return {}


def read_line(line: str) -> dict[str, Any] | None:
    """A line's mapping; None of another one, or where it was cut off by a crash."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


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
    with whole_file(path) as part:
        pq.write_table(table, part)


def merge_parquet(parts: Sequence[Path], target: Path) -> None:
    """One file of many: columns that only some parts have are padded with None; one whose type changed becomes text."""
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
        # Half a character of a pair (a surrogate), which UTF-8 cannot hold, is written as its code.
        texts = [None if v is None else str(v).encode("utf-8", "backslashreplace").decode() for v in plain]
        return pa.array(texts, pa.string())
