"""`RewardWatch`: logs the rewards of a run, checks them with `checks.rewards`, and logs or raises the findings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.checks.rewards import Notice, RewardHistory, extended, findings, unscored_rows
from posttrain.errors import RewardError
from posttrain.loop.run import Run
from posttrain.loop.scoring import completion_lengths, reward_metrics
from posttrain.losses.advantages import MOST_ADVANTAGE
from posttrain.methods.base import WATCHED_CODES
from posttrain.models import parallel
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Advantages, Finding

logger = logging.getLogger(__name__)


class RewardWatch:
    """Logs the rewards of a run and the findings of `checks.rewards` about them. Rewards are never changed.

    Args:
        rewards: Reward functions of the run.
        run: Run that receives the metrics and findings.
        scaled: Whether advantages are divided by the standard deviation of rewards.
        stop_after: Number of consecutive rollout batches without reward variance after which the run ends. None: such
            batches do not end the run.

    Attributes:
        history: Rewards of the training batches so far.
        min_group_std: Standard deviation of rewards below which a group gets no advantage. None: advantages are not
            divided by the group's standard deviation.
    """

    def __init__(self, rewards: RewardRunner, run: Run, *, scaled: bool, stop_after: int | None = None) -> None:
        self.rewards, self.run, self.scaled, self.stop_after = rewards, run, scaled, stop_after
        self.history, self.min_group_std = RewardHistory(), None
        self._counts: dict[str, int] = {}

    def log(self, run: Run, batch: RolloutBatch, table: RewardTable, made: Advantages) -> bool:
        """Log the rewards of the completions of all ranks, and the findings about them.

        Args:
            run: Run of the trainer.
            batch: Completions of this rank, with the loss masks that reward functions received.
            table: Rewards of all ranks. Its field ``values`` is a tensor ``(n, K)`` for n completions and K reward
                functions.
            made: Advantages that the method computed from the rewards.

        Returns:
            True, so that this watcher is called again for the next rollout batch.
        """
        lengths = parallel.all_gather_objects(completion_lengths(batch), run.accelerator)
        run.log(reward_metrics(table, made, lengths), batch.mode)
        clipped = None
        if made.unbounded is not None:
            sizes = made.unbounded.abs()
            far = int((sizes > MOST_ADVANTAGE).sum())
            clipped = far, sizes.numel(), float(sizes.max()) if far else None
        groups = torch.arange(len(table.values)) // batch.group_size
        prompts = [example["prompt"] for example in batch.examples]
        self.report(table, made, groups, clipped, prompts, batch.reward_columns(), training=batch.mode == "train")
        return True

    def report(
        self,
        table: RewardTable,
        made: Advantages,
        groups: Tensor,
        clipped: tuple[int, int, float | None] | None,
        prompts: Sequence[Any] = (),
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        training: bool = True,
    ) -> None:
        """Report the findings about the rewards of one rollout batch, over all ranks.

        Args:
            table: Rewards of all ranks, with ``values (n, K)``.
            made: Advantages that the method computed from the rewards.
            groups: ``(n,)`` group index of each row.
            clipped: Same as in `checks.rewards.findings`. None: advantages are not clipped.
            prompts: Prompts of this rank.
            columns: Dataset columns of this rank.
            training: Whether the batch is used for training. Only training batches are added to the history.

        Raises:
            RewardError: A check found an error, or `stop_after` consecutive batches had no reward variance.
        """
        columns = columns or {}
        if bool(table.values.isnan().any()):
            self._log(unscored_rows(table, groups, prompts, columns))
        if not training:
            return
        self.history = extended(self.history, table, made)
        preflight = self.run.checks.preflight
        preflight.notes["rewards"] = {name: running.to_dict() for name, running in self.history.running.items()}
        settings = {"scaled": self.scaled, "stop_after": self.stop_after, "min_group_std": self.min_group_std}
        with preflight.record_check("log_step", [c for c in WATCHED_CODES if clipped is not None or c != "PT-R028"]):
            self._log(findings(table, self.history, clipped=clipped, columns=sorted(columns), **settings))

    def _log(self, found: Iterable[Finding | Notice | RewardError | None]) -> None:
        for event in found:
            if isinstance(event, RewardError):
                raise event
            if isinstance(event, Notice):
                count = self._counts[event.key] = self._counts.get(event.key, 0) + 1
                if count % 100 == 1:
                    logger.log(event.level, "%s", event.text)
            elif event is not None and event.severity == "error":
                # Only record this finding here. The error that ends the run is raised below.
                self.run.checks.preflight.add(event)
            elif event is not None:
                self.run.checks.report([event])
