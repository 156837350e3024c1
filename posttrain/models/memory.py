"""Memory and FLOPs of a training step: activation checkpointing, offloading, available memory, and MFU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import ConfigError, ModelError
from posttrain.models.architecture import differs_by_layer, experts_per_token, head_size, layer_kinds
from posttrain.models.heads import causal_lm, output_layer, unwrapped
from posttrain.models.parallel import local_part

if TYPE_CHECKING:
    from transformers import PretrainedConfig, TrainerControl, TrainerState, TrainingArguments

    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)


def layers_to_keep(model: nn.Module) -> int:
    """Return the number of layers whose activations fit into the memory that chunked logits save.

    The number is ``k = floor(2 V / a)``. Full logits and their gradient would need ``2 V`` elements per token, which the
    chunked head does not allocate. A layer without checkpointing saves ``a = 2 sum(out_features)`` elements per token, which
    is twice the size of the outputs of its linear layers. One half is the outputs themselves. The other half is normalized,
    activated and summed tensors.

    Returns:
        Number of layers, at most the number of layers of the model. The result is 0 for a model that has no checkpointable
        layers or no output layer.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    head = output_layer(model)
    if not layers or head is None:
        return 0
    activations = max(2 * sum(m.out_features for m in layer.modules() if isinstance(m, nn.Linear)) for layer in layers)
    return min(len(layers), 2 * head.weight.shape[0] // activations) if activations else 0


# Operators of scaled_dot_product_attention. Some builds of torch lack some of these operators.
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
ATTENTION_OPS = {getattr(torch.ops.aten, name).default for name in ATTENTION if hasattr(torch.ops.aten, name)}


def keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the checkpoint policy of an operator. The outputs of attention are saved, because recomputing them has a cost
    quadratic in the length. The outputs of all other operators are recomputed.
    """
    is_attention = op in ATTENTION_OPS or any(name in str(op) for name in ("flash_attn", "varlen_attn"))
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_activations(model: nn.Module, options: dict[str, Any] | None = None) -> None:
    """Enable activation checkpointing in all layers of a transformers model.

    Args:
        model: A transformers model.
        options: Same as ``gradient_checkpointing_kwargs``. ``selective=True`` saves the outputs of attention.

    Raises:
        ConfigError: ``selective`` is combined with reentrant checkpointing, which does not support policies.
    """
    kwargs = dict(options or {"use_reentrant": False})
    if kwargs.pop("selective", False):
        if kwargs.get("use_reentrant"):
            raise ConfigError(
                "gradient_checkpointing_kwargs: selective=True does not work with use_reentrant=True. Fix: remove use_reentrant."
            )
        kwargs |= {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}
    own = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(kwargs or None, **own)


def recomputes(args: TrainingArguments) -> bool:
    """Return whether activation checkpointing is enabled. The function reads both option names of recent transformers
    versions.
    """
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


def recompute_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the keyword arguments of activation checkpointing. The function reads both option names of recent transformers
    versions.
    """
    return dict(getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {})


def keep_last_activations(model: nn.Module, count: int | None = None) -> int:
    """Disable checkpointing in the last ``count`` layers, so that they keep their activations. Return the number of layers
    without checkpointing. If ``count`` is None, `layers_to_keep` chooses the number.

    The backward pass starts with the last layers. Activations of the last layers are freed before the earlier layers
    are recomputed.
    """
    bare = causal_lm(model)
    layers = [m for m in bare.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    selected = layers[max(0, len(layers) - (layers_to_keep(bare) if count is None else count)) :]
    for layer in selected:
        layer.gradient_checkpointing = False
    return len(selected)


class KeepLastActivations(TrainerCallback):
    """Callback that calls `keep_last_activations` after the trainer has enabled checkpointing.

    The callback does nothing if the user set ``every_n_layers`` in ``gradient_checkpointing_kwargs``.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        options = recompute_options(args)
        if "selective" in options and recomputes(args):
            # The trainer has passed the option "selective" to torch, which does not support it. Enable checkpointing a
            # second time, without this option.
            recompute_activations(causal_lm(model), options)
        if "every_n_layers" not in options:
            keep_last_activations(model, args.kept_layers)


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that copy activations to pinned host memory. The backward pass copies them back.

    Both copies run on the current stream, so the copy to the host finishes before the copy back to the device starts. The
    host does not wait for the copies.

    Args:
        use_pin_memory: Whether to use page-locked memory. Copies to page-locked memory do not block the host.
        min_offload_size: Size in bytes below which a tensor stays on the device.
        device_type: Type of the device whose tensors are offloaded. Tests use ``cpu``.
        kept: Addresses of the storages of parameters, which stay on the device.

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
            # Do not offload tensor subclasses (e.g. fp8 or sharded tensors), because these classes implement offloading
            # themselves.
            or type(tensor) is not Tensor
            or tensor.untyped_storage().data_ptr() in self.kept
        )

    def _pack(self, tensor: Tensor) -> Any:
        # If a tensor is expanded (e.g. one mask for all heads), copy its underlying data only once.
        whole = tensor
        for axis, step in enumerate(tensor.stride()):
            tensor = tensor.narrow(axis, 0, 1) if step == 0 and tensor.shape[axis] > 1 else tensor
        if self._stays(tensor):
            return whole
        self.offloaded_bytes += tensor.nbytes
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
        host.copy_(tensor, non_blocking=self.pin)
        # Keep the strides of masks, because attention kernels need rows that are padded to a multiple of 16. A small view of
        # a large tensor is restored without the rest of that tensor.
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        return whole.device, whole.shape, host, tensor.stride() if span < 2 * tensor.numel() else host.stride()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, shape, host, strides = packed
        restored = host.new_empty_strided(host.shape, strides, device=device)
        return restored.copy_(host, non_blocking=self.pin).expand(shape)


class NoOpManager(torch.autograd.graph.saved_tensors_hooks):
    """Context with saved-tensor hooks that do nothing, which disables an outer `OffloadActivations`.

    >>> with NoOpManager():
    ...     y = torch.ones(2, requires_grad=True).exp()
    """

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


def check_offloading(args: PostTrainingConfig) -> None:
    """Raise an error if ``activation_offloading`` is set on a CPU. The check runs before the model is loaded.

    Raises:
        ConfigError: The run is on a CPU, where activations are always in host memory.
    """
    if args.activation_offloading and args.device.type == "cpu":
        raise ConfigError(
            "activation_offloading=True moves activations from an accelerator to host memory, but this run is on "
            "a CPU. Fix: remove the option. gradient_checkpointing=True saves memory on a CPU."
        )


def get_act_offloading_ctx_manager(model: nn.Module, *, enabled: bool = True, **options: Any) -> AbstractContextManager:
    """Return a context in which activations are offloaded to host memory. If ``enabled`` is False, the context has no
    effect.
    """
    if not enabled:
        return nullcontext()
    pointers = frozenset(local_part(p.detach()).untyped_storage().data_ptr() for p in model.parameters())
    return OffloadActivations(device_type=next(model.parameters()).device.type, kept=pointers, **options)


# Identifiers of `mallopt` parameters, from glibc's malloc.h. KEPT maps each identifier to the value that this library sets.
# STANDARD maps it to glibc's default.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
KEPT = {MMAP_MAX: 0, TRIM_THRESHOLD: -1, TOP_PAD: 64 * 2**20}  # The value -1 disables trimming (see mallopt(3)).
STANDARD = {MMAP_MAX: 65536, TRIM_THRESHOLD: 128 * 2**10, TOP_PAD: 128 * 2**10}


class KeepHostMemory(transformers.TrainerCallback):
    """Callback that makes glibc keep freed memory for reuse during training on a CPU.

    Each training step allocates and frees the same gigabytes. By default, glibc returns the memory of every freed tensor
    above 32 MB to the kernel. In the next step, the kernel has to clear these pages before they are reused. Clearing pages
    took a fifth of the CPU time of a reward-model step of a 135M model. Peak memory does not change. With another allocator,
    another C library or an accelerator, this callback does nothing.
    """

    _kept = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make glibc keep freed memory if training runs on the CPU."""
        if args.device.type == "cpu":
            self._kept = _set(KEPT)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore glibc's defaults and return free memory to the system."""
        if self._kept:
            self._kept = not _set(STANDARD)
            _glibc().malloc_trim(0)


@contextmanager
def gradients_first(model: nn.Module, *, passes: int) -> Iterator[None]:
    """Allocate gradients on a CPU before the first of several passes that accumulate gradients.

    Otherwise, gradients are allocated in memory that the first pass frees. The memory is then fragmented, and the activations
    of the next pass need new memory although they have the same sizes. In a GRPO step, this new memory was 10 % of the total.
    If a weight gets no gradient from any pass, its ``grad`` is None afterwards, so that the optimizer does not update it.

    Args:
        model: The model. If the model has a wrapper such as DDP, the function does nothing, because the wrapper manages the
            memory of gradients. Weights that FSDP2 sharded in place are skipped too, because their ``_version`` stays 0 when
            the gradient changes.
        passes: Number of forward and backward passes inside the context. For a single pass, the function does nothing.
    """
    without_gradient = []
    if passes > 1 and unwrapped(model) is model:
        plain = [p for p in model.parameters() if type(p.data) is Tensor and p.device.type == "cpu"]
        without_gradient = [p for p in plain if p.requires_grad and p.grad is None]
    for parameter in without_gradient:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in without_gradient:
            # No pass has added to this gradient.
            if parameter.grad is not None and parameter.grad._version == 0:
                parameter.grad = None


def _glibc() -> Any:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None


def _set(values: dict[int, int]) -> bool:
    """Set values with `mallopt`. Return whether glibc accepted all values."""
    try:
        library = _glibc()
    except (OSError, TypeError):  # ctypes cannot load the C library, e.g. on Windows.
        return False
    return library is not None and {library.mallopt(name, value) for name, value in values.items()} == {1}


# Files of a control group (container) with its memory limit, its memory usage and its statistics. The first item contains
# the files of cgroups version 2, and the second item those of version 1.
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


@dataclass(frozen=True)
class Available:
    """Memory that this process can use, in bytes.

    Attributes:
        free: Number of bytes that this process can use, including the bytes that it already uses.
        total: Total number of bytes of the device, or of the limit if a lower limit is set.
        where: Name of the device or of the limit, used in messages.
    """

    free: int
    total: int
    where: str


def available_memory(device: torch.device | str, limit: int | None = None) -> Available:
    """Return the memory that this process can use: free memory plus memory that the process already uses, at most ``limit``.

    On a GPU, the driver reports the free memory. On a CPU, the free memory is the available memory of the machine. If the
    unused part of the container's memory limit is smaller, the free memory is that part.

    Args:
        device: A ``torch.device``, or its type.
        limit: Maximum number of bytes that the user allows. None: no limit.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        available = Available(free + torch.cuda.memory_reserved(device), total, "the GPU")
    else:
        available = _of_host()
    if limit is not None and limit < available.free:
        return Available(int(limit), int(limit), "memory_limit_gib")
    return available


def _of_host() -> Available:
    machine, mine = psutil.virtual_memory(), in_use("cpu")
    host = Available(machine.available + mine, machine.total, "this machine")
    for limit, use, stat in CGROUPS:
        bound = _read(limit).strip()
        if bound.isdigit() and int(bound) < machine.total:
            # Subtract inactive file pages, which the kernel reports as used memory but can free.
            pages = [line.split() for line in _read(stat).splitlines() if "inactive_file " in line]
            used = int(_read(use).strip() or 0) - (int(pages[0][1]) if pages else 0)
            inside = Available(max(int(bound) - used, 0) + mine, int(bound), "the control group of this process")
            return min(host, inside, key=lambda a: a.free)
    return host


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8")
    return ""


def in_use(device: torch.device | str) -> int:
    """Return the number of bytes of a device's memory that this process currently uses."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def peak_in_use(device: torch.device | str) -> int:
    """Return the peak memory of this process on a device, in bytes, since the last `reset_peak` or since the process
    started.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    # ru_maxrss is in kilobytes on Linux and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device | str) -> bool:
    """Reset the peak memory of this process and return True. If the operating system does not support a reset, return False.
    `peak_in_use` then covers the whole lifetime of the process.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


# Dense bf16 operations per second of an H100 SXM, from NVIDIA's data sheet.
H100_BF16_PEAK = 989.5e12
# Cost of a forward and backward pass divided by the cost of a forward pass. The backward pass costs twice as much as the
# forward pass.
BACKWARD_FACTOR = 3


def _number(config: PretrainedConfig, *names: str) -> int:
    """Return the value of the first config field in ``names`` whose value is above 0."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return int(value)
    raise ModelError(
        f"the config of {type(config).__name__} has no {' or '.join(names)}, so its operations cannot be counted. Fix: count "
        "them with torch.utils.flop_counter.FlopCounterMode instead."
    )


def _text_config(config: PretrainedConfig) -> Any:
    text = config.get_text_config()
    kinds = set(layer_kinds(text))
    foreign = {kind for kind in kinds if not str(kind).endswith("attention") or str(kind).startswith("linear")}
    mixed = differs_by_layer(text)
    if foreign or mixed or getattr(text, "kv_lora_rank", None):
        what = f"layers of kind {sorted(foreign)}" if foreign else "latent attention (kv_lora_rank)"
        what = "layers whose heads differ in size" if mixed else what
        raise ModelError(
            f"{type(text).__name__} has {what}, for which the formula for grouped-query attention is not valid. Fix: count with "
            "torch.utils.flop_counter.FlopCounterMode instead."
        )
    return text


@functools.lru_cache(maxsize=4)
def _products(kind: Any, settings: str) -> int:
    """Return the number of operations per token that matrix products with the weights of the model's layers need in a
    forward pass.

    Each weight needs two operations, a multiplication and an addition. Only experts to which a token is routed are counted.

    Args:
        kind: Class of the config.
        settings: The config as JSON. The result is cached under this text, because it is needed for every log line.

    Raises:
        ModelError: The architecture cannot be built from its config.
    """
    config: Any = kind.from_dict(json.loads(settings))
    try:
        with torch.device("meta"):
            layers: nn.Module = transformers.AutoModel.from_config(config)
    except Exception as error:
        raise ModelError(
            f"no model can be built from {kind.__name__} ({type(error).__name__}: {error}), so its operations cannot be counted. "
            "Fix: count them with torch.utils.flop_counter.FlopCounterMode instead."
        ) from error
    looked_up = {p for module in layers.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    named = layers.named_parameters()
    weights = [p for name, p in named if p.dim() > 1 and p not in looked_up and not name.endswith("bias")]
    experts = experts_per_token(config)
    # The weights of all experts are in one tensor of shape (experts, ...).
    return sum(2 * p.numel() if p.dim() == 2 else 2 * p.numel() // len(p) * experts for p in weights)


def _scores(config: PretrainedConfig, seq_len: int) -> int:
    """Return the number of operations per token that attention scores and their product with the values need in a forward
    pass.
    """
    heads = _number(config, "num_attention_heads")
    return _number(config, "num_hidden_layers") * 4 * heads * head_size(config) * seq_len


def compute_flops_per_token(config: PretrainedConfig, seq_len: int) -> int:
    """Return the number of floating-point operations per training token of a decoder with grouped-query attention.

    The forward pass, for hidden size H, n query and k key-value heads of size d, MLP size I, vocabulary V and length S, is::

        layer = 2H(nd + 2kd) + 2ndH + 4nd S + 6HI       (routed: top_k 6HI + 2H experts, and 6HI of shared experts)
        total = layers + 2VH (embedding) + 2VH (output layer, if not tied)

    Except for the attention scores, all terms are products with weights, with two operations per weight. The weights are
    counted in a model that is built from the config on the meta device.

    Training costs three times the forward pass. Attention scores are counted for all pairs of tokens; `adjusted_mfu`
    subtracts the half of the scores that causal attention does not compute. The embedding is counted as a product, although
    it is a lookup. With tied weights, embedding and output layer are counted once together, so that the count is correct.
    Without tied weights, the forward count is too high by 2 * vocabulary size * hidden size.

    Args:
        config: A transformers config. For a multimodal model, only the text model is counted.
        seq_len: Sequence length in tokens.

    Returns:
        Floating-point operations of the forward and the backward pass for one token.

    Raises:
        ConfigError: ``seq_len`` is below 1.
        ModelError: The formula is not valid for this architecture.
    """
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len} must be at least 1.")
    text = _text_config(config)
    matrices = 1 if text.tie_word_embeddings else 2
    embeddings = 2 * _number(text, "vocab_size") * _number(text, "hidden_size") * matrices
    return BACKWARD_FACTOR * (
        _products(type(text), text.to_json_string(use_diff=False)) + _scores(text, seq_len) + embeddings
    )


def compute_mfu(
    flops_per_token: float, tokens_per_second: float, world_size: int = 1, peak_flops: float = H100_BF16_PEAK
) -> float:
    """Return model FLOPs utilization (MFU) in percent.

    ``100 * flops_per_token * tokens_per_second / (peak_flops * world_size)``

    Args:
        flops_per_token: Result of `compute_flops_per_token`.
        tokens_per_second: Tokens per second of all devices together.
        world_size: Number of devices.
        peak_flops: Peak operations per second of one device. The default is the dense bf16 peak of an H100.

    Raises:
        ConfigError: ``world_size`` or ``peak_flops`` is not above 0.

    Reference: Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B.

    >>> round(compute_mfu(6e9, 80_000, world_size=1), 2)
    48.51
    """
    if not (world_size > 0 and peak_flops > 0):
        raise ConfigError(f"world_size={world_size} and peak_flops={peak_flops} must both be above 0.")
    return 100 * flops_per_token * tokens_per_second / (peak_flops * world_size)


def adjusted_mfu(mfu: float, config: PretrainedConfig, seq_len: int) -> float:
    """Return the MFU that results if only half of the attention scores are counted. Causal attention computes only this
    half.

    ``mfu * (F - scores / 2) / F`` with F from `compute_flops_per_token`.

    Args:
        mfu: MFU in percent, computed by `compute_mfu` with the same config and length.
        config: Config with which the FLOPs were counted.
        seq_len: Sequence length with which the FLOPs were counted.

    Returns:
        MFU in percent.
    """
    total = compute_flops_per_token(config, seq_len)
    return mfu * (1 - BACKWARD_FACTOR * _scores(_text_config(config), seq_len) / 2 / total)
