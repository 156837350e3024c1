"""How far a student's next-token distribution q is from a teacher's p: whole vocabularies, sparse supports, sampled tokens.

All functions take log-probs in float32 or wider. ``0 log 0 = 0``: an id that neither side allows adds nothing, and no gradient.
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

FLOOR = -1e4  # Stands for log 0: its exponential is 0, and 0 times it is 0, where 0 times -inf is NaN.
FULL = -1e-7  # Log of the most mass a support may hold, so that the tail has a logarithm (-16.1).


def divergence(log_q: Tensor, log_p: Tensor, *, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence with the mixture ``M = beta p + (1 - beta) q``.

    ``beta = 0``: ``KL(p || q)``. ``beta = 1``: ``KL(q || p)``. Between: ``beta KL(p || M) + (1 - beta) KL(q || M)``, which tends
    to 0 at both ends, not to the KL.

    Args:
        log_q: ``(..., V)`` of the student.
        log_p: ``(..., V)`` of the teacher.
        beta: In [0, 1]; compared with 0 and 1 exactly.

    Returns:
        ``(...)`` nats; +inf where a KL is (one side has mass at an id that the other excludes).

    Reference: GKD, arXiv:2306.13649.

    >>> q, p = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()
    >>> divergence(q, p, beta=0.0), divergence(q, p, beta=1.0)
    (tensor(0.6931), tensor(inf))
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"beta={beta} must be in [0, 1]: 0 is KL(teacher || student), 1 is KL(student || teacher).")
    return _Divergence.apply(log_q, log_p, beta)


class _Divergence(torch.autograd.Function):
    """With a gradient of its own: autograd would keep eight tensors of the vocabulary's width, and this keeps three."""

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
            # The divergence is the same with both sides exchanged and 1 - beta.
            _slope(log_p, log_q, log_m, 1 - ctx.beta).mul_(grad) if of_p else None,
            None,
        )


def _slope(log_q: Tensor, log_p: Tensor, log_m: Tensor, beta: float) -> Tensor:
    """Derivative of the divergence by ``log_q``: ``(1 - beta) q (log q - log M)`` where ``beta`` is between 0 and 1."""
    if beta == 0:
        return log_p.exp().neg_()
    log_q, other = _finite(log_q), _finite(log_p) if beta == 1 else log_m
    slope = log_q - other
    slope = slope.add_(1.0) if beta == 1 else slope.mul_(1 - beta)
    return slope.mul_(log_q.exp())


def _finite(logp: Tensor) -> Tensor:
    if not logp.numel():  # A pass may have no trained token.
        return logp
    return logp.masked_fill(logp == -torch.inf, FLOOR) if bool(torch.isneginf(logp.detach().amin())) else logp


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """``sum_v a (log a - log b)``, ``(...)``."""
    a, b = _finite(log_a), _finite(log_b)
    value = torch.linalg.vecdot(a.exp(), a - b)
    if b is log_b:
        return value
    outside = ((log_b == -torch.inf) & (log_a > -torch.inf)).any(-1)
    return torch.where(outside, torch.inf, value)


# Sparse supports --------------------------------------------------------------------------------------------------------


def with_tail(logp: Tensor) -> Tensor:
    """``(..., k)`` log-probs and one category more, the mass outside, ``(..., k + 1)``.

    The captured log-mass is read as at most -1e-7, so that a support that holds everything has a tail of 1e-7.
    """
    captured = logp.logsumexp(-1, keepdim=True).clamp_max(FULL)
    return torch.cat([logp, torch.log(-torch.expm1(captured))], -1)


def normalized(logp: Tensor) -> Tensor:
    """``(..., k)`` log-probs divided by the mass they hold."""
    return logp - logp.logsumexp(-1, keepdim=True)


def support_mass(logp: Tensor) -> Tensor:
    """Mass that a support holds, ``(...)``."""
    return logp.logsumexp(-1).exp()


def union_support(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of two supports, ``(..., k)`` and ``(..., m)``, as one, ``(..., k + m)``; and which of them came before already."""
    ids = torch.cat([first, second], -1)
    again = (second[..., :, None] == first[..., None, :]).any(-1)
    return ids, torch.cat([torch.zeros_like(first, dtype=torch.bool), again], -1)


# Sampled tokens ---------------------------------------------------------------------------------------------------------


def score_surrogate(logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """``stopgrad(log q(y) - log p(y)) log q(y)``: its gradient is that of KL(q || p) where y was drawn from q; its value is not.

    Args:
        logp: Of the sampled tokens under the student, any shape.
        teacher_logp: Likewise under the teacher.
    """
    return (logp - teacher_logp).detach() * logp


def _by_sequence(values: Tensor, mask: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """``(B, T)`` values of masked tokens as one row a sequence, ``(S, L)``; and which entries are real."""
    lengths = torch.bincount(sequence[mask])
    lengths = lengths[lengths > 0].tolist()
    rows = pad_sequence(list(values[mask].split(lengths)), batch_first=True)
    real = pad_sequence([torch.ones(n, dtype=torch.bool, device=values.device) for n in lengths], batch_first=True)
    return rows, real


def discounted_returns(
    rewards: Tensor, mask: Tensor, sequence: Tensor, *, gamma: float, length_normalization: bool
) -> Tensor:
    """``A_t = r_t + gamma A_{t+1}`` within each sequence, ``(B, T)``, detached.

    Args:
        rewards: ``(B, T)``.
        mask: ``(B, T)`` bool, tokens that count; the others get 0.
        sequence: ``(B, T)`` int64.
        gamma: Discount in [0, 1].
        length_normalization: Divide by ``sum_{i >= t} gamma^(i - t)``.

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
    """``1 + gamma (1 - sum_{i < t} |a_i| / sum_i |a_i|)``, ``(B, T)``: early tokens weigh more, from ``1 + gamma`` to 1.

    Args:
        advantages: ``(B, T)`` how much more likely the teacher finds each sampled token, in nats.
        mask: ``(B, T)`` bool.
        sequence: ``(B, T)`` int64.
        gamma: At least 0.
        epsilon: Least denominator, above 0.

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
    """``sum_i |sort(q)_i - sort(p)_i|`` of ``(..., V)`` and ``(..., W)`` probabilities, the shorter filled with 0; ``(...)``.

    It is blind to which token has which probability.

    Reference: Universal Logit Distillation, arXiv:2402.12030.
    """
    width = max(q.shape[-1], p.shape[-1])
    a, b = (torch.nn.functional.pad(x, (0, width - x.shape[-1])).sort(-1, descending=True).values for x in (q, p))
    return (a - b).abs().sum(-1)


def hybrid_divergence(
    log_q: Tensor, log_p: Tensor, matched: tuple[Tensor, Tensor], *, beta: float
) -> tuple[Tensor, Tensor]:
    """The divergence over tokens that both vocabularies have, and `sorted_l1` over the others; both ``(...)``.

    Over matched tokens both sides have one category more, the rest of their mass, and so are distributions.

    Args:
        log_q: ``(..., V)`` of the student.
        log_p: ``(..., W)`` of the teacher.
        matched: ``(M,)`` ids of the same bytes, in the student's and in the teacher's vocabulary.
        beta: See `divergence`.
    """
    mine, theirs = matched
    both = divergence(with_tail(log_q[..., mine]), with_tail(log_p[..., theirs]), beta=beta)
    rest_q, rest_p = (
        log.exp().index_fill(-1, ids, 0.0) for log, ids in ((log_q, mine), (log_p, theirs))
    )  # A matched id counts as an empty category here.
    return both, sorted_l1(rest_q, rest_p)
