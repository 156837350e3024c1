"""Attention with scores ``cap * tanh(scale q k^T / cap)`` in PyTorch: `Capped`, `capped_attention`,
`capped_attention_backward`.

torch's flash attention for CPUs does not support a cap. `capped_attention` and `capped_attention_backward` compute one block
of tree attention with capped scores. The forward function also returns the log-sum-exp. The arguments of the backward
function are the output and the log-sum-exp that were merged over all blocks. Queries are processed in blocks of `BLOCK`, so
that the scores of all queries are never in memory at the same time.

Reference: Gemma 2, arXiv:2408.00118.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256


class Capped(NamedTuple):
    """Mask, scale and cap of one block of tree attention.

    Attributes:
        causal: Whether queries and keys are the same tokens. Each token then attends to itself and to earlier tokens.
        mask: ``(n, m)`` values that are added to the capped scores. None: no mask.
        scale: Factor of the products of queries and keys.
        cap: Upper bound on the absolute value of the scores.
    """

    causal: bool
    mask: Tensor | None
    scale: float
    cap: float


def capped_attention(q: Tensor, k: Tensor, v: Tensor, rule: Capped) -> tuple[Tensor, Tensor]:
    """Compute capped attention. Return the output ``(1, heads, n, d)`` and the log-sum-exp ``(1, heads, n)`` of n queries.

    Keys and values have the shape ``(1, KV heads, m, d)``. Several query heads share one key-value head.
    """
    wide = _wide(q)
    value = v.to(wide)[:, :, None]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=wide)
    for rows, scores, _ in _blocks(q, k, rule):
        total = scores.logsumexp(-1)
        out[:, :, rows] = ((scores - total[..., None]).exp_() @ value).flatten(1, 2).to(q.dtype)
        lse[:, :, rows] = total.flatten(1, 2)
    return out, lse


def capped_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Capped
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values. The arguments ``out`` and ``lse`` may include contributions of keys
    that are not in ``k``.
    """
    kv, wide = k.shape[1], _wide(q)
    key, value = k.to(wide)[:, :, None], v.to(wide)[:, :, None]
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(key[:, :, 0]), torch.zeros_like(value[:, :, 0])
    for rows, scores, slope in _blocks(q, k, rule):
        g, o, queries, total = (x[:, :, rows].to(wide).unflatten(1, (kv, -1)) for x in (grad, out, q, lse))
        weights = (scores - total[..., None]).exp_()
        dv += (weights.mT @ g).sum(2)
        dscores = weights * (g @ value.mT - (g * o).sum(-1, keepdim=True)) * slope * rule.scale
        dq[:, :, rows] = (dscores @ key).flatten(1, 2).to(q.dtype)
        dk += (dscores.mT @ queries).sum(2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor, rule: Capped) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the slice of each block of queries, its scores ``(1, KV heads, r, n, m)``, and the derivative of the cap."""
    wide = _wide(q)
    queries, keys = q.to(wide).unflatten(1, (k.shape[1], -1)), k.to(wide)[:, :, None]
    for start in range(0, q.shape[2], BLOCK):
        rows = slice(start, min(start + BLOCK, q.shape[2]))
        bent = (queries[:, :, :, rows] @ keys.mT).mul_(rule.scale / rule.cap).tanh_()
        scores = bent * rule.cap
        if rule.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(start + 1)
            scores.masked_fill_(later, -torch.inf)
        if rule.mask is not None:
            scores += rule.mask[rows]
        yield rows, scores, 1 - bent.square()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
