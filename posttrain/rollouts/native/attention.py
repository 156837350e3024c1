"""Attention over a shared prefix and an own suffix, plugged into transformers' models by name.

The model's own decoder code runs unchanged; only the attention product is ours. Prefill computes each prompt once and keeps
its keys and values per prompt. Decoding multiplies all live queries of a group with the shared prefix in one product,
without repeating key-value heads, and each query with its own suffix; the two partial softmaxes are merged exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["NAME", "Prefix", "Store", "native_attention", "plugged_in"]

NAME = "posttrain_native"
FIRST_BLOCK = 64  # Suffix positions allocated at first; doubled when they are used up.


@dataclass(slots=True)
class Prefix:
    """Keys and values of one prompt, one ``(KV heads, length, head size)`` pair a layer."""

    length: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Store:
    """The engine's key-value memory, and what the current forward call is about.

    Attributes:
        slots: Sequences that can be live at once.
        prefixes: Prompts that the current prefill fills, in batch order; empty while decoding.
        groups: While decoding: each live prompt with the ``(g,)`` rows of its live sequences.
        lengths: ``(n,)`` suffix tokens stored so far by each live row, the current one not included.
        longest: The largest of them, on the host.
        keys, values: Per layer ``(slots, KV heads, capacity, head size)``.
    """

    slots: int
    prefixes: list[Prefix] = field(default_factory=list)
    groups: list[tuple[Prefix, Tensor]] = field(default_factory=list)
    lengths: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    longest: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append one position to each live row; returns the used part of this layer's memory."""
        n, used = key.shape[0], self.longest + 1
        if layer not in self.keys or self.keys[layer].shape[2] < used:
            self._grow(layer, key, value)
        keys, values = self.keys[layer], self.values[layer]
        rows = torch.arange(n, device=key.device)
        keys[rows, :, self.lengths] = key[:, :, 0]
        values[rows, :, self.lengths] = value[:, :, 0]
        return keys[:n, :, :used], values[:n, :, :used]

    def _grow(self, layer: int, key: Tensor, value: Tensor) -> None:
        for memory, sample in ((self.keys, key), (self.values, value)):
            old = memory.get(layer)
            capacity = FIRST_BLOCK if old is None else 2 * old.shape[2]
            new = sample.new_zeros(self.slots, sample.shape[1], capacity, sample.shape[3])
            if old is not None:
                new[:, :, : old.shape[2]] = old
            memory[layer] = new

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row's suffix to another row, to close the gap a finished sequence leaves."""
        for memory in (self.keys, self.values):
            for tensor in memory.values():
                tensor[target, :, :length] = tensor[source, :, :length]


_current: Store | None = None


def native_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer: ``(n, heads, t, size)`` in, ``(n, t, heads, size)`` out."""
    assert _current is not None, "native attention runs inside plugged_in() only"
    store = _current
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None)
    # Under autocast the rotary embedding leaves queries and keys in float32 beside half-precision values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if store.prefixes:
        for row, prefix in enumerate(store.prefixes):
            prefix.keys.append(key[row, :, : prefix.length].contiguous())
            prefix.values.append(value[row, :, : prefix.length].contiguous())
        return _prefill(query, key, value, scale, softcap, sliding_window).transpose(1, 2), None
    keys, values = store.write(module.layer_idx, key, value)  # type: ignore[arg-type]
    out = _decode(store, module.layer_idx, query, keys, values, scale, softcap, sliding_window)  # type: ignore[arg-type]
    return out, None


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Causal attention over right-padded prompts; padding comes after every real token and so is never seen."""
    width = query.shape[2]
    if softcap is None and (window is None or width <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    repeat = query.shape[1] // key.shape[1]
    scores = _cap(query @ key.repeat_interleave(repeat, 1).transpose(2, 3) * scale, softcap)
    index = torch.arange(width, device=query.device)
    distance = index[:, None] - index[None, :]
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(value.dtype)
    return weights @ value.repeat_interleave(repeat, 1)


def _cap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _decode(
    store: Store,
    layer: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """One new query a row against its group's prefix and its own suffix, ``(n, 1, heads, size)``."""
    n, heads, _, size = query.shape
    kv = keys.shape[1]
    q = query.view(n, kv, heads // kv, size) * scale
    scores = _cap((q @ keys.transpose(2, 3)).float(), softcap)  # (n, kv, r, used)
    index = torch.arange(keys.shape[2], device=query.device)
    ahead = index[None, :] > store.lengths[:, None]
    if window is not None:
        ahead = ahead | (store.lengths[:, None] - index[None, :] >= window)
    scores = scores.masked_fill(ahead[:, None, None, :], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    mass = weights.sum(-1, keepdim=True)
    out = (weights.to(values.dtype) @ values).float()
    for prefix, rows in store.groups:
        part = _prefix_part(prefix, layer, q[rows], store.lengths[rows], softcap, window)
        if part is None:
            continue
        part_top, part_mass, part_out = part
        joint = torch.maximum(top[rows], part_top)
        own, shared = torch.exp(top[rows] - joint), torch.exp(part_top - joint)
        mass[rows] = mass[rows] * own + part_mass * shared
        out[rows] = out[rows] * own + part_out * shared
    return (out / mass).to(query.dtype).reshape(n, 1, heads, size)


def _prefix_part(
    prefix: Prefix, layer: int, q: Tensor, lengths: Tensor, softcap: float | None, window: int | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Partial softmax of g queries over their shared prompt: maximum, mass and weighted values."""
    g, kv, r, size = q.shape
    key, value, start = prefix.keys[layer], prefix.values[layer], 0
    if window is not None:  # The oldest position that any of these queries still sees.
        start = max(0, prefix.length + int(lengths.min()) - window + 1)
        if start >= prefix.length:
            return None
        key, value = key[:, start:], value[:, start:]
    flat = q.transpose(0, 1).reshape(kv, g * r, size)
    scores = _cap((flat @ key.transpose(1, 2)).float(), softcap).view(kv, g, r, -1)
    if window is not None:
        position = torch.arange(start, prefix.length, device=q.device)
        gone = (prefix.length + lengths)[:, None] - position[None, :] >= window  # (g, length)
        scores = scores.masked_fill(gone[None, :, None, :], -1e30)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    mass = weights.sum(-1, keepdim=True)
    out = (weights.view(kv, g * r, -1).to(value.dtype) @ value).float().view(kv, g, r, size)
    return top.transpose(0, 1), mass.transpose(0, 1), out.transpose(0, 1)


@contextmanager
def plugged_in(model: nn.Module, store: Store) -> Iterator[None]:
    """Route every attention layer of ``model`` to `native_attention` with ``store``; the former backend is restored."""
    global _current
    ALL_ATTENTION_FUNCTIONS.register(NAME, native_attention)
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    configs = [(config, config._attn_implementation_internal) for config in found.values()]
    previous, _current = _current, store
    try:
        for config, _ in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        _current = previous
        for config, implementation in configs:
            config._attn_implementation_internal = implementation
