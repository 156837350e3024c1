"""Stand-ins for the two operators of variable-length attention that no CPU has: what they are documented to compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from posttrain.models import tree_attention
from posttrain.models.tree_attention import Call, Level


def visible(level: Level, window: int | None) -> Tensor:
    """``(queries, keys)`` bool: of its own part, and where the part is causal, what is not behind it nor before its window."""
    q, k = (torch.arange(len(at), device=at.device) for at in (level.queries, level.keys))
    parts = [torch.bucketize(x, ends[1:], right=True) for x, ends in ((q, level.query_ends), (k, level.key_ends))]
    same = parts[0][:, None] == parts[1]
    ahead = q[:, None] - k
    return same & (ahead >= 0) & (ahead < (window or len(k))) if level.causal else same


def forward(q: Tensor, k: Tensor, v: Tensor, level: Level, call: Call) -> tuple[Tensor, Tensor]:
    """Output ``(N, heads, d)`` and log-sum-exp ``(heads, N)``, by a mask."""
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeat, 1)).float() * call.scale
    scores = scores.masked_fill(~visible(level, call.window), -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().to(v.dtype)
    return torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(repeat, 1)), lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, level: Level, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """What a flash backward computes of the ``out`` and ``lse`` that it is given."""
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys).float() * call.scale
    p = (scores.masked_fill(~visible(level, call.window), -math.inf) - lse[..., None]).exp().to(q.dtype)
    ds = p * (torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).T[..., None]) * call.scale
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, grad)
    folded = [x.unflatten(1, (-1, repeat)).sum(2) for x in (dk, dv)]
    return torch.einsum("hqk,khd->qhd", ds, keys), *folded


@contextmanager
def standing_in() -> Iterator[None]:
    """Inside, calls of an accelerator are the stand-ins', in any precision."""
    names = ("varlen_forward", "varlen_backward", "no_kernel")
    former = {name: getattr(tree_attention, name) for name in names}
    try:
        for name, stand_in in zip(names, (forward, backward, lambda *_: ""), strict=True):
            setattr(tree_attention, name, stand_in)
        yield
    finally:
        for name, value in former.items():
            setattr(tree_attention, name, value)
