"""From log-probs of tokens to what a preference loss reads: sums, means, weights, and scores under an f-divergence.

With ``L = log pi(y) - log rho(y)`` and a divergence's generator f, the score is ``f'(exp L)``, with the f for which it is 0 at
L = 0: reverse KL, plain DPO, scores by L itself. The reward is beta times it up to a number of the prompt, which cancels in a
difference of scores alone: a loss that reads one side reads L.
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

MAX_LOG_P = -1e-6  # log(1 - p) of a mean log-prob closer to 0 than this has no useful float32 gradient.
MAX_EXPONENT = 80.0  # exp(80) is 5.5e34: room for a factor of 6000 before float32 overflows.
MAX_EXPONENT_HALF = 11.0  # exp(11) is 59874, below the 65504 of float16.
NEAR_ONE = 1e-6  # An alpha this close to 1 is the reverse KL: the formula would divide by almost nothing.


def _wide(x: Tensor) -> Tensor:
    """Float32 unless it is float64 already."""
    return x if x.dtype == torch.float64 else x.float()


def _bounded_expm1(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return exponent.clamp_max(MAX_EXPONENT_HALF if dtype == torch.float16 else MAX_EXPONENT).expm1()


def reverse_kl(log_ratio: Tensor) -> Tensor:
    """``L``: plain DPO, any shape."""
    return log_ratio


def forward_kl(log_ratio: Tensor) -> Tensor:
    """``1 - exp(-L)``, any shape; the exponent stops at 80 (11 in float16), and beyond it the gradient is 0.

    Reference: Beyond reverse KL (f-DPO), arXiv:2309.16240, table 1.
    """
    return -_bounded_expm1(-_wide(log_ratio), log_ratio.dtype).to(log_ratio.dtype)


def js_divergence(log_ratio: Tensor) -> Tensor:
    """``log 2 + log sigmoid(L)``, any shape.

    Reference: Beyond reverse KL (f-DPO), arXiv:2309.16240, table 1.
    """
    return math.log(2.0) + F.logsigmoid(log_ratio)


def alpha_divergence(log_ratio: Tensor, *, alpha: float) -> Tensor:
    """``(exp((alpha - 1) L) - 1) / (alpha - 1)``, computed in float32 and cast back; ``L`` itself at alpha = 1.

    Args:
        log_ratio: Any shape and floating dtype.
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
    # The division can still leave the range of a narrow dtype: exp(11) / 0.5 is more than float16 holds.
    return score.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}


def link(log_ratio: Tensor, *, divergence: str = "reverse_kl", alpha: float = 0.5) -> Tensor:
    """The score of a log-ratio under the divergence of that name.

    Args:
        log_ratio: Any shape and floating dtype, in nats.
        divergence: A key of `DIVERGENCES`.
        alpha: Read by ``alpha_divergence`` only.

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
    """``log pi / max(n, 1)``: summed log-probs or scores a token; an empty completion gives 0, not NaN. ``(P,)``."""
    return logp / length.clamp_min(1).to(logp)


def desensitized_sum(logp: Tensor, mask: Tensor, sequence: Tensor, limits: Tensor, *, alpha: float) -> Tensor:
    """``sum_{k <= limit} l_k + alpha sum_{k > limit} l_k``: tokens past the shorter completion of the pair count less.

    Args:
        logp: ``(B, T)`` log-probs, of the policy or of the reference.
        mask: ``(B, T)`` bool, tokens that count.
        sequence: ``(B, T)`` int64, sequence of each token, -1 outside.
        limits: ``(S,)`` tokens of the shorter completion of each sequence's pair.
        alpha: 1 is the plain sum; 0 ignores the excess.

    Returns:
        ``(S,)``.

    Reference: Length desensitization in DPO (LD-DPO), arXiv:2409.06411.
    """
    kept = mask & (sequence >= 0)
    owner = sequence[kept]
    order = owner.argsort(stable=True)  # A sequence's tokens stay in reading order.
    counts = torch.bincount(owner, minlength=len(limits))
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(owner)
    rank[order] = torch.arange(len(owner), device=owner.device) - starts[owner[order]]
    weight = torch.where(rank < limits[owner], 1.0, alpha).to(logp)
    return logp.new_zeros(len(limits)).index_add(0, owner, weight * logp[kept])


def collision_logp(logits: Tensor) -> Tensor:
    """``log sum_v p_v^2 = lse(2 z) - 2 lse(z)`` of ``(..., V)`` logits, ``(...)``: how sure the model is of any token."""
    return (2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)


def wpo_weight(logp: Tensor, collision: Tensor, length: Tensor) -> Tensor:
    """``exp((sum_t l_t - sum_t log sum_v p_v^2) / n)``, ``(S,)``, no gradient, not capped; a pair weighs the product.

    Args:
        logp: ``(S,)`` plain sums.
        collision: ``(S,)`` sums of `collision_logp` over the same tokens.
        length: ``(S,)`` tokens n, read as at least 1.

    Reference: WPO, arXiv:2406.11827.
    """
    return mean_logp(logp - collision, length).detach().exp()


def alpha_reward(logp: Tensor, *, alpha: float) -> Tensor:
    """``(1 - exp(-alpha l)) / alpha``, ``(P,)``, and ``l`` at alpha = 0: AlphaPO's reward of a log-prob l.

    The probability itself is never formed: it would underflow where its power does not.

    Reference: AlphaPO, arXiv:2501.03884.
    """
    return logp if alpha == 0 else -torch.expm1((-alpha * logp).clamp_max(MAX_EXPONENT)) / alpha


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - e^x)`` for x < 0, any shape; x is read as at most -1e-6, and beyond that the gradient is 0.

    The branch for small probabilities never sees an x near 0: its slope there is infinite in half precision, and 0 times that,
    its share where it is not taken, is NaN. The other branch is safe wherever x is.

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
    """Everything a row of `posttrain.losses.preference.DPO_LOSSES` may read, by name, each ``(P,)``.

    Args:
        chosen_logp: ``(P,)`` sums of the policy, desensitised if they are to be.
        rejected_logp: ``(P,)`` likewise.
        ref_chosen_logp: ``(P,)`` sums of the reference, likewise.
        ref_rejected_logp: ``(P,)`` likewise.
        chosen_length: ``(P,)`` tokens.
        rejected_length: ``(P,)`` tokens.
        divergence: A key of `DIVERGENCES`.
        alpha: Coefficient of ``alpha_divergence``.
        plain_chosen_logp: ``(P,)`` plain sums for ``sft``, where ``chosen_logp`` is desensitised.

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
