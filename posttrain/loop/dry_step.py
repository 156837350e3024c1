"""A step of the longest rows before step 0: does it fit, and which batch size does?"""

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
    """What a step at the longest lengths took.

    Attributes:
        peak: Most bytes that the process held.
        needed: With the optimiser's states that its first update will make.
        tokens: Of the largest pass.
        seconds: Of that pass.
        failed: Whether memory ran out.
    """

    peak: int
    needed: int
    tokens: int
    seconds: float
    failed: bool = False


def fit_memory(run: Run, head: DatasetHead, optimizer: torch.optim.Optimizer | None) -> None:
    """A batch size where ``per_device_train_batch_size='auto'`` asks for one; a dry step where ``dry_step`` does.

    On a GPU a dry step is the default: it costs a step's time and finds out at once what would end the run later. On a
    CPU it is not: a step takes long there, and a system that runs out of memory ends the process instead of telling it.
    While training, `MemoryProfile` looks.

    Args:
        run: Before its first step.
        head: The training set.
        optimizer: None before it is made.
    """
    if parallel.is_prepared_late(run.accelerator):
        if run.args.auto_batch_size:
            raise ConfigError(
                "per_device_train_batch_size='auto' tries steps before the model is handed to FSDP or DeepSpeed, which "
                "cannot run it then. Set a number; posttrain estimate tells which."
            )
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
            logger.warning(
                "the dry step could not be taken (%s: %s); training begins without.", type(error).__name__, error
            )
            return
        _check_dry(run, step)


def dry_step(
    run: Run, head: DatasetHead, optimizer: torch.optim.Optimizer | None, batch_size: int | None = None
) -> DryStep:
    """Forward and backward of the longest rows; no update, and nothing that stays.

    Gradients, random numbers, metrics, dropout, the training mode and the name of the attention are as they were, so that
    training after it is the training it would have been.

    Args:
        run: Before or between steps.
        head: The training set.
        optimizer: None before it is made.
        batch_size: Rows; None: ``per_device_train_batch_size``.

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
            for _ in range(2):  # The second one has gradients to add to.
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
    # A model gets the autocast of its run only once training prepares it.
    offloading = get_act_offloading_ctx_manager(model, enabled=args.activation_offloading)
    with run.accelerator.autocast(), offloading:
        settings: dict[str, Any] = {"temperature": run.method.temperature, "chunk_size": args.logits_chunk_size}
        out = forward(model, batch.to(args.device), run.method.traits.needs, **settings)
        parts = [x.float().sum() for x in (out.logp, out.scores, out.values, out.logits) if x is not None]
        loss = torch.stack([part for part in parts if part.requires_grad]).sum()
    loss.backward()


@contextmanager
def _untouched(run: Run) -> Iterator[None]:
    """Everything that a pass moves, as it was before."""
    model = run.model
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    states = random.getstate(), numpy.random.get_state()
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
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def _recompute(run: Run) -> list[tuple[Any, bool]]:
    """Checkpointing as `transformers.Trainer` switches it on when training begins; what each layer had before."""
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
        "dry step: %d tokens in %.1f s, at most %s with the optimizer's states, of %s",
        step.tokens, step.seconds, gib(step.needed), gib(has.free),
    )  # fmt: skip


def largest_pass(run: Run, head: DatasetHead, batch_size: int) -> Batch:
    """The pass with most tokens of a micro-batch of so many rows, each as long as the longest."""
    batches = run.collate(longest_rows(run, head, batch_size))
    return max(batches, key=lambda batch: (batch.input_ids.numel(), int(batch.loss_mask.sum())))


def longest_rows(run: Run, head: DatasetHead, batch_size: int) -> list[Row]:
    """The longest micro-batch that the data can give.

    Given answers: the longest rows of the training set. Sampled ones: as many completions of the longest prompt as
    a micro-batch has, each of ``max_completion_length`` random tokens.
    """
    rows = head.rows_of(longest_examples(head.prepared, batch_size, head.id_columns))
    if not any(row.completions for row in rows):
        prompt = max(rows, key=lambda row: len(row.prompt_ids), default=Row([0], [], []))
        longest = prompt.prompt_ids or [0]
        length = int(run.method.cfg.max_completion_length)
        # Of the prompt's own tokens: none stands for an image that is not there.
        draw, words = random.Random(0), [int(run.pad_token_id)] if any(prompt.pictures) else longest
        counts = checks.group_sizes(run.args, batch_size)
        drawn = [[draw.choices(words, k=length) for _ in range(n)] for n in counts]
        shown = lambda n: [prompt.pictures[0], *([] for _ in range(n))] if any(prompt.pictures) else []  # noqa: E731
        rows = [Row(longest, d, [[1] * length] * len(d), pictures=shown(len(d))) for d in drawn]
    run.checks.longest_of_data = max(len(row.prompt_ids) + max(map(len, row.completions), default=0) for row in rows)
    return rows


def batch_sizes(args: PostTrainingConfig) -> list[int]:
    """Sizes that keep the effective batch, and the generation batch where there is one."""
    batch, steps = int(args.per_device_train_batch_size), args.steps_per_generation
    sizes = checks.batch_sizes(batch, int(args.gradient_accumulation_steps))
    return [n for n in sizes if steps is None or batch * int(steps) % n == 0]


def _choose_batch_size(run: Run, head: DatasetHead, optimizer: torch.optim.Optimizer | None) -> None:
    """Bisect over `batch_sizes` with dry steps at the longest lengths; all ranks take the smallest that any found."""
    if run.method.traits.single_pass:
        raise ConfigError(
            "per_device_train_batch_size='auto' with a loss that compares the rows of a micro-batch: its size is part of "
            "the loss. Set a number."
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

    # Larger steps never need less.
    count = bisect.bisect_left(sizes, True, lo=1, key=lambda size: not fits(size)) if fits(sizes[0]) else 0
    size = min(parallel.all_gather_objects([sizes[count - 1] if count else 0], run.accelerator))
    if size == 0:
        least = min(step.needed for step in tried.values())
        raise ConfigError(
            f"per_device_train_batch_size='auto': not even one row fits: a step at the longest lengths needs {gib(least)}, and "
            f"{has.where} has {gib(has.free)} (of which {checks.PLANNED_SHARE:.0%} are planned with). Lower max_length or "
            "max_completion_length, train an adapter, or take optim='adafactor'."
        )
    run.args.take_batch_size(size)
    logger.warning(
        "per_device_train_batch_size='auto': %d, with gradient_accumulation_steps=%d, of sizes %s, in %s.",
        size, run.args.gradient_accumulation_steps, sizes, gib(has.free),
    )  # fmt: skip


def _predicted(run: Run, tokens: int, tried: Iterable[DryStep], limit: int) -> DryStep | None:
    """A step far beyond the limit by what smaller passes took: on a CPU the system would end the process."""
    last = max((step for step in tried if not step.failed), key=lambda step: step.tokens, default=None)
    if last is None:
        return None
    each = max(last.peak - in_use(run.args.device), 0) / max(last.tokens, 1)
    needed = last.needed + int(each * (tokens - last.tokens))
    return DryStep(needed, needed, tokens, 0.0, failed=True) if needed > 1.5 * limit else None


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # fork_rng saves the CPU's numbers in any case.


def _devices(device: torch.device) -> list[Any]:
    return [] if device.type == "cpu" else [device]


def _is_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or ("alloc" in text and "memory" in text)
