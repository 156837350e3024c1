"""Rollouts that wait for their turn: in memory up to a bound, and on disk beyond it."""

from __future__ import annotations

import contextlib
import logging
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from posttrain.types import Row

__all__ = ["Spool", "row_bytes"]

logger = logging.getLogger(__name__)

NUMBER = 36  # Bytes of a number in a Python list: the object (28) and the reference to it (8).
REFERENCE = 8  # Of a mask's 0 or 1, which are shared objects.


def row_bytes(row: Row) -> int:
    """About what a row takes in memory.

    >>> row_bytes(Row([1, 2], [[3, 4, 5]], [[1, 1, 1]], token_columns={"old_logp": [[-0.1, -0.2, -0.3]]}))
    312
    """
    numbers = len(row.prompt_ids) + sum(map(len, row.completions))
    numbers += sum(map(len, row.sequence_columns.values()))
    numbers += sum(len(one) for lists in row.token_columns.values() for one in lists)
    tensors = (value for value in row.model_kwargs.values() if isinstance(value, torch.Tensor))
    return (
        NUMBER * numbers
        + REFERENCE * sum(map(len, row.loss_masks))
        + sum(t.numel() * t.element_size() for t in tensors)
    )


class Spool(Sequence[list[Row]]):
    """Slices of a generation, to be trained one after the other (and again, for several iterations).

    The first slices stay in memory while they fit the bound; the others are files until they are asked for, one at a
    time. Files are deleted by `close`, or with the last reference to this object.

    Args:
        slices: Rows of each micro-batch.
        most: Bytes to keep in memory; None keeps everything.
        folder: Where files go.
        rank: Of this process; part of the files' names.
    """

    def __init__(self, slices: Sequence[list[Row]], *, most: int | None, folder: Path, rank: int = 0) -> None:
        self._slices: list[list[Row] | Path] = []
        used = 0
        for index, rows in enumerate(slices):
            used += sum(map(row_bytes, rows))
            if most is None or used <= most:
                self._slices.append(rows)
            else:
                # A name that no earlier spool had: one that is still referred to deletes its files later.
                self._slices.append(_write(rows, folder / f"{rank}-{uuid.uuid4().hex[:12]}-{index}.pt"))
        self.files = [item for item in self._slices if isinstance(item, Path)]
        self._end = weakref.finalize(self, _delete, self.files, folder)
        if self.files:
            logger.info("%d of %d slices of this generation wait in %s.", len(self.files), len(self._slices), folder)

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, index: Any) -> Any:
        item = self._slices[index]
        return _read(item) if isinstance(item, Path) else item

    def __iter__(self) -> Iterator[list[Row]]:
        return (self[index] for index in range(len(self)))

    def close(self) -> None:
        """Delete the files."""
        self._end()


def _write(rows: list[Row], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save([{item.name: getattr(row, item.name) for item in fields(Row)} for row in rows], path)
    return path


def _read(path: Path) -> list[Row]:
    return [Row(**row) for row in torch.load(path, weights_only=True)]


def _delete(files: list[Path], folder: Path) -> None:
    for path in files:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # Another process may still have files there.
        folder.rmdir()
