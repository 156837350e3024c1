"""Rewards to advantages: how much better a completion is than its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, DataError, did_you_mean
from posttrain.types import Advantages

__all__ = [
    "MOST_ADVANTAGE",
    "AdvantageStats",
    "bounded",
    "centred",
    "flat_groups",
    "group_advantages",
    "group_spread",
    "leave_one_out_advantages",
    "standardized",
    "weighted_total",
    "within_groups",
]

AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
EPSILON = 1e-4  # Keeps a group without spread finite.
POPULATION_EPSILON = 1e-8  # Of the population std, as TRL's asynchronous GRPO has it.
# Rewards that differ by less, relative to their size, are equal: sums of the same numbers round apart by as much in float32.
EQUAL_SPREAD = 4 * torch.finfo(torch.float32).eps
# A group with a standard deviation up to this has no signal.
FLAT_SPREAD = 1e-8
# A standardised advantage beyond it is one outlier of a large group: |A| <= (G - 1) / sqrt(G), so G > 100.
MOST_ADVANTAGE = 10.0


@dataclass(slots=True)
class AdvantageStats:
    """Advantages of n completions, and the numbers behind them.

    Attributes:
        advantages: ``(n,)``; 0 where no reward function applied.
        totals: ``(n,)`` weighted rewards, NaN where no reward function applied.
        group_std: ``(n / G,)`` spread of each group, see `group_spread`.
        zero_std_share: Share of groups without spread.
    """

    advantages: Tensor
    totals: Tensor
    group_std: Tensor
    zero_std_share: float


def weighted_total(rewards: Tensor, weights: Tensor) -> Tensor:
    """``sum_k w_k r_k`` over the functions that applied; NaN where none did.

    Args:
        rewards: ``(n, K)``, NaN where a function did not apply.
        weights: ``(K,)``.
    """
    total = (rewards.nan_to_num(0.0) * weights).sum(-1)
    return total.masked_fill(rewards.isnan().all(-1), torch.nan)


def _alike(values: Tensor, dim: int) -> Tensor:
    """Whether the non-NaN entries along a dimension, which is kept, are all one number."""
    missing = values.isnan()
    high = values.masked_fill(missing, -torch.inf).amax(dim, keepdim=True)
    low = values.masked_fill(missing, torch.inf).amin(dim, keepdim=True)
    return high - low <= EQUAL_SPREAD * torch.maximum(high.abs(), low.abs())


def centred(values: Tensor, dim: int = -1) -> Tensor:
    """``values - mean`` over the non-NaN entries: exactly 0 where all are equal, though their mean rounds to another number."""
    gaps = values - values.nanmean(dim, keepdim=True)
    return torch.where(_alike(values, dim) & ~values.isnan(), 0.0, gaps)


def _std(values: Tensor, dim: int = -1) -> Tensor:
    """Bessel-corrected standard deviation of the non-NaN entries; NaN with fewer than two."""
    count = (~values.isnan()).sum(dim, keepdim=True)
    squares = centred(values, dim).square().nansum(dim, keepdim=True)
    variance = torch.where(count > 1, squares / (count - 1).clamp_min(1), torch.nan)
    return variance.sqrt().squeeze(dim)


def _groups(values: Tensor, group_size: int) -> Tensor:
    if values.shape[0] % group_size:
        raise DataError(f"{values.shape[0]} completions do not divide into groups of {group_size}.")
    return values.reshape(-1, group_size, *values.shape[1:])


def bounded(advantages: Tensor) -> Tensor:
    """Standardised advantages stop at `MOST_ADVANTAGE`, so that no completion is worth a step of its own."""
    return advantages.clamp(-MOST_ADVANTAGE, MOST_ADVANTAGE)


def within_groups(stats: AdvantageStats, start: int, *, bound: bool, **more: Any) -> Advantages:
    """Advantages within groups, where they were divided bounded to ±10; `Advantages` has the rest of the arguments."""
    values = bounded(stats.advantages) if bound else stats.advantages
    unbounded = stats.advantages if bound else None
    return Advantages(values, stats.totals, start, unbounded=unbounded, group_std=stats.group_std, **more)


def flat_groups(
    values: Tensor, weights: Tensor, size: int, *, least: float = 0.0, each_function: bool = False
) -> Tensor:
    """Which groups give no completion an advantage, ``(n / G,)`` bool: too little variance, or fewer than two scored.

    Args:
        values: ``(n, K)`` rewards, groups consecutive, NaN where a function did not apply.
        weights: ``(K,)``.
        size: G.
        least: Standard deviation that counts as signal.
        each_function: Where functions are normalised before they are added, one that varies and has a weight is enough.
    """
    how = "normalize_then_sum" if each_function else "sum_then_normalize"
    return ~(group_spread(values, weights, size, aggregation=how) > max(FLAT_SPREAD, least))


def group_spread(
    rewards: Tensor, weights: Tensor, group_size: int, *, aggregation: str = "sum_then_normalize"
) -> Tensor:
    """``(n / G,)`` Bessel-corrected standard deviation within each group, NaN with fewer than two scored rows.

    It is that of the weighted sum; with ``normalize_then_sum`` that of the function which varies most, of those with a weight:
    two that cancel in their sum still teach.

    >>> opposed = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> [group_spread(opposed, torch.ones(2), 2, aggregation=how).item() for how in AGGREGATIONS]
    [0.0, 0.7071067690849304]
    """
    if aggregation != "normalize_then_sum":
        return _std(_groups(weighted_total(rewards, weights), group_size))
    std = _std(_groups(rewards, group_size), 1).masked_fill(weights == 0, torch.nan)  # (n / G, K)
    return torch.where(std.isnan().all(-1), torch.nan, std.nan_to_num(0.0).amax(-1))


def group_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_size: int,
    *,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
    min_group_std: float = 0.0,
) -> AdvantageStats:
    """``A = (R - mean_g) / (std + 1e-4)``, with the std of the group, of the batch, or none; the population std has 1e-8.

    ``normalize_then_sum`` (GDPO) normalises each function within its group, sums with weights, and normalises over the
    batch. A row that no function scored gets 0 and is left out of every mean and std.

    Args:
        rewards: ``(n, K)`` over all ranks, groups consecutive, NaN where a function did not apply.
        weights: ``(K,)``.
        group_size: G.
        scale_rewards: ``group``, ``batch``, ``population`` (the group's std without Bessel's correction) or ``none``.
        aggregation: ``sum_then_normalize`` or ``normalize_then_sum``.
        min_group_std: A group that spreads less (`group_spread`) gets advantage 0: noise is not a signal.

    Reference: DeepSeekMath, arXiv:2402.03300, section 4.1.2; Dr. GRPO (none), 2503.20783; GDPO, 2601.05242.

    >>> rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    >>> group_advantages(rewards, torch.ones(1), 4).advantages
    tensor([ 0.8659, -0.8659, -0.8659,  0.8659])
    """
    totals = weighted_total(rewards, weights)
    grouped = _groups(totals, group_size)
    std = group_spread(rewards, weights, group_size, aggregation=aggregation)
    if aggregation == "normalize_then_sum":
        advantages = _normalize_then_sum(_groups(rewards, group_size), weights, totals)
    elif aggregation == "sum_then_normalize":
        advantages = centred(grouped).flatten() / _scale(std, grouped, scale_rewards)
    else:
        raise ConfigError(
            f"multi_objective_aggregation={aggregation!r} is not known{did_you_mean(aggregation, AGGREGATIONS)}."
        )
    if min_group_std > 0:
        advantages = advantages.masked_fill((std < min_group_std).repeat_interleave(group_size), 0.0)
    return AdvantageStats(
        advantages=advantages.nan_to_num(0.0),
        totals=totals,
        group_std=std,
        zero_std_share=float((std.nan_to_num(0.0) <= 1e-8).float().mean()),
    )


def _scale(std: Tensor, grouped: Tensor, scale_rewards: str) -> Tensor | float:
    """What ``grouped (n / G, G)`` totals are divided by once they are flat; ``std (n / G,)`` of each group."""
    if scale_rewards == "none":
        return 1.0
    if scale_rewards == "batch":
        return _std(grouped.flatten()) + EPSILON
    if scale_rewards == "group":
        return (std + EPSILON).repeat_interleave(grouped.shape[1])
    if scale_rewards == "population":
        spread = centred(grouped).square().nanmean(-1).sqrt()
        return (spread + POPULATION_EPSILON).repeat_interleave(grouped.shape[1])
    choices = ("group", "batch", "population", "none")
    raise ConfigError(f"scale_rewards={scale_rewards!r} is not known{did_you_mean(scale_rewards, choices)}.")


def _normalize_then_sum(rewards: Tensor, weights: Tensor, totals: Tensor) -> Tensor:
    """Each function in its own group first, so that two rewards cannot cancel before they are compared."""
    z = centred(rewards, 1) / (_std(rewards, 1).unsqueeze(1) + EPSILON)
    summed = (z.nan_to_num(0.0) * weights).sum(-1).flatten().masked_fill(totals.isnan(), torch.nan)
    return centred(summed) / (_std(summed) + EPSILON)


def leave_one_out_advantages(totals: Tensor, group_size: int) -> Tensor:
    """``A_i = R_i - mean of the others of its group``, ``(n,)``; 0 where nothing else was scored.

    Reference: RLOO, arXiv:2402.14740, equation 8.

    >>> leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    tensor([ 0.6667, -0.6667, -0.6667,  0.6667])
    """
    grouped = _groups(totals, group_size)
    count = (~grouped.isnan()).sum(-1, keepdim=True)
    others = (grouped.nansum(-1, keepdim=True) - grouped) / (count - 1)
    known = (count > 1) & ~_alike(grouped, -1)
    return torch.where(known, grouped - others, 0.0).nan_to_num(0.0).flatten()


def standardized(advantages: Tensor, scored: Tensor) -> Tensor:
    """``(A - mean) / (std + 1e-4)`` over the scored rows, ``(n,)``; 0 elsewhere, and everywhere with fewer than two of them.

    Args:
        advantages: ``(n,)`` over all ranks.
        scored: ``(n,)`` bool, rows that some reward function scored.
    """
    known = advantages.masked_fill(~scored, torch.nan)
    return (centred(known) / (_std(known) + EPSILON)).nan_to_num(0.0)
