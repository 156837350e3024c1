"""How much memory a run needs, from the configs of its models and the shape of its batches; no weight is read.

What stands in memory is counted parameter by parameter; what a pass adds is traced operation by operation on tensors without
memory (`posttrain.models.memory_trace`), or, where a model cannot be traced, told from the widths of its layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import ConfigError, ModelError
from posttrain.models.heads import causal_lm
from posttrain.models.logprob import CHUNK_BYTES
from posttrain.models.memory_trace import Part, PassPeak, Shadow, trace_pass
from posttrain.types import Batch

__all__ = [
    "CUDA_CONTEXT",
    "H100_BF16_PEAK",
    "Generating",
    "MemoryEstimate",
    "Shards",
    "Workload",
    "adjusted_mfu",
    "compute_flops_per_token",
    "compute_mfu",
    "estimate_memory",
    "key_value_width",
    "layer_configs",
    "optimizer_bytes",
]

logger = logging.getLogger(__name__)


H100_BF16_PEAK = 989.5e12  # Dense bf16 operations a second of an H100 SXM, from NVIDIA's data sheet.
BACKWARD_FACTOR = 3  # A backward pass costs twice its forward pass.


def _number(config: Any, *names: str) -> int:
    """The first of the named fields that is set to a number above 0."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return int(value)
    raise ModelError(
        f"the config of {type(config).__name__} has no {' or '.join(names)}, so its operations cannot be counted. Count them "
        "with torch.utils.flop_counter.FlopCounterMode instead."
    )


def _text_config(config: Any) -> Any:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ())
    foreign = {kind for kind in kinds if not str(kind).endswith("attention") or str(kind).startswith("linear")}
    mixed = getattr(text, "is_heterogeneous", False)
    if foreign or mixed or getattr(text, "kv_lora_rank", None):
        what = f"layers of kind {sorted(foreign)}" if foreign else "latent attention (kv_lora_rank)"
        what = "layers whose heads differ in size" if mixed else what
        raise ModelError(
            f"{type(text).__name__} has {what}, which the count for grouped-query attention does not describe. Count with "
            "torch.utils.flop_counter.FlopCounterMode instead."
        )
    return text


def layer_configs(config: Any) -> list[Any]:
    """A config for each layer: of one kind, or Gemma 4's, whose head size differs between layers."""
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    return [config] * config.num_hidden_layers


def key_value_width(config: Any) -> int:
    """Numbers of a token's keys in one layer: key-value heads times the size of a head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the size of one."""
    heads = _number(config, "num_attention_heads")
    key_values = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or _number(config, "hidden_size") // heads
    return heads, key_values, size


def _is_sparse(config: Any, layer: int) -> bool:
    """Whether a layer of a mixture-of-experts model routes, by the rules that configs write."""
    if (listed := getattr(config, "moe_layers", None)) is not None:
        return layer in listed
    step = getattr(config, "decoder_sparse_step", None) or getattr(config, "moe_layer_interval", None) or 1
    first = getattr(config, "first_k_dense_replace", None) or getattr(config, "moe_layer_start_index", None) or 0
    last = getattr(config, "moe_layer_end_index", None)
    dense = getattr(config, "mlp_only_layers", None) or ()
    inside = layer >= first and (last in (None, -1) or layer <= last)
    return inside and (layer + 1) % step == 0 and layer not in dense


def _shared_size(config: Any, inner: int) -> int:
    """Summed sizes of the experts that see every token."""
    if hasattr(config, "intermediate_size_mlp"):  # Llama 4 has one in every routed layer and no field for it.
        return inner
    count = getattr(config, "n_shared_experts", None) or getattr(config, "moe_num_shared_experts", None) or 0
    return getattr(config, "shared_expert_intermediate_size", None) or count * inner


def _mlp(config: Any) -> int:
    """Forward operations of all MLPs for one token."""
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    experts = next(
        (n for k in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, k, None))), 0
    )
    if not experts:
        return layers * 6 * hidden * _number(config, "intermediate_size")
    sparse = sum(_is_sparse(config, layer) for layer in range(layers))
    inner = _number(config, "moe_intermediate_size", "intermediate_size")
    shared = _shared_size(config, inner)
    chosen = _number(config, "num_experts_per_tok", "top_k_experts")
    routed = 6 * hidden * (chosen * inner + shared) + 2 * hidden * experts
    if sparse == layers:
        return layers * routed
    return sparse * routed + (layers - sparse) * 6 * hidden * _number(
        config, "intermediate_size_mlp", "intermediate_size"
    )


def _scores(config: Any, seq_len: int) -> int:
    """Forward operations of the attention scores and their product with the values, for one token."""
    heads, _, size = _heads(config)
    return _number(config, "num_hidden_layers") * 4 * heads * size * seq_len


def compute_flops_per_token(config: Any, seq_len: int) -> int:
    """Training operations per token of a decoder with grouped-query attention and gated MLPs.

    Forward, with hidden size H, n query and k key-value heads of size d, MLP size I, vocabulary V and sequence length S::

        layer = 2H(nd + 2kd) + 2ndH + 4nd S + 6HI       (routed: top_k 6HI + 2H experts, and 6HI of shared experts)
        total = layers + 2VH (embedding) + 2VH (output layer, if not tied)

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
    hidden = _number(text, "hidden_size")
    heads, key_values, size = _heads(text)
    projections = 2 * hidden * (heads + 2 * key_values) * size + 2 * heads * size * hidden
    embeddings = 2 * _number(text, "vocab_size") * hidden * (1 if text.tie_word_embeddings else 2)
    layers = _number(text, "num_hidden_layers") * projections + _scores(text, seq_len) + _mlp(text)
    return BACKWARD_FACTOR * (layers + embeddings)


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


def adjusted_mfu(mfu: float, config: Any, seq_len: int) -> float:
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


CUDA_CONTEXT = (
    600 * 2**20
)  # Of the driver and the libraries in one process; nvidia-smi shows about this much for an idle one.
# What allocators waste. glibc's puts small blocks where a large one was, so that the next large one needs a new place: up to
# three times the largest tensor was measured (benchmarks/estimate.py; SFT of three models). CUDA's: a guess, not measured.
HOLES = 3
CUDA_WASTE = 0.05
# Bytes of state for each byte of a trained weight (two moments of the weight's dtype), or for each weight.
PER_BYTE = {"adamw": 2, "adam": 2, "nadamw": 2, "lion": 1, "rmsprop": 1, "adagrad": 1, "ademamix": 3, "stable": 2}
EIGHT_BIT = {"adamw": 2, "lion": 1, "rmsprop": 1, "ademamix": 3}
STATELESS = ("sgd", "lomo", "adalomo")


@dataclass(frozen=True)
class Generating:
    """What the rollout engine holds.

    Attributes:
        prompts: Different prompts of a call.
        prompt_tokens: Of the longest.
        completion_tokens: Most of a completion.
        sequences: Completions of a call.
        slots: Most of them that are live at once.
        shares_prompts: Whether a prompt is kept once for all its completions.
        prefill_tokens: Of one prefill pass.
        models: Models that generate together (two of Nash-MD).
    """

    prompts: int
    prompt_tokens: int
    completion_tokens: int
    sequences: int
    slots: int = 64
    shares_prompts: bool = True
    prefill_tokens: int = 2048
    models: int = 1


@dataclass(frozen=True)
class Shards:
    """Over how many processes weights, gradients and optimiser states are divided; ``processes`` hold a copy of the rest."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    processes: int = 1


@dataclass(frozen=True)
class Workload:
    """One process of a run, as far as its memory goes.

    Attributes:
        policy: What is trained.
        batches: The passes of one micro-batch at its longest.
        passes: Of one optimiser step.
        critic: A value model beside the policy.
        value_head: A value head on its trunk.
        frozen: Reference and reward models that stay in memory.
        reference: Whether a pass without gradients scores the same rows: ``copy``, ``adapter`` (the policy itself), or none.
        needs: As `posttrain.models.forward.forward`.
        checkpointing, kept_layers, optimizer, autocast: As in the run's config.
        generating: What is sampled, if anything.
        shards: Over processes.
        device: ``cpu`` or ``cuda``.
        process: Bytes of the interpreter and its libraries.
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


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process.

    Attributes:
        standing: What is there all the time, by component.
        moments: What each part of a step adds, by component.
        traced: Whether passes were traced; else they are rougher.
        trainable, parameters: Numbers of weights of the policy.
    """

    standing: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]
    traced: bool = True
    trainable: int = 0
    parameters: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def fullest(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def components(self) -> dict[str, int]:
        """What is in memory at the fullest moment."""
        return {name: size for name, size in (*self.standing.items(), *self.moments[self.fullest].items()) if size}

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.components.values())


def optimizer_bytes(name: str, sizes: Sequence[tuple[int, int]]) -> int:
    """States of an optimiser.

    Args:
        name: As ``optim``.
        sizes: ``(weights, bytes)`` of each trained parameter.

    >>> [optimizer_bytes(name, [(10, 40)]) for name in ("adamw_torch", "adamw_bnb_8bit", "sgd")]
    [80, 20, 0]
    """
    name = name.lower()
    if name.startswith(STATELESS):
        return 0
    kind = next((key for key in PER_BYTE if key in name), "adamw")
    if "adafactor" in name:
        return sum(size // 50 for _, size in sizes)  # Sums of rows and columns: little of a matrix.
    if "8bit" in name:
        return EIGHT_BIT.get(kind, 2) * sum(count for count, _ in sizes)
    if "4bit" in name:
        return EIGHT_BIT.get(kind, 2) * sum(count for count, _ in sizes) // 2
    return PER_BYTE[kind] * sum(size for _, size in sizes)


def estimate_memory(work: Workload) -> MemoryEstimate:
    """What one process of this run needs at most.

    Standing: weights, optimiser states, frozen models. On top of it, whichever is most: forward and backward (gradients,
    activations, chunks of logits), the reference's pass, or generation (keys and values, logits of the live sequences)::

        peak = standing + max(moments)

    Raises:
        ModelError: A config that describes no model.
    """
    shadow = Shadow(
        work.policy, critic=work.critic, value_head=work.value_head,
        checkpointing=work.checkpointing, kept_layers=work.kept_layers,
    )  # fmt: skip
    sizes = shadow.named_sizes()
    parameters = dict(shadow.model.named_parameters())
    trained = [(parameters[name].numel(), size) for name, (size, learns) in sizes.items() if learns]
    weights, gradients = sum(size for size, _ in sizes.values()), sum(size for _, size in trained)
    shards = work.shards
    standing = {
        "process": work.process,
        "weights": weights // shards.weights,
        "optimizer states": optimizer_bytes(work.optimizer, trained) // shards.optimizer,
        **_frozen(work.frozen),
    }
    if work.device == "cuda":
        standing["CUDA context"] = CUDA_CONTEXT
    if shards.processes > 1 and shards.gradients == 1:
        standing["gradient buckets"] = gradients
    if shards.weights > 1:
        standing["gathered weights"] = _gathered(shadow.model)
    passes = _Passes(work, shadow)
    many = work.passes > 1
    training = passes.largest(training=True, accumulating=many)
    moments: dict[str, dict[str, int]] = {"forward and backward": {
        "gradients": (gradients if many else 0) // shards.gradients,
        "activations": training.activations,
        "logits": training.logits,
        "gradients of a pass": training.gradients if many else training.gradients // shards.gradients,
        "allocator": _wasted(work, training),
    }}  # fmt: skip
    moments["optimizer step"] = {"gradients": gradients // shards.gradients, "temporary": _step(work, trained)}
    if work.reference:
        scored = passes.largest(training=False, accumulating=False)
        moments["reference pass"] = {
            "activations": scored.activations, "logits": scored.logits, "allocator": _wasted(work, scored)
        }  # fmt: skip
    if work.generating is not None:
        moments["generation"] = _generation(work.generating, work.policy, shadow.model)
    count = sum(p.numel() for p in parameters.values())
    return MemoryEstimate(standing, moments, passes.traced, sum(n for n, _ in trained), count)


def _wasted(work: Workload, peak: PassPeak) -> int:
    return HOLES * peak.largest if work.device == "cpu" else int(CUDA_WASTE * peak.total)


def _frozen(parts: Sequence[Part]) -> dict[str, int]:
    held: dict[str, int] = {}
    for part in parts:
        sizes = Shadow(part).named_sizes()
        held[part.role] = held.get(part.role, 0) + sum(size for size, _ in sizes.values())
    return held


def _step(work: Workload, trained: Sequence[tuple[int, int]]) -> int:
    """What the update needs for itself: a list of temporaries where it works on all weights at once, else one weight's."""
    if "fused" in work.optimizer or not trained:
        return 0
    sizes = [size for _, size in trained]
    return sum(sizes) // work.shards.optimizer if work.device == "cuda" else 2 * max(sizes)


def _gathered(model: nn.Module) -> int:
    """Sharded weights that are whole at one moment: two layers, and what belongs to no layer."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    rest = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    return rest + 2 * max(sizes, default=0)


class _Passes:
    """The largest passes of a workload, traced where the model can be."""

    def __init__(self, work: Workload, shadow: Shadow) -> None:
        self.work, self.shadow, self.traced = work, shadow, True

    def largest(self, *, training: bool, accumulating: bool) -> PassPeak:
        """The peak of the batch that needs most."""
        wanted = {
            (tuple(b.input_ids.shape), int(b.loss_mask.sum())): b
            for b in (max(self.work.batches, key=_tokens), max(self.work.batches, key=lambda b: int(b.loss_mask.sum())))
        }
        found = [self._one(batch, training, accumulating) for batch in wanted.values()]
        return max(found, key=lambda peak: peak.total)

    def _one(self, batch: Batch, training: bool, accumulating: bool) -> PassPeak:
        if self.traced:
            try:
                return trace_pass(
                    self.shadow, batch, training=training, accumulating=accumulating,
                    needs=self.work.needs, autocast=self.work.autocast,
                )  # fmt: skip
            except Exception as error:  # A model that looks at values while it runs.
                logger.info("%s cannot be traced (%s): told from the widths of its layers.", self._name(), error)
                self.traced = False
        return _rough(self.shadow, batch, self.work, training=training, accumulating=accumulating)

    def _name(self) -> str:
        return type(causal_lm(self.shadow.model)).__name__


def _tokens(batch: Batch) -> int:
    return batch.input_ids.numel()


def _rough(shadow: Shadow, batch: Batch, work: Workload, *, training: bool, accumulating: bool) -> PassPeak:
    """A pass by the widths of its layers: a kept layer holds about twice what its linear layers put out."""
    inner: Any = causal_lm(shadow.model)
    config = inner.config.get_text_config()
    layers = [m for m in inner.modules() if isinstance(m, GradientCheckpointingLayer)]
    wide = max((2 * sum(m.out_features for m in x.modules() if isinstance(m, nn.Linear)) for x in layers), default=0)
    wide = max(wide, 8 * config.hidden_size)
    kept = sum(not (work.checkpointing and layer.gradient_checkpointing) for layer in layers) if training else 0
    item = (work.autocast or shadow.part.dtype).itemsize
    numbers = _tokens(batch) * (kept * wide + 2 * wide + (len(layers) * config.hidden_size if training else 0))
    chunk = min(int(batch.loss_mask.sum()) * 4 * config.vocab_size, CHUNK_BYTES)
    trained = sum(p.nbytes for p in inner.parameters() if p.requires_grad)
    head = config.vocab_size * config.hidden_size * shadow.part.dtype.itemsize
    gradients = 0 if not training else min(head, trained) if accumulating else trained + min(head, trained)
    return PassPeak(numbers * item, (2 if training else 1) * chunk, gradients, max(chunk, min(head, gradients)))


def _generation(asked: Generating, part: Part, model: nn.Module) -> dict[str, int]:
    """Keys and values ``2 L H_kv d bytes`` a token, and the numbers of one step: logits, their draws, a prefill pass."""
    config = causal_lm(model).config.get_text_config()
    item = part.dtype.itemsize
    each = 2 * sum(map(key_value_width, layer_configs(config))) * item
    live = min(asked.slots, asked.sequences)
    room = 64
    while room < asked.completion_tokens and asked.shares_prompts:
        room *= 2  # Suffixes grow by doubling.
    room = room if asked.shares_prompts else asked.completion_tokens
    kept = min(asked.prompts, live) if asked.shares_prompts else live
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    prefill = min(asked.prefill_tokens, asked.prompts * asked.prompt_tokens) if asked.shares_prompts else 0
    prefill = prefill or live * asked.prompt_tokens
    return {
        "keys and values": asked.models * each * (live * room + kept * asked.prompt_tokens),
        "logits": 3 * live * config.vocab_size * 4,
        "activations": prefill * (3 * inner + 6 * config.hidden_size) * item,
    }
