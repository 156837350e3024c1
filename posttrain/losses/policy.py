"""Policy-gradient surrogates, and the table that makes a loss type of a surrogate and a reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.losses.reduce import sequence_mean, sequence_sum, spread
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.types import Reduction

__all__ = [
    "LOSS_TYPES",
    "LossType",
    "cispo",
    "clip_metrics",
    "clipped",
    "geometric_ratio",
    "sapo",
    "vespo",
    "vespo_weight",
]


def clipped(
    log_ratio: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """``-min(r A, clip(r, 1 - eps, 1 + eps_high) A)``, with the unclipped ratio capped at ``delta`` when given.

    Args:
        log_ratio: ``(B, T)`` log importance ratio.
        advantages: ``(B, T)``.
        epsilon: Lower clip.
        epsilon_high: Upper clip.
        delta: Cap for the otherwise unbounded case of a negative advantage and a large ratio.

    Reference: PPO, arXiv:1707.06347, equation 7; two-sided clipping, INTELLECT-2, arXiv:2505.07291, section 3.4.
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    free = ratio if delta is None else ratio.clamp_max(delta)
    return -torch.minimum(free * advantages, bounded * advantages)


def cispo(log_ratio: Tensor, advantages: Tensor, logp: Tensor, *, epsilon_high: float) -> Tensor:
    """``-sg(min(r, eps_high)) A log p``: every token keeps a gradient, its weight is capped.

    Reference: MiniMax-M1, arXiv:2506.13585, equation 4.
    """
    return -log_ratio.exp().clamp_max(epsilon_high).detach() * advantages * logp


def sapo(log_ratio: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float) -> Tensor:
    """``-A (4 / tau) sigmoid(tau (r - 1))``: a soft gate instead of a clip; tau depends on the sign of A.

    Reference: SAPO, arXiv:2511.20347, equation 6.
    """
    tau = _by_sign(advantages > 0, temperature_pos, temperature_neg, advantages)
    return -advantages * (4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0))


def geometric_ratio(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    epsilon: float,
    epsilon_high: float,
) -> Tensor:
    """``c_i = exp(mean_t d'_t)`` with ``d' = min(d, eps_high)`` where A > 0 and ``max(d, -eps)`` elsewhere, ``(S,)``.

    Args:
        log_ratio: ``(B, T)`` token log-ratios d.
        advantages: ``(S,)``.
        mask: ``(B, T)`` bool, the tokens that count.
        sequence: ``(B, T)`` sequence index.
        num_sequences: S.
        epsilon: Lower clip, in log space.
        epsilon_high: Upper clip, in log space.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """
    better = spread(advantages, sequence) > 0
    clipped = torch.where(better, log_ratio.clamp_max(epsilon_high), log_ratio.clamp_min(-epsilon))
    return sequence_mean(clipped, mask, sequence, num_sequences).exp()


def _by_sign(good: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two constants, in the precision of ``like``: torch.where of two numbers would be float32."""
    return torch.where(good, like.new_tensor(yes), like.new_tensor(no))


def vespo_weight(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    pos: tuple[float, float],
    neg: tuple[float, float],
    rollout_weight: Tensor | None = None,
) -> Tensor:
    """``phi = exp(lam + k log w - lam w)`` with the sequence ratio ``w``, ``(S,)``, no gradient.

    A token whose rollout weight is 0 contributes ``log 1e-8`` and so silences its whole sequence: intended.

    Args:
        log_ratio: ``(B, T)`` token log-ratios.
        advantages: ``(S,)``.
        mask: ``(B, T)`` bool.
        sequence: ``(B, T)`` sequence index.
        num_sequences: S.
        pos: ``(k, lam)`` where A >= 0.
        neg: ``(k, lam)`` where A < 0.
        rollout_weight: ``(B, T)`` correction for the engine's own probabilities.

    Reference: VESPO, arXiv:2602.10693.
    """
    floor = math.log(1e-8)
    log_w = sequence_sum(log_ratio.detach().clamp(-20.0, 20.0), mask, sequence, num_sequences)
    if rollout_weight is not None:
        log_w = log_w + sequence_sum(rollout_weight.log().clamp(floor, 20.0), mask, sequence, num_sequences)
    log_w = log_w.clamp(floor, 20.0)
    k = _by_sign(advantages >= 0, pos[0], neg[0], log_w)
    lam = _by_sign(advantages >= 0, pos[1], neg[1], log_w).clamp_min(1e-4)
    return torch.exp(lam + k * log_w - lam * log_w.exp()).nan_to_num(0.0, posinf=0.0)


def vespo(phi: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
    """``-sg(phi) A log p``, ``(B, T)``."""
    return -phi.detach() * advantages * logp


@dataclass(frozen=True, slots=True)
class LossType:
    """One row of the table.

    Attributes:
        surrogate: ``clipped``, ``cispo``, ``sapo``, ``vespo`` or ``geometric``.
        reduction: How tokens become one number; see `posttrain.losses.reduce`.
        level: The ratio level it fixes; None leaves it to the config.
    """

    surrogate: str
    reduction: Reduction
    level: str | None = None


LOSS_TYPES: dict[str, LossType] = {
    "grpo": LossType("clipped", "sequence_token"),
    "bnpo": LossType("clipped", "local_token"),
    "dr_grpo": LossType("clipped", "constant"),
    "dapo": LossType("clipped", "token"),
    "cispo": LossType("cispo", "token"),
    "sapo": LossType("sapo", "sequence_token"),
    # A sequence's term times its length, averaged over sequences: the sum of its tokens' equal terms.
    "luspo": LossType("clipped", "constant", "sequence"),
    "vespo": LossType("vespo", "token", "token"),
    # One ratio a completion: all its tokens have its term, whose mean over the sequence is the term itself.
    "gmpo": LossType("geometric", "sequence_token", "token"),
}


def clip_metrics(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    surrogate: str = "clipped",
    level: str = "token",
) -> dict[str, Metric]:
    """Share of ratios whose gradient the clip removed: ``clip_ratio/{low,high,region}_mean``, ``low_min``, ``high_max``.

    A ratio of a whole sequence counts once, however long the sequence is. Methods without a clip have no such share.
    """
    ratio = log_ratio.detach().exp() if delta is None else log_ratio.detach().exp().clamp_max(delta)
    lengths = sequence_sum(mask.float(), mask, sequence, num_sequences)
    some = lengths > 0

    def per_sequence(hits: Tensor) -> Tensor:
        return (sequence_sum(hits, mask, sequence, num_sequences) / lengths.clamp_min(1.0))[some]

    def share(hits: Tensor) -> Metric:
        return mean(hits, mask) if level == "token" else mean(per_sequence(hits))

    if surrogate == "cispo":
        return {"cispo_clip_ratio": share(((ratio > epsilon_high) & (advantages > 0)).float())}
    if surrogate != "clipped":
        return {}
    low = ((ratio < 1.0 - epsilon) & (advantages < 0)).float()
    high = ((ratio > 1.0 + epsilon_high) & (advantages > 0)).float()
    return {
        "clip_ratio/low_mean": share(low),
        "clip_ratio/low_min": minimum(per_sequence(low)),
        "clip_ratio/high_mean": share(high),
        "clip_ratio/high_max": maximum(per_sequence(high)),
        "clip_ratio/region_mean": share(low + high),
    }
