"""Activations in the host's memory between forward and backward, for what recomputation alone does not make fit."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError

__all__ = ["NoOpManager", "OffloadActivations", "check_offloading", "get_act_offloading_ctx_manager"]

logger = logging.getLogger(__name__)


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks: activations travel to pinned host memory when saved and come back when backward needs them.

    Both copies run on the current stream: a copy out is finished before the copy back that follows it in the same stream,
    so no tensor can be read half-written. The host does not wait for either.

    Args:
        use_pin_memory: Page-locked memory, so that copies run beside the host.
        min_offload_size: Bytes; smaller tensors stay.
        device_type: Whose tensors travel; tests say ``cpu``.
        kept: Storages that stay on the device (parameters), by address.

    Raises:
        ConfigError: ``min_offload_size`` is negative.
    """

    def __init__(
        self,
        *,
        use_pin_memory: bool = True,
        min_offload_size: int = 1024,
        device_type: str = "cuda",
        kept: frozenset[int] = frozenset(),
    ) -> None:
        if min_offload_size < 0:
            raise ConfigError(f"min_offload_size={min_offload_size} must be 0 bytes or more.")
        self.pin = use_pin_memory and device_type == "cuda"
        self.min_size, self.device_type, self.kept = min_offload_size, device_type, kept
        self.offloaded_bytes = 0
        super().__init__(self._pack, self._unpack)

    def _stays(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type != self.device_type
            or tensor.nbytes < self.min_size
            or isinstance(tensor, nn.Parameter | nn.Buffer)
            or type(tensor) is not Tensor  # Wrappers (fp8, sharded tensors) know how to be saved themselves.
            or tensor.untyped_storage().data_ptr() in self.kept
        )

    def _pack(self, tensor: Tensor) -> Any:
        if self._stays(tensor):
            return tensor
        self.offloaded_bytes += tensor.nbytes
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
        host.copy_(tensor, non_blocking=self.pin)
        return tensor.device, host

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=self.pin) if device.type != "cpu" else host


class NoOpManager(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that keep everything where it is: what is computed inside escapes an outer `OffloadActivations`.

    >>> with NoOpManager():
    ...     y = torch.ones(2, requires_grad=True).exp()
    """

    def __init__(self) -> None:
        super().__init__(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def check_offloading(args: Any) -> None:
    """Refuse ``activation_offloading`` where it cannot help, before the model loads.

    Raises:
        ConfigError: There is no accelerator: the activations are in the host's memory already.
    """
    if args.activation_offloading and args.device.type == "cpu":
        raise ConfigError(
            "activation_offloading=True moves activations from an accelerator to the host's memory, and this run is on the "
            "CPU. Leave it out; gradient_checkpointing=True saves memory here."
        )


def get_act_offloading_ctx_manager(model: nn.Module, *, enabled: bool = True, **options: Any) -> AbstractContextManager:
    """A context for forward and backward of a training step."""
    if not enabled:
        return nullcontext()
    kept = frozenset(p.untyped_storage().data_ptr() for p in model.parameters())
    return OffloadActivations(device_type=next(model.parameters()).device.type, kept=kept, **options)
