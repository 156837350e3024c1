"""Whether a run fits in memory, and whether it uses what it has; `plan` makes the workload that is estimated."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from posttrain.checks.registry import Context, finding, probe, register
from posttrain.errors import ModelError
from posttrain.types import Finding, Row

if TYPE_CHECKING:
    from posttrain.data.forest import Layout
    from posttrain.models.memory_estimate import Generating, Shards, Workload

__all__ = [
    "FULL",
    "MOST",
    "Lengths",
    "Profile",
    "assumed_lengths",
    "check_dry_step",
    "check_estimate",
    "check_fragmentation",
    "check_profile",
    "check_ranks",
    "check_room",
    "check_shares",
    "gib",
    "larger_batch",
    "memory_fits",
    "plan",
    "samples",
]

logger = logging.getLogger(__name__)


# Share of the memory that a run may plan with: estimates are right within a fifth, and allocators waste some.
MOST = 0.9
# Share from which a longer sample than any seen so far is likely to run out of memory.
FULL = 0.94
# A peak below this share leaves room for twice the tokens.
IDLE = 0.5
# Share of the device that is reserved and holds nothing.
FRAGMENTED = 0.15
# Tokens of the busiest rank against the mean.
IMBALANCE = 1.25
# Share of a step that is spent on sampling.
GENERATION = 0.75
# Longest sample of the data against the longest that was trained.
MUCH_LONGER = 1.5
# Share of the memory below which a rough bound is enough, and nothing is traced.
PLAINLY = 0.25
# Tokens of a row, and of a prompt, where neither the data nor the config says.
ASSUMED, ASSUMED_PROMPT = 1024, 256
# Tokens of a pass in the rough bound.
MOST_TOKENS = 16_384

register(
    "PT-M001", "weights-exceed-memory", moment="data", title="weights and optimizer alone exceed the memory", page="e"
)
register("PT-M002", "estimate-exceeds-memory", moment="data", title="the longest step is likely not to fit", page="e")
register("PT-M003", "dry-step-out-of-memory", moment="first_batch", title="the longest step did not fit", page="e")
register("PT-M004", "memory-nearly-full", moment="log_step", title="little memory left for longer samples", page="l")
register(
    "PT-M005", "memory-unused", moment="log_step", title="much memory unused, and passes that could be larger", page="l"
)
register("PT-M006", "memory-fragmented", moment="log_step", title="reserved memory that holds nothing", page="l")
register("PT-M007", "ranks-uneven", moment="log_step", title="one rank keeps the others waiting", page="l")
register("PT-M008", "generation-dominates", moment="log_step", title="most of a step is spent on sampling", page="l")


def gib(size: float) -> str:
    """Bytes in words.

    >>> gib(3 * 2**30), gib(200 * 2**20)
    ('3.0 GiB', '200 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def check_estimate(
    components: Mapping[str, int], available: int, *, total: int, where: str, fixes: Sequence[str] = ()
) -> Finding | None:
    """An estimate beyond the memory: an error where no setting of lengths and batches could help, else a warning.

    Args:
        components: Bytes at the fullest moment, by component.
        available: Bytes that this process can have.
        total: Bytes of the device.
        where: The device, for messages.
        fixes: What would help, the best first.
    """
    peak = sum(components.values())
    largest = sorted(components.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {gib(size)}" for name, size in largest[:4])
    standing = sum(components.get(name, 0) for name in ("weights", "optimizer states", "reference"))
    advice = "; ".join(fixes) or "train an adapter, shorten rows, or shard the model over more processes"
    if standing > total:
        return finding(
            "PT-M001",
            "error",
            f"weights, optimizer states and reference alone need {gib(standing)}, and {where} has {gib(total)}.",
            "the model and optim",
            "the run would end at its first update, whatever the batch size and lengths are.",
            f"{advice}.",
        )
    if peak <= MOST * available:
        return None
    return finding(
        "PT-M002",
        "warning",
        f"the longest step needs about {gib(peak)} ({named}), and {where} has {gib(available)} for it.",
        "the estimate at the start",
        "memory is likely to run out when the longest rows come, which may be late in the run.",
        f"{advice}.",
    )


def check_dry_step(
    needed: int, available: int, *, tokens: int, where: str, failed: bool, divisible: bool = True
) -> Finding | None:
    """A dry step that ran out of memory, or that needs more than may be planned with.

    Args:
        needed: Bytes at its peak, with the optimiser's states that the first update will add.
        available: Bytes that this process can have.
        tokens: Of its largest pass.
        where: The device, for messages.
        failed: Whether memory ran out.
        divisible: Whether a pass that does not fit would be divided while training.
    """
    if not failed and needed <= MOST * available:
        return None
    what = (
        f"a step at the longest lengths ran out of memory in a pass of {tokens} tokens"
        if failed
        else f"a step at the longest lengths needs {gib(needed)} with the optimizer's states, and {where} has {gib(available)}"
    )
    return finding(
        "PT-M003",
        "error" if failed and not divisible else "warning",
        f"{what}.",
        "the dry step before step 0",
        "training would meet this when such rows come, hours into the run."
        + (" A pass that does not fit is divided then, which costs time." if divisible else ""),
        f"set max_row_tokens={max(tokens // 2, 1)} (or a smaller max_length or max_completion_length), keep "
        "gradient_checkpointing=True with kept_layers=0, or per_device_train_batch_size='auto'.",
    )


@dataclass(frozen=True)
class Profile:
    """Some steps of a run, in numbers.

    Attributes:
        step: Optimiser steps done.
        peak, total: Bytes in use at most, and of the device.
        reserved, allocated: Bytes that the allocator holds, and that tensors fill; 0 on a CPU.
        batch, accumulation: ``per_device_train_batch_size`` and ``gradient_accumulation_steps``.
        pass_tokens, row_tokens: Tokens of the largest pass, and the budget of a row.
        standing: Bytes that no batch size changes (weights, gradients, optimiser states).
        longest_seen, longest: Tokens of the longest row that was trained, and of the data (0: not known).
        tokens_per_second: Real tokens of all processes.
        mfu: Percent of the hardware's peak; None where that is not known.
        padding: Share of computed tokens.
        imbalance: Tokens of the busiest process against the mean.
        generation: Share of the time that sampling took; None for methods that do not sample.
        checkpointing: Whether activations are computed again.
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
    padding: float = 0.0
    imbalance: float = 1.0
    generation: float | None = None
    checkpointing: bool = False


def check_profile(seen: Profile) -> list[Finding]:
    """All that the numbers of some steps say."""
    found: Iterable[Finding | None] = (
        check_room(seen),
        check_fragmentation(seen),
        check_ranks(seen.imbalance),
        check_shares(seen),
    )
    return [one for one in found if one is not None]


def larger_batch(batch: int, accumulation: int, factor: float) -> tuple[int, int] | None:
    """The largest batch up to ``factor`` times as large whose product with the accumulation stays; None if there is none.

    >>> larger_batch(4, 8, 2.5), larger_batch(4, 1, 8.0)
    ((8, 4), None)
    """
    whole = batch * accumulation
    fits = [size for size in range(batch + 1, int(batch * factor) + 1) if whole % size == 0]
    return (fits[-1], whole // fits[-1]) if fits else None


def check_room(seen: Profile) -> Finding | None:
    """Memory that is nearly full while longer rows are still to come, or that lies idle."""
    if not seen.total:
        return None
    share = seen.peak / seen.total
    held = f"peak memory {gib(seen.peak)} of {gib(seen.total)} ({100 * share:.0f} %) after {seen.step} steps"
    if share >= FULL:
        longer = seen.longest / seen.longest_seen if seen.longest and seen.longest_seen else 0.0
        coming = (
            f" The longest row of the data ({seen.longest} tokens) is {longer:.1f}x the longest so far."
            if longer > 1
            else ""
        )
        return finding(
            "PT-M004",
            "warning",
            f"{held}.{coming}",
            f"step {seen.step}",
            "a longer row, an evaluation or a checkpoint may be what does not fit.",
            f"set max_row_tokens={max(seen.pass_tokens // 2, 1)}, kept_layers=0 or a smaller max_length; posttrain estimate "
            "tells what each saves.",
        )
    # The allocator of a CPU reserves nothing, and passes there are as large as they are fast.
    return None if share >= IDLE or not seen.reserved else _unused(seen, held)


def _unused(seen: Profile, held: str) -> Finding | None:
    """What to raise: the row budget where passes fill it, else the batch."""
    moving = max(seen.peak - seen.standing, 1)
    factor = min(max((MOST * seen.total - seen.standing) / moving, 1.0), 64.0)
    if seen.longest > MUCH_LONGER * max(seen.longest_seen, 1):
        factor = factor * seen.longest_seen / seen.longest  # Room is needed for what was not seen yet.
    advice = None
    if seen.row_tokens and seen.pass_tokens > 0.6 * seen.row_tokens:
        larger = int(seen.row_tokens * factor) // 128 * 128
        if larger >= 1.5 * seen.row_tokens:
            advice = f"max_row_tokens={seen.row_tokens} -> {larger} fills larger passes"
    else:
        found = larger_batch(seen.batch, seen.accumulation, factor)
        if found is not None:
            advice = (
                f"per_device_train_batch_size {seen.batch} -> {found[0]} with gradient_accumulation_steps "
                f"{seen.accumulation} -> {found[1]} keeps the effective batch of {seen.batch * seen.accumulation} a process"
            )
    if seen.checkpointing:
        saved = "gradient_checkpointing=False (or a larger kept_layers) computes nothing twice"
        advice = f"{advice}; {saved}" if advice else saved
    if advice is None:
        return None
    return finding(
        "PT-M005",
        "info",
        f"{held}.",
        f"step {seen.step}",
        "larger passes cost less time a token where they fit; each has a fixed cost.",
        f"{advice}.",
    )


def check_fragmentation(seen: Profile) -> Finding | None:
    """Memory that the allocator holds and no tensor fills."""
    wasted = seen.reserved - seen.allocated
    if not seen.total or seen.reserved < IDLE * seen.total or wasted < FRAGMENTED * seen.total:
        return None
    return finding(
        "PT-M006",
        "warning",
        f"{gib(wasted)} of {gib(seen.total)} are reserved and hold nothing.",
        f"step {seen.step}",
        "blocks of many sizes leave gaps: memory runs out before it is full.",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (env: in the YAML config does it), or pad_to_multiple_of=128.",
    )


def check_ranks(imbalance: float) -> Finding | None:
    """One process that computes more than the others, which wait for it.

    Args:
        imbalance: Tokens of the busiest process against the mean of all. (Times would not tell: all wait for the slowest.)
    """
    if imbalance <= IMBALANCE:
        return None
    return finding(
        "PT-M007",
        "warning",
        f"the busiest process computes {imbalance:.2f} times as many tokens as the mean.",
        "the latest steps",
        f"the others wait for it: {100 * (1 - 1 / imbalance):.0f} % of the machine idles.",
        "let rows of like length come together (group_by_length=True), pack them, or deal completions by tokens "
        "(balance_ranks=True).",
    )


def check_shares(seen: Profile) -> Finding | None:
    """A step that is mostly sampling."""
    if seen.generation is None or seen.generation <= GENERATION:
        return None
    return finding(
        "PT-M008",
        "info",
        f"{100 * seen.generation:.0f} % of a step is sampling.",
        f"step {seen.step}",
        "a faster update would hardly show.",
        "shorten max_completion_length if few completions reach it, train on each generation more than once (num_iterations=2), "
        "or sample more prompts at a time (steps_per_generation): posttrain bench-rollouts compares engines.",
    )


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and completion, and where they are known from."""

    prompt: int
    completion: int
    source: str = "given"


def samples(args: Any) -> bool:
    """Whether a method trains on completions that it samples, by its config."""
    return hasattr(args, "num_generations")


def _answers(trainer: Any) -> int:
    """Completions of a dataset row, by the trainer's class."""
    return len(getattr(trainer, "branches", ())) or trainer.answers_per_row


def _compares(trainer: Any, args: Any) -> bool:
    """Whether a frozen reference scores the rows."""
    if not samples(args) or not getattr(trainer, "compared", True):
        return getattr(trainer, "compared", False) and not args.precompute_ref_log_probs
    always = any(getattr(args, name, None) is not None for name in ("kl_coef", "beta2"))
    return always or bool(args.beta) or getattr(args, "log_ref_kl", False)


def assumed_lengths(trainer: Any, args: Any) -> Lengths:
    """The longest that the config allows, where the data was not read.

    Args:
        trainer: A trainer, or its class.
        args: Its config.
    """
    longest = getattr(args, "max_length", None)
    if not samples(args):
        total = longest or ASSUMED
        source = f"max_length={total}" if longest else f"assumed, as max_length is not set: {ASSUMED}"
        if not hasattr(trainer, "branches") and _answers(trainer) == 1:
            return Lengths(0, total, source)
        return Lengths(total // 2, total - total // 2, f"{source}, half of it prompt (assumed)")
    completion = args.max_completion_length or ASSUMED_PROMPT
    given = getattr(args, "max_prompt_length", None)
    prompt = given or (min(ASSUMED_PROMPT, longest - completion) if longest else ASSUMED_PROMPT)
    return Lengths(prompt, completion, f"the config's limits, prompts of {prompt}" + ("" if given else " (assumed)"))


def _longest_rows(trainer: Any, args: Any, lengths: Lengths, size: int) -> list[Row]:
    """A micro-batch of one process in which every row is as long as the longest; all tokens are 0."""
    counts = [_answers(trainer)] * size if not samples(args) else []
    if not counts:
        group = int(args.num_generations)
        size *= int(args.train_batch_size) // int(args.per_device_train_batch_size) // max(args.n_gpu, 1) or 1
        counts = [group] * (size // group) + ([size % group] if size % group else [])
    answer = [0] * max(lengths.completion, 1)
    return [Row([0] * lengths.prompt, [answer] * count, [[1] * len(answer)] * count) for count in counts]


def _layout(args: Any, config: Any, device: str) -> Layout:
    """How the trainer will lay out rows, if the model takes token forests."""
    import torch

    from posttrain.models.attention import layout_for

    given = dict(getattr(args, "model_init_kwargs", None) or {}).get("attn_implementation")
    text = SimpleNamespace(_attn_implementation=given or getattr(config, "_attn_implementation", None))
    weight = SimpleNamespace(device=torch.device(device))
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text), parameters=lambda: iter([weight])
    )
    layout = layout_for(model)
    row_tokens, multiple = getattr(args, "max_row_tokens", None), getattr(args, "pad_to_multiple_of", None)
    layout = layout if row_tokens is None else replace(layout, row_tokens=row_tokens)
    return replace(layout, pad_to_multiple_of=multiple) if multiple else layout


def _single_pass(args: Any) -> bool:
    """Whether the loss compares all rows of a micro-batch, which must then be one forward pass."""
    from posttrain.losses.preference import DPO_LOSSES

    losses = getattr(args, "loss_type", None)
    if isinstance(losses, list):
        return any(DPO_LOSSES[name].kind == "sorted" for name in losses if name in DPO_LOSSES)
    return losses == "bnpo" or getattr(args, "top_entropy_quantile", 1.0) < 1.0


def plan(
    trainer: Any,
    args: Any,
    model_config: Any,
    *,
    lengths: Lengths | None = None,
    peft_config: Any = None,
    parts: Mapping[str, Any] | None = None,
    device: str = "cpu",
    process: int = 0,
    processes: int = 1,
    batch_size: int | None = None,
    bits: int | None = None,
) -> Workload:
    """What one process of this run holds.

    Args:
        trainer: A trainer, or its class.
        args: Its config.
        model_config: Configuration of the policy.
        lengths: Of the longest prompt and completion; None: what the config allows.
        peft_config: Of an adapter that is trained.
        parts: Configurations of other models, by ``reward_model``, ``value_model`` and ``teacher``.
        device: ``cpu`` or ``cuda``.
        process: Bytes of the interpreter and its libraries.
        processes: Ranks.
        batch_size: Instead of the config's.
        bits: Of quantised weights.
    """
    from posttrain.data.forest import collate
    from posttrain.models.memory_estimate import Part, Workload

    parts = dict(parts or {})
    lengths = lengths or assumed_lengths(trainer, args)
    dtype = _dtype(args, model_config)
    policy = Part("policy", model_config, "causal" if trainer.generative else "sequence", dtype, peft_config, bits=bits)
    size = batch_size or int(args.per_device_train_batch_size)
    rows = _longest_rows(trainer, args, lengths, size)
    together = {"whole_rows": trainer.keep_groups_together, "together": _single_pass(args)}
    batches = collate(rows, pad_token_id=0, layout=_layout(args, model_config, device), **together)
    reference = ("copy" if peft_config is None else "adapter") if _compares(trainer, args) else ""
    frozen = [replace(policy, role="reference", trained=False, peft_config=None)] if reference == "copy" else []
    if parts.get("reward_model") is not None:
        frozen.append(Part("reward model", parts["reward_model"], "sequence", dtype, trained=False))
    teachers = trainer.teachers_in_memory(args, policy, parts) if hasattr(trainer, "teachers_in_memory") else []
    critic = parts.get("value_model")
    smoothing = {"logits"} if getattr(args, "label_smoothing_factor", 0) else set()
    return Workload(
        policy=policy,
        batches=batches,
        passes=max(1, round(len(batches) * _accumulation(args) * args.per_device_train_batch_size / size)),
        critic=None if critic is None else Part("value model", critic, "sequence", dtype),
        value_head="values" in trainer.needs and critic is None,
        frozen=(*frozen, *teachers),
        reference=reference or ("copy" if teachers else ""),
        needs=trainer.needs | {"entropy"} | smoothing,
        checkpointing=bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing),
        kept_layers=args.kept_layers,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        autocast=_autocast(args, dtype),
        generating=_generating(args, lengths, device),
        shards=_shards(args, processes),
        device=device,
        process=process,
    )


def _dtype(args: Any, config: Any) -> Any:
    import torch

    name = dict(getattr(args, "model_init_kwargs", None) or {}).get("dtype", "float32")
    if name in ("auto", None):
        name = getattr(config, "dtype", None) or torch.float32
    return name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."))


def _autocast(args: Any, dtype: Any) -> Any:
    """Dtype of the computation where it is not that of the weights."""
    import torch

    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return half if half is not dtype else None


def _accumulation(args: Any) -> int:
    """Micro-batches of an optimiser step; PPO's are its mini-batches."""
    if hasattr(args, "local_mini_batch_size"):
        return max(1, -(-args.local_mini_batch_size // args.per_device_train_batch_size))
    return int(args.gradient_accumulation_steps)


def _generating(args: Any, lengths: Lengths, device: str) -> Generating | None:
    """The largest call of an engine in this process; None where completions are given, or sampled by workers."""
    from posttrain.models.memory_estimate import Generating

    if not samples(args) or hasattr(args, "worker_engine"):
        return None
    world = max(int(getattr(args, "world_size", 1)), 1)
    sequences = max(1, int(args.generation_batch_size or args.per_device_train_batch_size) // world)
    return Generating(
        prompts=-(-sequences // int(args.num_generations)),
        prompt_tokens=lengths.prompt,
        completion_tokens=lengths.completion,
        sequences=sequences,
        slots=64 if device == "cpu" else 256,
        shares_prompts=getattr(args, "rollout_engine", "auto") != "hf",
        models=2 if hasattr(args, "mixture_coef") else 1,
    )


def _shards(args: Any, processes: int) -> Shards:
    """How ZeRO or FSDP divides the model, by the config or by the variables that ``accelerate launch`` exports."""
    from posttrain.models.memory_estimate import Shards

    plugin = getattr(args, "deepspeed_plugin", None)
    stage = int(plugin.zero_stage) if plugin is not None else 0
    fsdp = " ".join(str(getattr(option, "value", option)) for option in getattr(args, "fsdp", None) or ())
    if not fsdp and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        fsdp = os.environ.get("FSDP_SHARDING_STRATEGY", "full_shard").lower()
    if fsdp and fsdp != "no_shard":
        stage = 2 if "grad_op" in fsdp else 3
    return Shards(*(processes if stage >= least else 1 for least in (3, 2, 1)), processes=processes)


@probe("data", "PT-M001", "PT-M002")
def memory_fits(context: Context) -> Iterable[Finding | None]:
    """An estimate against what is free; traced (seconds) only where a rough bound leaves a doubt."""
    trainer = context.parts.get("trainer") or context.parts.get("trainer_class")
    config, args = context.model_config, context.args
    if trainer is None or config is None:
        return []
    from posttrain.models.device import available_memory, in_use
    from posttrain.models.memory_estimate import estimate_memory

    limit = getattr(args, "memory_limit_gib", None)
    device = args.device
    has = available_memory(device, None if limit is None else int(limit * 2**30))
    if _bound(config) < PLAINLY * has.free:
        return []
    process = 0
    if device.type == "cpu" and context.model is not None:
        # The estimate counts the weights, which are in memory already.
        process = max(in_use("cpu") - sum(parameter.nbytes for parameter in context.model.parameters()), 0)
    work = plan(
        trainer, args, config, lengths=_sampled_lengths(trainer, context), peft_config=context.peft_config,
        device=device.type, process=process, processes=context.processes,
    )  # fmt: skip
    try:
        found = estimate_memory(work)
    except ModelError as error:
        logger.warning("%s", error)
        return []
    fixes = [f"see what each setting saves with posttrain estimate (the estimate is {gib(found.peak)})"]
    if work.policy.peft_config is None:
        fixes.append("train an adapter (peft_config)")
    if work.kept_layers != 0:
        fixes.append("kept_layers=0")
    fixes.append("lower max_row_tokens, max_length or max_completion_length")
    return [check_estimate(found.components, has.free, total=has.total, where=has.where, fixes=fixes)]


def _bound(config: Any) -> float:
    """More than a run takes: weights, gradients, two moments and a reference in float32, and every activation of a pass."""
    from posttrain.models.device import compute_flops_per_token

    text = config.get_text_config()
    try:
        parameters = compute_flops_per_token(text, 1) / 6
        layer = 4 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size) + 12 * text.hidden_size
        return 24 * parameters + 4 * MOST_TOKENS * text.num_hidden_layers * layer
    except (ModelError, AttributeError, TypeError):
        return float("inf")


def _sampled_lengths(trainer: Any, context: Context) -> Lengths:
    """The longest of the sampled rows; sampled completions are as long as they may be."""
    known = assumed_lengths(trainer, context.args)
    rows = [row for row in context.rows if row.prompt_ids or row.completions]
    if not rows:
        return known
    prompt = max(len(row.prompt_ids) for row in rows)
    if samples(context.args):
        return Lengths(prompt, known.completion, "the sampled prompts")
    return Lengths(prompt, max(len(ids) for row in rows for ids in row.completions or [[]]), "the sampled rows")
