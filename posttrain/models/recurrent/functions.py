"""Replacements of transformers' functions for recurrent layers that support packed prefix trees and sampling.

The first argument of each function is an object that computes convolutions and recurrences (`Paths`): `Trees` in
training, `States` in sampling. All other arguments are those of transformers. The functions are short convolution
(`convolution`), gated delta rule (`gated_delta_rule`), state space of Mamba-2 (`state_space`, `no_fused_kernel`),
lightning attention (`lightning_attention`) and Kimi delta attention (`kimi_delta_attention`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Paths(Protocol):
    """Interface of objects that compute convolutions and recurrences along sequences."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def scan(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor: ...
    def kda(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor: ...


def convolution(
    paths: Paths,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve ``(B, D, T)`` hidden states along each path."""
    from transformers.activations import ACT2FN

    out = paths.convolve(hidden_states, weight, bias)
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype)


def gated_delta_rule(
    paths: Paths,
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
    return paths.scan(q, k, value, g, beta).to(query.dtype), None


def kimi_delta_attention(
    paths: Paths,
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
    return paths.kda(q, k, value, g, beta).to(query.dtype), None


def _normalized(query: Tensor, key: Tensor, normalizes: bool) -> tuple[Tensor, Tensor]:
    """Divide queries by the square root of the head size. Return queries and keys in float32 or float64. With ``normalizes``,
    both are first L2-normalized.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k = query.to(wide), key.to(wide)
    if normalizes:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def state_space(
    paths: Paths,
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
    """Compute the state space model of ``(B, T, heads, d)`` hidden states along each path, in float32 like transformers."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    # Call the method float() instead of to(), because some tests replace float() to compute in float64.
    x, dt = hidden_states.float(), dt.float()
    out = paths.scan(C, B, x * dt[..., None], A * dt, None)
    return out if D is None else out + D[:, None] * x


def no_fused_kernel(paths: Paths, *args: Any, **kwargs: Any) -> None:
    """Return None, so that the layer calls the separate functions instead of a fused kernel."""


def lightning_attention(
    paths: Paths, layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute a whole layer of MiniMax for ``(B, T, H)`` hidden states along each path.

    The whole layer is replaced, because its modeling file has no separate function for the recurrence. Decays are computed
    from the slopes in float32. The layer's own buffers of decays are cast to half precision together with the weights.
    """
    heads, size = layer.num_attention_heads, layer.head_dim
    states = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * size))
    decay = -layer.slope_rate.flatten().expand(*hidden_states.shape[:2], heads)
    out = paths.scan(*states.split(size, -1), decay, None)
    out = layer.norm(out.flatten(2).to(hidden_states.dtype))
    return layer.out_proj(F.sigmoid(layer.output_gate(hidden_states)) * out), None
