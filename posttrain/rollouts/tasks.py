"""Prompts in the order they are asked for, over as many epochs as it takes, with those that must be asked for again."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from posttrain.errors import DataError
from posttrain.rollouts.samples import GroupTask

__all__ = ["TaskSource"]


class TaskSource:
    """Never ends: the dataset is gone through again and again, in a new order each time.

    Args:
        dataset: Rows; anything without a length is gone through from its beginning.
        group_size: Completions of a prompt.
        seed: Of the order and of every group's sampling.
        shuffle: Whether rows with a length are shuffled.

    >>> source = TaskSource([{"prompt": "a"}, {"prompt": "b"}], 2, shuffle=False)
    >>> [source.next().row["prompt"] for _ in range(3)], source.epoch
    (['a', 'b', 'a'], 1)
    """

    def __init__(self, dataset: Iterable[dict[str, Any]], group_size: int, seed: int = 0, shuffle: bool = True) -> None:
        self.dataset, self.group_size, self.seed, self.shuffle = dataset, group_size, seed, shuffle
        self.epoch = self.cursor = self.group = 0
        self._again: deque[tuple[GroupTask, tuple[int, int]]] = deque()
        self._rows: Iterator[tuple[int, dict[str, Any]]] | None = None
        self._origin: dict[int, tuple[int, int]] = {}  # Epoch and position of the groups under way.

    def next(self) -> GroupTask:
        """The next prompt; those that were given back come first."""
        if self._again:
            task, origin = self._again.popleft()
        else:
            task, origin = self._fresh()
        self._origin[task.group_id] = origin
        return task

    def give_back(self, task: GroupTask) -> None:
        """Its completions came to nothing: ask again, as another group with other draws."""
        origin = self._origin.pop(task.group_id)
        self._again.append((self._task(task.row, task.attempt + 1), origin))

    def done(self, group_id: int) -> None:
        """A group was trained or dropped for good."""
        self._origin.pop(group_id, None)

    def _fresh(self) -> tuple[GroupTask, tuple[int, int]]:
        if self._rows is None:
            self._rows = self._epoch_rows()
        try:
            position, row = next(self._rows)
        except StopIteration:
            if self.cursor == 0:
                raise DataError("the dataset of prompts is empty: there is nothing to generate from.") from None
            self.epoch, self.cursor, self._rows = self.epoch + 1, 0, None
            return self._fresh()
        self.cursor = position + 1
        return self._task(row, 0), (self.epoch, position)

    def _task(self, row: dict[str, Any], attempt: int) -> GroupTask:
        number, self.group = self.group, self.group + 1
        seed = (self.seed * 1_000_003 + number * 7_919) % 2**31
        return GroupTask(number, row, self.group_size, seed, attempt)

    def _epoch_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        data: Any = self.dataset
        if not hasattr(data, "__len__"):
            if hasattr(data, "set_epoch"):
                data.set_epoch(self.epoch)
            yield from itertools.islice(enumerate(data), self.cursor, None)
            return
        for position in range(self.cursor, len(data)):
            yield position, data[self._order(self.epoch)[position]]

    def _order(self, epoch: int) -> list[int]:
        if getattr(self, "_ordered", (None, []))[0] != epoch:
            order = list(range(len(self.dataset)))  # type: ignore[arg-type]
            if self.shuffle:
                random.Random(self.seed * 1_000_003 + epoch).shuffle(order)
            self._ordered = (epoch, order)
        return self._ordered[1]

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where it stands; prompts under way are asked for again by whoever resumes."""
        pending = [*(origin for _, origin in self._again), *self._origin.values()]
        return {"epoch": self.epoch, "cursor": self.cursor, "group": self.group, "pending": [list(x) for x in pending]}

    def load(self, state: dict[str, Any]) -> None:
        """Undo `state`."""
        self.epoch, self.cursor, self.group = state["epoch"], state["cursor"], state["group"]
        self._rows, self._origin = None, {}
        self._again = deque()
        for epoch, position in state["pending"] if hasattr(self.dataset, "__len__") else []:
            row = self.dataset[self._order(epoch)[position]]  # type: ignore[index]
            self._again.append((self._task(row, 0), (epoch, position)))
