"""A trial step with the longest rows before training. The trial step tests whether the run fits into memory, and can choose
the batch size.
"""

from __future__ import annotations

import bisect
import logging
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch

from posttrain.checks import memory as checks
from posttrain.checks.machine import memory_limit
from posttrain.data.samplers import longest_examples
from posttrain.errors import ConfigError
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.heads import attention_renamed, causal_lm
from posttrain.models.memory import (
    available_memory,
    get_act_offloading_ctx_manager,
    in_use,
    keep_last_activations,
    peak_in_use,
    recompute_activations,
    recompute_options,
    recomputes,
    reset_peak,
)
from posttrain.models.memory_estimate import optimizer_bytes
from posttrain.types import Batch, Row
from posttrain.values import gib

if TYPE_CHECKING:
    from posttrain.loop.data_report import DatasetHead
    from posttrain.loop.run import Run
    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DryStep:
    """Memory and time of a trial step at the maximum lengths.

    Attributes:
        peak: Peak memory of the process in bytes.
        needed: Peak memory including the optimizer states, which exist only after the first update.
        tokens: Number of tokens of the largest pass.
        seconds: Duration of the largest pass.
        failed: Whether the device ran out of memory in the step.
    """

    peak: int
    needed: int
    tokens: int
    seconds: float
    failed: bool = False


def fit_memory(run: Run, head: DatasetHead, optimizer: torch.optim.Optimizer | None) -> None:
    """Choose the batch size if ``per_device_train_batch_size='auto'``, and run a dry step if ``dry_step`` is set.

    On a GPU, the dry step is enabled by default. It takes as long as one training step, and shows before training whether
    the memory is sufficient. On a CPU, the dry step is disabled by default, because a step is slow and the operating system
    kills a process that runs out of memory. During training, `MemoryProfile` logs the memory.

    Args:
        run: Run before its first step.
        head: Sampled rows of the training set.
        optimizer: Optimizer of the run, or None if it has not been created.
    """
    if parallel.is_prepared_late(run.accelerator):
        refuse_auto_batch_size(run.args)
        return
    if run.args.auto_batch_size:
        _choose_batch_size(run, head, optimizer)
        return
    wanted = run.args.dry_step
    if wanted if wanted is not None else run.args.device.type == "cuda":
        try:
            step = dry_step(run, head, optimizer)
        except Exception as error:
            if wanted or run.accelerator.num_processes > 1:
                raise
            logger.warning("the dry step failed (%s: %s). Training begins without it.", type(error).__name__, error)
            return
        _check_dry(run, step)


def refuse_auto_batch_size(args: PostTrainingConfig) -> None:
    """Raise an error if the run shards the model and ``per_device_train_batch_size`` is ``"auto"``.

    Raises:
        ConfigError: The batch size is ``"auto"``.
    """
    if args.auto_batch_size:
        raise ConfigError(
            "per_device_train_batch_size='auto' runs trial steps before the model is passed to FSDP or DeepSpeed, which do "
            "not support such steps. Set a number; posttrain estimate suggests one."
        )


def dry_step(
    run: Run, head: DatasetHead, optimizer: torch.optim.Optimizer | None, batch_size: int | None = None
) -> DryStep:
    """Run forward and backward passes on the longest rows. No weights are updated, and all state is restored afterwards.

    Gradients, random states, metrics, dropout, training mode and attention implementation are restored, so that
    training gives the same result as without a dry step.

    Args:
        run: Run before its first step or between steps.
        head: Sampled rows of the training set.
        optimizer: Optimizer of the run, or None if it has not been created.
        batch_size: Number of rows per micro-batch. None: ``per_device_train_batch_size``.

    >>> trainer.dry_step().needed / 2**30  # doctest: +SKIP
    """
    args = run.args
    batch = largest_pass(run, head, batch_size or int(args.per_device_train_batch_size))
    device, tokens = args.device, batch.input_ids.numel()
    sizes = [(p.numel(), p.nbytes) for p in run.model.parameters() if p.requires_grad]
    started = optimizer is not None and bool(optimizer.state)
    later = 0 if started else optimizer_bytes(args.optim, sizes)
    failed, seconds = False, 0.0
    with _untouched(run), attention_renamed(run.model, lambda name: name):
        reset_peak(device)
        try:
            # Run two passes. The second pass needs more memory, because it adds to gradients that already exist.
            for _ in range(2):
                begin = time.perf_counter()
                _dry_pass(run, batch)
                seconds = time.perf_counter() - begin
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            failed = True
        peak = peak_in_use(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return DryStep(peak, peak + later, tokens, seconds, failed)


def _dry_pass(run: Run, batch: Batch) -> None:
    args, model = run.args, run.model
    # Enable autocast here. The run enables autocast in the model only when training prepares the model.
    offloading = get_act_offloading_ctx_manager(model, enabled=args.activation_offloading)
    with run.accelerator.autocast(), offloading:
        settings: dict[str, Any] = {"temperature": run.method.temperature, "chunk_size": args.logits_chunk_size}
        out = forward(model, batch.to(args.device), run.method.traits.needs, **settings)
        parts = [x.float().sum() for x in (out.logp, out.scores, out.values, out.logits) if x is not None]
        loss = torch.stack([part for part in parts if part.requires_grad]).sum()
    loss.backward()


@contextmanager
def _untouched(run: Run) -> Iterator[None]:
    """Restore all state that a forward or backward pass changes, when the ``with`` block ends."""
    model = run.model
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    states = random.getstate(), numpy.random.get_state()
    # Save VeLoRA's projections, because VeLoRA computes them from the first batch in training mode.
    projections = [m for m in model.modules() if hasattr(m, "lora_velora_initialized")]
    computed = [(dict(m.lora_velora_initialized), dict(m.lora_velora_embed.items())) for m in projections]
    layers = _recompute(run)
    try:
        with torch.random.fork_rng(devices=_devices(run.args.device), device_type=_kind(run.args.device)):
            model.train()
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for layer, on in layers:
            layer.gradient_checkpointing = on
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        for module, (done, values) in zip(projections, computed, strict=True):
            module.lora_velora_initialized.update(done)
            module.lora_velora_embed.update(values)
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def _recompute(run: Run) -> list[tuple[Any, bool]]:
    """Enable gradient checkpointing, as `transformers.Trainer` does at the start of training. Return each layer that has the
    option, with its previous value.
    """
    args, inner = run.args, causal_lm(run.model)
    layers = [m for m in inner.modules() if hasattr(m, "gradient_checkpointing")]
    before = [(layer, bool(layer.gradient_checkpointing)) for layer in layers]
    if not recomputes(args) or any(on for _, on in before):
        return before
    options = recompute_options(args)
    recompute_activations(inner, options)
    if "every_n_layers" not in options:
        keep_last_activations(run.model, args.kept_layers)
    return before


def _check_dry(run: Run, step: DryStep) -> None:
    has = available_memory(run.args.device, memory_limit(run.args))
    divisible = not run.method.traits.single_pass and run.accelerator.num_processes == 1
    worst = max(parallel.all_gather_objects([(step.needed, step.failed)], run.accelerator))
    with run.checks.preflight.record_check("first_batch", ("PT-M003",)):
        run.checks.report([
            checks.check_dry_step(
                worst[0], has.free, tokens=step.tokens, where=has.where, failed=step.failed or worst[1], divisible=divisible
            )
        ])  # fmt: skip
    logger.info(
        "dry step: %d tokens in %.1f s, peak memory %s including optimizer states, of %s",
        step.tokens, step.seconds, gib(step.needed), gib(has.free),
    )  # fmt: skip


def largest_pass(run: Run, head: DatasetHead, batch_size: int) -> Batch:
    """Split a micro-batch with ``batch_size`` rows of maximum length into forward passes. Return the pass with the largest
    number of tokens.
    """
    batches = run.collate(longest_rows(run, head, batch_size))
    return max(batches, key=lambda batch: (batch.input_ids.numel(), int(batch.loss_mask.sum())))


def longest_rows(run: Run, head: DatasetHead, batch_size: int) -> list[Row]:
    """Return the micro-batch with the largest number of tokens that can occur in this run.

    For datasets with answers, the micro-batch contains the longest rows of the training set. For online methods, it contains
    completions of the longest prompt, each with ``max_completion_length`` random tokens.
    """
    rows = head.rows_of(longest_examples(head.prepared, batch_size, head.id_columns))
    if not any(row.completions for row in rows):
        prompt = max(rows, key=lambda row: len(row.prompt_ids), default=Row([0], [], []))
        longest = prompt.prompt_ids or [0]
        length = int(run.method.cfg.max_completion_length)
        # Sample the completions from the tokens of the prompt. If the prompt has no image, these tokens cannot be image
        # placeholders.
        draw, words = random.Random(0), [int(run.pad_token_id)] if any(prompt.pictures) else longest
        counts = checks.group_sizes(run.args, batch_size)
        drawn = [[draw.choices(words, k=length) for _ in range(n)] for n in counts]
        shown = lambda n: [prompt.pictures[0], *([] for _ in range(n))] if any(prompt.pictures) else []  # noqa: E731
        rows = [Row(longest, d, [[1] * length] * len(d), pictures=shown(len(d))) for d in drawn]
    run.checks.longest_of_data = max(len(row.prompt_ids) + max(map(len, row.completions), default=0) for row in rows)
    return rows


def batch_sizes(args: PostTrainingConfig) -> list[int]:
    """Return the per-device batch sizes that leave the effective batch size and the generation batch size unchanged.

    Sizes below the config's ``least_batch_size`` are excluded.
    """
    batch, steps = int(args.per_device_train_batch_size), args.steps_per_generation
    sizes = checks.batch_sizes(batch, int(args.gradient_accumulation_steps))
    return [n for n in sizes if n >= args.least_batch_size and (steps is None or batch * int(steps) % n == 0)]


def _choose_batch_size(run: Run, head: DatasetHead, optimizer: torch.optim.Optimizer | None) -> None:
    """Find the largest batch size of `batch_sizes` that fits into memory, by binary search.

    One step on rows of maximum length is run for each candidate. All ranks then use the smallest result of all ranks.
    """
    if run.method.traits.single_pass:
        raise ConfigError(
            "per_device_train_batch_size='auto' does not work with a loss that compares the rows of a micro-batch, "
            "because the batch size is part of such a loss. Set a number."
        )
    has, sizes = available_memory(run.args.device, memory_limit(run.args)), batch_sizes(run.args)
    limit, tried = int(checks.PLANNED_SHARE * has.free), {}

    def fits(size: int) -> bool:
        batch = largest_pass(run, head, size)
        shape = (*batch.input_ids.shape, int(batch.loss_mask.sum()))
        if shape not in tried:
            tried[shape] = _predicted(run, batch.input_ids.numel(), tried.values(), limit) or dry_step(
                run, head, optimizer, size
            )
        return not tried[shape].failed and tried[shape].needed <= limit

    # Bisection is valid here, because a larger micro-batch never needs less memory than a smaller one.
    count = bisect.bisect_left(sizes, True, lo=1, key=lambda size: not fits(size)) if fits(sizes[0]) else 0
    size = min(parallel.all_gather_objects([sizes[count - 1] if count else 0], run.accelerator))
    if size == 0:
        least = min(step.needed for step in tried.values())
        rows = "one row fits" if sizes[0] == 1 else f"{sizes[0]} rows fit"
        raise ConfigError(
            f"per_device_train_batch_size='auto': not even {rows} into memory. A step at the maximum lengths needs "
            f"{gib(least)}, and {has.where} has {gib(has.free)} free (of which {checks.PLANNED_SHARE:.0%} are used "
            "for planning). Lower max_length or max_completion_length, train an adapter, or use optim='adafactor'."
        )
    run.args.take_batch_size(size)
    logger.warning(
        "per_device_train_batch_size='auto': selected %d, with gradient_accumulation_steps=%d, from the sizes %s, in %s.",
        size, run.args.gradient_accumulation_steps, sizes, gib(has.free),
    )  # fmt: skip


def _predicted(run: Run, tokens: int, tried: Iterable[DryStep], limit: int) -> DryStep | None:
    """Predict the memory of a step from measurements with smaller passes. Return the prediction only if it is far above the
    limit. Running such a step on a CPU would make the operating system kill the process.
    """
    last = max((step for step in tried if not step.failed), key=lambda step: step.tokens, default=None)
    if last is None:
        return None
    each = max(last.peak - in_use(run.args.device), 0) / max(last.tokens, 1)
    needed = last.needed + int(each * (tokens - last.tokens))
    return DryStep(needed, needed, tokens, 0.0, failed=True) if needed > 1.5 * limit else None


def _kind(device: torch.device) -> str:
    # fork_rng always saves the CPU's random state, and also requires a device type. On a CPU, the type "cuda" has no effect.
    return "cuda" if device.type == "cpu" else device.type


def _devices(device: torch.device) -> list[Any]:
    return [] if device.type == "cpu" else [device]


def _is_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or ("alloc" in text and "memory" in text)
