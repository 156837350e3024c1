"""Checks of memory: whether the longest step fits, and how much memory a run uses. `plan` creates the input of the memory
estimate.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from posttrain.checks.registry import Context, finding
from posttrain.errors import ModelError
from posttrain.models.architecture import config_of
from posttrain.types import Batch, Finding, Row
from posttrain.values import gib

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PretrainedConfig

    from posttrain.data.forest import Layout
    from posttrain.methods.base import Method, Traits
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.models.memory import Available
    from posttrain.models.memory_estimate import Generating, Part, Shards, Workload

logger = logging.getLogger(__name__)

# Fraction of the free memory that a run may use. The rest is a reserve. Estimates can be wrong by up to 20 %, and the
# allocator cannot use all memory.
PLANNED_SHARE = 0.9
# Limits for the peak memory, as fractions of the total memory. If the peak is above FULL_SHARE, longer rows may not fit. If
# it is below IDLE_SHARE, at least half of the memory is unused.
FULL_SHARE, IDLE_SHARE = 0.94, 0.5
# Maximum fraction of the device's memory that the allocator may reserve without using it for tensors. If the fraction is
# larger, the memory is fragmented.
FRAGMENTED = 0.15
# Maximum ratio of the busiest rank's number of tokens to the mean over ranks. If the ratio is larger, ranks are unbalanced.
IMBALANCE = 1.25
# Maximum fraction of the step time that generation may take. A larger fraction is reported.
GENERATION_SHARE = 0.75
# Default maximum lengths of a row and of a prompt, in tokens. They are used if neither the data nor the config limits the
# length.
ASSUMED_ROW, ASSUMED_PROMPT = 1024, 256


def check_estimate(
    components: Mapping[str, int], available: int, *, total: int, where: str, fixes: Sequence[str] = ()
) -> Finding | None:
    """Return a finding if the estimated memory exceeds the available memory. Otherwise return None. If weights and optimizer
    states alone do not fit, the finding is an error, because a smaller batch size or length would not help.

    Args:
        components: Estimated bytes of each component (weights, gradients, activations, ...) at the peak.
        available: Bytes available to this process.
        total: Bytes of the device.
        where: Name of the device in messages.
        fixes: Possible fixes, best one first.
    """
    peak = sum(components.values())
    largest = sorted(components.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {gib(size)}" for name, size in largest[:4])
    standing = sum(components.get(name, 0) for name in ("weights", "optimizer states", "reference"))
    advice = "; ".join(fixes) or "train an adapter, use shorter rows, or shard the model over more processes"
    if standing > total:
        return finding(
            "PT-M001",
            "error",
            f"weights, optimizer states and reference alone need {gib(standing)}, but {where} has {gib(total)}.",
            "the model and optim",
            "the run would stop at its first update, regardless of batch size and lengths.",
            f"{advice}.",
        )
    if peak <= PLANNED_SHARE * available:
        return None
    return finding(
        "PT-M002",
        "warning",
        f"the longest step needs about {gib(peak)} ({named}), but {where} has {gib(available)} for it.",
        "the estimate at the start",
        "memory will probably run out at the longest rows, possibly late in the run.",
        f"{advice}.",
    )


def check_dry_step(
    needed: int, available: int, *, tokens: int, where: str, failed: bool, divisible: bool = True
) -> Finding | None:
    """Return a finding if the dry step ran out of memory, or needed more than the planned fraction of the memory. Otherwise
    return None.

    Args:
        needed: Peak memory in bytes. It includes the optimizer states that the first update will add.
        available: Bytes available to this process.
        tokens: Number of tokens of the largest micro-batch.
        where: Name of the device in messages.
        failed: Whether the step ran out of memory.
        divisible: Whether training can split a micro-batch that does not fit.
    """
    if not failed and needed <= PLANNED_SHARE * available:
        return None
    what = (
        f"a step at the longest lengths ran out of memory in a micro-batch of {tokens} tokens"
        if failed
        else f"a step at the longest lengths needs {gib(needed)} with optimizer states, but {where} has {gib(available)}"
    )
    return finding(
        "PT-M003",
        "error" if failed and not divisible else "warning",
        f"{what}.",
        "the dry step before step 0",
        "training would run out of memory at such rows, possibly hours into the run."
        + (" A micro-batch that does not fit is then split, which takes time." if divisible else ""),
        f"set max_row_tokens={max(tokens // 2, 1)} (or a smaller max_length or max_completion_length), keep "
        "gradient_checkpointing=True with kept_layers=0, or set per_device_train_batch_size='auto'.",
    )


@dataclass(frozen=True)
class Profile:
    """Measured memory and speed over some steps of a run.

    Attributes:
        step: Number of optimizer steps so far.
        peak, total: Peak memory in use, and total memory of the device, in bytes.
        reserved, allocated: Bytes reserved by the allocator, and bytes in tensors. They are 0 on a CPU.
        batch, accumulation: ``per_device_train_batch_size`` and ``gradient_accumulation_steps``.
        pass_tokens, row_tokens: Number of tokens of the largest micro-batch, and maximum number of tokens of a row.
        standing: Bytes of weights, gradients and optimizer states. They do not depend on the batch size.
        longest_seen, longest: Number of tokens of the longest row used for training so far, and of the longest row in the
            dataset. 0 means unknown.
        tokens_per_second: Number of tokens per second over all processes, without padding.
        mfu: Model FLOPS utilization in percent, or None if it is unknown.
        imbalance: Number of tokens of the busiest process, divided by the mean over processes. Durations do not show
            imbalance, because all processes wait for the slowest process.
        generation: Fraction of the time spent on generation. None for methods that do not sample.
        checkpointing: Whether activations are recomputed.
    """

    step: int
    peak: int
    total: int
    reserved: int = 0
    allocated: int = 0
    batch: int = 1
    accumulation: int = 1
    pass_tokens: int = 0
    row_tokens: int = 0
    standing: int = 0
    longest_seen: int = 0
    longest: int = 0
    tokens_per_second: float = 0.0
    mfu: float | None = None
    imbalance: float = 1.0
    generation: float | None = None
    checkpointing: bool = False


def check_profile(seen: Profile) -> Iterator[Finding]:
    """Find problems in a profile. There are five kinds: nearly full memory, unused memory, fragmented memory, unbalanced
    ranks and slow generation.
    """
    here, share, wasted = f"step {seen.step}", seen.peak / max(seen.total, 1), seen.reserved - seen.allocated
    peak = f"peak memory {gib(seen.peak)} of {gib(seen.total)} ({100 * share:.0f} %) after {seen.step} steps"
    if share >= FULL_SHARE:
        longer = seen.longest / max(seen.longest_seen, 1)
        coming = f" The longest row of the data ({seen.longest} tokens) is {longer:.1f}x as long as any row so far."
        yield finding(
            "PT-M004", "warning", f"{peak}.{coming if longer > 1 else ''}", here,
            "a longer row, an evaluation or a checkpoint may not fit.",
            f"set max_row_tokens={max(seen.pass_tokens // 2, 1)}, kept_layers=0 or a smaller max_length. `posttrain estimate` "
            "shows how much memory each setting saves.",
        )  # fmt: skip
    # On CPUs, this finding does not apply: the allocator reserves no memory, and larger micro-batches are not faster.
    elif share < IDLE_SHARE and seen.reserved and (advice := _larger_passes(seen)):
        why = "each micro-batch has a fixed cost, so larger micro-batches take less time per token."
        yield finding("PT-M005", "info", f"{peak}.", here, why, advice)
    if seen.reserved >= IDLE_SHARE * seen.total and wasted > FRAGMENTED * seen.total:
        yield finding(
            "PT-M006", "warning", f"{gib(wasted)} of {gib(seen.total)} are reserved but contain no tensors.", here,
            "free memory is split into blocks of many sizes, so a large tensor may not fit although enough memory is free.",
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (for example under env: in the YAML config), or "
            "pad_to_multiple_of=128.",
        )  # fmt: skip
    if seen.imbalance > IMBALANCE:
        yield finding(
            "PT-M007", "warning", f"the busiest process computes {seen.imbalance:.2f} times as many tokens as the mean.", here,
            f"all other processes wait for it, so {100 * (1 - 1 / seen.imbalance):.0f} % of the machine's time is idle.",
            "group rows of similar length (group_by_length=True), pack them, or distribute completions by tokens "
            "(balance_ranks=True).",
        )  # fmt: skip
    if (seen.generation or 0.0) > GENERATION_SHARE:
        yield finding(
            "PT-M008", "info", f"{100 * (seen.generation or 0.0):.0f} % of the step time is generation.", here,
            "a faster update would hardly make the step faster.",
            "reduce max_completion_length if few completions reach it, train on each generation more than once "
            "(num_iterations=2), or generate for more prompts at a time (steps_per_generation).",
        )  # fmt: skip


def _larger_passes(seen: Profile) -> str:
    """Return advice to use larger micro-batches. If no larger micro-batch fits, return an empty string. If micro-batches
    already have ``max_row_tokens`` tokens, advise to increase this option. Otherwise, advise to increase the batch size.
    """
    factor = min(max((PLANNED_SHARE * seen.total - seen.standing) / max(seen.peak - seen.standing, 1), 1.0), 64.0)
    # Reduce the factor, to reserve memory for rows that are longer than all rows so far.
    factor /= max(seen.longest / max(seen.longest_seen, 1), 1.0)
    advice = (
        ["gradient_checkpointing=False (or a larger kept_layers) avoids recomputation"] if seen.checkpointing else []
    )
    if seen.row_tokens and seen.pass_tokens > 0.6 * seen.row_tokens:
        larger = int(seen.row_tokens * factor) // 128 * 128
        if larger >= 1.5 * seen.row_tokens:
            advice.insert(0, f"max_row_tokens={seen.row_tokens} -> {larger} allows larger micro-batches")
    elif settings := larger_batch(seen.batch, seen.accumulation, factor):
        advice.insert(
            0,
            f"per_device_train_batch_size {seen.batch} -> {settings[0]} with gradient_accumulation_steps {seen.accumulation} -> "
            f"{settings[1]} keeps the effective batch size of {seen.batch * seen.accumulation} per process",
        )
    return "; ".join(advice)


def batch_sizes(batch: int, accumulation: int) -> list[int]:
    """Return all batch sizes per device that divide the effective batch size. With each of these sizes, the effective batch
    size can stay the same.
    """
    whole = batch * accumulation
    return [size for size in range(1, whole + 1) if whole % size == 0]


def larger_batch(batch: int, accumulation: int, factor: float) -> tuple[int, int] | None:
    """Return a larger batch size and its accumulation steps. The effective batch size stays the same. If no larger batch
    size is possible, return None.

    The result is the largest batch size that is at most ``factor`` times ``batch``.

    >>> larger_batch(4, 8, 2.5), larger_batch(4, 1, 8.0)
    ((8, 4), None)
    """
    fits = [size for size in batch_sizes(batch, accumulation) if batch < size <= batch * factor]
    return (fits[-1], batch * accumulation // fits[-1]) if fits else None


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of the longest prompt and of the longest completion, and a text that names the source of these
    lengths.
    """

    prompt: int
    completion: int
    source: str = "given"


def _compares(traits: Traits, args: PostTrainingConfig) -> bool:
    """Return whether a frozen reference model scores the rows."""
    if not traits.samples:
        return traits.compares_reference and not args.precompute_ref_log_probs
    kl = traits.beta_is_kl and (bool(args.beta) or args.log_ref_kl)
    return traits.compares_reference or kl


def assumed_lengths(traits: Traits, args: PostTrainingConfig) -> Lengths:
    """Return the maximum lengths that the config allows. These lengths are used if no data is available.

    Args:
        traits: Traits of the method.
        args: Config of the method.
    """
    longest = args.max_length
    if not traits.samples:
        total = longest or ASSUMED_ROW
        source = f"max_length={total}" if longest else f"assumed, because max_length is not set: {ASSUMED_ROW}"
        if traits.documents:
            return Lengths(0, total, source)
        return Lengths(total // 2, total - total // 2, f"{source}, half of it prompt (assumed)")
    completion = args.max_completion_length or ASSUMED_PROMPT
    max_prompt = vars(args).get("max_prompt_length")
    prompt = max_prompt or (min(ASSUMED_PROMPT, longest - completion) if longest else ASSUMED_PROMPT)
    return Lengths(
        prompt, completion, f"the config's limits, prompts of {prompt}" + ("" if max_prompt else " (assumed)")
    )


def group_sizes(args: PostTrainingConfig, size: int) -> list[int]:
    """Split a micro-batch of ``size`` completions into groups with the same prompt. Return the sizes of the groups. Only
    methods that sample use this function.
    """
    size *= int(args.train_batch_size) // int(args.per_device_train_batch_size) // max(args.n_gpu, 1) or 1
    group = min(int(args.num_generations), size)
    return [group] * (size // group) + ([size % group] if size % group else [])


def _longest_rows(traits: Traits, args: PostTrainingConfig, lengths: Lengths, size: int) -> list[Row]:
    """Return one process's micro-batch of rows that all have the maximum length. All token ids are 0."""
    counts = group_sizes(args, size) if traits.samples else [traits.answers] * size
    answer = [0] * max(lengths.completion, 1)
    return [Row([0] * lengths.prompt, [answer] * count, [[1] * len(answer)] * count) for count in counts]


def _layout(args: PostTrainingConfig, config: Any, device: str) -> Layout:
    """Return the layout that the trainer will use. Assume that the model supports tree attention."""
    from posttrain.models.attention import layout_for

    backend = (args.model_init_kwargs or {}).get("attn_implementation")
    fields = config.get_text_config().to_dict()
    text = SimpleNamespace(**fields | {"_attn_implementation": backend or config._attn_implementation})
    autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    weight = SimpleNamespace(dtype=torch.float32)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text), parameters=lambda: iter([weight])
    )
    layout = layout_for(model, autocast=autocast, device=device)
    return layout.adjusted(args.max_row_tokens, args.pad_to_multiple_of)


def plan(
    method: Method[Any],
    model_config: Any,
    *,
    lengths: Lengths | None = None,
    peft_config: PeftConfig | None = None,
    parts: Mapping[str, Any] | None = None,
    device: str = "cpu",
    process: int = 0,
    processes: int = 1,
    zero_stage: int = 0,
    batch_size: int | None = None,
    bits: float | None = None,
    pixels: Callable[[int], dict[str, torch.Tensor]] | None = None,
    model: nn.Module | None = None,
) -> Workload:
    """Create the `Workload` of one process of this run. It is the input of `estimate_memory`.

    Args:
        method: The method, with its config.
        model_config: Config of the policy.
        lengths: Lengths of the longest prompt and completion. None means the maximum lengths that the config allows.
        peft_config: Config of the trained adapter.
        parts: Configs of other models: ``reward_model``, ``value_model`` and ``teacher``.
        device: ``cpu`` or ``cuda``.
        process: Bytes that the interpreter and its libraries use.
        processes: Number of ranks.
        zero_stage: ZeRO stage for estimates before the ranks start. 0 means that config and environment decide.
        batch_size: Batch size. None means the batch size of the config.
        bits: Bits per quantized weight, with scales (see `posttrain.models.quantised.weight_bits`). None means the bits of
            the configs.
        pixels: Function that prepares the images of N copies of the longest row. None if rows contain only text.
        model: The policy, if it is loaded. Weights of a loaded model already have their final dtype.
    """
    from posttrain.data.forest import collate
    from posttrain.models.memory import recomputes
    from posttrain.models.memory_estimate import Part, Workload
    from posttrain.models.quantised import weight_bits

    parts, args, traits = dict(parts or {}), method.cfg, method.traits
    lengths = lengths or assumed_lengths(traits, args)
    dtype = _dtype(args, model_config, model)
    packing = _packing(args, model_config if model is None else config_of(model))
    bits = weight_bits(packing) if bits is None else bits
    options = _kind(traits, args, images=pixels is not None)
    policy = Part("policy", model_config, dtype=dtype, peft_config=peft_config, bits=bits, **options)
    size = batch_size or int(args.per_device_train_batch_size)
    rows = _longest_rows(traits, args, lengths, size)
    together = {"whole_rows": traits.whole_rows, "together": traits.single_pass}
    batches = collate(rows, pad_token_id=0, layout=_layout(args, model_config, device), **together)
    reference = ("copy" if peft_config is None else "adapter") if _compares(traits, args) else ""
    frozen = _frozen_parts(policy, reference, parts.get("reward_model"))
    teachers = method.other_models(policy, parts)
    critic, smoothing = parts.get("value_model"), bool(args.label_smoothing_factor)
    return Workload(
        policy=policy,
        batches=batches,
        passes=max(1, round(len(batches) * args.passes_per_step * args.per_device_train_batch_size / size)),
        critic=None if critic is None else Part("value model", critic, "sequence", dtype),
        value_head="values" in traits.needs and critic is None,
        frozen=(*frozen, *teachers),
        reference=reference or ("copy" if teachers else ""),
        needs=traits.needs | {"entropy"} | ({"logits"} if smoothing else set()),
        checkpointing=recomputes(args),
        kept_layers=args.kept_layers,
        optimizer=args.optim,
        autocast=_autocast(args, dtype),
        generating=_generating(traits, args, lengths, device),
        shards=_shards(args, processes, zero_stage),
        device=device,
        process=process,
        pixels={} if pixels is None else pixels(min(len(rows), max(map(_trees, batches)))),
    )


def _kind(traits: Traits, args: PostTrainingConfig, *, images: bool) -> dict[str, Any]:
    """Return the properties of the policy that the estimate needs and that depend on the method and its config."""
    kind = "causal" if traits.generative else "sequence"
    return {"kind": kind, "freeze_vision": args.freeze_vision, "images": images}


def _frozen_parts(policy: Part, reference: str, reward_model: Any) -> list[Part]:
    """Return the frozen models that stay in memory."""
    frozen = replace(policy, trained=False, peft_config=None)
    parts = [replace(frozen, role="reference")] if reference == "copy" else []
    if reward_model is not None:
        parts.append(replace(frozen, role="reward model", config=reward_model, kind="sequence", bits=None))
    return parts


def _trees(batch: Batch) -> int:
    return sum(segment.parent < 0 for segment in batch.segments)


def _dtype(args: PostTrainingConfig, config: Any, model: nn.Module | None = None) -> Any:
    """Return the dtype of most weights of a loaded model. If no model is loaded, return the dtype for loading it."""
    from posttrain.models.memory_estimate import named_dtype

    counts: Counter[torch.dtype] = Counter()
    for parameter in () if model is None else model.parameters():
        # Quantized weights are packed into one-byte dtypes. Such a dtype is not the dtype of the computation.
        counts[parameter.dtype] += parameter.numel() if parameter.is_floating_point() and parameter.itemsize > 1 else 0
    if counts.total():
        return counts.most_common(1)[0][0]
    name = (args.model_init_kwargs or {}).get("dtype", "float32")
    if name in ("auto", None):
        name = config.dtype or torch.float32
    return named_dtype(name)


def _packing(args: PostTrainingConfig, config: PretrainedConfig) -> Any:
    """Return the `quantization_config` in the run's arguments or in the checkpoint. If there is none, return None."""
    from posttrain.models.quantised import packing_of

    return (args.model_init_kwargs or {}).get("quantization_config") or packing_of(config)


def _autocast(args: PostTrainingConfig, dtype: Any) -> Any:
    """Return the dtype of the computation if it differs from the dtype of the weights. Otherwise return None."""
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return half if half is not dtype else None


def _generating(traits: Traits, args: PostTrainingConfig, lengths: Lengths, device: str) -> Generating | None:
    """Return the largest generation call of an engine in this process. If no engine generates in this process, return None."""
    from posttrain.models.memory_estimate import Generating

    if not traits.samples or traits.workers_sample:
        return None
    world = max(int(args.world_size), 1)
    sequences = max(1, int(args.generation_batch_size or args.per_device_train_batch_size) // world)
    return Generating(
        prompts=-(-sequences // int(args.num_generations)),
        prompt_tokens=lengths.prompt,
        completion_tokens=lengths.completion,
        sequences=sequences,
        slots=64 if device == "cpu" else 256,
        shares_prompts=args.rollout_engine != "hf",
    )


def _shards(args: PostTrainingConfig, processes: int, stage: int = 0) -> Shards:
    """Return how ZeRO or FSDP shards the model. Read the config, or the variables of ``accelerate launch``."""
    from posttrain.models.memory_estimate import Shards

    stage = stage if args.deepspeed_plugin is None else int(args.deepspeed_plugin.zero_stage)
    fsdp = " ".join(args.fsdp) if isinstance(args.fsdp, list) else ""
    # transformers replaces args.fsdp with True, and stores the strategy in fsdp_config.
    if args.fsdp and not fsdp:
        fsdp = "full_shard" if args.fsdp_config.get("reshard_after_forward", True) else "shard_grad_op"
    if not fsdp and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        fsdp = os.environ.get("FSDP_SHARDING_STRATEGY", "full_shard").lower()
    if fsdp and fsdp != "no_shard":
        stage = 2 if "grad_op" in fsdp else 3
    return Shards(*(processes if stage >= least else 1 for least in (3, 2, 1)), processes=processes)


def compare_weights(context: Context, has: Available) -> Finding | None:
    """Compare the memory for weights and optimizer states of a fully trained model with the total memory.

    Args:
        context: Context of the run. The model is not loaded yet.
        has: Memory of the device.
    """
    from posttrain.models.memory_estimate import Part, Shadow, optimizer_bytes

    args, dtype = context.args, _dtype(context.args, context.model_config)
    sizes = [size for size, _ in Shadow(Part("policy", context.model_config, dtype=dtype)).named_sizes().values()]
    shards = _shards(args, context.processes)
    trained = [(size // dtype.itemsize, size) for size in sizes]
    states = optimizer_bytes(args.optim, trained) // shards.optimizer
    fixes = [f"train an adapter (peft_config), or an optimizer with smaller states (the weights are loaded in {dtype})"]
    components = {"weights": sum(sizes) // shards.weights, "optimizer states": states}
    return check_estimate(components, sum(components.values()) * 2, total=has.total, where=has.where, fixes=fixes)


def compare_estimate(context: Context, method: Method[Any], has: Available) -> Finding | None:
    """Compare the estimate of the longest step with the free memory.

    Args:
        context: Context of the run.
        method: The method, with its config.
        has: Free memory.
    """
    from posttrain.models.heads import adapters_of
    from posttrain.models.memory import in_use
    from posttrain.models.memory_estimate import estimate_memory, optimizer_bytes

    args, model, process, vision = context.args, context.model, 0, context.parts.get("vision")
    loaded = [] if model is None else list(model.parameters())
    weights = sum(parameter.nbytes for parameter in loaded)
    if args.device.type == "cpu" and loaded:
        # Add the memory of loaded weights to the free memory, because the estimate includes these weights.
        process = max(in_use("cpu") - weights, 0)
    # The model may already contain its adapter.
    adapter = context.peft_config or next(iter(adapters_of(model).values()), None)
    work = plan(
        method, context.model_config, lengths=longest_of(context.rows, method.traits, args), peft_config=adapter,
        device=args.device.type, process=process, processes=context.processes,
        pixels=vision.pixels(context.rows) if vision else None, model=model,
    )  # fmt: skip
    try:
        estimate = estimate_memory(work)
    except ModelError as error:
        logger.warning("%s", error)
        return None
    if loaded and work.shards.weights == 1:
        # The sizes of the loaded parameters take quantization and frozen weights into account.
        trained = [(p.numel(), p.nbytes) for p in loaded if p.requires_grad]
        states = optimizer_bytes(args.optim, trained) // work.shards.optimizer
        estimate = replace(estimate, standing={**estimate.standing, "weights": weights, "optimizer states": states})
    fixes = [f"run posttrain estimate to see what each setting saves (the estimate is {gib(estimate.peak)})"]
    if work.policy.peft_config is None:
        fixes.append("train an adapter (peft_config)")
    if work.kept_layers != 0:
        fixes.append("kept_layers=0")
    fixes.append("decrease max_row_tokens, max_length or max_completion_length")
    return check_estimate(estimate.components, has.free, total=has.total, where=has.where, fixes=fixes)


def longest_of(rows: Sequence[Row], traits: Traits, args: PostTrainingConfig) -> Lengths:
    """Return the lengths of the longest row. If completions are sampled later, the config gives their maximum length."""
    assumed = assumed_lengths(traits, args)
    if not rows:
        return assumed
    if traits.samples:
        prompt = max(len(row.prompt_ids) for row in rows)
        return Lengths(prompt, assumed.completion, "the longest prompt of the data, the config's completions")
    longest = max(rows, key=lambda row: len(row.prompt_ids) + sum(map(len, row.completions)))
    return Lengths(
        len(longest.prompt_ids), max(map(len, longest.completions), default=0), "the longest row of the data"
    )
