"""What online trainers watch: the rewards of each generation, and the log at each log step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from posttrain.checks import online as log_checks
from posttrain.checks import rewards as reward_checks
from posttrain.checks.core import finding
from posttrain.checks.preflight import Preflight, describe
from posttrain.checks.reward_range import RunningReward, check_reward_ranges
from posttrain.errors import RewardError
from posttrain.losses.advantages import MOST
from posttrain.metrics import mean
from posttrain.rewards.base import RewardRunner, RewardTable
from posttrain.rewards.length import SoftOverlongPunishment
from posttrain.types import Finding

__all__ = ["OnlineHealthMixin"]

GENERATION_CODES = ("PT-R019", "PT-R020", "PT-R023", "PT-R027")  # Looked for in every generation's rewards.


class OnlineHealthMixin:
    """The part of `OnlineTrainer` that notices a run going wrong while it trains."""

    signs_of: ClassVar[str] = "R"
    looked_apart: ClassVar[tuple[str, ...]] = (*GENERATION_CODES, "PT-R022", "PT-R028")
    args: Any
    state: Any
    accelerator: Any
    rewards: RewardRunner
    _flat_generations = 0
    _flat_rewards: tuple[float, ...] = ()
    preflight: Preflight
    tell: Callable[[Iterable[Finding | None]], None]

    @cached_property
    def running(self) -> dict[str, RunningReward]:
        """Statistics of each reward function since the run began."""
        return {}

    def check_start(self) -> None:
        """As every trainer's; reward models are placed and tried."""
        super().check_start()  # type: ignore[misc]
        self.rewards.start(self.args.device)
        self.rewards.disagreements = {}
        longest = getattr(self.args, "max_completion_length", None)
        for function in self.rewards.functions:
            if isinstance(function, SoftOverlongPunishment) and longest is not None:
                with self.preflight.looking("config", ("PT-R021",)):
                    self.tell([reward_checks.check_overlong(function.limit, function.cache, longest)])

    def _disagreements(self) -> Iterable[Finding]:
        """Reward functions that judge this generation's answers by their spelling."""
        for name, said in (self.rewards.disagreements or {}).items():
            why = "a right answer in another spelling earns nothing, or a wrong one is paid: the model learns the spelling."
            yield finding(
                "PT-R023", "warning", said, f"rewards/{name}", why, "compare with posttrain.rewards.answers_match."
            )
        self.rewards.disagreements = {}

    @property
    def generations_per_step(self) -> float:
        """Generations of one optimiser step."""
        args = self.args
        return args.gradient_accumulation_steps / ((args.steps_per_generation or 1) * args.num_iterations)

    def signs(self, logs: dict[str, float]) -> Iterable[Finding | None]:
        """Of generating and learning, where a step was logged."""
        yield from super().signs(logs)  # type: ignore[misc]
        rows = self.state.log_history
        if rows and any(isinstance(function, SoftOverlongPunishment) for function in self.rewards.functions):
            yield reward_checks.check_overlong_tools(rows[-1].get("tools/token_share"))
        if rows and "loss" in rows[-1]:
            yield from log_checks.check_online(rows, generations_per_step=self.generations_per_step)

    def bounded(self, advantages: Tensor, mode: str) -> Tensor:
        """Standardised advantages stop at 10, so that no completion is worth a step of its own.

        Args:
            advantages: ``(n,)`` of all ranks, divided by a spread.
            mode: ``train`` or ``eval``.
        """
        sizes = advantages.abs()
        far = sizes > MOST
        self.log_metrics_now({"advantages/clipped_share": mean(far.float())}, mode)  # type: ignore[attr-defined]
        if mode == "train":
            self.tell_clipped(int(far.sum()), far.numel(), float(sizes.max()) if far.any() else None)
        return advantages.clamp(-MOST, MOST)

    def tell_clipped(self, far: int, total: int, largest: float | None = None) -> None:
        """Say that so many of a generation's advantages were cut; their greatest size, where that is known."""
        with self.preflight.looking("log_step", ("PT-R028",)):
            self.tell([reward_checks.check_clipped(far, total, MOST, largest)])

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
        for name, column in columns.items():
            self.running.setdefault(name, RunningReward()).add(column)
        weights = dict(zip(table.names, table.weights.tolist(), strict=True))
        self.preflight.notes["rewards"] = {name: running.to_dict() for name, running in self.running.items()}
        scaled = str(getattr(self.args, "scale_rewards", "none")) != "none"
        with self.preflight.looking("log_step", GENERATION_CODES):
            self.tell([check_reward_ranges(self.running, weights), *self._disagreements()])
            self.tell(reward_checks.check_reward_values(columns, scaled=scaled))
        self._tell_signal(totals, advantages)

    def _tell_signal(self, totals: Tensor, advantages: Tensor) -> None:
        self._flat_generations = 0 if bool(advantages.any()) else self._flat_generations + 1
        self._flat_rewards = (*self._flat_rewards, *totals.tolist()) if self._flat_generations else ()
        with self.preflight.looking("log_step", ("PT-R022",)):
            found = reward_checks.check_no_signal(self._flat_generations, self._flat_rewards)
            if found is not None and self.preflight.refuses(found):
                self.preflight.add(found)
                raise RewardError(describe(found))
            self.tell([found])
