"""What a trainer's model sends to an engine that holds a copy of it: whole tensors under known names, cast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.models.heads import unwrapped
from posttrain.models.merged import adapter_weights, merged_weights
from posttrain.models.parallel import flattens_parameters, summoned

__all__ = ["Weights", "as_dtype", "named_weights"]


def as_dtype(name: Any) -> torch.dtype | None:
    """A dtype by its name, with or without ``torch.``; None where an engine did not say, or keeps whatever comes.

    >>> as_dtype("torch.bfloat16"), as_dtype("auto")
    (torch.bfloat16, None)
    """
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


class Weights:
    """A model's weights, computed as they are read; every reading gives those of the moment.

    Where parameters are sharded, reading is a collective: all ranks iterate, whoever sends.

    Args:
        model: The trainer's model, wrapped or not, with or without adapters.
        dtype: Floating tensors are cast to it; None leaves them.
        checkpoint_names: Names and layout as ``save_pretrained`` writes them, where the model's own differ (experts).
        adapter_only: Send the adapter's tensors, for an engine that applies them itself.

    Attributes:
        names: Of what is sent, without reading anything.
        adapter: ``{r, alpha, target_modules}`` with ``adapter_only``, else None.

    Raises:
        ModelError: Adapters on flattened shards; an adapter that cannot be sent alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        checkpoint_names: bool = False,
        adapter_only: bool = False,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.adapter: dict[str, Any] | None = None
        bare: Any = unwrapped(model)
        if flattens_parameters(model) and hasattr(bare, "peft_config"):
            raise ModelError(
                "adapters on a model under FSDP1 cannot be sent to a rollout engine: its parameters are flattened, and merging "
                "would add to shards. Use FSDP2 (fsdp_version: 2) or DeepSpeed ZeRO."
            )
        self.checkpoint_names = checkpoint_names and _renamed(bare)
        if adapter_only:
            found = adapter_weights(model)
            if found is None:
                raise ModelError(
                    "this adapter is more than LoRA on linear layers: send it merged (vllm_lora_sync='merge')."
                )
            self.adapter = found[0]
            self.names = list(found[1])
        else:
            self.names = [name for name, _ in merged_weights(model)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        pairs = self._adapter() if self.adapter is not None else self._whole()
        for name, tensor in pairs:
            yield name, tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def _adapter(self) -> Iterator[tuple[str, Tensor]]:
        found = adapter_weights(self.model)
        assert found is not None
        yield from found[1].items()

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad(), summoned(self.model):
            pairs = ((name, read()) for name, read in merged_weights(self.model))
            if not self.checkpoint_names:
                yield from pairs
                return
            from transformers.core_model_loading import revert_weight_conversion

            bare: Any = unwrapped(self.model)
            base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
            yield from revert_weight_conversion(base, dict(pairs)).items()


def _renamed(model: Any) -> bool:
    """Whether transformers loads this architecture under other names, or in another layout, than its checkpoint's."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = getattr(base, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(base, add_legacy=False) if known is None else known)


def named_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Weights:
    """A model's weights for `posttrain.rollouts.base.RolloutEngine.load_weights`, adapters merged into copies."""
    return Weights(model, dtype=dtype)
