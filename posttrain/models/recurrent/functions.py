"""Versions of transformers' functions of recurrent layers for packed prefix trees, with the same arguments.

Short convolution (`convolution`), gated delta rule (`gated_delta_rule`), state space of Mamba-2 (`state_space`,
`no_fused_kernel`), lightning attention (`lightning_attention`) and Kimi delta attention (`kimi_delta_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.models.recurrent import chunks
from posttrain.models.recurrent.convolution import short_convolution
from posttrain.models.recurrent.kda import SIZE as KDA_SIZE
from posttrain.models.recurrent.kda import kda
from posttrain.models.recurrent.scan import scan
from posttrain.models.tree_attention import Forest


def _chunks(forest: Forest, device: torch.device, size: int = chunks.SIZE) -> chunks.Chunks:
    batch = forest.batch
    return forest.kept(
        ("chunks", size, device), lambda: chunks.chunks_of(batch.segments, batch.input_ids.shape, device, size)
    )


def _before(forest: Forest, device: torch.device, count: int) -> list[Tensor]:
    batch = forest.batch
    return forest.kept(
        ("before", count, device), lambda: chunks.predecessors(batch.segments, batch.input_ids.shape, device, count)
    )


def convolution(
    forest: Forest,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve ``(B, D, T)`` hidden states along each path."""
    from transformers.activations import ACT2FN

    before = _before(forest, hidden_states.device, weight.shape[1])
    out = short_convolution(hidden_states.to(weight.dtype), weight, bias, before)
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype)


def gated_delta_rule(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule of ``(B, T, heads, d)`` queries, keys and values along each path."""
    q, k = _normalized(query, key, use_qk_l2norm_in_kernel)
    return scan(q, k, value, g, beta, _chunks(forest, query.device)).to(query.dtype), None


def kimi_delta_attention(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute Kimi delta attention of ``(B, T, heads, d)`` queries, keys and values along each path."""
    q, k = _normalized(query, key, use_qk_l2norm_in_kernel)
    return kda(q, k, value, g, beta, _chunks(forest, query.device, KDA_SIZE)).to(query.dtype), None


def _normalized(query: Tensor, key: Tensor, normalizes: bool) -> tuple[Tensor, Tensor]:
    """Return queries, divided by the root of the head size, and keys, in float32 or float64."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k = query.to(wide), key.to(wide)
    if normalizes:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def state_space(
    forest: Forest,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    """Compute the state space of ``(B, T, heads, d)`` hidden states along each path, in float32 as the original."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    # float() is float64 in proofs.
    x, dt = hidden_states.float(), dt.float()
    out = scan(C, B, x * dt[..., None], A * dt, None, _chunks(forest, x.device))
    return out if D is None else out + D[:, None] * x


def no_fused_kernel(forest: Forest, *args: Any, **kwargs: Any) -> None:
    """Return None: no fused kernel exists for prefix trees, and the layer calls the functions above."""


def lightning_attention(
    forest: Forest, layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute a layer of MiniMax for ``(B, T, H)`` hidden states along each path.

    Its file has no function for the recurrence alone. Decays are computed in float32 from the slopes, because the layer's buffers
    of decays follow the weights into half precision.
    """
    heads, size = layer.num_attention_heads, layer.head_dim
    states = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * size))
    decay = -layer.slope_rate.flatten().expand(*hidden_states.shape[:2], heads)
    out = scan(*states.split(size, -1), decay, None, _chunks(forest, hidden_states.device))
    out = layer.norm(out.flatten(2).to(hidden_states.dtype))
    return layer.out_proj(F.sigmoid(layer.output_gate(hidden_states)) * out), None
