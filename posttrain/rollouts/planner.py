"""Which process trains which samples: rows within a token budget, and loads that are even in what attention costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["RowPlanner", "balanced_rows", "plan_step"]

T = TypeVar("T")


@dataclass(slots=True)
class _Open(Generic[T]):
    """A row that is being filled."""

    items: list[T] = field(default_factory=list)
    tokens: int = 0
    squares: int = 0

    def add(self, item: T, length: int) -> None:
        self.items.append(item)
        self.tokens += length
        self.squares += length * length


class RowPlanner(Generic[T]):
    """Fills one row a process from a stream of samples, each row within a token budget.

    A sample goes to the row with the smallest sum of squared lengths among those with room; where none has room, the rows
    are handed over and new ones begin with it.

    Args:
        budget: Most tokens of a row.
        world: Rows filled side by side.

    >>> planner = RowPlanner(8, 1)
    >>> [planner.add(name, 3) for name in "abc"], planner.flush()
    ([[], [], [['a', 'b']]], [['c']])
    """

    def __init__(self, budget: int, world: int) -> None:
        self.budget, self.world = budget, world
        self.too_long: list[T] = []
        self._rows: list[_Open[T]] = [_Open() for _ in range(world)]

    def add(self, item: T, length: int) -> list[list[T]]:
        """The rows that had no room for it, or nothing; one longer than the budget goes to ``too_long``."""
        if length > self.budget:
            self.too_long.append(item)
            return []
        full: list[list[T]] = []
        fits = [row for row in self._rows if row.tokens + length <= self.budget]
        if not fits:
            full, fits = self.flush(), self._rows
        min(fits, key=lambda row: row.squares).add(item, length)
        return full

    def flush(self) -> list[list[T]]:
        """The open rows as they are; new ones begin."""
        rows, self._rows = self._rows, [_Open() for _ in range(self.world)]
        return [row.items for row in rows]


def balanced_rows(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Indices of samples for each process: longest first, each to the one with the smallest sum of squares.

    None is empty while there are at least ``world`` samples.

    >>> balanced_rows([4, 3, 2, 1], 2)
    [[0], [1, 2, 3]]
    """
    rows: list[_Open[int]] = [_Open() for _ in range(world)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        min(rows, key=lambda row: row.squares).add(index, lengths[index])
    return [row.items for row in rows]


def plan_step(lengths: Sequence[int], *, budget: int, world: int) -> list[list[list[int]]]:
    """The samples of one optimiser step, as rows of each process: ``plan[process][row]`` lists indices.

    Args:
        lengths: Tokens of each sample, at least ``world`` of them, none above a positive budget.
        budget: Tokens of a row; 0 or less: one row a process, whatever its length.
        world: Processes.
    """
    even = [[row] for row in balanced_rows(lengths, world)]
    if budget <= 0:
        return even
    planner: RowPlanner[int] = RowPlanner(budget, world)
    handed = [full for index, length in enumerate(lengths) if (full := planner.add(index, length))]
    assert not planner.too_long, "samples beyond the budget are dropped before"
    handed.append(planner.flush())
    plan = [[rows[process] for rows in handed if rows[process]] for process in range(world)]
    if all(plan):
        return plan
    return [_within(rows[0], lengths, budget) for rows in even]  # The last rows left a process without work.


def _within(items: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    planner: RowPlanner[int] = RowPlanner(budget, 1)
    rows = [row for item in items for row in planner.add(item, lengths[item])]
    return [*rows, *planner.flush()]
