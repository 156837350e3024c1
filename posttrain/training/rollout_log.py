"""What online trainers say about a generation: lengths, rewards, and the rows of the completions table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from posttrain.checks import online as log_checks
from posttrain.checks import rewards as reward_checks
from posttrain.checks.registry import Preflight, describe, finding
from posttrain.checks.rewards import RunningReward, check_reward_ranges
from posttrain.errors import RewardError
from posttrain.losses.advantages import MOST
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.models import parallel
from posttrain.rewards.format import SoftOverlongPunishment
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rewards.transform import length_correlation
from posttrain.rollouts.batch import RolloutBatch
from posttrain.training.online_config import OnlineConfig
from posttrain.types import Finding

__all__ = [
    "OnlineHealthMixin",
    "RolloutLogMixin",
]


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


class RolloutLogMixin(OnlineHealthMixin):
    """The part of `OnlineTrainer` that turns a generation into metrics."""

    args: OnlineConfig
    counters: dict[str, float]
    state: Any
    accelerator: Any
    processing_class: Any
    _lengths: tuple[int, ...] = ()

    def log_lengths(self, generation: RolloutBatch, mode: str, seconds: float) -> None:
        """Lengths of what the model wrote, and how many completions were cut."""
        self.remember_lengths(generation)
        lengths = torch.tensor(self._lengths, dtype=torch.float32)
        ended = torch.tensor([r.finish_reason == "stop" for r in generation.rollouts])
        metrics: dict[str, Metric] = {
            "completions/mean_length": mean(lengths),
            "completions/min_length": minimum(lengths),
            "completions/max_length": maximum(lengths),
            "completions/clipped_ratio": mean((~ended).float()),
            "completions/mean_terminated_length": mean(lengths, ended),
            "completions/min_terminated_length": minimum(lengths[ended]),
            "completions/max_terminated_length": maximum(lengths[ended]),
            "completions/duplicate_ratio": duplicates(generation),
            "rollouts/tokens_per_second": mean(float(lengths.sum()) / max(seconds, 1e-9)),
            "rollouts/seconds": mean(seconds),
        }
        if any(rollout.tool_mask for rollout in generation.rollouts):
            tokens = sum(len(rollout.token_ids) for rollout in generation.rollouts)
            metrics["tools/token_share"] = mean(1 - float(lengths.sum()) / tokens, weight=tokens)
        if self.args.mask_truncated_completions:
            metrics["completions/masked_ratio"] = mean((~ended).float())
        self.log_metrics_now(metrics, mode)  # type: ignore[attr-defined]
        if mode == "train":
            tokens = float(lengths.sum()) + sum(len(r.prompt_ids) for r in generation.rollouts)
            self.counters["num_tokens"] += parallel.all_reduce_sum([tokens], self.accelerator)[0]

    def remember_lengths(self, generation: RolloutBatch) -> None:
        """For the correlation of lengths with the rewards that come: what is trained, not what was sampled last."""
        self._lengths = tuple(sum(generation.loss_mask(i, False)) for i in range(len(generation.rollouts)))

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Lengths of ended completions are 0 where none ended."""
        if "completions/mean_length" in metrics:
            for kind in ("mean", "min", "max"):
                metrics.setdefault(f"completions/{kind}_terminated_length", 0.0)
        return super().derived(metrics)  # type: ignore[misc]

    def count_tokens_seen(self, tokens: float) -> None:
        """Counted at generation instead, each prompt once per completion."""

    def log_rewards(
        self, table: RewardTable, totals: Tensor, advantages: Tensor, mode: str, **spread: float | Tensor
    ) -> None:
        """Rewards of all ranks' rows.

        Every rank holds the whole matrix: each emits the same numbers, and the mean over ranks leaves them unchanged.

        Args:
            table: ``values (n, K)``.
            totals: ``(n,)`` weighted rewards before any penalty, NaN where no function applied.
            advantages: ``(n,)``.
            mode: ``train`` or ``eval``.
            spread: ``reward_std``, ``frac_reward_zero_std``, as the method defines them.
        """
        metrics = {name: mean(value) for name, value in spread.items()}
        metrics["reward"] = mean(totals, ~totals.isnan())
        metrics["advantages/abs_max"] = maximum(advantages.abs())
        for k, name in enumerate(table.names):
            column = table.values[:, k]
            scored = column[~column.isnan()]
            metrics[f"rewards/{name}/mean"] = mean(scored)
            metrics[f"rewards/{name}/min"] = minimum(scored)
            metrics[f"rewards/{name}/max"] = maximum(scored)
            if scored.numel() > 1:
                metrics[f"rewards/{name}/std"] = mean(float(scored.std()), weight=scored.numel())
            metrics[f"rewards/{name}/applicable"] = mean(scored.numel() / max(column.numel(), 1))
        lengths = parallel.all_gather_objects(list(self._lengths), self.accelerator)
        related = length_correlation(lengths, totals) if len(lengths) == len(totals) else None
        if related is not None:
            metrics["rewards/length_corr"] = mean(related)
        self.log_metrics_now(metrics, mode)  # type: ignore[attr-defined]
        if mode == "train":
            self.watch_rewards(table, totals, advantages)

    def completion_rows(self, generation: RolloutBatch, table: RewardTable) -> list[dict[str, Any]]:
        """One row a completion of this rank: prompt, completion, each reward, extra columns, advantage."""
        rows = []
        for i, rollout in enumerate(generation.rollouts):
            rewards = dict(zip(table.names, table.values[table.start + i].tolist(), strict=True))
            row = {
                "step": self.state.global_step,
                "prompt": self.processing_class.decode(rollout.prompt_ids),
                "completion": rollout.text,
                **rewards,
                **{name: column[i] for name, column in table.extra_columns.items()},
            }
            rows.append(row | {name: column[i] for name, column in generation.shown().items()})
        first = generation.groups()[0] if table.start == 0 and len(rows) > 0 else []
        for i in first:  # One group a generation, so that the table stays small.
            rollout = generation.rollouts[i]
            rows[i]["tokens"] = [self.processing_class.decode([token]) for token in rollout.token_ids]
            rows[i]["logps"] = list(rollout.logp)
        return rows


def duplicates(generation: RolloutBatch) -> Metric:
    """Share of the completions beside the first of their group that repeat another one: 1 where all are equal."""
    repeated, beside = 0, 0
    for group in generation.groups():
        different = {tuple(generation.rollouts[i].token_ids) for i in group}
        repeated += len(group) - len(different)
        beside += len(group) - 1
    return mean(repeated / max(beside, 1), weight=beside)
