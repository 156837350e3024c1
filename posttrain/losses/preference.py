"""Losses on preference pairs: DPO and its variants, and the reference-free losses CPO, SimPO, AlphaPO, TPO and ORPO.

The arguments of every function are tensors ``(P,)`` in float32 or float64 with one number per pair. The return value is a
tensor ``(P,)`` with one loss per pair. Names of arguments:

- ``logp``: sum of log-probs over the tokens of the completion, in nats;
- ``ratio``: the sum of log-probs under the policy minus the sum under the reference model;
- ``score``: the score of the ratio under an f-divergence (`posttrain.losses.divergence`);
- ``length``: number of tokens of the completion.

In formulas, ``+`` marks the chosen and ``-`` the rejected completion. L is the ratio, s is the score, ``d = s+ - s-`` is the
difference of scores, and lsig is the log-sigmoid. The tables at the end of the module list the tensors and scalars of each
loss type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.errors import ConfigError
from posttrain.losses.divergence import MAX_EXPONENT, log1mexp, mean_logp

__all__ = [
    "CPO_LOSSES",
    "DPO_LOSSES",
    "TPO_LOSSES",
    "Formula",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "bco_pair",
    "bradley_terry",
    "centering",
    "discopop",
    "exo_pair",
    "hinge",
    "ipo",
    "log_odds_ratio",
    "mean_nll",
    "nca_pair",
    "orpo",
    "robust",
    "sigmoid",
    "sigmoid_norm",
    "simpo",
    "smoothed_sigmoid",
    "sppo_hard",
    "squared_gap",
]


# Scores are limited to this value before they are squared, because some f-divergences give exponentially large scores. The
# square of the limit, 1e36, is finite in float32.
MAX_SQUARED = 1e18


def _square(x: Tensor) -> Tensor:
    return x.clamp(-MAX_SQUARED, MAX_SQUARED).square()


def sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Compute the DPO loss ``-lsig(beta d)``. The loss increases the score of the chosen completion relative to the score of
    the rejected completion.

    Args:
        chosen: ``(P,)`` scores s+.
        rejected: ``(P,)`` scores s-.
        beta: Strength of the regularization towards the reference.

    Returns:
        ``(P,)`` losses.

    Reference: Direct preference optimization, arXiv:2305.18290, equation 7.

    >>> sigmoid(torch.tensor([0.0, 2.0]), torch.tensor([0.0, -1.0]), beta=0.1)
    tensor([0.6931, 0.5544])
    """
    return -F.logsigmoid(beta * (chosen - rejected))


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Compute the hinge loss ``max(0, 1 - beta d)`` of each pair. The gradient is 0 if the difference d of the scores is at
    least ``1 / beta``.

    Reference: Statistical rejection sampling (RSO), arXiv:2309.06657; SLiC-HF, arXiv:2305.10425.
    """
    return torch.relu(1.0 - beta * (chosen - rejected))


def squared_gap(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Compute the squared loss ``(d - 1 / (2 beta))^2`` of each pair. The loss moves the difference d of the scores to the
    target ``1 / (2 beta)``.

    Reference: A general theoretical paradigm (IPO), arXiv:2310.12036, equation 17.
    """
    return _square(chosen - rejected - 1.0 / (2.0 * beta))


def ipo(chosen: Tensor, rejected: Tensor, chosen_length: Tensor, rejected_length: Tensor, *, beta: float) -> Tensor:
    """Compute the IPO loss ``(s+/N+ - s-/N- - 1 / (2 beta))^2`` of each pair, i.e. `squared_gap` of scores per token.

    Args:
        chosen: ``(P,)`` scores s+.
        rejected: ``(P,)`` scores s-.
        chosen_length: ``(P,)`` number of tokens N+, clamped to at least 1.
        rejected_length: ``(P,)`` number of tokens N-, clamped to at least 1.
        beta: The target for the difference of scores **per token** is ``1 / (2 beta)``. A larger beta keeps the policy closer
            to the reference.

    Reference: A general theoretical paradigm (IPO), arXiv:2310.12036, equation 17.
    """
    return squared_gap(mean_logp(chosen, chosen_length), mean_logp(rejected, rejected_length), beta=beta)


def exo_pair(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute the EXO loss ``sig(beta d) [lsig(beta d) - log(1-eps)] + sig(-beta d) [lsig(-beta d) - log eps]``. The EXO loss
    is the reverse KL divergence from the smoothed label.

    Args:
        chosen: ``(P,)`` scores s+.
        rejected: ``(P,)`` scores s-.
        beta: Strength of the regularization towards the reference.
        label_smoothing: eps in (0, 1), the probability that the label is wrong.

    Returns:
        ``(P,)`` losses. They are never negative, and are 0 for ``sig(beta d) = 1 - eps``.

    Raises:
        ConfigError: ``label_smoothing`` is not in (0, 1).

    Reference: Efficient exact optimization (EXO), arXiv:2402.00856.
    """
    if not 0.0 < label_smoothing < 1.0:
        raise ConfigError(
            f"label_smoothing={label_smoothing} is not valid for the loss 'exo_pair', which computes the logarithm of "
            "label_smoothing. Fix: use a value above 0 and below 1, e.g. 1e-3."
        )
    x = beta * (chosen - rejected)
    right = torch.sigmoid(x) * (F.logsigmoid(x) - math.log1p(-label_smoothing))
    return right + torch.sigmoid(-x) * (F.logsigmoid(-x) - math.log(label_smoothing))


def nca_pair(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """Compute the NCA loss ``-lsig(beta L+) - lsig(-beta L+) / 2 - lsig(-beta L-) / 2`` of each pair. The loss prevents
    chosen completions from becoming less likely.

    Reference: Noise contrastive alignment (NCA), arXiv:2402.05369.
    """
    c, r = beta * chosen_ratio, beta * rejected_ratio
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-r)


def robust(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute the robust DPO loss ``[-(1 - eps) lsig(beta d) + eps lsig(-beta d)] / (1 - 2 eps)``. If a fraction eps of the
    labels is flipped, the expectation of the loss is the DPO loss on the correct labels.

    Args:
        chosen: ``(P,)`` scores s+.
        rejected: ``(P,)`` scores s-.
        beta: Strength of the regularization towards the reference.
        label_smoothing: eps in [0, 0.5), the probability that a label is wrong.

    Returns:
        ``(P,)`` losses, which can be negative.

    Raises:
        ConfigError: ``label_smoothing`` is not in [0, 0.5).

    Reference: Provably robust DPO, arXiv:2403.00409.
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing={label_smoothing} is not valid for the loss 'robust'. If half of the labels are flipped, the "
            "labels contain no information. With 0.5, the loss divides by zero. Fix: use a value of at least 0 and below 0.5."
        )
    x = beta * (chosen - rejected)
    return (-(1 - label_smoothing) * F.logsigmoid(x) + label_smoothing * F.logsigmoid(-x)) / (1 - 2 * label_smoothing)


def bco_pair(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """Compute the BCO loss ``-lsig(beta L+) - lsig(-beta L-)`` of each pair. No running mean of rewards is subtracted,
    unlike in `posttrain.losses.unpaired.bco`.

    Reference: Binary classifier optimization, arXiv:2404.04656.
    """
    return -F.logsigmoid(beta * chosen_ratio) - F.logsigmoid(-beta * rejected_ratio)


def sppo_hard(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """Compute the SPPO loss ``(L+ - 1 / (2 beta))^2 + (L- + 1 / (2 beta))^2`` of each pair. The chosen log-ratio has the
    target ``1 / (2 beta)``, and the rejected log-ratio has the target ``-1 / (2 beta)``.

    Reference: Self-play preference optimization (SPPO), arXiv:2405.00675, with hard labels.
    """
    target = 1.0 / (2.0 * beta)
    return _square(chosen_ratio - target) + _square(rejected_ratio + target)


def smoothed_sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute the cross-entropy ``-(1 - eps) lsig(beta d) - eps lsig(-beta d)`` of each pair with smoothed labels
    (conservative DPO).

    Reference: Mitchell 2023, "A note on DPO with noisy preferences"; as CPO without a reference, arXiv:2401.08417.
    """
    x = beta * (chosen - rejected)
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def aot(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Compute the AOT loss `smoothed_sigmoid(u - v)`, where u and v are the sorted log-prob differences of policy and
    reference.

    The loss increases the i-th value of ``u = sort(log pi+ - log pi-)`` relative to the i-th value of
    ``v = sort(log rho+ - log rho-)``. If every value of u exceeds the value of v at the same index, the distribution of u
    dominates the distribution of v (first-order stochastic dominance).

    Args:
        chosen_logp: ``(P,)`` policy's log-probs of chosen completions.
        rejected_logp: ``(P,)`` policy's log-probs of rejected completions.
        ref_chosen_logp: ``(P,)`` reference's log-probs of chosen completions.
        ref_rejected_logp: ``(P,)`` reference's log-probs of rejected completions.
        beta: Strength of the regularization towards the reference.
        label_smoothing: eps in [0, 1].

    Returns:
        ``(P,)`` losses in sorted order. The i-th loss belongs to the i-th smallest values and not to the i-th pair.

    Reference: Distributional preference alignment (AOT), arXiv:2406.05882.
    """
    policy, reference = (chosen_logp - rejected_logp).sort().values, (ref_chosen_logp - ref_rejected_logp).sort().values
    return smoothed_sigmoid(policy, reference, beta=beta, label_smoothing=label_smoothing)


def aot_unpaired(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute `smoothed_sigmoid` of the sorted chosen log-ratios minus the sorted rejected log-ratios. The ``(P,)`` losses
    are in sorted order.

    Reference: Distributional preference alignment (AOT), arXiv:2406.05882.
    """
    chosen, rejected = chosen_ratio.sort().values, rejected_ratio.sort().values
    return smoothed_sigmoid(chosen, rejected, beta=beta, label_smoothing=label_smoothing)


def apo_zero(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """Compute the APO-zero loss ``[1 - sig(beta L+)] + sig(beta L-)`` of each pair. The loss makes chosen completions more
    likely and rejected completions less likely.

    Reference: Anchored preference optimization, arXiv:2408.06266.
    """
    return torch.sigmoid(-beta * chosen_ratio) + torch.sigmoid(beta * rejected_ratio)


def apo_down(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """Compute the APO-down loss ``sig(beta L+) + [1 - sig(beta (L+ - L-))]`` of each pair. The loss makes both completions
    less likely. The likelihood of the rejected completion decreases more.

    Reference: Anchored preference optimization, arXiv:2408.06266.
    """
    return torch.sigmoid(beta * chosen_ratio) + torch.sigmoid(-beta * (chosen_ratio - rejected_ratio))


def discopop(chosen: Tensor, rejected: Tensor, *, beta: float, discopop_tau: float) -> Tensor:
    """Compute the DiscoPOP loss ``(1 - g)(-lsig(a)) + g exp(-a)`` of each pair, with ``a = beta d`` and
    ``g = sig(a / tau)``.

    The second term is computed as ``exp(-a + lsig(a / tau))``, which avoids 0 times infinity for very negative a. The loss is
    not convex. For tau below 0.102, the slope of the loss at a = 0 is positive, so the first optimizer steps decrease
    d.

    Reference: Discovering preference optimization algorithms (DiscoPOP), arXiv:2406.08414.
    """
    a = beta * (chosen - rejected)
    exponential = (F.logsigmoid(a / discopop_tau) - a).clamp_max(MAX_EXPONENT).exp()
    return torch.sigmoid(-a / discopop_tau) * -F.logsigmoid(a) + exponential


def sigmoid_norm(
    chosen: Tensor, rejected: Tensor, chosen_length: Tensor, rejected_length: Tensor, *, beta: float
) -> Tensor:
    """Compute the length-normalized DPO loss ``-lsig(beta (s+/N+ - s-/N-))`` of each pair. Dividing scores by lengths avoids
    a preference for long completions.

    Reference: Tülu 3, arXiv:2411.15124.
    """
    return sigmoid(mean_logp(chosen, chosen_length), mean_logp(rejected, rejected_length), beta=beta)


def mean_nll(logp: Tensor, length: Tensor, *, mean_length: float | None = None) -> Tensor:
    """Compute the loss term ``-P log pi / sum n`` of each row. The mean of these terms over P rows equals the mean negative
    log-likelihood over all **tokens** of the rows.

    Args:
        logp: ``(P,)`` sums of log-probs, without length desensitization.
        length: ``(P,)`` number of tokens in each sum.
        mean_length: Mean number of tokens per row over the whole optimizer step. None: the mean over the rows in ``length``.

    Returns:
        ``(P,)`` terms. The term of a row without tokens is 0.
    """
    per_row = length.to(logp).sum().clamp_min(1) / length.numel() if mean_length is None else mean_length
    return -logp / per_row


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float, gamma: float, label_smoothing: float) -> Tensor:
    """Compute the SimPO loss: `smoothed_sigmoid` of ``u - gamma / beta``, where u is the difference of the mean log-probs per
    token. The loss favors a difference u above the margin ``gamma / beta``.

    Args:
        chosen: ``(P,)`` mean log-prob per token of the chosen completions, or its `alpha_reward`.
        rejected: ``(P,)`` mean log-prob per token of the rejected completions, or its `alpha_reward`.
        beta: Scale of the reward.
        gamma: Margin of the scaled reward.
        label_smoothing: eps in [0, 1].

    Reference: SimPO, arXiv:2405.14734, equation 6.
    """
    return smoothed_sigmoid(chosen - gamma / beta, rejected, beta=beta, label_smoothing=label_smoothing)


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute the logarithm ``(a - b) - [log(1 - e^a) - log(1 - e^b)]`` of each pair's odds ratio. a and b are mean
    log-probs per token. The result is float32 or float64.
    """
    a, b = (x if x.dtype == torch.float64 else x.float() for x in (chosen, rejected))
    return a - b - (log1mexp(a) - log1mexp(b))


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Compute ORPO's penalty ``-beta lsig(o)`` of each pair, where o is `log_odds_ratio`. ORPO adds the penalty to the
    negative log-likelihood.

    Reference: ORPO, arXiv:2403.07691, equation 6.
    """
    return -beta * F.logsigmoid(log_odds_ratio(chosen, rejected))


@dataclass(frozen=True, slots=True)
class Formula:
    """Loss function with the names of its inputs. A call selects the inputs by name from a mapping, which may contain
    additional names.

    Attributes:
        function: The loss function.
        tensors: Names of the tensors that the function needs, in the order of its arguments. For DPO, the names are keys of
            the mapping that `posttrain.losses.divergence.pair_values` returns.
        scalars: Names of the scalar arguments of the function.
        per_token: Whether scores or log-probs are divided by the number of tokens. beta should then be one or two orders of
            magnitude larger than for sums.
        kind: Unit to which a loss term belongs. ``pair``: a pair. ``sorted``: a position in the sorted order, so that pairs
            cannot have weights. ``likelihood``: a chosen completion.
        of_margin: Whether the loss is a smooth function of only the difference between the two scores.
    """

    function: Callable[..., Tensor]
    tensors: tuple[str, ...] = ("chosen_score", "rejected_score")
    scalars: tuple[str, ...] = ("beta",)
    per_token: bool = False
    kind: Literal["pair", "sorted", "likelihood"] = "pair"
    of_margin: bool = False

    def __call__(self, values: Mapping[str, Tensor], **scalars: float) -> Tensor:
        """Compute the loss terms. Tensors and scalars that the loss does not use are ignored."""
        return self.function(*[values[n] for n in self.tensors], **{n: scalars[n] for n in self.scalars})

    @property
    def uses_link(self) -> bool:
        """Whether the choice of f-divergence affects the loss."""
        return any(name.endswith("_score") for name in self.tensors)


_RATIOS = ("chosen_ratio", "rejected_ratio")
_SCORES_AND_LENGTHS = ("chosen_score", "rejected_score", "chosen_length", "rejected_length")
_LOGPS = ("chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp")
_SMOOTHED = ("beta", "label_smoothing")

DPO_LOSSES: dict[str, Formula] = {
    "sigmoid": Formula(sigmoid, of_margin=True),
    "hinge": Formula(hinge),
    "ipo": Formula(ipo, _SCORES_AND_LENGTHS, per_token=True, of_margin=True),
    "exo_pair": Formula(exo_pair, scalars=_SMOOTHED),
    "nca_pair": Formula(nca_pair, _RATIOS),
    "robust": Formula(robust, scalars=_SMOOTHED, of_margin=True),
    "bco_pair": Formula(bco_pair, _RATIOS),
    "sppo_hard": Formula(sppo_hard, _RATIOS),
    "aot": Formula(aot, _LOGPS, _SMOOTHED, kind="sorted"),
    "aot_unpaired": Formula(aot_unpaired, _RATIOS, _SMOOTHED, kind="sorted"),
    "apo_zero": Formula(apo_zero, _RATIOS),
    "apo_down": Formula(apo_down, _RATIOS),
    "discopop": Formula(discopop, scalars=("beta", "discopop_tau"), of_margin=True),
    "sft": Formula(mean_nll, ("plain_chosen_logp", "chosen_length"), (), kind="likelihood"),
    "sigmoid_norm": Formula(sigmoid_norm, _SCORES_AND_LENGTHS, per_token=True, of_margin=True),
}

# In losses without a reference, the "scores" are sums of the policy's log-probs. With ``per_token``, the "scores" are means
# per token.
_SIMPO = Formula(simpo, scalars=("beta", "gamma", "label_smoothing"), per_token=True)
_REFERENCE_FREE = {
    "sigmoid": Formula(smoothed_sigmoid, scalars=_SMOOTHED),
    "hinge": Formula(hinge),
    "ipo": Formula(squared_gap, per_token=True),
}
CPO_LOSSES: dict[str, Formula] = {**_REFERENCE_FREE, "simpo": _SIMPO, "alphapo": _SIMPO}
TPO_LOSSES: dict[str, Formula] = {**_REFERENCE_FREE, "tpo-l": _SIMPO}


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Compute the Bradley-Terry loss ``-log sigmoid(r+ - r- - m)``. The loss favors chosen scores that exceed rejected scores
    by more than the margin m.

    Args:
        chosen: ``(P,)`` scores r+.
        rejected: ``(P,)`` scores r-.
        margin: ``(P,)`` margin m. None: m is 0.

    Returns:
        ``(P,)`` losses.

    Reference: Training a helpful and harmless assistant, arXiv:2204.05862; margin: Llama 2, arXiv:2307.09288, equation 2.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute the penalty ``(r+ + r-)^2`` of each pair. The penalty keeps the mean score close to 0, because losses on
    differences of scores do not determine the mean.

    Reference: Helping or herding, arXiv:2312.09244, equation 2.
    """
    return (chosen + rejected) ** 2
