"""Properties of Llama 4's attention layers that they do not pass to attention functions: chunk size and scale by position.

`chunk_of` returns the size of chunks, `tempered` corrects the scale of queries, and `placed` does both. Only layers of
`MODEL_TYPE` call these functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.models.architecture import layer_kinds

MODEL_TYPE = "llama4_text"


def placed(module: Any, query: Tensor, positions: Tensor) -> tuple[Tensor, int | None]:
    """Return queries ``(B, heads, T, d)``, scaled for their positions ``(B, T)``, and the size of chunks or None."""
    return tempered(module, query, positions) if has_temperature(module) else query, chunk_of(module)


def chunk_of(module: Any) -> int | None:
    """Return the size of the chunks of positions within which a layer attends, or None if attention is not chunked."""
    chunked = "chunked_attention" in layer_kinds(module.config)[module.layer_idx :][:1]
    return module.config.attention_chunk_size if chunked else None


def has_temperature(module: Any) -> bool:
    """Return whether an attention layer scales its queries by their positions."""
    return module.attn_temperature_tuning and not module.use_rope


def tempered(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Correct the scale of queries ``(B, heads, T, d)`` for their positions ``(B, T)``.

    Without a cache, a layer with `has_temperature` uses columns instead of positions.
    """

    def factor(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    columns = torch.arange(query.shape[2], device=query.device)
    return (query * (factor(positions) / factor(columns))[:, None, :, None]).to(query.dtype)
