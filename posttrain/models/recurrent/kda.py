"""Kimi delta attention over the chunks of packed prefix trees: the gated delta rule with one decay per channel (`kda`).

With log decays ``g`` ``(T, dk)`` and the terms of `posttrain.models.recurrent.scan`:

    S_t = diag(a_t) S_{t-1} + beta_t k_t (v_t - (diag(a_t) S_{t-1})^T k_t)^T,   o_t = S_t^T q_t

The product of two tokens of a chunk is ``sum_d q_id k_jd exp(gam_id - gam_jd)``. Products are computed one column at a time, so
that exponents are never positive and no tensor has the size ``(C, C, dk)``.

Reference: Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.models.recurrent.chunks import Chunks

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

SIZE = 16  # Number of tokens in a chunk.


def kda(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunks: Chunks, initial: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute Kimi delta attention along each path of packed prefix trees.

    Args:
        q: ``(B, T, H, dk)`` queries.
        k: ``(B, T, H, dk)`` keys.
        v: ``(B, T, H, dv)`` values.
        log_decay: ``(B, T, H, dk)`` logs of decays, at most 0.
        beta: ``(B, T, H)`` step sizes.
        chunks: Layout of the batch.
        initial: ``(S, H, dk, dv)`` states from which S sequences continue. If it is set, each segment of ``chunks`` is one
            sequence. None: all states start at 0.

    Returns:
        Outputs ``(B, T, H, dv)`` in float32, or in float64 if ``v`` is float64. Outputs of padding tokens are 0. The second
        result contains the states after each sequence, or None without ``initial``.
    """
    shape, wide = v.shape, torch.float64 if v.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, log_decay, beta = (
            chunks.gather(x.to(wide).flatten(0, 1)).transpose(1, 2) for x in (q, k, v, log_decay, beta[..., None])
        )  # (N, H, C, ...)
        total = log_decay.cumsum(2)
        start, last = total.exp(), total[:, :, -1:]
        scores, overlaps = _Pairs.apply(q, k, total), _Pairs.apply(k, k, total)
        right = beta * torch.cat([v, start * k], -1)
        solved = torch.linalg.solve_triangular(beta * overlaps, right, upper=False, unitriangular=True)
        values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
        ended, whole = ((last - total).exp() * k).mT, last.exp().mT
        first = v.new_zeros(chunks.levels[0].stop, v.shape[1], k.shape[-1], v.shape[-1])
        states = [first if initial is None else initial]
        updates = []
        for level, parents in zip(chunks.levels, [*chunks.parents, None], strict=True):
            updates.append(values[level] - keys[level] @ states[-1])
            if parents is not None:
                states.append((whole[level] * states[-1] + ended[level] @ updates[-1])[parents])
        before, added, ends = torch.cat(states), torch.cat(updates), chunks.ends
        out = (start * q) @ before + scores @ added
        after = None if initial is None else whole[ends] * before[ends] + ended[ends] @ added[ends]
        return chunks.scatter(out.transpose(1, 2)).view(shape), after


class _Pairs(torch.autograd.Function):
    """Lower triangular ``(..., C, C)`` products ``sum_d x_id y_jd exp(total_id - total_jd)``."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, total)
        out = x.new_zeros(*x.shape[:-1], x.shape[-2])
        for j in range(x.shape[-2]):
            decayed = x[..., j:, :] * (total[..., j:, :] - total[..., j, None, :]).exp_()
            out[..., j:, j] = (decayed @ y[..., j, :, None])[..., 0]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:
        x, y, total = ctx.saved_tensors
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        for j in range(x.shape[-2]):
            decay = (total[..., j:, :] - total[..., j, None, :]).exp_().mul_(grad[..., j:, j, None])
            dx[..., j:, :] += decay * y[..., j, None, :]
            dy[..., j, :] = (decay * x[..., j:, :]).sum(-2)
        return dx, dy, x * dx - y * dy
