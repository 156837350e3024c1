"""When memory runs out: a pass that does not fit is divided, and the step goes on with the same normalisers."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from posttrain.checks import memory as checks
from posttrain.checks.registry import codes_of
from posttrain.data.forest import halves
from posttrain.errors import ModelError
from posttrain.metrics import MetricBuffer, mean, total
from posttrain.models import parallel
from posttrain.models.device_memory import available_memory, peak_in_use
from posttrain.models.memory_estimate import compute_flops_per_token, compute_mfu
from posttrain.types import Batch

__all__ = [
    "MemoryMixin",
    "MemoryProfile",
]

logger = logging.getLogger(__name__)


MOST_HALVINGS = 3  # Of one pass; what does not fit in an eighth will not fit in a sixteenth.


class MemoryMixin:
    """The part of `PostTrainer` that runs one forward and backward pass, in halves where the device has no room for it.

    The loss is a sum over completions divided by counts of the whole optimiser step, so that two halves add up to the
    gradient of the whole. A backward pass that broke off has left part of its gradient behind: then all passes of the
    step are run again. With several processes the error is passed on: the others would wait for this one.
    """

    accelerator: Any
    args: Any
    buffers: dict[str, MetricBuffer]
    layout: Any
    pad_token_id: int
    router_coefficient: float
    state: Any
    together: bool
    whole_rows: bool
    _most_tokens: int | None = None  # Of a pass, padding included; found out by running out of memory.
    _done: tuple[tuple[Batch, float], ...] = ()
    _done_step = -1

    def one_pass(self, model: nn.Module, batch: Batch, weight: float = 1.0, *, halvings: int = 0) -> Tensor:
        """Forward and backward of one batch; its loss times ``weight``."""
        if self._done_step != self.state.global_step:
            self._done, self._done_step = (), self.state.global_step
        if self._most_tokens is not None and batch.input_ids.numel() > self._most_tokens:
            parts = self._halves(batch)
            if len(parts) > 1:
                return self._parts(model, parts, weight, halvings)
        loss, problem = self._attempt(model, batch, weight)
        if problem is None:
            self._done = (*self._done, (batch, weight))
            return loss
        parts = self._halves(batch) if halvings < MOST_HALVINGS else [batch]
        if len(parts) == 1:
            raise problem
        size = batch.input_ids.numel()
        self._most_tokens = max(1, size // 2)
        logger.warning(
            "out of memory in a pass of %d tokens (step %d): it is divided, and later passes hold at most %d. The gradient does "
            "not change. To do without: lower max_row_tokens, per_device_train_batch_size or max_completion_length.",
            size, self.state.global_step + 1, self._most_tokens,
        )  # fmt: skip
        self.log_metrics_now({"memory/halvings": total(1.0)})  # type: ignore[attr-defined]
        return self._parts(model, parts, weight, halvings + 1)

    def _parts(self, model: nn.Module, parts: list[Batch], weight: float, halvings: int) -> Tensor:
        return torch.stack([self.one_pass(model, part, weight, halvings=halvings) for part in parts]).sum()

    def _halves(self, batch: Batch) -> list[Batch]:
        """The batch in parts; itself where the objective wants it whole, or where other processes would be left behind."""
        if self.together or self.router_coefficient or self.accelerator.num_processes > 1:
            return [batch]
        return halves(batch, pad_token_id=self.pad_token_id, layout=self.layout, whole_rows=self.whole_rows)

    def _attempt(
        self, model: nn.Module, batch: Batch, weight: float
    ) -> tuple[Tensor, None] | tuple[None, torch.OutOfMemoryError]:
        """The loss, or the error; after one, gradients and metrics are as they were before."""
        metrics, self.buffers["train"] = self.buffers["train"], MetricBuffer()
        began, problem, loss = False, None, torch.zeros(())
        try:
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                loss = self.compute_loss(model, batch.to(self.args.device)) * weight  # type: ignore[attr-defined]
            began = True
            self.accelerator.backward(loss)
            metrics.add(self.buffers["train"]._items)
        except torch.OutOfMemoryError as error:
            problem = error.with_traceback(None)  # Its frames hold the activations.
        finally:
            self.buffers["train"] = metrics
        if problem is None:
            return loss.detach(), None
        del loss
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if began and not parallel.shards_parameters(self.accelerator):
            self._again(model)
        return None, problem

    def _again(self, model: nn.Module) -> None:
        """The gradients of this step's earlier passes, which a broken backward pass has mixed with part of its own."""
        for parameter in model.parameters():
            parameter.grad = None
        metrics, self.buffers["train"] = self.buffers["train"], MetricBuffer()
        done, self._done = self._done, ()
        try:
            for batch, weight in done:
                self.one_pass(model, batch, weight)
        finally:
            self.buffers["train"] = metrics


PROFILED = (3, 50)  # Then every thousandth step.
EVERY = 1000
# Dense bf16 operations a second, from the makers' data sheets; sparse ones are twice as many on paper.
PEAKS = {"H100": 989.5e12, "H200": 989.5e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12, "RTX 4090": 165e12}


class MemoryProfile(transformers.TrainerCallback):
    """Says after 3 and 50 steps, then every 1,000, how full the memory was and where the time went.

    Logged at these steps: ``memory/peak_gib``, ``memory/peak_share``, ``memory/fragmentation``,
    ``health/tokens_per_second``, ``health/mfu`` (where the device's peak is known), ``health/rank_imbalance`` and
    ``health/generation_share``.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._begun: tuple[float, int, int] | None = None  # Time, real and computed tokens when the first step ended.
        self._logs: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Remember what sampling took."""
        if logs and "step_time" in logs:
            self._logs = dict(logs)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look, where it is time."""
        tokens = getattr(self.trainer, "_tokens", (0, 0))
        if self._begun is None:
            self._begun = (time.perf_counter(), *tokens)
            return
        if state.global_step in PROFILED or state.global_step % EVERY == 0:
            self._look(state.global_step, tokens)

    def _look(self, step: int, tokens: tuple[int, int]) -> None:
        trainer = self.trainer
        assert self._begun is not None
        seconds = max(time.perf_counter() - self._begun[0], 1e-9)
        real, computed = tokens[0] - self._begun[1], tokens[1] - self._begun[2]
        ranks = parallel.all_gather_objects([(real, computed)], trainer.accelerator)
        rate = sum(one for one, _ in ranks) / seconds
        work = [one for _, one in ranks]
        imbalance = max(work) * len(work) / max(sum(work), 1)
        seen = self._profile(step, rate, 1 - real / max(computed, 1), imbalance)
        trainer.log_metrics_now({name: mean(value) for name, value in _logged(seen).items()})
        with trainer.preflight.looking("log_step", codes_of("M", "log_step")):
            trainer.tell(checks.check_profile(seen))

    def _profile(self, step: int, rate: float, padding: float, imbalance: float) -> checks.Profile:
        trainer, args = self.trainer, self.trainer.args
        device, peak = args.device, peak_in_use(args.device)
        has = available_memory(device, trainer._memory_limit())
        gpu = device.type == "cuda"
        largest = trainer.largest_seen
        return checks.Profile(
            step=step,
            peak=peak,
            total=has.total if gpu else has.free,
            reserved=torch.cuda.max_memory_reserved(device) if gpu else 0,
            allocated=torch.cuda.max_memory_allocated(device) if gpu else 0,
            batch=int(args.per_device_train_batch_size),
            accumulation=int(args.gradient_accumulation_steps),
            pass_tokens=largest[0],
            row_tokens=trainer.layout.row_tokens,
            standing=_standing(trainer),
            longest=trainer.longest_of_data,
            longest_seen=largest[1],
            tokens_per_second=rate,
            mfu=_mfu(trainer, rate, largest[1]) if gpu else None,
            padding=padding,
            imbalance=imbalance,
            generation=self._generation(),
            checkpointing=bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing),
        )

    def _generation(self) -> float | None:
        logs = self._logs
        if "rollouts/seconds" not in logs or not logs.get("step_time"):
            return None
        return min(1.0, logs["rollouts/seconds"] * self.trainer.generations_per_step / logs["step_time"])


def _logged(seen: checks.Profile) -> dict[str, float]:
    found = {
        "memory/peak_gib": seen.peak / 2**30,
        "memory/peak_share": seen.peak / max(seen.total, 1),
        "health/tokens_per_second": seen.tokens_per_second,
        "health/rank_imbalance": seen.imbalance,
    }
    if seen.reserved:
        found["memory/fragmentation"] = (seen.reserved - seen.allocated) / max(seen.reserved, 1)
    if seen.mfu is not None:
        found["health/mfu"] = seen.mfu
    if seen.generation is not None:
        found["health/generation_share"] = seen.generation
    return found


def _standing(trainer: Any) -> int:
    """Bytes that no batch changes: weights, their gradients, optimiser states."""
    model: nn.Module = trainer.model
    weights = sum(p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters())
    states = getattr(trainer.optimizer, "state", {}) or {}
    kept = [v for state in states.values() if isinstance(state, dict) for v in state.values()]
    return weights + sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))


def _mfu(trainer: Any, rate: float, length: int) -> float | None:
    name = torch.cuda.get_device_name(trainer.args.device)
    peak = next((value for key, value in PEAKS.items() if key in name), None)
    if peak is None or not length:
        return None
    try:
        each = compute_flops_per_token(trainer.model.config, length)
    except ModelError:
        return None
    return compute_mfu(each, rate, trainer.accelerator.num_processes, peak)
