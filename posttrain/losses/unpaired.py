"""Losses on single completions that are labeled good or bad: KTO, APO, and BCO.

The arguments of every function are tensors ``(S,)`` with one number per completion. L is the log-ratio
``log pi(y) - log rho(y)``, summed over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.losses.preference import Formula

__all__ = [
    "BCO_LOSSES",
    "KTO_LOSSES",
    "Moments",
    "apo_zero_unpaired",
    "bco",
    "density_weight",
    "kl_baseline",
    "kl_totals",
    "kto",
    "update_moments",
]


def kl_totals(log_ratio: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the sum and the number of log-ratios of mismatched prompts and completions. The caller adds these two values
    over ranks, and passes the results to `kl_baseline`.

    Args:
        log_ratio: ``(S,)`` log-ratios L of prompts that are followed by another prompt's completion.
        valid: Bool tensor ``(S,)``, True for prompts that are followed by a completion of another prompt. None: True for all
            prompts.

    Returns:
        ``(2,)`` totals in the dtype of ``log_ratio``, without gradient.
    """
    valid = torch.ones_like(log_ratio, dtype=torch.bool) if valid is None else valid
    masked = torch.where(valid, log_ratio.detach(), 0.0)
    return torch.stack([masked.sum(), valid.to(masked).sum()])


def kl_baseline(totals: Tensor) -> Tensor:
    """Compute KTO's baseline ``z0 = max(0, sum L / count)`` from the `kl_totals` of all ranks. The baseline is a scalar
    without gradient. If count is 0, the baseline is 0.

    Reference: KTO, arXiv:2402.01306, section 4.
    """
    return (totals[0] / totals[1].clamp_min(1.0)).clamp_min(0.0).detach()


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Compute the KTO loss: ``w_D [1 - sig(beta (L - z0))]`` for good and ``w_U [1 - sig(beta (z0 - L))]`` for bad
    completions.

    Args:
        log_ratio: ``(S,)`` log-ratios L.
        desirable: Bool tensor ``(S,)``, True for good completions.
        baseline: Scalar z0 from `kl_baseline`, which gets no gradient.
        beta: Strength of the regularization towards the reference.
        desirable_weight: Weight w_D of good completions.
        undesirable_weight: Weight w_U of bad completions.

    Returns:
        ``(S,)`` losses between 0 and the weight.

    Reference: KTO, arXiv:2402.01306, section 4.

    >>> good = torch.tensor([True, False])
    >>> kto(torch.zeros(2), good, torch.zeros(()), beta=0.1, desirable_weight=1.0, undesirable_weight=3.0)
    tensor([0.5000, 1.5000])
    """
    x = beta * (log_ratio - baseline.detach())
    return torch.where(desirable, desirable_weight * torch.sigmoid(-x), undesirable_weight * torch.sigmoid(x))


def apo_zero_unpaired(
    log_ratio: Tensor, desirable: Tensor, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """Compute the APO-zero loss: ``w_D [1 - sig(beta L)]`` for good and ``w_U sig(beta L)`` for bad completions. The loss is
    `kto` with the baseline 0.

    Reference: Anchored preference optimization, arXiv:2408.06266.
    """
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    return kto(log_ratio, desirable, log_ratio.new_zeros(()), beta=beta, **weights)


def bco(
    log_ratio: Tensor, desirable: Tensor, shift: Tensor | float, weight: Tensor | None = None, *, beta: float
) -> Tensor:
    """Compute the BCO loss: ``-lsig(beta L - delta)`` for good and ``-w lsig(-(beta L - delta))`` for bad completions.

    Args:
        log_ratio: ``(S,)`` log-ratios L.
        desirable: Bool tensor ``(S,)``, True for good completions.
        shift: Running mean delta of the rewards ``beta L``, which gets no gradient.
        weight: ``(S,)`` weights w of bad completions, see `density_weight`. Weights of good completions are ignored. None: all
            weights are 1.
        beta: Strength of the regularization towards the reference.

    Returns:
        ``(S,)`` losses.

    Reference: Binary classifier optimization, arXiv:2404.04656.
    """
    x = beta * log_ratio - (shift.detach() if isinstance(shift, Tensor) else shift)
    bad = -F.logsigmoid(-x)
    # Set the weights of good completions to 1 before multiplying, because a NaN among them would make the gradient NaN.
    if weight is not None:
        bad = torch.where(desirable, 1.0, weight.detach()) * bad
    return torch.where(desirable, -F.logsigmoid(x), bad)


def density_weight(probability: Tensor, *, low: float, high: float) -> Tensor:
    """Compute BCO's weight ``clamp(p / (1 - p + 1e-8), low, high)`` of each bad completion.

    ``p`` is the estimated probability that the completion of a prompt is good. ``p`` and the result are tensors ``(S,)``.

    Reference: Binary classifier optimization, arXiv:2404.04656, underlying distribution matching.
    """
    return (probability / (1.0 - probability + 1e-8)).clamp(low, high)


@dataclass(frozen=True, slots=True)
class Moments:
    """Running mean and variance of rewards. The first batch replaces the initial values.

    Attributes:
        mean: Mean of the rewards, which is BCO's shift delta.
        var: Population variance.
        std: Sample standard deviation.
        count: Number of rewards so far.
    """

    mean: float = 0.0
    var: float = 1.0
    std: float = 1.0
    count: float = 1e-24


def update_moments(moments: Moments, mean: float, var: float, count: float) -> Moments:
    """Update the running moments with the rewards of a new batch.

    The formulas are ``D = mean_b - mean``, ``N = n + n_b``, ``mean += D n_b / N`` and
    ``var = (var_b n_b + var n + D^2 n n_b / N) / N``.

    Args:
        moments: Moments of all previous rewards.
        mean: Mean of the batch's rewards over all ranks and both labels.
        var: Population variance of the batch's rewards.
        count: Number n_b of the batch's rewards. If the number is 0, the moments do not change.

    >>> update_moments(Moments(), 0.5, 0.25, 2.0).mean
    0.5
    """
    if count <= 0:
        return moments
    total = moments.count + count
    gap = mean - moments.mean
    spread = var * count + moments.var * moments.count + gap * gap * moments.count * count / total
    merged = spread / total
    deviation = math.sqrt(merged * total / (total - 1.0)) if total > 1.0 else 0.0
    return Moments(moments.mean + gap * count / total, merged, deviation, total)


_WEIGHTED = ("beta", "desirable_weight", "undesirable_weight")

KTO_LOSSES: dict[str, Formula] = {
    "kto": Formula(kto, ("log_ratio", "desirable", "baseline"), _WEIGHTED),
    "apo_zero_unpaired": Formula(apo_zero_unpaired, ("log_ratio", "desirable"), _WEIGHTED),
}
BCO_LOSSES: dict[str, Formula] = {"bco": Formula(bco, ("log_ratio", "desirable", "shift", "weight"))}
