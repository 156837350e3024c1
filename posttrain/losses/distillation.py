"""Divergences between a student's next-token distribution q and a teacher's distribution p.

Divergences are computed over full vocabularies, over selected token ids, or over sampled tokens. All functions expect
log-probs in float32 or float64. A token id with probability 0 in both distributions contributes 0 to the divergence and has no
gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.errors import ConfigError
from posttrain.losses.ppo import gae

__all__ = [
    "discounted_returns",
    "divergence",
    "hybrid_divergence",
    "normalized",
    "prefix_weights",
    "score_surrogate",
    "sorted_l1",
    "support_mass",
    "union_support",
    "with_tail",
]

# Finite number that replaces log 0, because 0 * -inf would be NaN. exp(FLOOR) is 0, and 0 * FLOOR is 0.
FLOOR = -1e4
# Maximum logarithm of the total probability of the selected ids. With this limit, the log-prob of the tail (all other ids) is
# at least -16.1, so it is finite.
FULL = -1e-7


def divergence(log_q: Tensor, log_p: Tensor, *, beta: float) -> Tensor:
    """Compute the generalized Jensen-Shannon divergence with the mixture ``M = beta p + (1 - beta) q``.

    ``beta = 0`` gives ``KL(p || q)`` and ``beta = 1`` gives ``KL(q || p)``. Values between 0 and 1 give the mixture
    divergence ``beta KL(p || M) + (1 - beta) KL(q || M)``. For beta close to 0 or 1, the mixture divergence approaches 0 and
    not the KL divergence.

    Args:
        log_q: ``(..., V)`` log-probs of the student.
        log_p: ``(..., V)`` log-probs of the teacher.
        beta: Number from 0 to 1. Only the exact values 0 and 1 give the KL divergence.

    Returns:
        ``(...)`` divergences in nats. With beta 0 or 1, the divergence is infinite if an id with probability 0 in one
        distribution has a positive probability in the other.

    Reference: GKD, arXiv:2306.13649.

    >>> q, p = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()
    >>> divergence(q, p, beta=0.0), divergence(q, p, beta=1.0)
    (tensor(0.6931), tensor(inf))
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"beta={beta} must be in [0, 1]: 0 is KL(teacher || student), 1 is KL(student || teacher).")
    return _Divergence.apply(log_q, log_p, beta)


class _Divergence(torch.autograd.Function):
    """Autograd function of `divergence`. The function saves three tensors of vocabulary size for the backward pass. Automatic
    differentiation would save eight tensors.
    """

    @staticmethod
    def forward(ctx: Any, log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
        ctx.beta = beta
        if beta in (0, 1):
            ctx.save_for_backward(log_q, log_p, log_q)
            return _kl(log_p, log_q) if beta == 0 else _kl(log_q, log_p)
        log_q, log_p = _finite(log_q), _finite(log_p)
        log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
        ctx.save_for_backward(log_q, log_p, log_m)
        return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        log_q, log_p, log_m = ctx.saved_tensors
        of_q, of_p, _ = ctx.needs_input_grad
        grad = grad[..., None]
        return (
            _slope(log_q, log_p, log_m, ctx.beta).mul_(grad) if of_q else None,
            # The divergence does not change if p and q are exchanged and beta is replaced with 1 - beta. The gradient with
            # respect to p is therefore computed like the gradient with respect to q.
            _slope(log_p, log_q, log_m, 1 - ctx.beta).mul_(grad) if of_p else None,
            None,
        )


def _slope(log_q: Tensor, log_p: Tensor, log_m: Tensor, beta: float) -> Tensor:
    """Return the derivative of the divergence with respect to ``log_q``: ``(1 - beta) q (log q - log M)`` if 0 < beta < 1."""
    if beta == 0:
        return log_p.exp().neg_()
    log_q, other = _finite(log_q), _finite(log_p) if beta == 1 else log_m
    slope = log_q - other
    slope = slope.add_(1.0) if beta == 1 else slope.mul_(1 - beta)
    return slope.mul_(log_q.exp())


def _finite(logp: Tensor) -> Tensor:
    # Return an empty tensor unchanged. The tensor is empty if a forward pass has no loss tokens.
    if not logp.numel():
        return logp
    return logp.masked_fill(logp == -torch.inf, FLOOR) if bool(torch.isneginf(logp.detach().amin())) else logp


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Compute the KL divergence ``sum_v a (log a - log b)`` over the last dimension."""
    a, b = _finite(log_a), _finite(log_b)
    value = torch.linalg.vecdot(a.exp(), a - b)
    if b is log_b:
        return value
    outside = ((log_b == -torch.inf) & (log_a > -torch.inf)).any(-1)
    return torch.where(outside, torch.inf, value)


# Selected token ids -----------------------------------------------------------------------------------------------------


def with_tail(logp: Tensor) -> Tensor:
    """Append the log-prob of all other token ids together to the log-probs of k selected ids. Tensors ``(..., k)`` become
    tensors ``(..., k + 1)``.

    The logarithm of the total probability of the selected ids is limited to -1e-7. The probability of the appended category
    is therefore at least about 1e-7.
    """
    captured = logp.logsumexp(-1, keepdim=True).clamp_max(FULL)
    return torch.cat([logp, torch.log(-torch.expm1(captured))], -1)


def normalized(logp: Tensor) -> Tensor:
    """Normalize ``(..., k)`` log-probs so that their probabilities sum to 1."""
    return logp - logp.logsumexp(-1, keepdim=True)


def support_mass(logp: Tensor) -> Tensor:
    """Return the total probability of the selected ids, which is a sum over the last dimension."""
    return logp.logsumexp(-1).exp()


def union_support(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate two tensors ``(..., k)`` and ``(..., m)`` of selected ids. Return all ids and a mask of repeated ids.

    The mask is True for ids of ``second`` that are also in ``first``.
    """
    ids = torch.cat([first, second], -1)
    again = (second[..., :, None] == first[..., None, :]).any(-1)
    return ids, torch.cat([torch.zeros_like(first, dtype=torch.bool), again], -1)


# Sampled tokens ---------------------------------------------------------------------------------------------------------


def score_surrogate(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Compute ``stopgrad(log q(y) - log p(y)) log q(y)``. If y is sampled from q, the expected gradient of this term is the
    gradient of KL(q || p).

    The value of the term is not the KL divergence.

    Args:
        logp: Log-probs of the sampled tokens under the student. The tensor may have any shape.
        teacher_logp: Log-probs of the same tokens under the teacher.
    """
    return (logp - teacher_logp).detach() * logp


def _by_sequence(values: Tensor, mask: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Rearrange the ``(B, T)`` values of selected tokens to a tensor ``(S, L)`` with one padded row per sequence. Return the
    rows and a mask that is False for padding.
    """
    lengths = torch.bincount(sequence[mask])
    lengths = lengths[lengths > 0].tolist()
    rows = pad_sequence(list(values[mask].split(lengths)), batch_first=True)
    real = pad_sequence([torch.ones(n, dtype=torch.bool, device=values.device) for n in lengths], batch_first=True)
    return rows, real


def discounted_returns(
    rewards: Tensor, mask: Tensor, sequence: Tensor, *, gamma: float, length_normalization: bool
) -> Tensor:
    """Compute ``(B, T)`` discounted returns ``A_t = r_t + gamma A_{t+1}`` within each sequence, without gradient.

    Args:
        rewards: ``(B, T)`` reward of each token.
        mask: Bool tensor ``(B, T)``, True for tokens that are included. All other tokens get the return 0.
        sequence: ``(B, T)`` int64 sequence index of each token.
        gamma: Discount in [0, 1].
        length_normalization: Whether to divide each return by ``sum_{i >= t} gamma^(i - t)``.

    Reference: MiniLLM, arXiv:2306.08543.
    """
    if not mask.any():
        return torch.zeros_like(rewards)
    rows, real = _by_sequence(rewards.detach().float(), mask, sequence)
    returns, _ = gae(rows, torch.zeros_like(rows), gamma=gamma, lam=1.0)
    if length_normalization:
        returns = returns / gae(real.to(rows), torch.zeros_like(rows), gamma=gamma, lam=1.0)[0].clamp_min(1.0)
    return torch.zeros_like(rewards, dtype=returns.dtype).masked_scatter(mask, returns[real])


def prefix_weights(advantages: Tensor, mask: Tensor, sequence: Tensor, *, gamma: float, epsilon: float) -> Tensor:
    """Compute the ``(B, T)`` token weights ``1 + gamma (1 - sum_{i < t} |a_i| / sum_i |a_i|)`` of IW-OPD. Within a sequence,
    the weights decrease from ``1 + gamma`` to 1.

    Args:
        advantages: ``(B, T)`` log-prob of each sampled token under the teacher minus its log-prob under the student, in
            nats.
        mask: Bool tensor ``(B, T)``, True for tokens that are included.
        sequence: ``(B, T)`` int64 sequence index of each token.
        gamma: Maximum additional weight, at least 0.
        epsilon: Minimum of the denominator, above 0.

    Reference: IW-OPD, arXiv:2606.22600.
    """
    if not mask.any():
        return torch.zeros_like(advantages)
    rows, real = _by_sequence(advantages.detach().abs(), mask, sequence)
    before = rows.cumsum(1) - rows
    weights = 1 + gamma * (1 - before / rows.sum(1, keepdim=True).clamp_min(epsilon))
    return torch.zeros_like(advantages).masked_scatter(mask, weights[real])


# Two vocabularies -------------------------------------------------------------------------------------------------------


def sorted_l1(q: Tensor, p: Tensor) -> Tensor:
    """Compute ``sum_i |sort(q)_i - sort(p)_i|`` for the probabilities ``q (..., V)`` and ``p (..., W)`` of two vocabularies.

    The shorter vector is padded with 0. The loss depends only on the sorted probabilities, so the vocabularies need not have
    common tokens.

    Reference: Universal Logit Distillation, arXiv:2402.12030.
    """
    width = max(q.shape[-1], p.shape[-1])
    a, b = (torch.nn.functional.pad(x, (0, width - x.shape[-1])).sort(-1, descending=True).values for x in (q, p))
    return (a - b).abs().sum(-1)


def hybrid_divergence(
    log_q: Tensor, log_p: Tensor, matched: tuple[Tensor, Tensor], *, beta: float
) -> tuple[Tensor, Tensor]:
    """Compute two losses for different vocabularies: the divergence over tokens that are in both vocabularies, and
    `sorted_l1` over all other tokens.

    For the divergence, the total probability of all other tokens of a model becomes one additional category, so that
    probabilities sum to 1.

    Args:
        log_q: ``(..., V)`` log-probs of the student.
        log_p: ``(..., W)`` log-probs of the teacher.
        matched: Ids ``(M,)`` in the student's vocabulary and ids ``(M,)`` in the teacher's vocabulary. The i-th id of the
            student and the i-th id of the teacher stand for the same bytes.
        beta: Same as in `divergence`.
    """
    mine, theirs = matched
    both = divergence(with_tail(log_q[..., mine]), with_tail(log_p[..., theirs]), beta=beta)
    # Set the probability of matched ids to 0.
    rest_q, rest_p = (log.exp().index_fill(-1, ids, 0.0) for log, ids in ((log_q, mine), (log_p, theirs)))
    return both, sorted_l1(rest_q, rest_p)
