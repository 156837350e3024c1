"""Importance ratios: how far the policy has moved since a token was sampled, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posttrain.errors import ConfigError, did_you_mean
from posttrain.losses.reduce import sequence_mean, sequence_sum, spread
from posttrain.metrics import Metric, maximum, mean

__all__ = [
    "CORRECTIONS",
    "LEVELS",
    "engine_gap",
    "entropy_mask",
    "importance_log_ratio",
    "off_policy_mask",
    "rollout_correction",
]

LEVELS = ("token", "sequence", "sequence_token")


def importance_log_ratio(
    logp: Tensor, old_logp: Tensor | None, mask: Tensor, sequence: Tensor, num_sequences: int, *, level: str
) -> Tensor:
    """Log of the ratio between the current policy and the one that sampled, ``(B, T)``.

    ``token``: ``logp - old_logp``. ``sequence``: its mean over the sequence, the geometric mean of the ratios, on every
    token. ``sequence_token``: that value, with each token's own gradient.

    Args:
        logp: ``(B, T)`` log-probs under the current policy.
        old_logp: ``(B, T)`` at sampling time; None while the policy has not moved: the value is 0, the gradient is intact.
        mask: ``(B, T)`` bool, loss tokens.
        sequence: ``(B, T)`` sequence index.
        num_sequences: S.
        level: One of `LEVELS`.

    Reference: GSPO, arXiv:2507.18071, equations 7 (sequence) and 14 (sequence_token).
    """
    token = logp - (logp.detach() if old_logp is None else old_logp)
    if level == "token":
        return token
    if level not in LEVELS:
        raise ConfigError(f"importance_sampling_level={level!r} is not known{did_you_mean(level, LEVELS)}.")
    whole = spread(sequence_mean(token, mask, sequence, num_sequences), sequence)
    return whole if level == "sequence" else whole.detach() + logp - logp.detach()


def _truncate(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(low, high)


def _mask(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


# name -> (how the log gap is pooled over a sequence, how the ratio is bounded)
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
    """Weight that makes tokens sampled by an engine count as if the trainer had sampled them, ``(B, T)``, no gradient.

    ``r = exp(d)`` with ``d = logp - rollout_logp`` on loss tokens, per token, summed over the sequence (``sequence_*``) or
    averaged over it (``geometric``); then clamped to the bounds (``*_truncate``) or zeroed outside them. A token that the
    engine gave no log-prob (NaN) gets weight 0, and counts as no gap in its sequence.

    Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS, MIS).
    """
    if mode not in CORRECTIONS:
        raise ConfigError(f"importance sampling mode {mode!r} is not known{did_you_mean(mode, CORRECTIONS)}.")
    pooling, bound = CORRECTIONS[mode]
    gap = (logp - rollout_logp).detach()
    unknown = gap.isnan()
    gap = torch.where(mask & ~unknown, gap, 0.0)
    if pooling != "token":
        pool = sequence_sum if pooling == "sum" else sequence_mean
        gap = spread(pool(gap, mask, sequence, num_sequences), sequence)
    weight = bound(gap.exp(), clip_min or 0.0, float("inf") if clip_max is None else clip_max)
    return weight.masked_fill(unknown, 0.0)


def engine_gap(logp: Tensor, sampled_logp: Tensor, mask: Tensor) -> dict[str, Metric]:
    """How far what an engine said of its tokens is from what the trainer says of them, under the same weights.

    Args:
        logp: Log-probs of the trainer, any shape, nats.
        sampled_logp: Those of the engine; NaN where it gave none.
        mask: Loss tokens.

    Returns:
        Mean and largest ``|logp - sampled_logp|``, the KL estimate ``mean(rho - 1 - log rho)``, and the share of NaN.
    """
    known = mask & ~sampled_logp.isnan()
    difference = torch.where(known, logp.detach() - sampled_logp, 0.0)
    gap = difference.abs()
    return {
        "sampling/sampling_logp_difference/mean": mean(gap, known),
        "sampling/sampling_logp_difference/max": maximum(gap[known]),
        "sampling/kl": mean(torch.expm1(difference) - difference, known),
        "sampling/nan_logprobs": mean((~known).float(), mask),
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
    """Keep a sequence iff its advantage is not negative or the policy has not moved away from it, ``(S,)`` bool.

    ``A_i >= 0  or  mean_t(sampled_logp - logp) <= threshold``. Tokens without a sampled log-prob (NaN) are no evidence.

    Reference: DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    gap = (sampled_logp - logp.detach()).nan_to_num(nan=0.0)
    gap = sequence_mean(gap, mask, sequence, num_sequences)
    return (advantages >= 0) | (gap <= threshold)


def entropy_mask(
    entropy: Tensor, mask: Tensor, *, quantile: float, gather: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Keep the loss tokens whose entropy reaches the ``1 - quantile`` quantile of all loss tokens, ``(B, T)`` bool.

    Args:
        entropy: ``(B, T)`` nats.
        mask: ``(B, T)`` bool.
        quantile: Share of the tokens to keep; 0 keeps the maximum only.
        gather: Concatenates a 1-D tensor over ranks, so that the threshold is one for all of them.

    Reference: Beyond the 80/20 rule, arXiv:2506.01939.
    """
    values = entropy[mask].detach().float()
    values = gather(values) if gather is not None else values
    if values.numel() == 0:
        return torch.zeros_like(mask)
    # Sorting has no size limit; torch.quantile refuses more than 2**24 elements.
    ordered = values.sort().values
    position = (1.0 - quantile) * (values.numel() - 1)
    below = int(position)
    above = min(below + 1, values.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return mask & (entropy >= threshold)
