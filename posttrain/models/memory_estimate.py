"""Estimate of a run's memory from the configs of its models and the shapes of its batches, without reading weights.

Weights, gradients and optimizer states are counted from the parameters of the real architecture. The memory of a
forward and backward pass is traced operation by operation, with fake tensors that have shapes but no data.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain import plugins
from posttrain.errors import ModelError
from posttrain.models.architecture import inner_size, key_value_width, layer_configs, layer_kinds
from posttrain.models.attention import attention_inputs
from posttrain.models.heads import ScoreHead, TokenHead, causal_lm, has_tower, install_token_head, train_score_head
from posttrain.models.load import add_adapter
from posttrain.models.memory import keep_last_activations, recompute_activations
from posttrain.models.recurrent import table as recurrent
from posttrain.models.recurrent.states import States
from posttrain.models.value_head import attach_value, critic_of
from posttrain.types import Batch

# Memory that the driver and libraries use in one process, in bytes. nvidia-smi shows about this value for an idle process.
CUDA_CONTEXT = 600 * 2**20
# HOLES is the memory that glibc cannot reuse, as a multiple of the size of the largest tensor. glibc puts small blocks into
# the space of a large block that was freed, so that the next large block needs new memory. In measurements, this memory was
# up to three times as large as the largest tensor (benchmarks/estimate.py). CUDA_WASTE is the fraction of memory that the
# CUDA allocator cannot reuse. Its value is a guess.
HOLES = 3
CUDA_WASTE = 0.05
# PER_BYTE is the number of bytes of optimizer states per byte of a trained weight. EIGHT_BIT is the number of bytes of 8-bit
# optimizer states per trained weight.
PER_BYTE = {"adamw": 2, "adam": 2, "nadamw": 2, "lion": 1, "rmsprop": 1, "adagrad": 1, "ademamix": 3, "stable": 2}
EIGHT_BIT = {"adamw": 2, "lion": 1, "rmsprop": 1, "ademamix": 3}
STATELESS = ("sgd", "lomo", "adalomo")
LOW_RANK, RANK = ("galore", "apollo"), 128  # The rank is the default value in transformers.
AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "images": "AutoModelForImageTextToText",
    "sequence": "AutoModelForSequenceClassification",
}


def named_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Convert the name of a dtype, with or without the prefix ``torch.``, to the dtype. A dtype is returned unchanged."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))


@dataclass(frozen=True)
class Part:
    """One of the models in a run, e.g. the policy or a reward model.

    Attributes:
        role: ``policy``, ``reference``, ``value model`` or ``reward model``.
        config: The transformers config.
        kind: Causal language model or sequence classifier.
        dtype: Dtype of the weights.
        peft_config: Config of the model's adapter. If it is set, only the adapter is trained.
        trained: Whether the model is trained, so that it has gradients and optimizer states.
        bits: Bits per quantized weight of linear layers, including scales; see `weight_bits`. None: the weights are not
            quantized.
        freeze_vision: Value of the option ``freeze_vision``, which only affects models with a vision tower.
        images: Whether the run's rows contain images, which only affects models with a vision tower.
    """

    role: str
    config: Any
    kind: Literal["causal", "sequence"] = "causal"
    dtype: torch.dtype = torch.float32
    peft_config: Any = None
    trained: bool = True
    bits: float | None = None
    freeze_vision: Any = "auto"
    images: bool = False


@dataclass(frozen=True)
class Generating:
    """Size of one call of a rollout engine that runs in the trainer's process.

    Attributes:
        prompts: Number of distinct prompts of the call.
        prompt_tokens: Length of the longest prompt in tokens.
        completion_tokens: Maximum length of a completion in tokens.
        sequences: Number of completions of the call.
        slots: Maximum number of sequences that are decoded concurrently.
        shares_prompts: Whether the keys and values of a prompt are stored only once for all of its completions.
    """

    prompts: int
    prompt_tokens: int
    completion_tokens: int
    sequences: int
    slots: int = 64
    shares_prompts: bool = True


# Maximum number of tokens of a prefill pass of the native engine.
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Shards:
    """Numbers of processes over which weights, gradients and optimizer states are sharded. ``processes`` is the total number
    of processes in the run.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    processes: int = 1


@dataclass(frozen=True)
class Workload:
    """Settings of a run that determine the memory of one process.

    Attributes:
        policy: Model that is trained.
        batches: Batches of the forward passes of one micro-batch. Their rows have the maximum length.
        passes: Number of forward and backward passes in one optimizer step.
        critic: Value model that is trained with the policy.
        value_head: Whether the policy has a value head.
        frozen: Reference and reward models. Frozen models are in memory during the whole run.
        reference: Kind of the model that computes the reference's log-probs of the policy's rows, without gradients.
            ``copy``: a separate model. ``adapter``: the policy without its adapter. Empty: there is no reference.
        needs: Names of additional outputs; see `posttrain.models.forward.forward`.
        checkpointing, kept_layers, optimizer, autocast: Values of the options with these names.
        generating: Largest call of the rollout engine. None: no engine runs in the trainer's process.
        shards: Numbers of processes over which the models are sharded.
        device: ``cpu`` or ``cuda``.
        process: Number of bytes that the Python interpreter and its libraries use.
        pixels: Prepared images of the largest pass, by argument name of the vision tower. Tensors on the device ``meta`` are
            sufficient if the vision tower does not use their values.
    """

    policy: Part
    batches: Sequence[Batch]
    passes: int = 1
    critic: Part | None = None
    value_head: bool = False
    frozen: tuple[Part, ...] = ()
    reference: str = ""
    needs: frozenset[str] = frozenset({"logp"})
    checkpointing: bool = True
    kept_layers: int | None = None
    optimizer: str = "adamw_torch_fused"
    autocast: torch.dtype | None = None
    generating: Generating | None = None
    shards: Shards = Shards()
    device: str = "cpu"
    process: int = 0
    pixels: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory of one process of a run, in bytes.

    Attributes:
        standing: Memory that is in use during the whole run. The key is the component, e.g. the weights.
        moments: Additional memory in each phase of a training step. Each value maps components to bytes.
        trainable, parameters: Number of trained weights and number of all weights of the policy.
    """

    standing: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]
    trainable: int = 0
    parameters: int = 0

    @property
    def fullest(self) -> str:
        """Name of the phase of a training step that needs the most memory."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component, in the phase of a training step that needs the most memory."""
        return {name: size for name, size in (*self.standing.items(), *self.moments[self.fullest].items()) if size}

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        return sum(self.components.values())


def optimizer_bytes(name: str, sizes: Sequence[tuple[int, int]]) -> int:
    """Return the number of bytes of an optimizer's states.

    Args:
        name: Value of ``optim``.
        sizes: ``(weights, bytes)`` of each trained parameter.

    >>> [optimizer_bytes(name, [(10, 40)]) for name in ("adamw_torch", "adamw_bnb_8bit", "sgd")]
    [80, 20, 0]
    """
    name = name.lower()
    if name.startswith(STATELESS):
        return 0
    if name.startswith(LOW_RANK):
        # The states are two moments in the subspace and the projection. The estimate assumes that all matrices are square
        # and that `optim_target_modules` selects all of them.
        return sum(size * min(2 * count, int(3 * RANK * count**0.5)) // count for count, size in sizes if count)
    kind = next((key for key in PER_BYTE if key in name), "adamw")
    if "adafactor" in name:
        # Adafactor stores sums of rows and columns. Their size is a small fraction of the matrix.
        return sum(size // 50 for _, size in sizes)
    if "8bit" in name or "4bit" in name:
        return EIGHT_BIT.get(kind, 2) * sum(count for count, _ in sizes) // (2 if "4bit" in name else 1)
    return PER_BYTE[kind] * sum(size for _, size in sizes)


def estimate_memory(work: Workload) -> MemoryEstimate:
    """Estimate the peak memory of one process of a run.

    ``standing`` contains the memory of weights, optimizer states and frozen models. ``moments`` contains the additional
    memory of each phase of a step. The phases are forward and backward pass, optimizer step, the reference's forward pass,
    and generation. Forward and backward pass need gradients, activations and chunks of logits. Generation needs keys, values
    and logits of the running sequences::

        peak = standing + max(moments)

    Raises:
        ModelError: No model can be built from a config, or its forward pass needs the values of its tensors.
    """
    shadow = Shadow(
        work.policy, critic=work.critic, value_head=work.value_head,
        checkpointing=work.checkpointing, kept_layers=work.kept_layers,
    )  # fmt: skip
    sizes = shadow.named_sizes()
    parameters = dict(shadow.model.named_parameters())
    trained = [(parameters[name].numel(), size) for name, (size, learns) in sizes.items() if learns]
    gradients, shards = sum(size for _, size in trained), work.shards
    standing = {
        "process": work.process,
        "CUDA context": CUDA_CONTEXT if work.device == "cuda" else 0,
        "weights": sum(size for size, _ in sizes.values()) // shards.weights,
        "optimizer states": optimizer_bytes(work.optimizer, trained) // shards.optimizer,
        "gradient buckets": gradients if shards.processes > 1 and shards.gradients == 1 else 0,
        "gathered weights": _gathered(shadow.model) if shards.weights > 1 else 0,
        "unpacked weight": _unpacked(shadow, work.autocast or work.policy.dtype) if work.policy.bits else 0,
    }
    for part in work.frozen:
        size_of_part = sum(size for size, _ in Shadow(part).named_sizes().values())
        standing[part.role] = standing.get(part.role, 0) + size_of_part
    many = work.passes > 1
    training = _largest_pass(work, shadow, training=True, accumulating=many)
    moments: dict[str, dict[str, int]] = {
        "forward and backward": {
            "gradients": (gradients if many else 0) // shards.gradients,
            **_of_pass(work, training),
            "gradients of a pass": training["gradients"] // (1 if many else shards.gradients),
        },
        "optimizer step": {"gradients": gradients // shards.gradients, "temporary": _update_bytes(work, trained)},
    }
    if work.reference:
        moments["reference pass"] = _of_pass(work, _largest_pass(work, shadow, training=False, accumulating=False))
    if work.generating is not None:
        moments["generation"] = _generation(work.generating, shadow)
    count = sum(p.numel() for p in parameters.values())
    return MemoryEstimate(standing, moments, sum(n for n, _ in trained), count)


def _of_pass(work: Workload, peak: Mapping[str, int]) -> dict[str, int]:
    wasted = HOLES * peak["largest"] if work.device == "cpu" else int(CUDA_WASTE * _total(peak))
    return {name: peak[name] for name in ("activations", "images", "logits")} | {"allocator": wasted}


def _total(peak: Mapping[str, int]) -> int:
    return sum(peak.values()) - peak["largest"]


def _update_bytes(work: Workload, trained: Sequence[tuple[int, int]]) -> int:
    """Return the number of temporary bytes in an optimizer step. On a GPU, temporary memory is needed for all weights at
    once, and on a CPU for one weight at a time. A fused optimizer needs no temporary memory.
    """
    if "fused" in work.optimizer or not trained:
        return 0
    sizes = [size for _, size in trained]
    return sum(sizes) // work.shards.optimizer if work.device == "cuda" else 2 * max(sizes)


def _gathered(model: nn.Module) -> int:
    """Return the number of bytes of the weights that are gathered at the same time. These are the weights of two layers and
    all weights outside of layers.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    rest = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    return rest + 2 * max(sizes, default=0)


def _unpacked(shadow: Shadow, dtype: torch.dtype) -> int:
    """Return the number of bytes of the largest dequantized weight and its transpose. The other weights need no such memory
    at the same time, because only one weight is dequantized at a time.
    """
    packed = (p for name, p in shadow.model.named_parameters() if name in shadow.quantised)
    return 2 * dtype.itemsize * max((p.numel() for p in packed), default=0)


def _largest_pass(work: Workload, shadow: Shadow, *, training: bool, accumulating: bool) -> dict[str, int]:
    """Estimate the memory of two batches: the batch with the largest number of tokens, and the batch with the largest number
    of loss tokens. Return the estimate with the larger peak.
    """
    options = {"training": training, "accumulating": accumulating, "needs": work.needs, "autocast": work.autocast}
    options["pixels"] = work.pixels
    by_tokens = max(work.batches, key=lambda batch: batch.input_ids.numel())
    by_loss = max(work.batches, key=lambda batch: int(batch.loss_mask.sum()))
    wanted = [by_tokens] if by_tokens is by_loss else [by_tokens, by_loss]
    try:
        return max((trace_pass(shadow, batch, **options) for batch in wanted), key=_total)
    except Exception as error:
        name = type(causal_lm(shadow.model)).__name__
        raise ModelError(
            f"the memory of {name} cannot be estimated, because its forward pass needs the values of its tensors and not only "
            f"their shapes ({str(error).splitlines()[0][:120]}). Fix: measure the memory with dry_step=True."
        ) from error


def _text_config(model: nn.Module) -> Any:
    inner: Any = causal_lm(model)
    return inner.config.get_text_config()


# Layer types of models with recurrent layers that store no keys and values.
WITHOUT_KEYS = ("linear_attention", "conv", "mlp", "moe")


def _generation(call: Generating, shadow: Shadow) -> dict[str, int]:
    """Return the number of bytes that each component of generation needs. The components are keys and values
    (``2 L H_kv d bytes`` per token), logits, and the activations of a prefill pass.

    Instead of keys and values, recurrent layers store one state per sequence and one state per prompt.
    """
    config, item = _text_config(shadow.model), shadow.part.dtype.itemsize
    layers, states = layer_configs(config), _state_bytes(shadow)
    if states:
        layers = [each for each, kind in zip(layers, layer_kinds(config), strict=True) if kind not in WITHOUT_KEYS]
    each = 2 * sum(map(key_value_width, layers)) * item
    live = min(call.slots, call.sequences)
    room, prompts, prefill = call.completion_tokens, live, live * call.prompt_tokens
    if call.shares_prompts:
        # The native engine first allocates 64 suffix positions per sequence, and doubles their number each time all are
        # used.
        room = 64 << max(0, (call.completion_tokens - 1) // 64).bit_length()
        prompts = min(call.prompts, live)
        prefill = min(PREFILL_TOKENS, call.prompts * call.prompt_tokens) or prefill
    sizes = {
        "keys and values": each * (live * room + prompts * call.prompt_tokens),
        "logits": 3 * live * config.vocab_size * 4,
        "activations": prefill * (3 * inner_size(config) + 6 * config.hidden_size) * item,
    }
    return sizes | ({"recurrent states": states * (live + prompts)} if states else {})


def _state_bytes(shadow: Shadow) -> int:
    """Return the number of bytes of one sequence's recurrent states in the native engine. The size is measured in a forward
    pass over one token.
    """
    model: Any = causal_lm(shadow.model)
    states: list[Tensor] = []
    if recurrent.replaced(model):
        recurrent.install(model)
        with shadow.mode, torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long)
            trunk = model.get_decoder()
            trunk(input_ids=token, position_ids=token, use_cache=False, recurrent_states=States(states))
    return sum(state.nbytes for state in states)


class Shadow:
    """A model with fake tensors instead of weights, with the output head and the activation checkpointing of the trainer.

    Args:
        part: Model to build.
        critic: Second model that runs in every forward pass, e.g. PPO's value model.
        value_head: Whether the model has a value head.
        checkpointing: Whether activations are recomputed in the backward pass.
        kept_layers: Value of `PostTrainingConfig.kept_layers`.
    """

    def __init__(
        self,
        part: Part,
        *,
        critic: Part | None = None,
        value_head: bool = False,
        checkpointing: bool = False,
        kept_layers: int | None = None,
    ) -> None:
        self.part = part
        self.values = value_head or critic is not None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.device("meta"):
            self.model = _build(part)
            if self.values:
                attach_value(self.model, None if critic is None else _build(critic))
        with self.mode:
            _from_meta(self.model)
        self.model.train(part.trained)
        install_token_head(self.model)
        if checkpointing and part.trained:
            recompute_activations(causal_lm(self.model))
            keep_last_activations(self.model, kept_layers)

    @property
    def quantised(self) -> set[str]:
        """Names of quantized weights, which are the frozen weights of all linear layers except the output layer."""
        if self.part.bits is None:
            return set()
        linear = {f"{n}.weight" for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        head = getattr(getattr(causal_lm(self.model), "lm_head", None), "weight", None)
        named = self.model.named_parameters()
        return {name for name, p in named if name in linear and not p.requires_grad and p is not head}

    def named_sizes(self) -> dict[str, tuple[int, bool]]:
        """Map each parameter name to the parameter's number of bytes and to a flag. The flag is True if the parameter is
        trained.
        """
        packed, bits = self.quantised, self.part.bits or 0
        return {
            name: (int(p.numel() * bits / 8) if name in packed else p.nbytes, p.requires_grad)
            for name, p in self.model.named_parameters()
        }


def _build(part: Part) -> Any:
    import transformers
    from transformers import initialization
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = copy.deepcopy(part.config)
    if part.kind != "causal":
        config.num_labels = 1
    ALL_EXPERTS_FUNCTIONS.register("posttrain_shapes", _experts_by_shape)
    config.get_text_config()._experts_implementation = "posttrain_shapes"
    kind = part.kind if part.kind != "causal" or config.get_text_config() is config else "images"
    with initialization.no_init_weights():
        model = getattr(transformers, AUTO_CLASSES[kind]).from_config(config, dtype=part.dtype)
    model.tie_weights()
    if not part.trained:
        return model.requires_grad_(False).eval()
    adapter = part.peft_config if part.kind == "causal" else train_score_head(part.peft_config, model)
    if has_tower(model):
        tower = plugins.module("extensions.images.encoder")
        adapter, _ = tower.freeze_tower(model, adapter, part.freeze_vision, images=part.images)
    if adapter is not None:
        model = add_adapter(model, copy.deepcopy(adapter))
        model.enable_input_require_grads()
    return model


def _experts_by_shape(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute a mixture-of-experts layer in which all tokens are routed to the first expert.

    All tensors have the shapes of a grouped matrix product, but the values of the router's outputs are not needed.

    Args:
        experts: Module with the weights of all experts.
        hidden: ``(N, H)`` hidden states.
        index: ``(N, k)`` indices of the experts of each token. Only the shape is used.
        weights: ``(N, k)`` routing weights.
    """
    first, last = (experts.gate_up_proj if experts.has_gate else experts.up_proj), experts.down_proj
    x = hidden.repeat_interleave(index.shape[-1], dim=0)  # (N k, H)
    x = x @ (first[0] if experts.is_transposed else first[0].T)
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)  # (N k, I)
    x = x @ (last[0] if experts.is_transposed else last[0].T)  # (N k, H)
    return (x * weights.reshape(-1, 1)).view(*index.shape, -1).sum(1).to(hidden.dtype)


def _from_meta(model: nn.Module) -> None:
    """Replace meta tensors with fake tensors on the CPU. Tied tensors stay tied."""
    by_id: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is None:
                    continue
                if id(tensor) not in by_id:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_weight = isinstance(tensor, nn.Parameter)
                    by_id[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                holder[name] = by_id[id(tensor)]


class _Meter(TorchDispatchMode):
    """Counter of the bytes of all existing tensor storages. It counts each kind of storage separately, and records the peak."""

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        super().__init__()
        # Kind of new tensors, unless they are gradients of weights or logits.
        self.kind = "activations"
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.largest = 0
        self.vocabulary = vocabulary
        tensors = [*model.parameters(), *model.buffers()]
        self.known: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in tensors}
        shapes = [tuple(p.shape) for p in model.parameters() if p.requires_grad and p.dim() > 1]
        self.weights = {*shapes, *(shape[::-1] for shape in shapes)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.known:
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, shape = tensor.untyped_storage(), tuple(tensor.shape)
        is_logits = len(shape) == 2 and shape[1] == self.vocabulary
        kind = "gradients" if shape in self.weights else "logits" if is_logits else self.kind
        key, size = storage._cdata, storage.nbytes()
        self.known[key] = weakref.finalize(storage, self._remove, key, kind, size)
        self.live[kind] += size
        self.largest = max(self.largest, size)
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def _remove(self, key: int, kind: str, size: int) -> None:
        self.known.pop(key, None)
        self.live[kind] -= size

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count tensor storages inside the context. On exit, stop observing the storages that still exist."""
        try:
            with self:
                yield
        finally:
            for finalizer in self.known.values():
                if finalizer is not None:
                    finalizer.detach()


def trace_pass(
    shadow: Shadow,
    batch: Batch,
    *,
    training: bool = True,
    accumulating: bool = True,
    needs: frozenset[str] = frozenset({"logp"}),
    autocast: torch.dtype | None = None,
    pixels: Mapping[str, Tensor] | None = None,
) -> dict[str, int]:
    """Return the peak memory of one pass over a batch by kind, without the memory of weights and earlier gradients.

    The pass is traced operation by operation, with fake tensors.

    Args:
        shadow: Model with fake tensors.
        batch: Packed prefix trees. Only their shapes and masks matter.
        training: Whether to run the forward and the backward pass. If False, only the forward pass is run, without
            gradients.
        accumulating: Whether gradients of an earlier pass exist. Their memory is not included in the result.
        needs: Additional outputs, see `posttrain.models.forward.forward`.
        autocast: Dtype of autocast. None: the dtype of the weights.
        pixels: Prepared images, see `Workload`.

    Returns:
        Bytes by kind. ``activations`` are tensors saved for the backward pass and temporary tensors. ``logits`` are chunks of
        logits and their gradients. ``gradients`` are gradients of weights before accumulation. ``images`` are pixels, features
        and the activations of the vision tower. ``largest`` is the size of the largest tensor, which is included in one of the
        other kinds too.
    """
    model = shadow.model
    trained = [p for p in model.parameters() if p.requires_grad]
    config = _text_config(model)
    attention = attention_inputs(batch, causal_lm(model), shadow.part.dtype)
    # Compute these numbers outside of fake mode, because fake tensors have no values.
    counts = batch.num_loss_tokens, batch.num_sequences, int((batch.sequence >= 0).sum())

    def forget(parameter: Tensor) -> None:
        parameter.grad = None

    with shadow.mode:
        meter = _Meter(model, config.vocab_size)
        # Delete each gradient immediately, because autograd cannot accumulate fake tensors in place.
        hooks = [p.register_post_accumulate_grad_hook(forget) for p in trained] if accumulating else []
        compute = torch.autocast("cpu", dtype=autocast) if autocast is not None else nullcontext()
        try:
            with meter.counting(), torch.set_grad_enabled(training), compute:
                meter.kind = "images"
                seen = []
                if pixels:
                    encoder = plugins.module("extensions.images.encoder")
                    seen = [encoder.traced_features(causal_lm(model), pixels, shadow.part.dtype)]
                meter.kind = "activations"
                loss = _sum_of_outputs(shadow, batch.input_ids.shape, attention, counts, needs)
                loss = sum((features.sum() for features in seen), loss)
                if training:
                    loss.backward()
                del loss, seen
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in trained:
                parameter.grad = None
    kinds = ("activations", "logits", "gradients", "images")
    return {kind: meter.peak[kind] for kind in kinds} | {"largest": meter.largest}


def _sum_of_outputs(
    shadow: Shadow, shape: torch.Size, attention: dict[str, Any], counts: tuple[int, int, int], needs: frozenset[str]
) -> Tensor:
    """Run a forward pass like `posttrain.models.forward.forward`, but with zeros as inputs. Return the sum of its outputs.

    Args:
        shadow: Model with fake tensors.
        shape: ``(B, T)`` of the batch.
        attention: Attention inputs of the real batch; see `attention_inputs`.
        counts: Three numbers about the batch: loss tokens, sequences, and completion tokens.
        needs: Outputs that the head computes in addition to log-probs.
    """
    place = torch.zeros(shape, dtype=torch.long)  # (B, T)
    mask = attention["attention_mask"]
    fake = {k: _ones_like(v) for k, v in mask.items()} if isinstance(mask, dict) else _ones_like(mask)
    inputs = attention | {"input_ids": place, "attention_mask": fake, "position_ids": place, "use_cache": False}
    tokens, sequences, states = (torch.zeros(count, dtype=torch.long) for count in counts)
    if shadow.part.kind != "causal":
        return shadow.model(**inputs, token_head=ScoreHead(sequences, sequences))["scores"].sum()
    head = TokenHead(tokens, tokens, tokens, needs=needs)
    inner: Any = causal_lm(shadow.model)
    critic = critic_of(inner)
    if critic is not None:
        head.values = lambda _: critic(**inputs, token_head=ScoreHead(states, states))["scores"][:, 0]
    elif shadow.values:
        head.values = lambda hidden: inner.v_head(hidden[states, states])[:, 0].float()
    result = shadow.model(**inputs, token_head=head)
    return torch.stack(
        [result[name].sum() for name in ("logp", "values", "logits") if result.get(name) is not None]
    ).sum()


def _ones_like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.ones(tensor.shape, dtype=tensor.dtype)
