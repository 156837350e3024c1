"""Data files on disk: loaded with messages that name file, line and column."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from posttrain.data.messages import check_unicode
from posttrain.errors import DataError

__all__ = ["LOADERS", "check_json", "load_file", "parquet_conflict", "quiet_loader"]

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # File ending -> loader's name.


def load_file(file: Path, split: str | None, streaming: bool) -> Any:
    """The rows of one file; a stream of a .jsonl file is read line by line.

    Raises:
        DataError: An unknown kind of file, an empty one, or one that cannot be read, with the line where there are lines.
    """
    kind = LOADERS.get(file.suffix)
    if kind is None:
        raise DataError(f"dataset file {str(file)!r} ends in {file.suffix!r}; known are {', '.join(LOADERS)}.")
    if file.stat().st_size == 0:
        raise DataError(f"dataset file {str(file)!r} is empty.")
    if streaming and file.suffix == ".jsonl" and split in (None, "train"):
        stream = datasets.IterableDataset.from_generator(_lines, gen_kwargs={"files": [str(file)]})
        return stream if split else datasets.IterableDatasetDict({"train": stream})
    try:
        with quiet_loader():
            loaded = datasets.load_dataset(kind, data_files=str(file), split=split, streaming=streaming)
            for part in () if streaming else loaded.values() if split is None else (loaded,):
                part.data.validate(full=True)  # Bytes that are no UTF-8 would show when a row is read.
            return loaded
    except Exception as error:
        if kind == "json":
            check_json(file)
        cause = str(error.__cause__ or error).rstrip(".")
        hint = " One file has one split, 'train', and every column one type."
        raise DataError(
            f"dataset file {str(file)!r} cannot be read{f' (split {split!r})' if split else ''}: {cause}."
            f"{'' if 'magic bytes' in cause or 'UTF8' in cause else hint}"
        ) from error


@contextlib.contextmanager
def quiet_loader() -> Iterator[None]:
    """Without the loader's own error lines: what is wrong is said once, by us."""
    logger = logging.getLogger("datasets")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _lines(files: list[str]) -> Iterator[dict[str, Any]]:
    for file in files:
        with Path(file).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(line, f"{file}, line {number}")


def _row(line: bytes, where: str) -> dict[str, Any]:
    """One line as a row.

    Raises:
        DataError: It is no UTF-8, no JSON, no object, or holds lone surrogates.
    """
    shown = line.strip()[:80].decode("utf-8", "replace")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: it is not valid UTF-8 (byte {error.start}: {error.reason}): {shown!r}. Save the file as UTF-8."
        ) from error
    try:
        row = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: it is not valid JSON ({error}): {shown!r}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, and it is a {type(row).__name__}: {shown!r}")
    if re.search(r"\\u[dD][89a-fA-F]", text):  # Escapes of surrogates; pairs of them are fine.
        check_unicode(json.dumps(row, ensure_ascii=False), where)
    return row


def check_json(file: Path) -> None:
    """Raise for the first line that is not one JSON object; a .json file may also be one array of objects."""
    if file.suffix == ".json" and _is_one_document(file):
        return
    for _ in _lines([str(file)]):
        pass


def _is_one_document(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        return False
    return True


def parquet_conflict(files: list[Path]) -> str | None:
    """The first column whose kind of value, or presence, differs between parquet files; widths of numbers may differ."""
    import pyarrow.parquet as pq

    if len(files) < 2:
        return None
    try:
        schemas = {file: pq.read_schema(file) for file in files}
    except Exception:  # A broken file is the loader's to tell.
        return None
    first = schemas[files[0]]
    for file, schema in schemas.items():
        for name in sorted({*first.names, *schema.names}):
            one, two = (str(s.field(name).type) if name in s.names else "absent" for s in (first, schema))
            if _kind(one) != _kind(two) and "null" not in (one, two):
                where = f"{one} in {files[0].name} and {two} in {file.name}"
                return f"column {name!r} is {where}. Give it one type in all files."
    return None


def _kind(type_name: str) -> str:
    plain = re.sub(r"\blarge_", "", type_name)
    return re.sub(r"\b(u?int\d+)\b", "int", re.sub(r"\b(halffloat|float|double)\b", "float", plain))
