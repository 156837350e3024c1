"""The rows a trainer was given, looked at before they are tokenised; bad ones are left out where the config says so."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.compute

from posttrain.checks.pair_texts import PAIR_TEXT_CODES, PairScan, scan_pairs, score_columns
from posttrain.checks.samples import (
    ROW_CODES,
    WHOLE,
    answers_of,
    bad_rows,
    columns_of,
    doubt,
    doubtful_rows,
    fault,
    too_many,
)
from posttrain.data.formats import get_dataset_column_names
from posttrain.rollouts.environments import EMPTY_PROMPT
from posttrain.types import Finding

__all__ = ["is_open", "note_suspects", "row_codes", "usable_rows"]

logger = logging.getLogger(__name__)

DEEP, STREAMED = 1000, 256  # Rows that are read whole; of the others, Arrow counts what is missing or empty.
BATCH = 20_000
PAIRS = 100_000  # Pairs that are compared with each other.
EXCERPT = 200
SUSPECTS = "suspect_pairs.jsonl"


def row_codes(dataset: Any) -> tuple[str, ...]:
    """What `usable_rows` looks for in this set."""
    pairs = not isinstance(dataset, datasets.IterableDataset) and _is_pairs(get_dataset_column_names(dataset))
    return (*ROW_CODES, *(PAIR_TEXT_CODES if pairs else ()))


def usable_rows(dataset: Any, args: Any, *, main: bool, filled: bool = False) -> tuple[Any, list[Finding]]:
    """The rows that can be trained, and what is wrong with the others.

    Args:
        dataset: As it was given.
        args: ``bad_rows``, ``bad_rows_max``, ``preflight``, ``output_dir``.
        main: Whether this process writes files.
        filled: Whether an environment fills empty prompts.

    Returns:
        The set, without bad rows if ``bad_rows="drop"``; and findings, the same on every rank.
    """
    drop = args.bad_rows == "drop"
    if args.preflight == "off" and not drop:
        return dataset, []
    columns = columns_of(get_dataset_column_names(dataset), prompts_only=hasattr(args, "max_completion_length"))
    if not columns:
        return dataset, []
    if isinstance(dataset, datasets.IterableDataset):
        if drop:
            return dataset.filter(functools.partial(_is_good, columns=columns, filled=filled)), []
        faults, doubts = _read(islice(dataset, STREAMED), columns, filled)
        looked = STREAMED if faults or doubts else 0
        return dataset, _found(faults, doubts, looked)
    faults, doubts = _read(_plain_rows(dataset, columns, len(dataset) if drop else DEEP), columns, filled)
    scan = _pairs(dataset, columns)
    if not drop:
        faults = _empty_rows(dataset, columns) | faults
        _write_suspects(dataset, scan, args.output_dir, main)
        return dataset, [*_found(faults, doubts, len(dataset)), *scan.findings()]
    bad = dict.fromkeys(scan.swapped, "a pair that appears both ways round") | doubts | faults
    _write(args.output_dir, "bad_rows.jsonl", _lines(dataset, bad, columns), main and bool(bad))
    _write_suspects(dataset, scan, args.output_dir, main)
    many = too_many(len(bad), len(dataset), most=args.bad_rows_max)
    told = [*([many] if many else [bad_rows(bad, len(dataset), dropped=True)]), *scan.findings()]
    kept = dataset.select([index for index in range(len(dataset)) if index not in bad]) if bad else dataset
    return kept, [finding for finding in told if finding is not None]


def _found(faults: dict[int, str], doubts: dict[int, str], total: int) -> list[Finding]:
    return [f for f in (bad_rows(faults, total), doubtful_rows(doubts, total)) if f is not None]


def _is_good(row: Mapping[str, Any], columns: Sequence[str], filled: bool = False) -> bool:
    return not fault(row, columns) and (not doubt(row, columns) or is_open(row, filled))


def is_open(row: Mapping[str, Any], filled: bool) -> bool:
    """Whether a row's prompt is empty for an environment to fill; ``filled`` says that there is one."""
    return filled and row.get("prompt") == EMPTY_PROMPT


def _read(rows: Any, columns: Sequence[str], filled: bool) -> tuple[dict[int, str], dict[int, str]]:
    faults: dict[int, str] = {}
    doubts: dict[int, str] = {}
    for index, row in enumerate(rows):
        if wrong := fault(row, columns):
            faults[index] = wrong
        elif (odd := doubt(row, columns)) and not is_open(row, filled):
            doubts[index] = odd
    return faults, doubts


def _plain_rows(dataset: datasets.Dataset, columns: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
    """Some columns of the first rows, whatever format the dataset was given."""
    return islice(iter(dataset.select_columns(list(columns)).with_format(None)), count)


def _empty_rows(dataset: datasets.Dataset, columns: Sequence[str]) -> dict[int, str]:
    """What Arrow alone can tell of all rows: what is missing, and lists without an item."""
    found: dict[int, str] = {}
    pair = _is_pairs(columns)
    several = len(columns) > 1 and bool(set(columns) & set(WHOLE))  # Forms, of which a row needs one.
    for name in columns:
        if name == "prompt" and pair:
            continue
        start = 0
        for table in dataset.select_columns([name]).with_format("arrow").iter(batch_size=BATCH):
            column = table.column(name)
            if column.null_count and not several:
                _note(found, pyarrow.compute.is_null(column), start, f"no `{name}`")
            if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
                empty = pyarrow.compute.equal(pyarrow.compute.list_value_length(column), 0)
                _note(found, pyarrow.compute.fill_null(empty, False), start, f"empty `{name}`")
            start += table.num_rows
    return found


def _note(found: dict[int, str], mask: Any, start: int, reason: str) -> None:
    for index in pyarrow.compute.indices_nonzero(mask).to_pylist():
        found.setdefault(start + index, reason)


def _is_pairs(columns: Sequence[str]) -> bool:
    return {"chosen", "rejected"} <= set(columns)


def _pairs(dataset: datasets.Dataset, columns: Sequence[str]) -> PairScan:
    if not _is_pairs(columns):
        return PairScan()
    scores = score_columns(dataset.column_names)
    wanted = [name for name in ("prompt", "chosen", "rejected", *(scores or ())) if name in dataset.column_names]
    return scan_pairs(_plain_rows(dataset, wanted, PAIRS), scores)


def _lines(dataset: datasets.Dataset, reasons: Mapping[int, str], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for index in sorted(reasons):
        row = dataset[index]
        shown = {name: answers_of(row[name])[:EXCERPT] for name in columns if name != "label"}
        yield {"row": index, "reason": reasons[index], **shown}


def _write_suspects(dataset: datasets.Dataset, scan: PairScan, folder: str | None, main: bool) -> None:
    lines = _lines(dataset, scan.suspects, [c for c in ("prompt", "chosen", "rejected") if c in dataset.column_names])
    _write(folder, SUSPECTS, lines, main and bool(scan.suspects))


def note_suspects(folder: str | None, reason: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put pairs into ``suspect_pairs.jsonl``, in place of what stands there for the same reason.

    Args:
        folder: Of the run.
        reason: Why they are suspected.
        rows: Number and texts.
    """
    path = Path(folder or ".").expanduser() / SUSPECTS
    there = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in map(json.loads, there) if line["reason"] != reason]
    _write(folder, SUSPECTS, iter([*kept, *({"reason": reason, **row} for row in rows)]), bool(there or rows))


def _write(folder: str | None, name: str, lines: Iterator[dict[str, Any]], wanted: bool) -> None:
    if not wanted:
        return
    path = Path(folder or ".").expanduser() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
