"""What online trainers watch: the rewards of each generation, and the log at each log step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from posttrain.checks import online as log_checks
from posttrain.checks import rewards as reward_checks
from posttrain.errors import RewardError
from posttrain.rewards.base import RewardRunner, RewardTable
from posttrain.rewards.length import SoftOverlongPunishment
from posttrain.types import Finding

__all__ = ["OnlineHealthMixin"]

REPEATED = 100  # A finding is told the first time, and then every so many times.


class OnlineHealthMixin:
    """The part of `OnlineTrainer` that notices a run going wrong while it trains."""

    args: Any
    state: Any
    accelerator: Any
    rewards: RewardRunner
    _flat_generations = 0
    _flat_rewards: tuple[float, ...] = ()
    _times_found: dict[tuple[str, str], int]

    def check_start(self) -> None:
        """As every trainer's; reward models are placed and tried."""
        super().check_start()  # type: ignore[misc]
        self.rewards.start(self.args.device)
        longest = getattr(self.args, "max_completion_length", None)
        for function in self.rewards.functions:
            if isinstance(function, SoftOverlongPunishment) and longest is not None:
                found = reward_checks.check_overlong(function.limit, function.cache, longest)
                self.tell_sometimes([found] if found is not None else [])

    def tell_sometimes(self, findings: Iterable[Finding]) -> None:
        """Tell each kind of finding the first time and then every hundredth."""
        counts = self.__dict__.setdefault("_times_found", {})
        for finding in findings:
            key = (finding.code, finding.where)
            counts[key] = counts.get(key, 0) + 1
            if counts[key] % REPEATED == 1 and self.accelerator.is_main_process:
                self.tell([finding])  # type: ignore[attr-defined]

    @property
    def generations_per_step(self) -> float:
        """Generations of one optimiser step."""
        args = self.args
        return args.gradient_accumulation_steps / ((args.steps_per_generation or 1) * args.num_iterations)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Write the row, then look at the log it ends."""
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        rows = self.state.log_history
        if rows and "loss" in rows[-1]:
            self.tell_sometimes(log_checks.check_online(rows, generations_per_step=self.generations_per_step))

    def watch_rewards(self, table: RewardTable, totals: Tensor, advantages: Tensor) -> None:
        """Look at one generation's rewards of all ranks.

        Args:
            table: ``values (n, K)``.
            totals: ``(n,)`` weighted rewards, NaN where no function applied.
            advantages: ``(n,)``.

        Raises:
            RewardError: 20 generations in a row had no signal.
        """
        columns = {name: table.values[:, k].tolist() for k, name in enumerate(table.names)}
        scaled = str(getattr(self.args, "scale_rewards", "none")) != "none"
        self.tell_sometimes(reward_checks.check_reward_values(columns, scaled=scaled))
        self._flat_generations = 0 if bool(advantages.any()) else self._flat_generations + 1
        self._flat_rewards = (*self._flat_rewards, *totals.tolist()) if self._flat_generations else ()
        found = reward_checks.check_no_signal(self._flat_generations, self._flat_rewards)
        if found is not None:
            raise RewardError(f"{found.code}: {found.what} {found.why} Do: {found.fix}")
