"""What online trainers say about a generation: lengths, rewards, and the rows of the completions table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.algorithms.online_config import OnlineConfig
from posttrain.algorithms.online_health import OnlineHealthMixin
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.models import parallel
from posttrain.rewards.base import RewardTable
from posttrain.rewards.shares import length_correlation
from posttrain.rollouts.generation import Generation

__all__ = ["RolloutLogMixin"]


class RolloutLogMixin(OnlineHealthMixin):
    """The part of `OnlineTrainer` that turns a generation into metrics."""

    args: OnlineConfig
    counters: dict[str, float]
    state: Any
    accelerator: Any
    processing_class: Any
    _lengths: tuple[int, ...] = ()

    def log_lengths(self, generation: Generation, mode: str, seconds: float) -> None:
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

    def remember_lengths(self, generation: Generation) -> None:
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

    def completion_rows(self, generation: Generation, table: RewardTable) -> list[dict[str, Any]]:
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


def duplicates(generation: Generation) -> Metric:
    """Share of the completions beside the first of their group that repeat another one: 1 where all are equal."""
    repeated, beside = 0, 0
    for group in generation.groups():
        different = {tuple(generation.rollouts[i].token_ids) for i in group}
        repeated += len(group) - len(different)
        beside += len(group) - 1
    return mean(repeated / max(beside, 1), weight=beside)
