"""Advantages of completions, computed from rewards. An advantage is a reward minus a baseline, for example the mean reward of
the completion's group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import DataError, check_choice
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
# Constant that is added to a standard deviation. It avoids division by 0 if all rewards of a group are equal.
EPSILON = 1e-4
# Constant that replaces EPSILON with scale_rewards='population', as in TRL's asynchronous GRPO.
POPULATION_EPSILON = 1e-8
# Maximum relative difference of two rewards that are treated as equal. float32 sums of the same numbers can differ by
# rounding.
EQUAL_SPREAD = 4 * torch.finfo(torch.float32).eps
# Maximum standard deviation of a group's rewards at which the group has no learning signal.
FLAT_SPREAD = 1e-8
# Maximum absolute value of a standardized advantage. In a group of size G, |A| is at most (G - 1) / sqrt(G), so only groups of
# more than 100 completions can exceed it.
MOST_ADVANTAGE = 10.0


@dataclass(slots=True)
class AdvantageStats:
    """Advantages of n completions, with the reward statistics from which they were computed.

    Attributes:
        advantages: ``(n,)`` advantages. The advantage is 0 for completions that no reward function has scored.
        totals: ``(n,)`` weighted sums of rewards. The sum is NaN for completions that no reward function has scored.
        group_std: ``(n / G,)`` standard deviation of each group; see `group_spread`.
        zero_std_share: Fraction of groups whose standard deviation is 0 or undefined.
    """

    advantages: Tensor
    totals: Tensor
    group_std: Tensor
    zero_std_share: float


def weighted_total(rewards: Tensor, weights: Tensor) -> Tensor:
    """Compute the total reward ``sum_k w_k r_k`` of each completion, over the reward functions that have scored it. The
    result is NaN if no function has scored it.

    Args:
        rewards: Rewards ``(n, K)``. NaN means that the function did not score the completion.
        weights: Weights ``(K,)``.
    """
    total = (rewards.nan_to_num(0.0) * weights).sum(-1)
    return total.masked_fill(rewards.isnan().all(-1), torch.nan)


def _alike(values: Tensor, dim: int) -> Tensor:
    """Return whether all values along ``dim`` that are not NaN are equal. The result keeps ``dim`` with size 1."""
    missing = values.isnan()
    high = values.masked_fill(missing, -torch.inf).amax(dim, keepdim=True)
    low = values.masked_fill(missing, torch.inf).amin(dim, keepdim=True)
    return high - low <= EQUAL_SPREAD * torch.maximum(high.abs(), low.abs())


def centred(values: Tensor, dim: int = -1) -> Tensor:
    """Subtract the mean along ``dim``, ignoring NaN values. If all values are equal, the result is exactly 0, without
    rounding errors.
    """
    gaps = values - values.nanmean(dim, keepdim=True)
    return torch.where(_alike(values, dim) & ~values.isnan(), 0.0, gaps)


def _std(values: Tensor, dim: int = -1) -> Tensor:
    """Return the Bessel-corrected standard deviation of the values that are not NaN. Return NaN if there are fewer than two
    such values.
    """
    count = (~values.isnan()).sum(dim, keepdim=True)
    squares = centred(values, dim).square().nansum(dim, keepdim=True)
    variance = torch.where(count > 1, squares / (count - 1).clamp_min(1), torch.nan)
    return variance.sqrt().squeeze(dim)


def _groups(values: Tensor, group_size: int) -> Tensor:
    if values.shape[0] % group_size:
        raise DataError(f"{values.shape[0]} completions cannot be divided into groups of {group_size}.")
    return values.reshape(-1, group_size, *values.shape[1:])


def bounded(advantages: Tensor) -> Tensor:
    """Clamp standardized advantages to ``±MOST_ADVANTAGE``, so that one completion cannot dominate a step."""
    return advantages.clamp(-MOST_ADVANTAGE, MOST_ADVANTAGE)


def within_groups(stats: AdvantageStats, start: int, *, bound: bool, **more: Any) -> Advantages:
    """Create an `Advantages` object from `AdvantageStats`. With ``bound``, advantages are clipped to ``±MOST_ADVANTAGE``.
    ``more`` contains additional fields of `Advantages`.
    """
    values = bounded(stats.advantages) if bound else stats.advantages
    unbounded = stats.advantages if bound else None
    return Advantages(values, stats.totals, start, unbounded=unbounded, group_std=stats.group_std, **more)


def flat_groups(
    values: Tensor, weights: Tensor, size: int, *, least: float = 0.0, each_function: bool = False
) -> Tensor:
    """Return a bool tensor ``(n / G,)``. It is True for groups without a learning signal, in which all rewards are (nearly)
    equal or fewer than two completions have a reward.

    Args:
        values: Rewards ``(n, K)`` with consecutive groups. NaN means that the function did not score the completion.
        weights: Weights ``(K,)``.
        size: Group size G.
        least: Minimum standard deviation of a group's rewards for a learning signal (exclusive).
        each_function: Whether the rewards of each function are normalized before they are summed. If True, a group has a
            learning signal if the rewards of at least one function with a nonzero weight differ.
    """
    how = "normalize_then_sum" if each_function else "sum_then_normalize"
    return ~(group_spread(values, weights, size, aggregation=how) > max(FLAT_SPREAD, least))


def group_spread(
    rewards: Tensor, weights: Tensor, group_size: int, *, aggregation: str = "sum_then_normalize"
) -> Tensor:
    """Compute the Bessel-corrected standard deviation of each group's rewards, as a tensor ``(n / G,)``. The result is NaN
    for groups with fewer than two scored completions.

    By default, the function returns the standard deviation of the total reward. With ``normalize_then_sum``, it returns the
    largest of the standard deviations of the reward functions with a nonzero weight. Two functions whose rewards cancel in the
    sum then still give a learning signal.

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
    """Compute the advantages ``A = (R - mean_g) / (std + 1e-4)``, where R is the total reward and mean_g the mean of its group.

    ``scale_rewards`` selects std: the standard deviation of the group or of the batch, or no division. For the population
    standard deviation, the constant is 1e-8 instead of 1e-4. ``normalize_then_sum`` (GDPO) normalizes the rewards of each
    function within the group, computes the weighted sum, and normalizes the sum over the batch. Completions that no reward
    function has scored get the advantage 0 and are excluded from every mean and standard deviation.

    Args:
        rewards: Rewards ``(n, K)`` of the completions of all ranks, with consecutive groups. NaN means that the function did
            not score the completion.
        weights: Weights ``(K,)``.
        group_size: Group size G.
        scale_rewards: ``group``, ``batch``, ``population`` (the group's std without Bessel's correction) or ``none``.
        aggregation: ``sum_then_normalize`` or ``normalize_then_sum``.
        min_group_std: Minimum standard deviation (`group_spread`) of a group. In a group with a smaller standard deviation,
            all advantages are 0, because the differences of the group's rewards are only noise.

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
    else:
        check_choice("multi_objective_aggregation", aggregation, AGGREGATIONS)
        advantages = centred(grouped).flatten() / _scale(std, grouped, scale_rewards)
    if min_group_std > 0:
        advantages = advantages.masked_fill((std < min_group_std).repeat_interleave(group_size), 0.0)
    return AdvantageStats(
        advantages=advantages.nan_to_num(0.0),
        totals=totals,
        group_std=std,
        zero_std_share=float((std.nan_to_num(0.0) <= 1e-8).float().mean()),
    )


def _scale(std: Tensor, grouped: Tensor, scale_rewards: str) -> Tensor | float:
    """Return the divisor of the centered total rewards. The argument ``grouped`` contains the ``(n / G, G)`` total rewards,
    and ``std`` the ``(n / G,)`` standard deviations of the groups.
    """
    if scale_rewards == "none":
        return 1.0
    if scale_rewards == "batch":
        return _std(grouped.flatten()) + EPSILON
    if scale_rewards == "group":
        return (std + EPSILON).repeat_interleave(grouped.shape[1])
    check_choice("scale_rewards", scale_rewards, ("group", "batch", "population", "none"))
    spread = centred(grouped).square().nanmean(-1).sqrt()
    return (spread + POPULATION_EPSILON).repeat_interleave(grouped.shape[1])


def _normalize_then_sum(rewards: Tensor, weights: Tensor, totals: Tensor) -> Tensor:
    """Normalize the rewards of each function within each group, compute their weighted sum, and normalize the sum over the
    batch (GDPO).
    """
    z = centred(rewards, 1) / (_std(rewards, 1).unsqueeze(1) + EPSILON)
    summed = (z.nan_to_num(0.0) * weights).sum(-1).flatten().masked_fill(totals.isnan(), torch.nan)
    return centred(summed) / (_std(summed) + EPSILON)


def leave_one_out_advantages(totals: Tensor, group_size: int) -> Tensor:
    """Compute ``(n,)`` RLOO advantages ``A_i = R_i - mean(R_j, j != i)`` within each group. An advantage is 0 if no other
    completion of the group has a reward.

    Reference: RLOO, arXiv:2402.14740, equation 8.

    >>> leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    tensor([ 0.6667, -0.6667, -0.6667,  0.6667])
    """
    grouped = _groups(totals, group_size)
    count = (~grouped.isnan()).sum(-1, keepdim=True)
    others = (grouped.nansum(-1, keepdim=True) - grouped) / (count - 1)
    valid = (count > 1) & ~_alike(grouped, -1)
    return torch.where(valid, grouped - others, 0.0).nan_to_num(0.0).flatten()


def standardized(advantages: Tensor, scored: Tensor) -> Tensor:
    """Standardize advantages to ``(A - mean) / (std + 1e-4)``, with mean and std over the completions with a reward.
    Completions without a reward get 0. If fewer than two completions have a reward, all completions get 0.

    Args:
        advantages: ``(n,)`` advantages of the completions of all ranks.
        scored: Bool tensor ``(n,)``, True for completions that a reward function has scored.
    """
    masked = advantages.masked_fill(~scored, torch.nan)
    return (centred(masked) / (_std(masked) + EPSILON)).nan_to_num(0.0)
