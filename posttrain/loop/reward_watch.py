"""Rewards that teach nothing: flat groups, constant functions, advantages out of bounds."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
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
from posttrain.types import Advantages

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

# Groups this narrow against all rewards are noise; more than this share of them is reported.
NARROW_SPREAD, NARROW_SHARE = 1e-3, 0.2
# Minimum number of groups for a report, and the number of latest groups that the share is computed over.
GROUPS_NEEDED, GROUPS_REMEMBERED = 5, 64


class NoiseWatch:
    """Watch that warns once if groups spread little compared with all rewards so far: division turns their noise into updates.

    Args:
        least: Groups that spread less have no advantage (``min_group_std``).
    """

    def __init__(self, least: float) -> None:
        self.least, self._warned, self._totals = least, False, RunningReward()
        self._seen: deque[float] = deque(maxlen=GROUPS_REMEMBERED)

    def look(self, totals: Tensor, group_std: Tensor) -> None:
        """Take in ``(n,)`` rewards and the ``(n / G,)`` spreads of their groups; a generation may hold a single group."""
        self._totals.add(totals.tolist())
        self._seen.extend(group_std[~group_std.isnan()].tolist())
        known, whole = len(self._seen), self._totals.std
        narrow = sum(std > 0 and self.least <= std < NARROW_SPREAD * whole for std in self._seen)
        if self._warned or known < GROUPS_NEEDED or narrow <= NARROW_SHARE * known:
            return
        self._warned = True
        logger.warning(
            "%d of the last %d groups spread less than a thousandth of the rewards' std so far (%.3g), and scale_rewards='group' "
            "blows that up to full-size updates. If it is noise, set min_group_std, or scale_rewards='batch'.",
            narrow, known, whole,
        )  # fmt: skip


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
        self.noise: NoiseWatch | None = None  # Of a method that divides groups by their own spread.
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

    def log(self, batch: RolloutBatch, table: RewardTable, found: Advantages, mode: str) -> None:
        """Log the rewards of all ranks' completions; in training, look at them too.

        Args:
            batch: This rank's completions, with the loss masks that rewards saw.
            table: ``values (n, K)``.
            found: What the method made of them.
            mode: ``train`` or ``eval``.
        """
        if found.unbounded is not None:
            self._log_bound(found.unbounded.abs(), mode)
        lengths = parallel.all_gather_objects(completion_lengths(batch), self.run.accelerator)
        metrics = reward_metrics(table, found.totals, found.values, lengths)
        if found.zero_std_share is not None:
            metrics["reward_std"] = reward_spread(found.totals)
            metrics["frac_reward_zero_std"] = mean(found.zero_std_share, weight=len(found.totals))
        self.run.log(metrics, mode)
        if mode == "train":
            self.batch(table, found.totals, found.values)
            if found.group_std is not None and self.noise is not None:
                self.noise.look(found.totals, found.group_std)

    def _log_bound(self, sizes: Tensor, mode: str) -> None:
        far = sizes > MOST_ADVANTAGE
        self.run.log({"advantages/clipped_share": mean(far.float())}, mode)
        if mode == "train":
            self.clipped(int(far.sum()), far.numel(), float(sizes.max()) if far.any() else None)

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
