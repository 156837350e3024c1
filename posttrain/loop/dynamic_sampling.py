"""Dynamic sampling of DAPO: groups whose rewards are all equal are replaced with groups of new prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.data.samplers import PromptStream
from posttrain.errors import ConfigError
from posttrain.metrics import Metric, mean, total
from posttrain.models import parallel
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from accelerate import Accelerator


class DynamicSampler:
    """Replaces groups whose rewards are all equal with groups of new prompts, in a limited number of sampling rounds.

    Args:
        rounds: Maximum number of additional sampling rounds for one rollout batch.
        group_size: Number of completions per prompt G.
        prompts: Source of new prompts. Their order is independent of the order of training prompts.
        accelerator: Accelerator of the run.
        rewards: Reward functions of the run. Only `RewardRunner.transformed` is called.
        sample: Function that samples completions for dataset rows, each repeated G times. It returns the completions of this
            rank and the rewards of all ranks. It is a collective operation.
        flat: Function that maps the rewards of all ranks to a bool tensor ``(n / G,)``. The tensor is True for groups that
            do not contribute to the loss.

    Reference: DAPO, arXiv:2503.14476, section 3.2.
    """

    def __init__(
        self,
        rounds: int,
        group_size: int,
        *,
        prompts: PromptStream,
        accelerator: Accelerator,
        rewards: RewardRunner,
        sample: Callable[[list[dict[str, Any]]], tuple[RolloutBatch, RewardTable]],
        flat: Callable[[RewardTable], Tensor],
    ) -> None:
        self.rounds, self.group_size, self.prompts = rounds, group_size, prompts
        self.accelerator, self.rewards = accelerator, rewards
        self.sample, self.flat = sample, flat

    def replace(self, batch: RolloutBatch, table: RewardTable) -> tuple[RolloutBatch, RewardTable, dict[str, Metric]]:
        """Replace groups whose rewards are all equal. Each round samples one new prompt per group to replace. A new group
        replaces an old group if the rewards of the new group are not all equal.

        All ranks compute the same plan from the rewards of all ranks. They generate the same number of whole groups, and
        call each collective operation the same number of times.

        Args:
            batch: Completions of this rank.
            table: Rewards of the completions of all ranks.

        Returns:
            The batch and the table with the replaced groups, and metrics.
        """
        places = self.flat(table).nonzero().flatten().tolist()
        flat, drawn, tokens, rounds, accepted = len(places), 0, 0, 0, 0
        size = self.group_size
        while places and rounds < self.rounds:
            rounds += 1
            fresh, judged = self._sample_groups(len(places))
            usable = (~self.flat(judged)).nonzero().flatten().tolist()
            drawn += len(judged.values) // size
            tokens += sum(len(rollout.token_ids) for rollout in fresh.rollouts)
            accepted += len(usable)
            batch, table = self._put(batch, table, fresh, judged, list(zip(places, usable, strict=False)))
            places = places[len(usable) :]
        # Transform the rewards once more, because a transformation may depend on all rewards of the batch.
        if accepted and table.raw is not None:
            values = self.rewards.transformed(table.raw, torch.arange(len(table.raw)) // size)
            table = dataclasses.replace(table, values=values)
        groups = len(table.values) // size
        metrics = {
            "dynamic_sampling/groups_without_variance": mean(flat / groups),
            "dynamic_sampling/groups_left": mean(len(places) / groups),
            "dynamic_sampling/rounds": mean(float(rounds)),
            "dynamic_sampling/prompts_drawn": mean(float(drawn)),
            "dynamic_sampling/tokens": total(float(tokens)),
        }
        if drawn:
            metrics["dynamic_sampling/accepted"] = mean(accepted / drawn, weight=drawn)
        return batch, table, metrics

    def _sample_groups(self, count: int) -> tuple[RolloutBatch, RewardTable]:
        """Sample at least ``count`` new groups over all ranks. Each rank samples the same number of whole groups."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        each = -(-count // world)
        rows = self.prompts.take(each * world)[rank * each : (rank + 1) * each]
        return self.sample([row for row in rows for _ in range(self.group_size)])

    def _put(
        self,
        batch: RolloutBatch,
        table: RewardTable,
        fresh: RolloutBatch,
        judged: RewardTable,
        pairs: list[tuple[int, int]],
    ) -> tuple[RolloutBatch, RewardTable]:
        """Replace group ``a`` with the new group ``b`` for every pair ``(a, b)``. The groups ``a`` and ``b`` may be on
        any rank.
        """
        if self.accelerator.num_processes > 1 and batch.environments is not None:
            raise ConfigError("dynamic_sampling cannot move environments to another process. Set dynamic_sampling=0.")
        size = self.group_size
        moves = {b * size + k: a * size + k for a, b in pairs for k in range(size)}
        mine = range(judged.start, judged.start + len(fresh.rollouts))
        parcels = [(row, _take(fresh, judged, row - judged.start)) for row in moves if row in mine]
        own = range(table.start, table.start + len(batch.rollouts))
        received = {
            moves[row] - table.start: parcel
            for row, parcel in parallel.all_gather_objects(parcels, self.accelerator)
            if moves[row] in own
        }
        places, rows = list(moves.values()), list(moves)
        values, raw = table.values.clone(), table.raw
        values[places] = judged.values[rows]
        if raw is not None and judged.raw is not None:
            raw = raw.index_copy(0, torch.tensor(places, dtype=torch.long), judged.raw[rows])
        lists = _lists(batch, table)
        names = dict.fromkeys([*lists, *(name for parcel in received.values() for name in parcel)])
        merged = {
            name: [
                received[i].get(name) if i in received else lists[name][i] if name in lists else None
                for i in range(len(batch.rollouts))
            ]
            for name in names
        }
        where = {home: {name: column for (h, name), column in merged.items() if h == home} for home, _ in merged}
        left_out = {i for i, out in enumerate(merged["left_out", ""]) if out}
        batch = dataclasses.replace(batch, **where[""], extra=where.get("extra", {}), left_out=left_out)
        extra_columns = where.get("table", {})
        return batch, dataclasses.replace(table, values=values, raw=raw, extra_columns=extra_columns)


def _lists(generation: RolloutBatch, table: RewardTable) -> dict[tuple[str, str], list[Any]]:
    """Collect all lists that have one item per completion of this rank. The key of a list consists of the object that
    contains it and its field name.
    """
    lists: dict[tuple[str, str], list[Any]] = {
        ("", field.name): value
        for field in dataclasses.fields(generation)
        if isinstance(value := getattr(generation, field.name), list)
    }
    lists["left_out", ""] = [i in generation.left_out for i in range(len(generation.rollouts))]
    lists |= {("extra", name): values for name, values in generation.extra.items()}
    return lists | {("table", name): values for name, values in table.extra_columns.items()}


def _take(generation: RolloutBatch, table: RewardTable, index: int) -> dict[tuple[str, str], Any]:
    """Return the data of one completion of this rank, which is one item from each list of `_lists`."""
    return {key: values[index] for key, values in _lists(generation, table).items()}
