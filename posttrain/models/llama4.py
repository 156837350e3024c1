"""Chunk size and position-dependent query scale of Llama 4's attention layers. transformers does not pass these two values
to attention functions.

`chunk_of` returns the chunk size, `tempered` corrects the scale of queries, and `placed` does both. All three functions are
called only for layers of models with the type `MODEL_TYPE`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.models.architecture import layer_kinds

MODEL_TYPE = "llama4_text"


def placed(module: Any, query: Tensor, positions: Tensor) -> tuple[Tensor, int | None]:
    """Scale queries ``(B, heads, T, d)`` by their positions ``(B, T)``. Return the queries and the chunk size, which can be
    None.
    """
    return tempered(module, query, positions) if has_temperature(module) else query, chunk_of(module)


def chunk_of(module: Any) -> int | None:
    """Return the chunk size of a layer, in which a token attends only to positions of its own chunk. Return None if the layer
    has no chunks.
    """
    chunked = "chunked_attention" in layer_kinds(module.config)[module.layer_idx :][:1]
    return module.config.attention_chunk_size if chunked else None


def has_temperature(module: Any) -> bool:
    """Return whether an attention layer scales queries by their positions."""
    return module.attn_temperature_tuning and not module.use_rope


def tempered(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Correct the scale of queries ``(B, heads, T, d)``, so that it depends on their positions ``(B, T)``.

    Without a cache, a layer with `has_temperature` computes the scale from columns, which differ from positions in
    packed rows.
    """

    def factor(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    columns = torch.arange(query.shape[2], device=query.device)
    return (query * (factor(positions) / factor(columns))[:, None, :, None]).to(query.dtype)
