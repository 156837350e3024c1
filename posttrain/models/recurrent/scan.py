"""Linear recurrences over the chunks of packed prefix trees, with gradients (`scan`) or from initial states (`scan_from`).

Per head, with decay ``a_t = exp(g_t)``, state ``S`` ``(dk, dv)``, keys ``k``, queries ``q`` and values ``v``:

    gated delta rule:   S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T,   o_t = S_t^T q_t
    state space (SSD):  S_t = a_t S_{t-1} + k_t v_t^T,                                o_t = S_t^T q_t

Inside a chunk that starts with state ``S``, with ``gam = cumsum(g)``, ``e = exp(gam)`` and ``D_ij = exp(gam_i - gam_j)`` for
``i >= j``:

    M = I + strict_lower(diag(beta) K K^T * D)
    X = V - e (K S);   U = M^-1 (beta X)      (state space: U = V)
    O = e (Q S) + (Q K^T * D) U
    S' = e_C S + K^T (exp(gam_C - gam) U)

The backward pass recomputes D, the products and M^-1 from the inputs. The gradient of a log decay is computed as a sum over
all pairs of tokens between which the decay is applied. A difference of two sums would be less precise, because the two sums
cancel under strong decay.

References: Gated Delta Networks, arXiv:2412.06464; Mamba-2 (SSD), arXiv:2405.21060; Lightning Attention-2, arXiv:2401.04658.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from posttrain.models.recurrent.chunks import Chunks

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, chunks: Chunks) -> Tensor:
    """Compute a linear recurrence along each path of packed prefix trees.

    Args:
        q: ``(B, T, G, dk)`` queries. Each group of heads shares queries and keys.
        k: ``(B, T, G, dk)`` keys.
        v: ``(B, T, H, dv)`` values. H is a multiple of G.
        log_decay: ``(B, T, H)`` logs of decays, at most 0.
        beta: ``(B, T, H)`` step sizes of the gated delta rule. None: the state space recurrence without delta rule.
        chunks: Layout of the batch.

    Returns:
        Outputs ``(B, T, H, dv)`` in float32, or in float64 if ``v`` is float64. Outputs of padding tokens are 0.
    """
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        return _Scan.apply(*(None if x is None else x.to(wide) for x in (q, k, v, log_decay, beta)), chunks)


@torch.no_grad()
def scan_from(
    initial: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """Compute a linear recurrence of sequences that continue from given states, without gradients.

    ``initial`` contains the states ``(S, G, dk, r, dv)`` of S sequences, with ``r = H / G``. Every segment of ``chunks`` is
    one sequence. The other arguments are those of `scan` and must have the dtype of ``initial``. The function returns the
    outputs and the final states.
    """
    x = _inside(q, k, v, log_decay, beta, chunks)
    out, states, updates = _through(x, chunks, initial)
    ends = chunks.ends
    after = x.whole[ends] * states[ends] + _outer(x.k[ends], x.rest[ends] * updates[ends])
    return chunks.scatter(out.transpose(1, 2)).view(v.shape), after


def _mixed(weights: Tensor, x: Tensor) -> Tensor:
    """Return ``(N, G, C, r, d)`` products of ``(N, G, r, C, C)`` weights with ``(N, G, C, r, d)`` values."""
    return (weights @ x.transpose(2, 3)).transpose(2, 3)


def _by_row(x: Tensor) -> Tensor:
    """Reshape ``(N, G, r, C)`` factors to ``(N, G, C, r, 1)``."""
    return x.transpose(2, 3)[..., None]


def _times(x: Tensor, state: Tensor) -> Tensor:
    """Return the product ``x @ state`` of a tensor ``(N, G, C, d)`` with a state ``(N, G, d, r, dv)``."""
    return (x @ state.flatten(3)).unflatten(3, state.shape[3:])


def _outer(x: Tensor, y: Tensor) -> Tensor:
    """Return the product ``x^T @ y``, a tensor ``(N, G, d, r, dv)``, of tensors ``(N, G, C, d)`` and ``(N, G, C, r, dv)``."""
    return (x.transpose(2, 3) @ y.flatten(3)).unflatten(3, y.shape[3:])


class _Inside(NamedTuple):
    """Tensors of all chunks that do not depend on recurrent states. The module's docstring defines the tensors."""

    q: Tensor  # (N, G, C, dk)
    k: Tensor
    v: Tensor  # (N, G, C, r, dv)
    beta: Tensor | None  # (N, G, r, C)
    decays: Tensor  # (N, G, r, C, C)
    start: Tensor  # (N, G, C, r, 1): exp(gam)
    rest: Tensor  # (N, G, C, r, 1): exp(gam_C - gam)
    whole: Tensor  # (N, G, 1, r, 1): exp(gam_C)
    scores: Tensor  # (N, G, r, C, C): Q K^T * D
    overlaps: Tensor | None  # (N, G, r, C, C): K K^T * D
    inverse: Tensor | None  # (N, G, r, C, C): M^-1


def _inside(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, chunks: Chunks) -> _Inside:
    groups, repeats = q.shape[2], v.shape[2] // q.shape[2]

    def grouped(x: Tensor) -> Tensor:
        return chunks.gather(x.flatten(0, 1).unflatten(1, (groups, -1))).transpose(1, 2)

    keys, queries, values = grouped(k)[:, :, :, 0], grouped(q)[:, :, :, 0], grouped(v)
    assert values.shape[3] == repeats
    total = grouped(log_decay).transpose(2, 3).cumsum(-1)  # (N, G, r, C)
    upper = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    # Apply the mask before exp, because positive exponents would overflow.
    decays = (total[..., :, None] - total[..., None, :]).masked_fill_(upper, -torch.inf).exp_()
    scores = (queries @ keys.transpose(2, 3))[:, :, None] * decays
    last = total[..., -1:]
    factors = _by_row(total.exp()), _by_row((last - total).exp()), _by_row(last.exp())
    if beta is None:
        return _Inside(queries, keys, values, None, decays, *factors, scores, None, None)
    steps = grouped(beta).transpose(2, 3)
    overlaps = (keys @ keys.transpose(2, 3))[:, :, None] * decays
    system = steps[..., None] * overlaps
    identity = torch.eye(total.shape[-1], dtype=total.dtype, device=total.device)
    inverse = torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True)
    return _Inside(queries, keys, values, steps, decays, *factors, scores, overlaps, inverse)


def _through(x: _Inside, chunks: Chunks, initial: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of all chunks, the states before each chunk, and the updates (U in the module's docstring)."""
    count, groups, _, repeats, size = x.v.shape
    states = x.v.new_zeros(count, groups, x.k.shape[-1], repeats, size)
    if initial is not None:
        states[chunks.levels[0]] = initial
    updates = x.v if x.beta is None else torch.empty_like(x.v)
    for level, parents in zip(chunks.levels, [*chunks.parents, None], strict=True):
        state = states[level]
        if x.beta is not None and x.inverse is not None:
            values = x.v[level] - x.start[level] * _times(x.k[level], state)
            updates[level] = _mixed(x.inverse[level], _by_row(x.beta[level]) * values)
        if parents is not None:
            after = x.whole[level] * state + _outer(x.k[level], x.rest[level] * updates[level])
            following = slice(level.stop, level.stop + len(parents))
            torch.index_select(after, 0, parents, out=states[following])
    return x.start * _times(x.q, states) + _mixed(x.scores, updates), states, updates


class _Scan(torch.autograd.Function):
    """Autograd function of `scan`; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, chunks: Chunks
    ) -> Tensor:
        x = _inside(q, k, v, log_decay, beta, chunks)
        out, states, updates = _through(x, chunks)
        ctx.save_for_backward(q, k, v, log_decay, beta, states, None if beta is None else updates)
        ctx.chunks = chunks
        return chunks.scatter(out.transpose(1, 2)).view(v.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states, updates = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        x = _inside(*inputs, chunks)
        updates = x.v if updates is None else updates
        out = chunks.gather(grad.flatten(0, 1).unflatten(1, (x.k.shape[1], -1))).transpose(1, 2)
        direct, into = _mixed(x.scores.mT, out), _outer(x.q, x.start * out)
        # Gradients of the updates (dupdates), of the right-hand side of M^-1 (dright), and of the states after each chunk
        # (leaving). The loop starts at the leaves of the tree.
        dupdates, dright, leaving = torch.empty_like(direct), torch.empty_like(direct), torch.zeros_like(states)
        for level, parents in zip(reversed(chunks.levels), [None, *reversed(chunks.parents)], strict=True):
            if parents is not None:
                following = slice(level.stop, level.stop + len(parents))
                leaving[level].index_add_(0, parents, into[following])
            dupdates[level] = direct[level] + x.rest[level] * _times(x.k[level], leaving[level])
            into[level] += x.whole[level] * leaving[level]
            if x.beta is not None and x.inverse is not None:
                dright[level] = _mixed(x.inverse[level].mT, dupdates[level])
                into[level] -= _outer(x.k[level], x.start[level] * _by_row(x.beta[level]) * dright[level])
        shares = _shares(x, out, states, updates, dupdates, dright, leaving)
        flat = (None if share is None else chunks.scatter(share) for share in shares)
        shaped = (None if g is None else g.view(t.shape) for g, t in zip(flat, inputs, strict=True))
        return (*shaped, None)


def _shares(
    x: _Inside, out: Tensor, states: Tensor, updates: Tensor, dupdates: Tensor, dright: Tensor, leaving: Tensor
) -> tuple[Tensor | None, ...]:
    """Return gradients ``(N, C, G, ...)`` of queries, keys, values, log decays and step sizes."""

    def pairs(a: Tensor, b: Tensor) -> Tensor:
        """Return ``(N, G, r, C, C)`` products over the values' dimension."""
        return a.transpose(2, 3) @ b.transpose(2, 3).mT

    def back(y: Tensor, state: Tensor) -> Tensor:
        """Return the product ``y @ state^T`` as a tensor ``(N, G, C, dk)``."""
        return y.flatten(3) @ state.flatten(3).mT

    started, ended = x.start * out, x.rest * updates
    dscores = pairs(out, updates)
    dqk = (dscores * x.decays).sum(2)
    dq = dqk @ x.k + back(started, states)
    dk = dqk.mT @ x.q + back(ended, leaving)
    between = dscores * x.scores  # (N, G, r, C, C): gradient of gam_i - gam_j.
    before = (started * _times(x.q, states)).sum(-1)  # (N, G, C, r): gradient of gam_i
    after = (ended * _times(x.k, leaving)).sum(-1)  # (N, G, C, r): gradient of gam_C - gam_j
    dv, dbeta = dupdates, None
    if x.beta is not None and x.overlaps is not None:
        steps = _by_row(x.beta)
        dv = steps * dright
        read = x.start * _times(x.k, states)
        dsystem = -pairs(dright, updates).tril_(-1)
        weighted = dsystem * x.overlaps
        dbeta = (dright * (x.v - read)).sum(-1) + weighted.sum(-1).transpose(2, 3)
        dkk = (x.beta[..., None] * dsystem * x.decays).sum(2)
        dk += (dkk + dkk.mT) @ x.k - back(x.start * dv, states)
        between += x.beta[..., None] * weighted
        before -= (dv * read).sum(-1)
    # The log decay at position t affects all pairs of tokens i and j with i >= t > j.
    ones = torch.ones(between.shape[-2:], dtype=between.dtype, device=between.device)
    spanned = ((between @ ones.triu(1)) * ones.tril()).sum(-2).transpose(2, 3)
    whole = (x.whole[..., 0] * (states * leaving).sum((2, 4))[:, :, None]).expand_as(before)
    ddecay = spanned + before.flip(2).cumsum(2).flip(2) + (after.cumsum(2) - after) + whole
    return tuple(None if g is None else g.transpose(1, 2) for g in (dq, dk, dv, ddecay, dbeta))
