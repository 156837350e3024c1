"""Policy losses of reinforcement learning: importance ratios, surrogates, and the KL penalty."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import check_choice
from posttrain.losses.reduce import sequence_mean, sequence_sum, spread
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.types import Reduction

__all__ = [
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LEVELS",
    "LOSS_TYPES",
    "LossType",
    "cispo",
    "clip_metrics",
    "clipped",
    "engine_gap",
    "entropy_mask",
    "geometric_ratio",
    "importance_log_ratio",
    "k1",
    "k2",
    "k3",
    "kl_penalty",
    "off_policy_mask",
    "rollout_correction",
    "sapo",
    "sequence_weight",
    "surrogate",
    "token_terms",
    "vespo",
    "vespo_weight",
]


LEVELS = ("token", "sequence", "sequence_token")


def importance_log_ratio(
    logp: Tensor, old_logp: Tensor | None, mask: Tensor, sequence: Tensor, num_sequences: int, *, level: str
) -> Tensor:
    """Compute the ``(B, T)`` logarithms of importance ratios. The ratio of a token is the token's probability under the
    current policy divided by its probability under the policy that sampled it.

    The level ``token`` gives ``logp - old_logp``. The level ``sequence`` gives every token the mean of these log-ratios over
    its sequence, i.e. the log of the geometric mean of the token ratios. The level ``sequence_token`` gives the same values,
    but the gradient of a token flows only through its own log-prob.

    Args:
        logp: ``(B, T)`` log-probs under the current policy.
        old_logp: ``(B, T)`` log-probs under the policy that sampled the tokens. None if the policy has not changed since
            then. The log-ratio is then 0, and its gradient is the gradient of ``logp``.
        mask: Bool tensor ``(B, T)``, True for loss tokens.
        sequence: ``(B, T)`` sequence index of each token.
        num_sequences: Number of sequences S.
        level: One of `LEVELS`.

    Reference: GSPO, arXiv:2507.18071, equations 7 (sequence) and 14 (sequence_token).
    """
    token = logp - (logp.detach() if old_logp is None else old_logp)
    if level == "token":
        return token
    check_choice("importance_sampling_level", level, LEVELS)
    whole = spread(sequence_mean(token, mask, sequence, num_sequences), sequence)
    return whole if level == "sequence" else whole.detach() + logp - logp.detach()


def _truncate(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(low, high)


def _mask(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


# Modes of rollout correction. Each value contains the aggregation of log-ratios over a sequence, and the function that
# limits the ratio.
CORRECTIONS: dict[str, tuple[str, Callable[[Tensor, float, float], Tensor]]] = {
    "token_truncate": ("token", _truncate),
    "token_mask": ("token", _mask),
    "sequence_truncate": ("sum", _truncate),
    "sequence_mask": ("sum", _mask),
    "geometric": ("mean", _mask),
}


def rollout_correction(
    logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    mode: str,
    clip_max: float | None,
    clip_min: float | None = None,
) -> Tensor:
    """Compute importance weights ``(B, T)`` that correct for differences between the log-probs of engine and trainer. The
    weights have no gradient.

    The weight is ``r = exp(d)`` with ``d = logp - rollout_logp`` on loss tokens. d is computed per token (``token_*``),
    summed over the sequence (``sequence_*``), or averaged over the sequence (``geometric``). The modes ``*_truncate`` clamp r
    to the bounds. All other modes set r to 0 if r is outside the bounds. If the engine has returned no log-prob for a token
    (NaN), the token gets the weight 0 and contributes d = 0 to the sum or mean of its sequence.

    Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS, MIS).
    """
    check_choice("vllm_importance_sampling_mode", mode, CORRECTIONS)
    pooling, bound = CORRECTIONS[mode]
    gap = (logp - rollout_logp).detach()
    unknown = gap.isnan()
    gap = torch.where(mask & ~unknown, gap, 0.0)
    if pooling != "token":
        pool = sequence_sum if pooling == "sum" else sequence_mean
        gap = spread(pool(gap, mask, sequence, num_sequences), sequence)
    weight = bound(gap.exp(), clip_min or 0.0, float("inf") if clip_max is None else clip_max)
    return weight.masked_fill(unknown, 0.0)


def sequence_weight(
    weight: Tensor, rollout_logp: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """Reduce the weights of a sequence-level correction to one weight per sequence. Return a tensor ``(S,)`` of weights, and
    a bool tensor ``(S,)`` that is False for sequences without a weight.

    Args:
        weight: ``(B, T)`` weights from `rollout_correction`.
        rollout_logp: ``(B, T)`` log-probs of the engine. Tokens with NaN are ignored, because their weight is always 0.
        mask: Bool tensor ``(B, T)``, True for loss tokens.
        sequence: ``(B, T)`` sequence index of each token.
        num_sequences: Number of sequences S.
    """
    valid = mask & ~rollout_logp.isnan()
    some = sequence_sum(valid.float(), valid, sequence, num_sequences) > 0
    return sequence_mean(weight, valid, sequence, num_sequences), some


def engine_gap(logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Compute metrics of the difference between the log-probs of engine and trainer for the same tokens and weights.

    Args:
        logp: Log-probs of the trainer in nats. The tensor may have any shape.
        sampled_logp: Log-probs of the engine, or NaN for tokens for which the engine has returned no log-prob.
        mask: Bool tensor, True for loss tokens.

    Returns:
        Metrics by name: mean and maximum of ``|logp - sampled_logp|``, the KL estimate ``mean(rho - 1 - log rho)``, and the
        fraction of NaN log-probs.
    """
    valid = mask & ~sampled_logp.isnan()
    difference = torch.where(valid, logp.detach() - sampled_logp, 0.0)
    gap = difference.abs()
    return {
        "sampling/sampling_logp_difference/mean": mean(gap, valid),
        "sampling/sampling_logp_difference/max": maximum(gap, valid),
        "sampling/kl": mean(torch.expm1(difference) - difference, valid),
        "sampling/nan_logprobs": mean((~valid).float(), mask),
    }


def off_policy_mask(
    logp: Tensor,
    sampled_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    threshold: float,
) -> Tensor:
    """Return a bool tensor ``(S,)`` that is False for sequences to exclude. A sequence is excluded if its advantage is
    negative and its probability has decreased strongly since sampling.

    Sequences with ``A_i >= 0 or mean_t(sampled_logp - logp) <= threshold`` are kept. Tokens without a sampled log-prob (NaN)
    contribute 0 to the mean.

    Reference: DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    gap = (sampled_logp - logp.detach()).nan_to_num(nan=0.0)
    gap = sequence_mean(gap, mask, sequence, num_sequences)
    return (advantages >= 0) | (gap <= threshold)


def entropy_mask(
    entropy: Tensor, mask: Tensor, *, quantile: float, gather: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Select the fraction ``quantile`` of loss tokens with the largest entropies. Return a bool mask ``(B, T)``.

    Args:
        entropy: ``(B, T)`` entropy in nats of the distribution of each token.
        mask: Bool tensor ``(B, T)``, True for loss tokens.
        quantile: Fraction of the tokens to select. 0 selects only the token with the maximum entropy.
        gather: Function that concatenates a 1-D tensor over ranks, so that all ranks use the same threshold. None: one
            process.

    Reference: Beyond the 80/20 rule, arXiv:2506.01939.
    """
    values = entropy[mask].detach().float()
    values = gather(values) if gather is not None else values
    if values.numel() == 0:
        return torch.zeros_like(mask)
    # Sort the values, because torch.quantile does not support more than 2**24 elements.
    ordered = values.sort().values
    position = (1.0 - quantile) * (values.numel() - 1)
    below = int(position)
    above = min(below + 1, values.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return mask & (entropy >= threshold)


def clipped(
    log_ratio: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """Compute PPO's clipped loss ``-min(r A, clip(r, 1 - eps, 1 + eps_high) A)``, where r is the importance ratio. With
    ``delta``, the unclipped r is limited to delta.

    Args:
        log_ratio: ``(B, T)`` log importance ratio.
        advantages: ``(B, T)`` advantages.
        epsilon: Clip range below 1.
        epsilon_high: Clip range above 1.
        delta: Maximum of the unclipped ratio, or None. Without this limit, the loss of a token with a negative advantage is
            unbounded.

    Reference: PPO, arXiv:1707.06347, equation 7; two-sided clipping, INTELLECT-2, arXiv:2505.07291, section 3.4.
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    free = ratio if delta is None else ratio.clamp_max(delta)
    return -torch.minimum(free * advantages, bounded * advantages)


def cispo(log_ratio: Tensor, advantages: Tensor, logp: Tensor, *, epsilon_high: float) -> Tensor:
    """Compute the CISPO loss ``-sg(min(r, eps_high)) A log p``. The ratio r is a limited weight without gradient. Unlike with
    PPO's clip, no token loses its gradient.

    Reference: MiniMax-M1, arXiv:2506.13585, equation 4.
    """
    return -log_ratio.exp().clamp_max(epsilon_high).detach() * advantages * logp


def sapo(log_ratio: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float) -> Tensor:
    """Compute the SAPO loss ``-A (4 / tau) sigmoid(tau (r - 1))``, which uses a smooth function of r instead of a clip. The
    temperature tau depends on the sign of A.

    Reference: SAPO, arXiv:2511.20347, equation 6.
    """
    tau = _by_sign(advantages > 0, temperature_pos, temperature_neg, advantages)
    return -advantages * (4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0))


def surrogate(
    name: str,
    log_ratio: Tensor,
    advantages: Tensor,
    logp: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
    sapo_temperatures: tuple[float, float],
) -> Tensor:
    """Compute the ``(B, T)`` policy losses of tokens with the surrogate ``name``.

    Args:
        name: Name of the surrogate; see `LossType`.
        log_ratio: ``(B, T)`` log importance ratio.
        advantages: ``(B, T)`` advantages.
        logp: ``(B, T)`` log-probs under the current policy.
        epsilon: Clip range below 1.
        epsilon_high: Clip range above 1.
        delta: Maximum of the unclipped ratio, see `clipped`.
        sapo_temperatures: Temperatures for positive advantages and for all other advantages, see `sapo`.
    """
    if name == "cispo":
        return cispo(log_ratio, advantages, logp, epsilon_high=epsilon_high)
    if name == "sapo":
        positive, negative = sapo_temperatures
        return sapo(log_ratio, advantages, temperature_pos=positive, temperature_neg=negative)
    return clipped(log_ratio, advantages, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta)


def token_terms(
    name: str,
    logp: Tensor,
    *,
    advantages: Tensor,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    beta: float,
    corrected: bool,
    **options: Any,
) -> Tensor:
    """Compute the loss ``surrogate + beta * KL`` of each token from the token's own log-prob. The result has the shape of
    ``logp``.

    Args:
        name: Name of the surrogate.
        logp: Log-probs under the current policy.
        advantages: Advantage of each token's completion.
        old_logp: Log-probs at sampling time. None if the policy has not changed since then.
        ref_logp: Log-probs under the reference. None: no KL penalty.
        beta: Coefficient of the KL penalty.
        corrected: Whether the KL penalty is multiplied by the importance ratio.
        options: Further arguments of `surrogate`.
    """
    log_ratio = logp - (logp.detach() if old_logp is None else old_logp)
    terms = surrogate(name, log_ratio, advantages, logp, **options)
    if ref_logp is None:
        return terms
    return terms + beta * kl_penalty(logp, ref_logp, log_ratio if corrected else None)


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
    """Compute GMPO's ratio ``c_i = exp(mean_t d'_t)`` of each of S sequences. The clipped log-ratio ``d'`` is
    ``min(d, eps_high)`` if A > 0, and ``max(d, -eps)`` otherwise.

    Args:
        log_ratio: ``(B, T)`` token log-ratios d.
        advantages: ``(S,)`` advantages.
        mask: Bool tensor ``(B, T)``, True for tokens that are included.
        sequence: ``(B, T)`` sequence index of each token.
        num_sequences: Number of sequences S.
        epsilon: Clip range of the log-ratio below 0.
        epsilon_high: Clip range of the log-ratio above 0.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """
    better = spread(advantages, sequence) > 0
    clipped = torch.where(better, log_ratio.clamp_max(epsilon_high), log_ratio.clamp_min(-epsilon))
    return sequence_mean(clipped, mask, sequence, num_sequences).exp()


def _by_sign(good: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Select one of two constants for each element of ``good``, in the dtype of ``like``. With two Python floats, torch.where
    would return float32.
    """
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
    """Compute VESPO's weight ``phi = exp(lam + k log w - lam w)`` of each of S sequences, where w is the sequence's
    importance ratio. The weight has no gradient.

    A token with the rollout weight 0 contributes ``log 1e-8`` to ``log w``. The weight of the token's whole sequence is then
    almost 0, which is intended.

    Args:
        log_ratio: ``(B, T)`` token log-ratios.
        advantages: ``(S,)`` advantages.
        mask: Bool tensor ``(B, T)``, True for loss tokens.
        sequence: ``(B, T)`` sequence index of each token.
        num_sequences: Number of sequences S.
        pos: Parameters ``(k, lam)`` for A >= 0.
        neg: Parameters ``(k, lam)`` for A < 0.
        rollout_weight: ``(B, T)`` weights from `rollout_correction`, or None.

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
    """Compute the ``(B, T)`` VESPO losses ``-sg(phi) A log p`` of tokens."""
    return -phi.detach() * advantages * logp


@dataclass(frozen=True, slots=True)
class LossType:
    """Definition of a loss type (a value of ``loss_type``): its surrogate, its reduction and its ratio level.

    Attributes:
        surrogate: ``clipped``, ``cispo``, ``sapo``, ``vespo`` or ``geometric``.
        reduction: Name of the reduction of token terms to one number; see `posttrain.losses.reduce`.
        level: Ratio level that the loss type requires. None: the level in the config is used.
    """

    surrogate: str
    reduction: Reduction
    level: str | None = None

    @property
    def by_token(self) -> bool:
        """Whether the surrogate of a token is independent of all other tokens. The property assumes token-level ratios."""
        return self.surrogate in ("clipped", "cispo", "sapo")


LOSS_TYPES: dict[str, LossType] = {
    "grpo": LossType("clipped", "sequence_token"),
    "bnpo": LossType("clipped", "local_token"),
    "dr_grpo": LossType("clipped", "constant"),
    "dapo": LossType("clipped", "token"),
    "cispo": LossType("cispo", "token"),
    "sapo": LossType("sapo", "sequence_token"),
    # LUSPO multiplies the term of each sequence by its length and averages over sequences. All tokens of a sequence have the
    # same term, so the product equals a sum over tokens.
    "luspo": LossType("clipped", "constant", "sequence"),
    "vespo": LossType("vespo", "token", "token"),
    # GMPO has one ratio per completion, so all tokens of a completion have the same term. The mean over the completion's
    # tokens equals this term.
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
    """Compute metrics of the fraction of clipped ratios: ``clip_ratio/{low,high,region}_mean``, ``clip_ratio/low_min`` and
    ``clip_ratio/high_max``.

    A sequence-level ratio is counted once per sequence. For surrogates without a clip, the function returns no metrics.
    """
    ratio = log_ratio.detach().exp()
    lengths = sequence_sum(mask.float(), mask, sequence, num_sequences)
    some = lengths > 0

    def per_sequence(hits: Tensor) -> Tensor:
        return sequence_sum(hits, mask, sequence, num_sequences) / lengths.clamp_min(1.0)

    def share(hits: Tensor) -> Metric:
        return mean(hits, mask) if level == "token" else mean(per_sequence(hits), some)

    if surrogate == "cispo":
        return {"cispo_clip_ratio": share(((ratio > epsilon_high) & (advantages > 0)).float())}
    if surrogate != "clipped":
        return {}
    ratio = ratio if delta is None else ratio.clamp_max(delta)
    low = ((ratio < 1.0 - epsilon) & (advantages < 0)).float()
    high = ((ratio > 1.0 + epsilon_high) & (advantages > 0)).float()
    return {
        "clip_ratio/low_mean": share(low),
        "clip_ratio/low_min": minimum(per_sequence(low), some),
        "clip_ratio/high_mean": share(high),
        "clip_ratio/high_max": maximum(per_sequence(high), some),
        "clip_ratio/region_mean": share(low + high),
    }


# Maximum absolute value of the exponent in k3. A token with exp(20) = 5e8 already dominates the loss.
CLAMP = 20.0


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Compute the KL estimate ``logp - ref_logp``, which is unbiased and can be negative."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Compute the KL estimate ``(logp - ref_logp)^2 / 2``, which is biased and never negative."""
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Compute the KL estimate ``exp(d) - d - 1`` with ``d = ref_logp - logp``. The estimate is unbiased and never
    negative. It is 0 for equal log-probs.

    Reference: Schulman 2020, "Approximating KL divergence"; GRPO, arXiv:2402.03300, equation 4.
    """
    gap = ref_logp - logp
    return torch.exp(gap.clamp(-CLAMP, CLAMP)) - gap - 1.0


def kl_penalty(logp: Tensor, ref_logp: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Compute the KL estimate `k3` of each token. If ``log_ratio`` is passed, the estimate is multiplied by the importance
    ratio ``exp(log_ratio)``.
    """
    kl = k3(logp, ref_logp)
    return kl if log_ratio is None else kl * log_ratio.exp()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
