"""Inputs of preference losses: sums and means of log-probs, weights, and scores under an f-divergence.

Let ``L = log pi(y) - log rho(y)`` be the log-ratio of policy and reference. For a divergence with generator f, the score is
``f'(exp L)``, where f is chosen so that the score is 0 at L = 0. For the reverse KL (plain DPO), the score is L. The reward
is beta times the score plus a per-prompt constant. The constant cancels in a difference of two scores, but not in a single
score. Losses that use a single completion therefore use L instead of the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.errors import check_choice

__all__ = [
    "DIVERGENCES",
    "MAX_EXPONENT",
    "alpha_divergence",
    "alpha_reward",
    "collision_logp",
    "desensitized_sum",
    "forward_kl",
    "js_divergence",
    "link",
    "log1mexp",
    "mean_logp",
    "pair_values",
    "reverse_kl",
    "wpo_weight",
]

# Upper limit of the mean log-prob in log(1 - p). For values closer to 0, the gradient in float32 would be inaccurate.
MAX_LOG_P = -1e-6
# Maximum exponent in float32. exp(80) is 5.5e34, which is a factor of 6000 below the largest float32.
MAX_EXPONENT = 80.0
# Maximum exponent in half precision. exp(11) is 59874, which is below the largest float16 (65504).
MAX_EXPONENT_HALF = 11.0
# Minimum difference of alpha from 1. For a smaller difference, the reverse KL is used, because the formula divides by alpha
# - 1.
NEAR_ONE = 1e-6


def _wide(x: Tensor) -> Tensor:
    """Cast to float32 unless the dtype is float64."""
    return x if x.dtype == torch.float64 else x.float()


def _bounded_expm1(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return exponent.clamp_max(MAX_EXPONENT_HALF if dtype == torch.float16 else MAX_EXPONENT).expm1()


def reverse_kl(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio ``L`` unchanged, which is its score in plain DPO."""
    return log_ratio


def forward_kl(log_ratio: Tensor) -> Tensor:
    """Compute the forward-KL score ``1 - exp(-L)`` of log-ratios of any shape. The exponent is limited to 80 (11 in float16).
    Beyond this limit, the gradient is 0.

    Reference: Beyond reverse KL (f-DPO), arXiv:2309.16240, table 1.
    """
    return -_bounded_expm1(-_wide(log_ratio), log_ratio.dtype).to(log_ratio.dtype)


def js_divergence(log_ratio: Tensor) -> Tensor:
    """Compute the Jensen-Shannon score ``log 2 + log sigmoid(L)`` of log-ratios of any shape.

    Reference: Beyond reverse KL (f-DPO), arXiv:2309.16240, table 1.
    """
    return math.log(2.0) + F.logsigmoid(log_ratio)


def alpha_divergence(log_ratio: Tensor, *, alpha: float) -> Tensor:
    """Compute the alpha-divergence score ``(exp((alpha - 1) L) - 1) / (alpha - 1)``, or ``L`` itself if alpha is 1. The score
    is computed in float32 and cast to the dtype of ``L``.

    Args:
        log_ratio: Log-ratios in nats, with any shape and floating dtype.
        alpha: Coefficient of the divergence.

    Returns:
        Scores in the log-ratio's shape and dtype, always finite.

    Reference: Beyond reverse KL (f-DPO), arXiv:2309.16240, table 1.
    """
    power = alpha - 1.0
    if abs(power) < NEAR_ONE:
        return log_ratio
    dtype = log_ratio.dtype
    score = _bounded_expm1(power * _wide(log_ratio), dtype) / power
    # Clamp the quotient, because it can exceed the range of a 16-bit dtype. For example, exp(11) / 0.5 overflows float16.
    return score.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}


def link(log_ratio: Tensor, *, divergence: str = "reverse_kl", alpha: float = 0.5) -> Tensor:
    """Compute the score of a log-ratio under the f-divergence called ``divergence``.

    Args:
        log_ratio: Log-ratios in nats, with any shape and floating dtype.
        divergence: A key of `DIVERGENCES`.
        alpha: Coefficient of ``alpha_divergence``. Other divergences have no coefficient.

    Returns:
        Scores in the log-ratio's shape and dtype.

    Raises:
        ConfigError: ``divergence`` is not in `DIVERGENCES`.

    >>> link(torch.tensor([0.0, 2.0]), divergence="forward_kl")
    tensor([0.0000, 0.8647])
    """
    check_choice("f_divergence_type", divergence, DIVERGENCES)
    if divergence == "alpha_divergence":
        return alpha_divergence(log_ratio, alpha=alpha)
    return DIVERGENCES[divergence](log_ratio)


# Sums and weights over tokens -------------------------------------------------------------------------------------------


def mean_logp(logp: Tensor, length: Tensor) -> Tensor:
    """Compute the mean log-prob (or score) per token of each completion, ``log pi / max(n, 1)``. For empty completions, the
    mean is 0 instead of NaN.
    """
    return logp / length.clamp_min(1).to(logp)


def desensitized_sum(logp: Tensor, mask: Tensor, sequence: Tensor, limits: Tensor, *, alpha: float) -> Tensor:
    """Sum the log-probs of each sequence, with the weight ``alpha`` for tokens beyond a limit (LD-DPO). The sum is
    ``sum_{k <= limit} l_k + alpha sum_{k > limit} l_k``.

    Args:
        logp: ``(B, T)`` log-probs of the policy or of the reference.
        mask: Bool tensor ``(B, T)``, True for tokens that are included.
        sequence: ``(B, T)`` int64 sequence index of each token, or -1 for tokens that belong to no sequence.
        limits: ``(S,)`` limit of each sequence, which is the length in tokens of the shorter completion of the pair.
        alpha: Weight of the tokens beyond the limit. 1 gives the plain sum, and 0 ignores these tokens.

    Returns:
        ``(S,)`` sums.

    Reference: Length desensitization in DPO (LD-DPO), arXiv:2409.06411.
    """
    valid = mask & (sequence >= 0)
    owner = sequence[valid]
    # A stable sort keeps the order of tokens within a sequence.
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=len(limits))
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(owner)
    rank[order] = torch.arange(len(owner), device=owner.device) - starts[owner[order]]
    weight = torch.where(rank < limits[owner], 1.0, alpha).to(logp)
    return logp.new_zeros(len(limits)).index_add(0, owner, weight * logp[valid])


def collision_logp(logits: Tensor) -> Tensor:
    """Compute the logarithm of the probability that two sampled tokens are equal. For logits ``z (..., V)``, the result is
    ``log sum_v p_v^2 = lse(2 z) - 2 lse(z)``.
    """
    return (2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)


def wpo_weight(logp: Tensor, collision: Tensor, length: Tensor) -> Tensor:
    """Compute the WPO weight ``exp((sum_t l_t - sum_t log sum_v p_v^2) / n)`` of each of S completions. The weight has no
    gradient and no upper limit.

    The weight of a pair is the product of the weights of its two completions.

    Args:
        logp: ``(S,)`` sums of log-probs, without weights.
        collision: ``(S,)`` sums of `collision_logp` over the same tokens.
        length: ``(S,)`` number of tokens n, clamped to at least 1.

    Reference: WPO, arXiv:2406.11827.
    """
    return mean_logp(logp - collision, length).detach().exp()


def alpha_reward(logp: Tensor, *, alpha: float) -> Tensor:
    """Compute AlphaPO's reward ``(1 - exp(-alpha l)) / alpha`` of each log-prob l. If alpha is 0, the reward is ``l``.

    The argument is a log-prob, because the probability itself could underflow.

    Reference: AlphaPO, arXiv:2501.03884.
    """
    return logp if alpha == 0 else -torch.expm1((-alpha * logp).clamp_max(MAX_EXPONENT)) / alpha


def log1mexp(x: Tensor) -> Tensor:
    """Compute ``log(1 - e^x)`` for a tensor x < 0 of any shape. x is limited to -1e-6. Above this limit, the gradient is 0.

    Two formulas are combined with torch.where, which also computes the gradient of the formula that is not selected. In half
    precision, the formula for small probabilities has an infinite slope near x = 0, and 0 times infinity is NaN. Near x = 0,
    this formula is therefore evaluated at x = -1 instead.

    Reference: Mächler 2012, "Accurately computing log(1 - exp(-|a|))", equation 7.
    """
    x = x.clamp_max(MAX_LOG_P)
    small = x < -math.log(2.0)
    far = torch.log1p(-torch.where(small, x, -1.0).exp())
    return torch.where(small, far, torch.log(-torch.expm1(x)))


def pair_values(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    *,
    divergence: str = "reverse_kl",
    alpha: float = 0.5,
    plain_chosen_logp: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute all inputs of the losses in `posttrain.losses.preference.DPO_LOSSES`, as a mapping from names to tensors
    ``(P,)``.

    Args:
        chosen_logp: ``(P,)`` summed log-probs of the chosen completions under the policy. With LD-DPO, computed by
            `desensitized_sum`.
        rejected_logp: ``(P,)`` summed log-probs of the rejected completions under the policy.
        ref_chosen_logp: ``(P,)`` summed log-probs of the chosen completions under the reference.
        ref_rejected_logp: ``(P,)`` summed log-probs of the rejected completions under the reference.
        chosen_length: ``(P,)`` number of tokens of the chosen completions.
        rejected_length: ``(P,)`` number of tokens of the rejected completions.
        divergence: A key of `DIVERGENCES`.
        alpha: Coefficient of ``alpha_divergence``.
        plain_chosen_logp: ``(P,)`` sums of log-probs without weights, for the loss ``sft``. Required if ``chosen_logp`` comes
            from `desensitized_sum`. None: ``chosen_logp``.

    >>> one = torch.ones(1)
    >>> pair_values(2 * one, one, one, one, one, one)["chosen_score"]
    tensor([1.])
    """
    chosen_ratio, rejected_ratio = chosen_logp - ref_chosen_logp, rejected_logp - ref_rejected_logp
    return {
        "chosen_logp": chosen_logp,
        "rejected_logp": rejected_logp,
        "ref_chosen_logp": ref_chosen_logp,
        "ref_rejected_logp": ref_rejected_logp,
        "chosen_length": chosen_length,
        "rejected_length": rejected_length,
        "chosen_ratio": chosen_ratio,
        "rejected_ratio": rejected_ratio,
        "chosen_score": link(chosen_ratio, divergence=divergence, alpha=alpha),
        "rejected_score": link(rejected_ratio, divergence=divergence, alpha=alpha),
        "plain_chosen_logp": chosen_logp if plain_chosen_logp is None else plain_chosen_logp,
    }
