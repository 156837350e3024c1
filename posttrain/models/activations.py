"""Activation checkpointing with the last layers left out, as many as the logits' saved memory pays for."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import ConfigError
from posttrain.models.heads import causal_lm

__all__ = [
    "KeepHostMemory",
    "KeepLastActivations",
    "NoOpManager",
    "OffloadActivations",
    "check_offloading",
    "get_act_offloading_ctx_manager",
    "gradients_first",
    "keep_last_activations",
    "layers_to_keep",
    "recompute_activations",
]

logger = logging.getLogger(__name__)


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


# Kernels of scaled_dot_product_attention: not every build of torch has all of them.
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
ATTENTION_OPS = {getattr(torch.ops.aten, name).default for name in ATTENTION if hasattr(torch.ops.aten, name)}


def keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What backward does about one operation: attention, which costs the square of the length, is not computed again."""
    kept = op in ATTENTION_OPS or "flash_attn" in str(op)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_activations(model: Any, options: dict[str, Any] | None = None) -> None:
    """Switch checkpointing on in all layers, by the name that this version of transformers gives it.

    Args:
        model: Of transformers.
        options: As ``gradient_checkpointing_kwargs``; ``selective`` keeps what attention computed.

    Raises:
        ConfigError: ``selective`` with reentrant checkpointing, which cannot choose.
    """
    given = dict(options or {"use_reentrant": False})
    if given.pop("selective", False):
        if given.get("use_reentrant"):
            raise ConfigError(
                "gradient_checkpointing_kwargs: selective=True needs use_reentrant=False, and it is True. Leave it out."
            )
        given |= {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}
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
        if "selective" in options and (getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing):
            recompute_activations(
                causal_lm(model), options
            )  # The trainer passed it on as it is written, which torch does not know.
        if "every_n_layers" not in options:
            keep_last_activations(model, args.kept_layers)


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


# The numbers of `mallopt` in glibc's malloc.h, and what glibc starts with.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
KEPT = {MMAP_MAX: 0, TRIM_THRESHOLD: -1, TOP_PAD: 64 * 2**20}  # -1 is never, by mallopt(3).
STANDARD = {MMAP_MAX: 65536, TRIM_THRESHOLD: 128 * 2**10, TOP_PAD: 128 * 2**10}


class KeepHostMemory(transformers.TrainerCallback):
    """Tells glibc's allocator to keep what is freed from the beginning of training on a CPU until its end.

    A training step takes and frees the same gigabytes each time. By default every tensor of more than 32 MB is mapped
    anew and unmapped again, so that the kernel clears all its pages each step: a fifth of the processor's time in a
    reward-model step of a 135M model. Peak memory is the same. Elsewhere (another allocator, another C library, an
    accelerator) nothing is done.
    """

    _kept = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep freed memory, where that is the memory that tensors lie in."""
        if args.device.type == "cpu":
            self._kept = _set(KEPT)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Back to what glibc does by itself, and give back what is free."""
        if self._kept:
            self._kept = not _set(STANDARD)
            _glibc().malloc_trim(0)


@contextmanager
def gradients_first(model: nn.Module, *, passes: int) -> Iterator[None]:
    """Gradients that several passes on a CPU add up get their memory before the first of them, not in the middle of it.

    Otherwise they settle in what the first pass frees, between what is freed later, and the activations of the next pass,
    of the very same sizes, find no room there: a tenth of the memory of a GRPO step. A weight that no pass reaches has no
    gradient afterwards, as ever, so that no optimiser moves it.

    Args:
        model: Not wrapped by parallelism, which keeps gradients in memory of its own; one that is stays as it is, and so do
            weights that are sharded in place (FSDP2), whose own count of changes stays 0 when their shard's gradient grows.
        passes: Forward and backward passes inside; one alone adds nothing up.
    """
    made = []
    if passes > 1 and not isinstance(getattr(model, "module", None), nn.Module):
        plain = [p for p in model.parameters() if type(p.data) is Tensor and p.device.type == "cpu"]
        made = [p for p in plain if p.requires_grad and p.grad is None]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in made:
            if parameter.grad is not None and parameter.grad._version == 0:  # Nothing was added.
                parameter.grad = None


def _glibc() -> Any:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None


def _set(values: dict[int, int]) -> bool:
    """Whether glibc took all of them."""
    try:
        library = _glibc()
    except (OSError, TypeError):  # No C library to ask, as on Windows.
        return False
    return library is not None and {library.mallopt(name, value) for name, value in values.items()} == {1}
