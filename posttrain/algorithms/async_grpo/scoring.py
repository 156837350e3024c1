"""From the rollouts of one prompt to scored samples: rewards, advantages, and what is logged of them."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.losses.advantages import MOST, centred, group_advantages, weighted_total
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rollouts.batch import RolloutBatch, prompt_suffixes
from posttrain.rollouts.workers.samples import RolloutSample, Trajectory
from posttrain.types import Rollout

__all__ = ["Finished", "Scorer", "population_advantages"]

EPSILON = 1e-8  # Of the population std.


@dataclass(slots=True)
class Finished:
    """The rollouts of one prompt that came to an end, before they are scored.

    Attributes:
        group_id: Of the prompt.
        version: Of the weights when its first request was sent.
        rows: The dataset row each answers.
        rollouts: Their tokens.
        completions: What reward functions see.
        environments: Each one's, if any.
        metrics: Numbers to log, one dict a rollout.
        errors: One for each rollout of the group that did not come to an end.
        parts: Rows of a conversation whose context was rewritten, one list a rollout; None: one row each.
    """

    group_id: int
    version: int
    rows: list[dict[str, Any]]
    rollouts: list[Rollout]
    completions: list[Any]
    environments: list[Any] | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    parts: list[list[Rollout]] | None = None


def population_advantages(totals: Tensor) -> Tensor:
    """``(r - mean) / (std + 1e-8)`` with the population std over the scored members of one group; 0 for the others.

    Args:
        totals: ``(n,)`` rewards, NaN where no function applied.

    >>> population_advantages(torch.tensor([1.0, 0.0, float("nan"), 1.0, 0.0]))
    tensor([ 1., -1.,  0.,  1., -1.])
    """
    scored = ~totals.isnan()
    if not bool(scored.any()):
        return torch.zeros_like(totals)
    gaps = centred(totals)
    return (gaps / (gaps[scored].square().mean().sqrt() + EPSILON)).nan_to_num(0.0)


class Scorer:
    """Calls the reward functions on one group at a time.

    Args:
        rewards: The functions.
        tokenizer: Decodes the ends of prompts, for format rewards.
        scale_rewards: ``population``, ``group`` or ``none``.
        mask_truncated: Leave out rollouts that were cut.
    """

    def __init__(self, rewards: RewardRunner, tokenizer: Any, *, scale_rewards: str, mask_truncated: bool) -> None:
        self.rewards, self.tokenizer = rewards, tokenizer
        self.scale_rewards, self.mask_truncated = scale_rewards, mask_truncated

    def __call__(self, group: Finished) -> list[Trajectory]:
        """One trajectory a rollout; those without a trained token are left out.

        Raises:
            RewardError: A function raised or returned what is no reward.
            RolloutError: A trained token has no log-prob.
        """
        generation = RolloutBatch(group.rows, group.rollouts, group.completions)
        table = self._rewards(group, generation)
        totals = weighted_total(table.values, table.weights)
        exact = self._advantages(table, totals)
        most = math.inf if self.scale_rewards == "none" else MOST
        advantages = exact.clamp(-most, most).tolist()
        scored = totals[~totals.isnan()]
        shared = {"reward_std": float(scored.std()) if len(scored) > 1 else math.nan}
        shared |= {name: float(m.value) / float(m.weight) for name, m in table.metrics.items() if m.reduction == "mean"}
        odd = {name: float(m.value) for name, m in table.metrics.items() if name.endswith("/nan")}
        shared |= {name: count / len(totals) for name, count in odd.items()}
        found = []
        for i, rollout in enumerate(group.rollouts):
            own = group.metrics[i] if group.metrics else {}
            metrics = {**shared, **own, **_shown(table, totals, i), **_lengths(rollout)}
            metrics["advantages/clipped_share"] = float(exact[i].abs() > most)
            parts = group.parts[i] if group.parts is not None else [rollout]
            samples = [self._sample(group, part, i, advantages[i], metrics) for part in parts]
            kept = [sample for sample in samples if any(sample.completion_mask)]
            for sample in kept:
                sample.check()
            if kept and not (self.mask_truncated and rollout.finish_reason != "stop"):
                found.append(Trajectory(kept, finished=rollout.finish_reason == "stop"))
        return found

    def _rewards(self, group: Finished, generation: RolloutBatch) -> RewardTable:
        table = self.rewards(
            prompts=[row["prompt"] for row in group.rows],
            completions=group.completions,
            completion_ids=[rollout.token_ids for rollout in group.rollouts],
            columns=generation.reward_columns(),
            trainer_state=types.SimpleNamespace(global_step=group.version),
            prompt_suffixes=prompt_suffixes(self.tokenizer, group.rollouts),
            environments=group.environments,
            judge=False,
        )
        table.values = self.rewards.transformed(table.values, torch.zeros(len(group.rollouts), dtype=torch.long))
        return table

    def _advantages(self, table: RewardTable, totals: Tensor) -> Tensor:
        if self.scale_rewards == "population":
            return population_advantages(totals)
        stats = group_advantages(table.values, table.weights, len(totals), scale_rewards=self.scale_rewards)
        return stats.advantages

    def _sample(
        self, group: Finished, rollout: Rollout, index: int, advantage: float, metrics: dict[str, float]
    ) -> RolloutSample:
        before, count = len(rollout.prompt_ids), len(rollout.token_ids)
        mask = rollout.tool_mask or [1] * count
        logp = rollout.logp if len(rollout.logp) == count else [math.nan] * count
        versions = [version for version, _ in rollout.spans or [(rollout.version, count)]]
        return RolloutSample(
            prompt=group.rows[index]["prompt"],
            completion=group.completions[index],
            input_ids=[*rollout.prompt_ids, *rollout.token_ids],
            completion_mask=[*[0] * before, *mask],
            old_log_probs=[*[0.0] * before, *(x if kept else 0.0 for x, kept in zip(logp, mask, strict=True))],
            advantage=advantage,
            model_version=min([group.version, *versions]),
            group_id=group.group_id,
            metrics=metrics,
            spans=list(rollout.spans or [(rollout.version, sum(mask))]),
        )


def _shown(table: RewardTable, totals: Tensor, index: int) -> dict[str, float]:
    values: Sequence[float] = table.values[index].tolist()
    return {"reward": float(totals[index]), **{f"rewards/{n}": v for n, v in zip(table.names, values, strict=True)}}


def _lengths(rollout: Rollout) -> dict[str, float]:
    written = sum(rollout.tool_mask) if rollout.tool_mask else len(rollout.token_ids)
    tools = {"tools/token_share": 1 - written / len(rollout.token_ids)} if rollout.tool_mask else {}
    return tools | {
        "completions/mean_length": float(written),
        "completions/clipped_ratio": float(rollout.finish_reason != "stop"),
    }
