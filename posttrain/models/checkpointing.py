"""Activation checkpointing with the last layers left out, as many as the logits' saved memory pays for."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.heads import causal_lm

__all__ = ["KeepLastActivations", "keep_last_activations", "layers_to_keep", "recompute_activations"]


def layers_to_keep(model: nn.Module) -> int:
    """How many layers' activations fit where full logits and their gradient would have been.

    ``k = floor(2 V / a)``, both sides in numbers a token: logits and their gradient are 2 V, which the chunked head never
    holds; a layer without checkpointing keeps about twice what its linear layers put out, ``a = 2 sum(out_features)``
    (outputs, and the normalised, activated and summed tensors between them).

    Returns:
        0 for a model without repeated layers, at most all of them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not layers or head is None:
        return 0
    kept = max(2 * sum(m.out_features for m in layer.modules() if isinstance(m, nn.Linear)) for layer in layers)
    return min(len(layers), 2 * head.weight.shape[0] // kept) if kept else 0


def recompute_activations(model: Any, options: dict[str, Any] | None = None) -> None:
    """Switch checkpointing on in all layers, by the name that this version of transformers gives it.

    Args:
        model: Of transformers.
        options: As ``gradient_checkpointing_kwargs``.
    """
    given = dict(options or {"use_reentrant": False})
    own = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(given or None, **own)


def keep_last_activations(model: nn.Module, count: int | None = None) -> int:
    """Switch checkpointing off in the last ``count`` layers (None: `layers_to_keep`) and say how many there were.

    The last layers, because backward needs them first: what they keep is freed before the others are recomputed.
    """
    bare = causal_lm(model)
    layers = [m for m in bare.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    kept = layers[max(0, len(layers) - (layers_to_keep(bare) if count is None else count)) :]
    for layer in kept:
        layer.gradient_checkpointing = False
    return len(kept)


class KeepLastActivations(TrainerCallback):
    """Runs `keep_last_activations` once the trainer has switched checkpointing on.

    A pattern the user chose (``every_n_layers`` in ``gradient_checkpointing_kwargs``) is left as it is.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        options = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
        if "every_n_layers" not in options:
            keep_last_activations(model, args.kept_layers)
