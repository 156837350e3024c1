"""Rows dealt to ranks by tokens: the rank with the longest completions would keep all others waiting."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.types import Row

if TYPE_CHECKING:
    from posttrain.algorithms.online_config import OnlineConfig

__all__ = ["BalanceMixin", "Cost", "deal"]

WORTH = 0.9  # The busiest rank must lose a tenth of its tokens, or rows stay where they are.

Cost = tuple[int, list[int]]  # Tokens of a row's prompt, and of each of its completions.
Place = tuple[int, int, int]  # (rank, row of that rank's slice, completion of that row)


def load(rows: Sequence[Cost]) -> int:
    """Tokens of a rank: every prompt once, and all completions."""
    return sum(prompt + sum(completions) for prompt, completions in rows)


def deal(costs: Sequence[Sequence[Cost]]) -> dict[Place, int] | None:
    """Where each completion goes, ``{(rank, row, completion): rank}``; None where moving does not pay.

    The longest completion first, each to the rank that then has the fewest tokens; one that does not hold its prompt yet
    pays for the prompt too, so that groups stay together while that is cheaper.

    Args:
        costs: Of each row, by rank.

    >>> deal([[(2, [10, 10])], [(2, [1, 1])]])
    {(0, 0, 0): 0, (0, 0, 1): 1, (1, 0, 0): 1, (1, 0, 1): 0}
    >>> deal([[(2, [10, 1])], [(2, [10, 1])]]) is None
    True
    """
    world = range(len(costs))
    items = [(-size, r, k, i) for r in world for k, (_, sizes) in enumerate(costs[r]) for i, size in enumerate(sizes)]
    if len(items) < len(costs):
        return None  # A rank without a completion would have nothing to run.
    loads = [0] * len(costs)
    holds: set[tuple[int, int, int]] = set()  # (rank, and whose prompt it holds)
    found: dict[Place, int] = {}
    for size, home, row, completion in sorted(items):
        after = [loads[r] - size + (0 if (r, home, row) in holds else costs[home][row][0]) for r in world]
        target = min(world, key=lambda r, after=after, home=home: (after[r], r != home, r))
        loads[target] = after[target]
        holds.add((target, home, row))
        found[home, row, completion] = target
    pays = min(loads) > 0 and max(loads) <= WORTH * max(map(load, costs))
    return found if pays and set(found.values()) == set(world) else None


def part(row: Row, members: Sequence[int]) -> Row:
    """A row with some of its completions."""

    def chosen(values: list[Any]) -> list[Any]:
        return [values[i] for i in members]

    return dataclasses.replace(
        row,
        completions=chosen(row.completions),
        loss_masks=chosen(row.loss_masks),
        sequence_columns={name: chosen(values) for name, values in row.sequence_columns.items()},
        token_columns={name: chosen(values) for name, values in row.token_columns.items()},
    )


class BalanceMixin:
    """The part of `OnlineTrainer` that evens out the ranks' work.

    Completions never leave their slice, so every optimiser step holds the same ones as before, and its denominators count
    them over all ranks: the gradient does not change.
    """

    args: OnlineConfig
    accelerator: Any
    whole_rows: bool

    def balanced(self, slices: list[list[Row]]) -> list[list[Row]]:
        """The slices of this rank after completions were exchanged, where that pays."""
        if self.accelerator.num_processes == 1 or not self.args.balance_ranks or self.whole_rows:
            return slices
        mine: list[list[Cost]] = [[(len(r.prompt_ids), [len(ids) for ids in r.completions]) for r in s] for s in slices]
        costs = parallel.all_gather_objects([mine], self.accelerator)
        plans = [deal([of_rank[number] for of_rank in costs]) for number in range(len(slices))]
        if any(row.model_kwargs for rows in slices for row in rows):
            plans = [None] * len(slices)  # Images are cut by sample elsewhere.
        parcels = self._parcels(slices, plans)
        if any(plan is not None for plan in plans):  # Known to every rank.
            parcels = parallel.all_gather_objects(parcels, self.accelerator)
        rank = self.accelerator.process_index
        result = [
            rows
            if plans[number] is None
            else [row for slot, target, row in parcels if (slot, target) == (number, rank)]
            for number, rows in enumerate(slices)
        ]
        self._tell(costs, result)
        return result

    def _parcels(self, slices: list[list[Row]], plans: list[dict[Place, int] | None]) -> list[tuple[int, int, Row]]:
        """Rows of this rank, cut up by where their completions go, ``(slice, rank, part)``."""
        rank, found = self.accelerator.process_index, []
        for number, plan in enumerate(plans):
            for k, row in enumerate(slices[number]) if plan is not None else ():
                targets = [plan[rank, k, i] for i in range(len(row.completions))]  # type: ignore[index]
                for target in sorted(set(targets)):
                    found.append((number, target, part(row, [i for i, t in enumerate(targets) if t == target])))
        return found

    def _tell(self, costs: list[list[list[Cost]]], slices: list[list[Row]]) -> None:
        """Tokens of the busiest rank against the mean, before and after."""
        sizes = [sum(len(r.prompt_ids) + sum(map(len, r.completions)) for r in rows) for rows in slices]
        after = parallel.all_gather_objects([sizes], self.accelerator)
        for number in range(len(slices)):
            before = [load(of_rank[number]) for of_rank in costs]
            now = [of_rank[number] for of_rank in after]
            told = {"balance/busiest_rank_before": before, "balance/busiest_rank": now}
            self.log_metrics_now(  # type: ignore[attr-defined]
                {name: mean(max(loads) * len(loads) / max(sum(loads), 1)) for name, loads in told.items()}
            )
