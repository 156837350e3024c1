"""An output layer that computes in float32, whatever the rest of the model and autocast do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, ModelError

__all__ = ["Float32Linear", "cast_head_to_fp32"]


class Float32Linear(nn.Linear):
    """A linear layer with float32 weights that leaves autocast: logits are not rounded to bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """``(..., H)`` of any dtype to float32 ``(..., V)``."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


def cast_head_to_fp32(model: Any) -> None:
    """Turn the output layer of a causal language model into a `Float32Linear`, in place.

    Where the input embeddings are the same matrix, what they return is cast back, so that the layers see their own dtype.

    Args:
        model: A transformers model, not a peft wrapper around one.

    Raises:
        ConfigError: An adapter sits on the head.
        ModelError: The head is no plain linear layer (a quantised one has no float32).

    Reference: MiniMax-M1, arXiv:2506.13585
    """
    head = model.get_output_embeddings()
    name = type(head).__name__
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        raise ConfigError(
            f"cast_lm_head_to_fp32=True cannot be used with an adapter on the output layer ({name}). Take lm_head out of "
            "target_modules and modules_to_save, or set cast_lm_head_to_fp32=False."
        )
    if type(head) is Float32Linear:
        return
    if type(head) is not nn.Linear:
        raise ModelError(f"cast_lm_head_to_fp32=True needs a plain linear output layer, and this model has a {name}.")
    embeddings = model.get_input_embeddings()
    before = embeddings.weight.dtype
    tied = head.weight is embeddings.weight
    head.float()
    head.__class__ = Float32Linear
    if tied:
        embeddings.weight = head.weight  # ``float()`` may have made a new parameter.
        if before != torch.float32:
            embeddings.register_forward_hook(_cast_back(before))


def _cast_back(dtype: torch.dtype) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.to(dtype)

    return hook
