"""Rewards that teach nothing: flat groups, constant functions, advantages out of bounds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from posttrain.checks import rewards as reward_checks
from posttrain.checks.registry import describe
from posttrain.checks.rewards import FLAT_GENERATIONS, RunningReward, check_reward_ranges
from posttrain.errors import RewardError
from posttrain.loop.run import Run
from posttrain.loop.scoring import completion_lengths, reward_metrics, reward_spread
from posttrain.losses.advantages import MOST_ADVANTAGE
from posttrain.methods.base import BATCH_CODES
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.rewards.format import SoftOverlongPunishment
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    import torch


class RewardWatch:
    """Logs the rewards of a run, and notices those that cannot teach anything or teach the wrong thing.

    Args:
        rewards: The reward functions of the run.
        run: Whose metrics and findings these are.
        scaled: Whether rewards are divided by their standard deviation.
        stop_after: Rollout batches without a signal, in a row, that end the run; None: it goes on.
    """

    def __init__(
        self,
        rewards: RewardRunner,
        run: Run,
        *,
        scaled: bool,
        stop_after: int | None = None,
    ) -> None:
        self.rewards, self.run, self.checks = rewards, run, run.checks
        self.stop_after, self.scaled = stop_after, scaled
        # Statistics of each reward function since the run began.
        self.running: dict[str, RunningReward] = {}
        self._flat_batches = 0
        self._flat_rewards: list[list[float]] = []

    def start(self, device: torch.device | str, longest: int | None) -> None:
        """Place and try reward models; check length punishments against the longest completion.

        Args:
            device: For reward models.
            longest: Most tokens of a completion; None where there is no bound.
        """
        self.rewards.start(device)
        for function in self.rewards.functions if longest is not None else ():
            if isinstance(function, SoftOverlongPunishment):
                with self.checks.preflight.record_check("config", ("PT-R021",)):
                    self.checks.report([reward_checks.check_overlong(function.limit, function.cache, longest)])

    def bounded(self, advantages: Tensor, mode: str) -> Tensor:
        """Standardised advantages stop at 10, so that no completion is worth a step of its own.

        Args:
            advantages: ``(n,)`` of all ranks, divided by a standard deviation.
            mode: ``train`` or ``eval``.
        """
        sizes = advantages.abs()
        far = sizes > MOST_ADVANTAGE
        self.run.log({"advantages/clipped_share": mean(far.float())}, mode)
        if mode == "train":
            self.clipped(int(far.sum()), far.numel(), float(sizes.max()) if far.any() else None)
        return advantages.clamp(-MOST_ADVANTAGE, MOST_ADVANTAGE)

    def log(
        self,
        batch: RolloutBatch,
        table: RewardTable,
        totals: Tensor,
        advantages: Tensor,
        mode: str,
        zero_std_share: float | None = None,
    ) -> None:
        """Log the rewards of all ranks' completions; in training, look at them too.

        Args:
            batch: This rank's completions, with the loss masks that rewards saw.
            table: ``values (n, K)``.
            totals: ``(n,)`` weighted rewards before any penalty, NaN where no function applied.
            advantages: ``(n,)``.
            mode: ``train`` or ``eval``.
            zero_std_share: Share of groups without a spread of rewards; None where there are no groups.
        """
        lengths = parallel.all_gather_objects(completion_lengths(batch), self.run.accelerator)
        metrics = reward_metrics(table, totals, advantages, lengths)
        if zero_std_share is not None:
            metrics["reward_std"] = reward_spread(totals)
            metrics["frac_reward_zero_std"] = mean(zero_std_share, weight=len(totals))
        self.run.log(metrics, mode)
        if mode == "train":
            self.batch(table, totals, advantages)

    def clipped(self, far: int, total: int, largest: float | None = None) -> None:
        """Report that ``far`` of ``total`` advantages were clipped; ``largest`` is their greatest size, where it is known."""
        with self.checks.preflight.record_check("log_step", ("PT-R028",)):
            self.checks.report([reward_checks.check_clipped(far, total, MOST_ADVANTAGE, largest)])

    def batch(self, table: RewardTable, totals: Tensor, advantages: Tensor) -> None:
        """Look at the rewards of one rollout batch, of all ranks.

        Args:
            table: ``values (n, K)``.
            totals: ``(n,)`` weighted rewards, NaN where no function applied.
            advantages: ``(n,)``.

        Raises:
            RewardError: As many rollout batches in a row as ``stop_without_signal`` says had no signal.
        """
        columns = {name: table.values[:, k].tolist() for k, name in enumerate(table.names)}
        for name, column in columns.items():
            self.running.setdefault(name, RunningReward()).add(column)
        weights = dict(zip(table.names, table.weights.tolist(), strict=True))
        self.checks.preflight.notes["rewards"] = {name: running.to_dict() for name, running in self.running.items()}
        with self.checks.preflight.record_check("log_step", BATCH_CODES):
            self.checks.report([check_reward_ranges(self.running, weights)])
            self.checks.report(reward_checks.check_reward_values(columns, scaled=self.scaled))
        self._check_signal(totals, advantages)

    def _check_signal(self, totals: Tensor, advantages: Tensor) -> None:
        self._flat_batches = 0 if bool(advantages.any()) else self._flat_batches + 1
        self._flat_rewards = [*self._flat_rewards, totals.tolist()][-FLAT_GENERATIONS:] if self._flat_batches else []
        rewards = [reward for batch in self._flat_rewards for reward in batch]
        ends = self.stop_after is not None and self._flat_batches >= self.stop_after
        with self.checks.preflight.record_check("log_step", ("PT-R022",)):
            finding = reward_checks.check_no_signal(
                self._flat_batches, rewards, **({"limit": self.stop_after} if ends else {})
            )
            if finding is not None and ends:
                self.checks.preflight.add(dataclasses.replace(finding, severity="error"))
                raise RewardError(f"{describe(finding)} stop_without_signal={self.stop_after} ends the run here.")
            self.checks.report([finding])
