"""Whether a run fits in memory, and whether it uses what it has: plain numbers in, findings out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.checks.memory_plan import TRAITS, Lengths, assumed_lengths, plan
from posttrain.checks.registry import Context, finding, probe, register
from posttrain.types import Finding

__all__ = [
    "FULL",
    "MOST",
    "Profile",
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
    "name_of",
]


MOST = (
    0.9  # Share of the memory that a run may plan with: estimates are right within a fifth, and allocators waste some.
)
FULL = 0.94  # Share from which a longer sample than any seen so far is likely to be the end.
IDLE = 0.5  # A peak below this share leaves room for twice the tokens.
FRAGMENTED = 0.15  # Share of the device that is reserved and holds nothing.
IMBALANCE = 1.25  # Busiest rank against the mean.
GENERATION = 0.75  # Share of a step that is spent on sampling.
MUCH_LONGER = 1.5  # Longest sample of the data against the longest that was trained.

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
    """An estimate beyond what there is: an error where no setting of lengths and batches could help, else a warning.

    Args:
        components: Bytes at the fullest moment, by what they are.
        available: Bytes that this process could have.
        total: Bytes of the device.
        where: The device, in words.
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
    """What the dry step took, with the optimiser's states that come later.

    Args:
        needed: Bytes at its peak, states included.
        available: Bytes that this process could have.
        tokens: Of its largest pass.
        where: The device, in words.
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


PLAINLY = 0.25  # Share of the memory below which a bound made in no time is enough.
MOST_TOKENS = 16_384  # Of a pass, where nothing else is said.


def name_of(context: Context) -> str | None:
    """The training command behind a trainer's class, or behind the class that it extends; None where there is none."""
    trainer = context.parts.get("trainer")
    classes = [kind.__name__ for kind in type(trainer).__mro__] if trainer is not None else []
    plain = {name.replace("-", ""): name for name in TRAITS}
    for name in (context.trainer, *classes):
        key = name.removesuffix("Trainer").lower().replace("-", "").replace("_", "")
        if key in plain:
            return plain[key]
    return None


@probe("data", "PT-M001", "PT-M002")
def memory_fits(context: Context) -> Iterable[Finding | None]:
    """An estimate against what is free; traced (seconds) only where a rough bound leaves a doubt."""
    name, config = name_of(context), context.model_config
    if name is None or config is None:
        return []
    from posttrain.models.device_memory import available_memory, in_use

    limit = getattr(context.args, "memory_limit_gib", None)
    device = context.args.device
    has = available_memory(device, None if limit is None else int(limit * 2**30))
    if _bound(config) < PLAINLY * has.free:
        return []
    from posttrain.models.memory_estimate import estimate_memory

    process = in_use("cpu") - _loaded(context.model) if device.type == "cpu" else 0
    work = plan(
        name, context.args, config, lengths=_lengths(name, context), peft_config=context.peft_config,
        device=device.type, process=max(process, 0), processes=context.processes,
    )  # fmt: skip
    found = estimate_memory(work)
    fixes = [f"posttrain estimate {name} tells what each of its settings saves (here {gib(found.peak)})"]
    if work.policy.peft_config is None:
        fixes.append("train an adapter (peft_config)")
    if work.kept_layers != 0:
        fixes.append("kept_layers=0")
    fixes.append("lower max_row_tokens, max_length or max_completion_length")
    return [check_estimate(found.components, has.free, total=has.total, where=has.where, fixes=fixes)]


def _loaded(model: Any) -> int:
    """Bytes of weights that are in memory already, which the estimate counts by themselves."""
    return 0 if model is None else sum(parameter.nbytes for parameter in model.parameters())


def _bound(config: Any) -> float:
    """More than a run takes: weights, gradients, two moments and a reference in float32, and every activation of a pass."""
    from posttrain.errors import ModelError
    from posttrain.models.memory_estimate import compute_flops_per_token

    text = config.get_text_config()
    try:
        parameters = compute_flops_per_token(text, 1) / 6
        layer = 4 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size) + 12 * text.hidden_size
        return 24 * parameters + 4 * MOST_TOKENS * text.num_hidden_layers * layer
    except (ModelError, AttributeError, TypeError):
        return float("inf")


def _lengths(name: str, context: Context) -> Lengths:
    """The longest of the sampled rows; completions that are sampled as long as they may be."""
    known = assumed_lengths(name, context.args)
    rows = [row for row in context.rows if row.prompt_ids or row.completions]
    if not rows:
        return known
    prompt = max(len(row.prompt_ids) for row in rows)
    if not TRAITS[name].answers:
        return Lengths(prompt, known.completion, "the sampled prompts")
    return Lengths(prompt, max(len(ids) for row in rows for ids in row.completions or [[]]), "the sampled rows")
