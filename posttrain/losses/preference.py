"""Losses of preference pairs: the DPO family, and the reference-free CPO, SimPO, AlphaPO, TPO and ORPO.

Every function takes ``(P,)`` tensors, one number a pair, float32 or float64, and returns ``(P,)`` unreduced terms. A name
that says ``logp`` is a sum over the completion's tokens in nats, ``ratio`` is such a sum minus the reference's, ``score`` is a
ratio after its f-divergence link (`posttrain.losses.divergence`), and ``length`` counts completion tokens. Below, ``+`` and
``-`` mark the chosen and the rejected completion, L is the ratio, ``d = s+ - s-``, and lsig is the log-sigmoid.

The tables at the end say which tensors and which scalars a loss type reads.
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


MAX_SQUARED = 1e18  # Its square is the last that float32 holds with room to sum; exponential links go far beyond it.


def _square(x: Tensor) -> Tensor:
    return x.clamp(-MAX_SQUARED, MAX_SQUARED).square()


def sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """``-lsig(beta d)``: the chosen completion gains likelihood over the rejected one, relative to the reference.

    Args:
        chosen: ``(P,)`` scores s+.
        rejected: ``(P,)`` scores s-.
        beta: Strength of the tie to the reference.

    Returns:
        ``(P,)``.

    Reference: Direct preference optimization, arXiv:2305.18290, equation 7.

    >>> sigmoid(torch.tensor([0.0, 2.0]), torch.tensor([0.0, -1.0]), beta=0.1)
    tensor([0.6931, 0.5544])
    """
    return -F.logsigmoid(beta * (chosen - rejected))


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """``max(0, 1 - beta d)``, ``(P,)``: no gradient once the gap has reached ``1 / beta``.

    Reference: Statistical rejection sampling (RSO), arXiv:2309.06657; SLiC-HF, arXiv:2305.10425.
    """
    return torch.relu(1.0 - beta * (chosen - rejected))


def squared_gap(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """``(d - 1 / (2 beta))^2``, ``(P,)``: pulls the gap to a target instead of to infinity.

    Reference: A general theoretical paradigm (IPO), arXiv:2310.12036, equation 17.
    """
    return _square(chosen - rejected - 1.0 / (2.0 * beta))


def ipo(chosen: Tensor, rejected: Tensor, chosen_length: Tensor, rejected_length: Tensor, *, beta: float) -> Tensor:
    """``(s+/N+ - s-/N- - 1 / (2 beta))^2``, ``(P,)``: `squared_gap` of scores a token.

    Args:
        chosen: ``(P,)`` scores s+.
        rejected: ``(P,)`` scores s-.
        chosen_length: ``(P,)`` tokens N+, read as at least 1.
        rejected_length: ``(P,)`` tokens N-, likewise.
        beta: Inverse of twice the target gap **a token**; the larger, the closer to the reference.

    Reference: A general theoretical paradigm (IPO), arXiv:2310.12036, equation 17.
    """
    return squared_gap(mean_logp(chosen, chosen_length), mean_logp(rejected, rejected_length), beta=beta)


def exo_pair(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """``sig(beta d) [lsig(beta d) - log(1-eps)] + sig(-beta d) [lsig(-beta d) - log eps]``: a reverse KL to the label.

    Args:
        chosen: ``(P,)`` scores s+.
        rejected: ``(P,)`` scores s-.
        beta: Strength of the tie to the reference.
        label_smoothing: eps in (0, 1): the chance that the label is wrong.

    Returns:
        ``(P,)``, 0 where ``sig(beta d) = 1 - eps`` and never negative.

    Raises:
        ConfigError: ``label_smoothing`` outside (0, 1).

    Reference: Efficient exact optimization (EXO), arXiv:2402.00856.
    """
    if not 0.0 < label_smoothing < 1.0:
        raise ConfigError(
            f"label_smoothing={label_smoothing} with exo_pair: its logarithm needs a value above 0 and below 1, e.g. 1e-3."
        )
    x = beta * (chosen - rejected)
    right = torch.sigmoid(x) * (F.logsigmoid(x) - math.log1p(-label_smoothing))
    return right + torch.sigmoid(-x) * (F.logsigmoid(-x) - math.log(label_smoothing))


def nca_pair(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """``-lsig(beta L+) - lsig(-beta L+) / 2 - lsig(-beta L-) / 2``, ``(P,)``: the chosen side alone may not sink.

    Reference: Noise contrastive alignment (NCA), arXiv:2402.05369.
    """
    c, r = beta * chosen_ratio, beta * rejected_ratio
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-r)


def robust(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """``[-(1 - eps) lsig(beta d) + eps lsig(-beta d)] / (1 - 2 eps)``: unbiased when a share eps of labels is flipped.

    Args:
        chosen: ``(P,)`` scores s+.
        rejected: ``(P,)`` scores s-.
        beta: Strength of the tie to the reference.
        label_smoothing: eps in [0, 0.5).

    Returns:
        ``(P,)``; can be negative.

    Raises:
        ConfigError: ``label_smoothing`` outside [0, 0.5).

    Reference: Provably robust DPO, arXiv:2403.00409.
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing={label_smoothing} with robust: labels flipped half of the time or more say nothing (0.5 divides "
            "by zero). Use a value from 0 to below 0.5."
        )
    x = beta * (chosen - rejected)
    return (-(1 - label_smoothing) * F.logsigmoid(x) + label_smoothing * F.logsigmoid(-x)) / (1 - 2 * label_smoothing)


def bco_pair(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """``-lsig(beta L+) - lsig(-beta L-)``, ``(P,)``: each side against 0, without a running shift.

    Reference: Binary classifier optimization, arXiv:2404.04656.
    """
    return -F.logsigmoid(beta * chosen_ratio) - F.logsigmoid(-beta * rejected_ratio)


def sppo_hard(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """``(L+ - 1 / (2 beta))^2 + (L- + 1 / (2 beta))^2``, ``(P,)``: each side has its own target.

    Reference: Self-play preference optimization (SPPO), arXiv:2405.00675, with hard labels.
    """
    target = 1.0 / (2.0 * beta)
    return _square(chosen_ratio - target) + _square(rejected_ratio + target)


def smoothed_sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """``-(1 - eps) lsig(beta d) - eps lsig(-beta d)``, ``(P,)``: the cross-entropy with a label that may be wrong.

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
    """`smoothed_sigmoid` of sorted policy gaps against sorted reference gaps: one distribution dominates the other.

    ``u = sort(log pi+ - log pi-)`` and ``v = sort(log rho+ - log rho-)``, matched by rank.

    Args:
        chosen_logp: ``(P,)``.
        rejected_logp: ``(P,)``.
        ref_chosen_logp: ``(P,)``.
        ref_rejected_logp: ``(P,)``.
        beta: Strength of the tie to the reference.
        label_smoothing: eps in [0, 1].

    Returns:
        ``(P,)`` in sorted order: a term belongs to a rank, not to a pair.

    Reference: Distributional preference alignment (AOT), arXiv:2406.05882.
    """
    policy, reference = (chosen_logp - rejected_logp).sort().values, (ref_chosen_logp - ref_rejected_logp).sort().values
    return smoothed_sigmoid(policy, reference, beta=beta, label_smoothing=label_smoothing)


def aot_unpaired(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """`smoothed_sigmoid` of sorted chosen against sorted rejected log-ratios, ``(P,)`` in sorted order.

    Reference: Distributional preference alignment (AOT), arXiv:2406.05882.
    """
    chosen, rejected = chosen_ratio.sort().values, rejected_ratio.sort().values
    return smoothed_sigmoid(chosen, rejected, beta=beta, label_smoothing=label_smoothing)


def apo_zero(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """``[1 - sig(beta L+)] + sig(beta L-)``, ``(P,)``: raises the chosen and lowers the rejected likelihood.

    Reference: Anchored preference optimization, arXiv:2408.06266.
    """
    return torch.sigmoid(-beta * chosen_ratio) + torch.sigmoid(beta * rejected_ratio)


def apo_down(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float) -> Tensor:
    """``sig(beta L+) + [1 - sig(beta (L+ - L-))]``, ``(P,)``: lowers both likelihoods, the rejected one more.

    Reference: Anchored preference optimization, arXiv:2408.06266.
    """
    return torch.sigmoid(beta * chosen_ratio) + torch.sigmoid(-beta * (chosen_ratio - rejected_ratio))


def discopop(chosen: Tensor, rejected: Tensor, *, beta: float, discopop_tau: float) -> Tensor:
    """``(1 - g)(-lsig(a)) + g exp(-a)`` with ``a = beta d`` and ``g = sig(a / tau)``, ``(P,)``.

    The second part is ``exp(-a + lsig(a / tau))``, which has no 0 times infinity at a very negative a. Not convex: for tau
    below 0.102 the slope at a = 0 is positive, so the first steps shrink the gap.

    Reference: Discovering preference optimization algorithms (DiscoPOP), arXiv:2406.08414.
    """
    a = beta * (chosen - rejected)
    exponential = (F.logsigmoid(a / discopop_tau) - a).clamp_max(MAX_EXPONENT).exp()
    return torch.sigmoid(-a / discopop_tau) * -F.logsigmoid(a) + exponential


def sigmoid_norm(
    chosen: Tensor, rejected: Tensor, chosen_length: Tensor, rejected_length: Tensor, *, beta: float
) -> Tensor:
    """``-lsig(beta (s+/N+ - s-/N-))``, ``(P,)``: `sigmoid` of scores a token, so that length earns nothing.

    Reference: Tülu 3, arXiv:2411.15124.
    """
    return sigmoid(mean_logp(chosen, chosen_length), mean_logp(rejected, rejected_length), beta=beta)


def mean_nll(logp: Tensor, length: Tensor, *, mean_length: float | None = None) -> Tensor:
    """``-P log pi / sum n``: terms whose mean over the rows is the mean over all their **tokens**.

    Args:
        logp: ``(P,)`` plain sums, without length desensitisation.
        length: ``(P,)`` tokens each sum is over.
        mean_length: Mean tokens a row of the whole optimiser step; None takes the mean of these rows.

    Returns:
        ``(P,)``; 0 for rows without a token, also when no row has one.
    """
    per_row = length.to(logp).sum().clamp_min(1) / length.numel() if mean_length is None else mean_length
    return -logp / per_row


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float, gamma: float, label_smoothing: float) -> Tensor:
    """`smoothed_sigmoid` of ``u - gamma / beta``: the gap a token has to reach a margin.

    Args:
        chosen: ``(P,)`` mean log-prob a token, or its `alpha_reward`.
        rejected: ``(P,)`` likewise.
        beta: Scale of the reward.
        gamma: Margin of the scaled reward.
        label_smoothing: eps in [0, 1].

    Reference: SimPO, arXiv:2405.14734, equation 6.
    """
    return smoothed_sigmoid(chosen - gamma / beta, rejected, beta=beta, label_smoothing=label_smoothing)


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``(a - b) - [log(1 - e^a) - log(1 - e^b)]``, ``(P,)``, of mean log-probs a and b a token, at least in float32."""
    a, b = (x if x.dtype == torch.float64 else x.float() for x in (chosen, rejected))
    return a - b - (log1mexp(a) - log1mexp(b))


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """``-beta lsig(o)``, ``(P,)``, with o the `log_odds_ratio`: what ORPO adds to the likelihood loss.

    Reference: ORPO, arXiv:2403.07691, equation 6.
    """
    return -beta * F.logsigmoid(log_odds_ratio(chosen, rejected))


@dataclass(frozen=True, slots=True)
class Formula:
    """One row of a table: a function, and what it reads; calling the row picks that out of everything there is.

    Attributes:
        function: The loss.
        tensors: Keys of its tensors, in the order the function takes them; DPO's are those of
            `posttrain.losses.divergence.pair_values`.
        scalars: Names of its scalars; one that is missing here is not used by this loss.
        per_token: Scores or log-probs are divided by lengths, so beta is one or two orders larger than for sums.
        kind: ``pair`` terms belong to a pair, ``sorted`` terms to a rank (no weight a pair can multiply them), and
            ``likelihood`` terms to the chosen completion alone.
        of_margin: It is known to be a smooth function of the margin between the two scores alone.
    """

    function: Callable[..., Tensor]
    tensors: tuple[str, ...] = ("chosen_score", "rejected_score")
    scalars: tuple[str, ...] = ("beta",)
    per_token: bool = False
    kind: Literal["pair", "sorted", "likelihood"] = "pair"
    of_margin: bool = False

    def __call__(self, values: Mapping[str, Tensor], **scalars: float) -> Tensor:
        """The terms; tensors and scalars that this loss does not read are ignored."""
        return self.function(*[values[n] for n in self.tensors], **{n: scalars[n] for n in self.scalars})

    @property
    def uses_link(self) -> bool:
        """Whether an f-divergence link changes the loss."""
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

# Their "scores" are rewards of the policy alone: sums of log-probs, or means a token where ``per_token``.
_SIMPO = Formula(simpo, scalars=("beta", "gamma", "label_smoothing"), per_token=True)
_REFERENCE_FREE = {
    "sigmoid": Formula(smoothed_sigmoid, scalars=_SMOOTHED),
    "hinge": Formula(hinge),
    "ipo": Formula(squared_gap, per_token=True),
}
CPO_LOSSES: dict[str, Formula] = {**_REFERENCE_FREE, "simpo": _SIMPO, "alphapo": _SIMPO}
TPO_LOSSES: dict[str, Formula] = {**_REFERENCE_FREE, "tpo-l": _SIMPO}


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """``-log sigmoid(r+ - r- - m)``: the chosen answer scores higher, by at least the margin.

    Args:
        chosen: ``(P,)`` scores r+.
        rejected: ``(P,)`` scores r-.
        margin: ``(P,)`` m, 0 without.

    Returns:
        ``(P,)``.

    Reference: Training a helpful and harmless assistant, arXiv:2204.05862; margin: Llama 2, arXiv:2307.09288, equation 2.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``(r+ + r-)^2``, ``(P,)``: keeps the scores' mean near 0, which differences alone leave free.

    Reference: Helping or herding, arXiv:2312.09244, equation 2.
    """
    return (chosen + rejected) ** 2
