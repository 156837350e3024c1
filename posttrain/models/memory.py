"""Memory and work of a step: activations kept, recomputed or offloaded; what the device has; FLOPs."""

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
    """How many layers' activations fit where full logits and their gradient would have been.

    ``k = floor(2 V / a)``, both sides in numbers a token: logits and their gradient are 2 V, which the chunked head never
    holds; a layer without checkpointing keeps about twice what its linear layers put out, ``a = 2 sum(out_features)``
    (outputs, and the normalised, activated and summed tensors between them).

    Returns:
        0 for a model without repeated layers, at most all of them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    head = output_layer(model)
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
    kept = op in ATTENTION_OPS or any(name in str(op) for name in ("flash_attn", "varlen_attn"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_activations(model: nn.Module, options: dict[str, Any] | None = None) -> None:
    """Switch checkpointing on in all layers, by the name that this version of transformers gives it.

    Args:
        model: Of transformers.
        options: As ``gradient_checkpointing_kwargs``; ``selective`` keeps what attention computed.

    Raises:
        ConfigError: ``selective`` with reentrant checkpointing, which cannot choose.
    """
    kwargs = dict(options or {"use_reentrant": False})
    if kwargs.pop("selective", False):
        if kwargs.get("use_reentrant"):
            raise ConfigError(
                "gradient_checkpointing_kwargs: selective=True needs use_reentrant=False, and it is True. Leave it out."
            )
        kwargs |= {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}
    own = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(kwargs or None, **own)


def recomputes(args: TrainingArguments) -> bool:
    """Whether activations are computed again in backward, by either name of the switch: transformers has two of late."""
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


def recompute_options(args: TrainingArguments) -> dict[str, Any]:
    """What goes with the switch that `recomputes` reads, by either name."""
    return dict(getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {})


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
            # The trainer passed it on as it is written, which torch does not know.
            recompute_activations(causal_lm(model), options)
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
        # What is expanded (one mask for all heads) travels once.
        whole = tensor
        for axis, step in enumerate(tensor.stride()):
            tensor = tensor.narrow(axis, 0, 1) if step == 0 and tensor.shape[axis] > 1 else tensor
        if self._stays(tensor):
            return whole
        self.offloaded_bytes += tensor.nbytes
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
        host.copy_(tensor, non_blocking=self.pin)
        return whole.device, whole.shape, host

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, shape, host = packed
        return (host.to(device, non_blocking=self.pin) if device.type != "cpu" else host).expand(shape)


class NoOpManager(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that keep everything where it is: what is computed inside escapes an outer `OffloadActivations`.

    >>> with NoOpManager():
    ...     y = torch.ones(2, requires_grad=True).exp()
    """

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


def check_offloading(args: PostTrainingConfig) -> None:
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
    kept = frozenset(local_part(p.detach()).untyped_storage().data_ptr() for p in model.parameters())
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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep freed memory, where that is the memory that tensors lie in."""
        if args.device.type == "cpu":
            self._kept = _set(KEPT)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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


# Limit, use and statistics of a control group: of version 2, then of version 1.
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
    """Bytes.

    Attributes:
        free: What this process can have, including what it holds already.
        total: Of the device, or of the limit that applies.
        where: The device or limit, for messages.
    """

    free: int
    total: int
    where: str


def available_memory(device: torch.device | str, limit: int | None = None) -> Available:
    """Free memory and what this process holds now; never more than ``limit``.

    On a GPU what the driver calls free; on a CPU the memory that is available, or what a control group (a container) leaves
    where that is less.

    Args:
        device: ``torch.device`` or its type.
        limit: Bytes that the user allows; None: all.
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
            # File pages that the kernel would give back are not used.
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
    """Bytes that this process holds now."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def peak_in_use(device: torch.device | str) -> int:
    """Most bytes that this process held since `reset_peak`, or ever."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    # Linux counts kilobytes here, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device | str) -> bool:
    """Start a new peak; False where the system does not allow it (the peak is then that of the whole process)."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


# Dense bf16 operations a second of an H100 SXM, from NVIDIA's data sheet.
H100_BF16_PEAK = 989.5e12
# A backward pass costs twice its forward pass.
BACKWARD_FACTOR = 3


def _number(config: PretrainedConfig, *names: str) -> int:
    """The first of the named fields that is set to a number above 0."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return int(value)
    raise ModelError(
        f"the config of {type(config).__name__} has no {' or '.join(names)}, so its operations cannot be counted. Count them "
        "with torch.utils.flop_counter.FlopCounterMode instead."
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
            f"{type(text).__name__} has {what}, which the count for grouped-query attention does not describe. Count with "
            "torch.utils.flop_counter.FlopCounterMode instead."
        )
    return text


@functools.lru_cache(maxsize=4)
def _products(kind: Any, settings: str) -> int:
    """Forward operations of all products with weights in the layers, for one token: two a weight, of experts those it goes to.

    Args:
        kind: Class of the config.
        settings: The config as JSON, so that what was counted is known again: every line of a log asks.

    Raises:
        ModelError: The architecture cannot be built from its config.
    """
    config: Any = kind.from_dict(json.loads(settings))
    try:
        with torch.device("meta"):
            layers: nn.Module = transformers.AutoModel.from_config(config)
    except Exception as error:
        raise ModelError(
            f"{kind.__name__} builds no model ({type(error).__name__}: {error}), so its operations cannot be counted. "
            "Count them with torch.utils.flop_counter.FlopCounterMode instead."
        ) from error
    looked_up = {p for module in layers.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    named = layers.named_parameters()
    weights = [p for name, p in named if p.dim() > 1 and p not in looked_up and not name.endswith("bias")]
    experts = experts_per_token(config)
    # Weights of experts lie in one tensor (experts, ...).
    return sum(2 * p.numel() if p.dim() == 2 else 2 * p.numel() // len(p) * experts for p in weights)


def _scores(config: PretrainedConfig, seq_len: int) -> int:
    """Forward operations of the attention scores and their product with the values, for one token."""
    heads = _number(config, "num_attention_heads")
    return _number(config, "num_hidden_layers") * 4 * heads * head_size(config) * seq_len


def compute_flops_per_token(config: PretrainedConfig, seq_len: int) -> int:
    """Training operations per token of a decoder with grouped-query attention.

    Forward, with hidden size H, n query and k key-value heads of size d, MLP size I, vocabulary V and sequence length S::

        layer = 2H(nd + 2kd) + 2ndH + 4nd S + 6HI       (routed: top_k 6HI + 2H experts, and 6HI of shared experts)
        total = layers + 2VH (embedding) + 2VH (output layer, if not tied)

    All but the scores are products with weights, two operations a weight: they are counted on the architecture itself, which is
    built without memory.

    Training costs three times that. Scores are counted over the whole sequence (`adjusted_mfu` takes the causal half off),
    and the embedding as a product although it is a look-up: with tied weights the two embedding terms are one and right,
    without them the count is 2VH too high.

    Args:
        config: Of transformers; of a multimodal model the text part is counted.
        seq_len: Tokens of a sequence.

    Returns:
        Floating-point operations of forward and backward for one token.

    Raises:
        ConfigError: ``seq_len`` below 1. ModelError: A model that the formula does not describe.
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
    """Model FLOPs utilisation in percent: ``100 * flops_per_token * tokens_per_second / (peak_flops * world_size)``.

    Args:
        flops_per_token: From `compute_flops_per_token`.
        tokens_per_second: Of all devices together.
        world_size: Devices.
        peak_flops: Operations a second that one device could do; the default is an H100's in bf16.

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
    """The utilisation with causal attention counted once: half of the score term is never needed.

    ``mfu * (F - scores / 2) / F`` with F of `compute_flops_per_token`.

    Args:
        mfu: Percent, from `compute_mfu` with the same config and length.
        config: As there.
        seq_len: As there.

    Returns:
        Percent.
    """
    total = compute_flops_per_token(config, seq_len)
    return mfu * (1 - BACKWARD_FACTOR * _scores(_text_config(config), seq_len) / 2 / total)
