"""What one call to an engine produced, with what scoring adds to it, on its way to rows."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from posttrain.data.responses import parse_response
from posttrain.types import Rollout, Row

__all__ = [
    "RolloutBatch",
    "Spool",
    "completions_for_rewards",
    "row_bytes",
]

logger = logging.getLogger(__name__)


def completions_for_rewards(tokenizer: Any, rollouts: Sequence[Rollout], *, conversational: bool) -> list[Any]:
    """What reward functions see: the text, or one message, read with the tokenizer's response template if it has one."""
    if not conversational:
        return [rollout.text for rollout in rollouts]
    return [[parse_response(tokenizer, rollout.token_ids, prefix=rollout.prompt_ids)] for rollout in rollouts]


@dataclasses.dataclass(slots=True)
class RolloutBatch:
    """What one call to the engine produced on this rank, one entry a completion, groups consecutive.

    Attributes:
        examples: The dataset row each completion answers.
        rollouts: Token ids, log-probs and finish reasons.
        completions: What reward functions see: text, or a list of messages.
        columns: Filled in after scoring, one number a completion (``advantages``).
        token_columns: Per-completion lists of per-token numbers (``old_logp``, ``ref_logp``, ``rollout_logp``).
        born: Optimiser step whose weights sampled it.
        environments: The environment each completion came about in, if there was one.
        extra: Further columns for the reward functions, one value a completion.
        left_out: Completions that carry no loss, whatever their tokens.
    """

    examples: list[dict[str, Any]]
    rollouts: list[Rollout]
    completions: list[Any]
    columns: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    token_columns: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    born: int = 0
    environments: list[Any] | None = None
    extra: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    left_out: set[int] = dataclasses.field(default_factory=set)

    def loss_mask(self, index: int, skip_truncated: bool) -> list[int]:
        """1 on tokens the model wrote; all 0 on one left out, and on a truncated one when those are masked."""
        rollout = self.rollouts[index]
        if index in self.left_out or (skip_truncated and rollout.finish_reason != "stop"):
            return [0] * len(rollout.token_ids)
        return rollout.tool_mask or [1] * len(rollout.token_ids)

    def reward_columns(self) -> dict[str, list[Any]]:
        """What reward functions get besides prompts and completions: dataset columns (those of the first row decide)."""
        if not self.examples:
            return dict(self.extra)
        own = ("prompt", "completion", "completion_ids")
        columns = {k: [e.get(k) for e in self.examples] for k in self.examples[0] if k not in own}
        return columns | self.extra

    def shown(self) -> dict[str, list[float]]:
        """Columns as the completions table names them."""
        return {name.removesuffix("s"): column for name, column in self.columns.items()}

    def groups(self) -> list[list[int]]:
        """Indices of completions that stand together and share a prompt."""
        found: list[list[int]] = []
        for i, rollout in enumerate(self.rollouts):
            if found and self.rollouts[found[-1][0]].prompt_ids == rollout.prompt_ids:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def rows(self, indices: Sequence[int], *, skip_truncated: bool) -> list[Row]:
        """The chosen completions as rows; neighbours with the same prompt share one."""
        rows: list[Row] = []
        for i in indices:
            rollout = self.rollouts[i]
            if not rows or rows[-1].prompt_ids != rollout.prompt_ids:
                rows.append(Row(list(rollout.prompt_ids), [], []))
            row = rows[-1]
            row.completions.append(list(rollout.token_ids))
            row.loss_masks.append(self.loss_mask(i, skip_truncated))
            for name, numbers in self.columns.items():
                row.sequence_columns.setdefault(name, []).append(numbers[i])
            for name, column in self.token_columns.items():
                row.token_columns.setdefault(name, []).append(column[i])
        return rows

    def every_row(self) -> list[Row]:
        """All completions as rows, cut ones with their tokens."""
        return self.rows(range(len(self.rollouts)), skip_truncated=False)


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
