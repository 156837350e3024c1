"""Before training: a dry step at the longest lengths, and a batch size that fits."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from posttrain.checks import memory as checks
from posttrain.data.forest import collate
from posttrain.data.samplers import longest_examples
from posttrain.errors import ConfigError
from posttrain.models import parallel
from posttrain.models.activations import get_act_offloading_ctx_manager, keep_last_activations, recompute_activations
from posttrain.models.device_memory import available_memory, in_use, peak_in_use, reset_peak
from posttrain.models.forward import causal_lm, forward
from posttrain.models.memory_estimate import optimizer_bytes
from posttrain.training.passes import MemoryMixin, MemoryProfile
from posttrain.types import Batch, Row

__all__ = ["DryStep", "MemoryHealthMixin"]

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


class MemoryHealthMixin(MemoryMixin):
    """The part of `PostTrainer` that tries whether the longest step fits, before one that counts is taken."""

    model: Any
    train_dataset: Any
    temperature: float
    needs: frozenset[str]
    largest_seen = (0, 0)  # Tokens of the largest pass, and of the longest sequence, that were trained.
    longest_of_data = 0  # Tokens of the longest sequence of the training set, once it was looked for.

    def check_step(self, batches: Sequence[Batch], *counts: float) -> None:
        """As every trainer's; the largest pass and the longest sequence are remembered."""
        widths = [
            (batch.input_ids.numel(), int(batch.position_ids.max()) + 1) for batch in batches if batch.input_ids.numel()
        ]
        self.largest_seen = tuple(map(max, zip(*widths, self.largest_seen, strict=False)))  # type: ignore[assignment]
        super().check_step(batches, *counts)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As every trainer's, once it is known what fits."""
        self.fit_memory()
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def fit_memory(self) -> None:
        """A batch size where ``per_device_train_batch_size='auto'`` asks for one; a dry step where ``dry_step`` does.

        On a GPU a dry step is the default: it costs a step's time and finds out at once what would end the run later. On a
        CPU it is not: a step takes long there, and a system that runs out of memory ends the process instead of telling it.
        While training, `MemoryProfile` looks.
        """
        if not any(isinstance(one, MemoryProfile) for one in self.callback_handler.callbacks):  # type: ignore[attr-defined]
            self.add_callback(MemoryProfile(self))  # type: ignore[attr-defined]
        if parallel.is_prepared_late(self.accelerator):
            if getattr(self.args, "auto_batch_size", False):
                raise ConfigError(
                    "per_device_train_batch_size='auto' tries steps before the model is handed to FSDP or DeepSpeed, which "
                    "cannot run it then. Set a number; posttrain estimate tells which."
                )
            return
        if getattr(self.args, "auto_batch_size", False):
            self._choose_batch_size()
            return
        wanted = getattr(self.args, "dry_step", None)
        if wanted if wanted is not None else self.args.device.type == "cuda":
            try:
                step = self.dry_step()
            except Exception as error:
                if wanted or self.accelerator.num_processes > 1:
                    raise
                logger.warning(
                    "the dry step could not be taken (%s: %s); training begins without.", type(error).__name__, error
                )
                return
            self._check_dry(step)

    # The dry step ------------------------------------------------------------------------------------------------

    def dry_step(self, batch_size: int | None = None) -> DryStep:
        """Forward and backward of the longest rows; no update, and nothing that stays.

        Gradients, random numbers, metrics, dropout and the training mode are as they were, so that training after it is
        the training it would have been.

        Args:
            batch_size: Rows; None: ``per_device_train_batch_size``.

        >>> trainer.dry_step().needed / 2**30  # doctest: +SKIP
        """
        batch = self._largest_pass(batch_size or int(self.args.per_device_train_batch_size))
        device, tokens = self.args.device, batch.input_ids.numel()
        sizes = [(p.numel(), p.nbytes) for p in self.model.parameters() if p.requires_grad]
        started = bool(getattr(getattr(self, "optimizer", None), "state", None))
        later = 0 if started else optimizer_bytes(str(getattr(self.args.optim, "value", self.args.optim)), sizes)
        failed, seconds = False, 0.0
        with self._untouched():
            reset_peak(device)
            try:
                for _ in range(2):  # The second one has gradients to add to.
                    begin = time.perf_counter()
                    self._dry_pass(batch)
                    seconds = time.perf_counter() - begin
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _is_memory(error):
                    raise
                failed = True
            peak = peak_in_use(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return DryStep(peak, peak + later, tokens, seconds, failed)

    def _dry_pass(self, batch: Batch) -> None:
        model = self.model
        offloading = get_act_offloading_ctx_manager(model, enabled=self.args.activation_offloading)
        with offloading, self.compute_loss_context_manager():  # type: ignore[attr-defined]
            settings: dict[str, Any] = {"temperature": self.temperature, "chunk_size": self.args.logits_chunk_size}
            out = forward(model, batch.to(self.args.device), self.needs, **settings)
            parts = [x.float().sum() for x in (out.logp, out.scores, out.values, out.logits) if x is not None]
            loss = torch.stack([part for part in parts if part.requires_grad]).sum()
        loss.backward()

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Everything that a pass moves, as it was before."""
        model = self.model
        gradients = [(p, p.grad) for p in model.parameters()]
        modes = [(module, module.training) for module in model.modules()]
        states = random.getstate(), numpy.random.get_state()
        layers = self._recompute()
        try:
            with torch.random.fork_rng(devices=_devices(self.args.device), device_type=_kind(self.args.device)):
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

    def _recompute(self) -> list[tuple[Any, bool]]:
        """Checkpointing as `transformers.Trainer` switches it on when training begins; what each layer had before."""
        args, inner = self.args, causal_lm(self.model)
        layers = [m for m in inner.modules() if hasattr(m, "gradient_checkpointing")]
        before = [(layer, bool(layer.gradient_checkpointing)) for layer in layers]
        wanted = getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing
        if not wanted or any(on for _, on in before):
            return before
        options = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs
        recompute_activations(inner, options)
        if "every_n_layers" not in (options or {}):
            keep_last_activations(self.model, args.kept_layers)
        return before

    def _check_dry(self, step: DryStep) -> None:
        has = available_memory(self.args.device, self._memory_limit())
        divisible = not self.together and self.accelerator.num_processes == 1
        worst = max(parallel.all_gather_objects([(step.needed, step.failed)], self.accelerator))
        with self.preflight.looking("first_batch", ("PT-M003",)):  # type: ignore[attr-defined]
            self.tell([  # type: ignore[attr-defined]
                checks.check_dry_step(
                    worst[0], has.free, tokens=step.tokens, where=has.where, failed=step.failed or worst[1], divisible=divisible
                )
            ])  # fmt: skip
        logger.info(
            "dry step: %d tokens in %.1f s, at most %s with the optimizer's states, of %s",
            step.tokens, step.seconds, checks.gib(step.needed), checks.gib(has.free),
        )  # fmt: skip

    def _memory_limit(self) -> int | None:
        limit = getattr(self.args, "memory_limit_gib", None)
        return None if limit is None else int(limit * 2**30)

    # Rows at their longest ---------------------------------------------------------------------------------------

    def _largest_pass(self, batch_size: int) -> Batch:
        rows = self.longest_rows(batch_size)
        batches = collate(
            rows, pad_token_id=self.pad_token_id, layout=self.layout, whole_rows=self.whole_rows, together=self.together
        )
        return max(batches, key=lambda batch: (batch.input_ids.numel(), int(batch.loss_mask.sum())))

    def longest_rows(self, batch_size: int) -> list[Row]:
        """The longest micro-batch that the data can give.

        Given answers: the longest rows of the training set. Sampled ones: as many completions of the longest prompt as
        a micro-batch has, each of ``max_completion_length`` random tokens.
        """
        examples = longest_examples(self.train_dataset, batch_size)
        try:
            rows = self.rows(examples)  # type: ignore[attr-defined]
        except NotImplementedError:
            prompts = self._rows_of(examples)  # type: ignore[attr-defined]
            longest = max((row.prompt_ids for row in prompts), key=len, default=[0]) or [0]
            doubled = int(self.args.train_batch_size) // max(int(self.args.per_device_train_batch_size), 1)
            total = batch_size * max(doubled // max(self.args.n_gpu, 1), 1)
            group = min(int(getattr(self.args, "num_generations", 1) or 1), total)
            counts = [group] * (total // group) + ([total % group] if total % group else [])
            length = int(self.args.max_completion_length)
            draw = random.Random(0)  # Of the prompt's own tokens: none stands for an image that is not there.
            rows = [
                Row(longest, [draw.choices(longest, k=length) for _ in range(n)], [[1] * length] * n) for n in counts
            ]
        self.longest_of_data = max(len(row.prompt_ids) + max(map(len, row.completions), default=0) for row in rows)
        return rows

    # per_device_train_batch_size="auto" --------------------------------------------------------------------------

    def batch_sizes(self) -> list[int]:
        """Sizes that keep the effective batch, and the generation batch where there is one."""
        args = self.args
        whole = int(args.per_device_train_batch_size) * int(args.gradient_accumulation_steps)
        sampled = int(args.per_device_train_batch_size) * int(getattr(args, "steps_per_generation", None) or 1)
        online = getattr(args, "steps_per_generation", None) is not None
        return [n for n in range(1, whole + 1) if whole % n == 0 and (not online or sampled % n == 0)]

    def _choose_batch_size(self) -> None:
        """Bisect over `batch_sizes` with dry steps at the longest lengths; all ranks take the smallest that any found."""
        if self.together:
            raise ConfigError(
                "per_device_train_batch_size='auto' with a loss that compares the rows of a micro-batch: its size is part of "
                "the loss. Set a number."
            )
        has = available_memory(self.args.device, self._memory_limit())
        found = _Bisection(self, int(checks.MOST * has.free))
        sizes = self.batch_sizes()
        size = min(parallel.all_gather_objects([found.largest(sizes)], self.accelerator))
        if size == 0:
            raise ConfigError(
                f"per_device_train_batch_size='auto': not even one row fits: a step at the longest lengths needs "
                f"{checks.gib(found.least)}, and {has.where} has {checks.gib(has.free)} (of which {checks.MOST:.0%} are planned "
                "with). Lower max_length or max_completion_length, train an adapter, or take optim='adafactor'."
            )
        self._take_batch_size(size)
        logger.warning(
            "per_device_train_batch_size='auto': %d, with gradient_accumulation_steps=%d, of sizes %s; the longest step needs "
            "%s of %s.",
            size, self.args.gradient_accumulation_steps, sizes, checks.gib(found.needed(size)), checks.gib(has.free),
        )  # fmt: skip

    def _take_batch_size(self, size: int) -> None:
        args = self.args
        old = int(args.per_device_train_batch_size)
        args.gradient_accumulation_steps = old * int(args.gradient_accumulation_steps) // size
        if "steps_per_generation" in vars(args):
            args.steps_per_generation = old * int(args.steps_per_generation) // size
        args.per_device_train_batch_size = size
        args.auto_batch_size = False  # Found: a second call of train() keeps it.
        if hasattr(args, "micro_batch_size"):
            args.micro_batch_size = size * args.world_size
        self._train_batch_size = args.train_batch_size
        self.accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps


class _Bisection:
    """Dry steps by size; sizes whose largest pass is equal are tried once."""

    def __init__(self, trainer: MemoryHealthMixin, limit: int) -> None:
        self.trainer, self.limit = trainer, limit
        self.tried: dict[tuple[int, ...], DryStep] = {}

    def step(self, size: int) -> DryStep:
        """Of this size, or of another with the same pass."""
        batch = self.trainer._largest_pass(size)
        shape = (*batch.input_ids.shape, int(batch.loss_mask.sum()))
        if shape not in self.tried:
            self.tried[shape] = self._predicted(shape) or self.trainer.dry_step(size)
        return self.tried[shape]

    def _predicted(self, shape: tuple[int, ...]) -> DryStep | None:
        """Far beyond the limit by what smaller passes took: on a CPU the system would end the process."""
        known = [step for step in self.tried.values() if not step.failed]
        if not known:
            return None
        base, tokens = in_use(self.trainer.args.device), shape[0] * shape[1]
        last = max(known, key=lambda step: step.tokens)
        needed = last.needed + max(last.peak - base, 0) * (tokens - last.tokens) // max(last.tokens, 1)
        return DryStep(needed, needed, tokens, 0.0, failed=True) if needed > 1.5 * self.limit else None

    def fits(self, size: int) -> bool:
        """Whether a step of this size stays within the limit."""
        step = self.step(size)
        return not step.failed and step.needed <= self.limit

    def largest(self, sizes: Sequence[int]) -> int:
        """The largest that fits, 0 if none does; larger steps never need less."""
        low, high = 0, len(sizes)  # sizes[:low] fit, sizes[high:] do not.
        if not self.fits(sizes[0]):
            return 0
        low = 1
        while low < high:
            middle = (low + high) // 2
            if self.fits(sizes[middle]):
                low = middle + 1
            else:
                high = middle
        return sizes[low - 1]

    def needed(self, size: int) -> int:
        """Bytes of a step of this size."""
        return self.step(size).needed

    @property
    def least(self) -> int:
        """Bytes of the smallest step."""
        return min(step.needed for step in self.tried.values())


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # fork_rng saves the CPU's numbers in any case.


def _devices(device: torch.device) -> list[Any]:
    return [] if device.type == "cpu" else [device]


def _is_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or ("alloc" in text and "memory" in text)
