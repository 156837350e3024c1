"""When memory runs out: a pass that does not fit is divided, and the step goes on with the same normalisers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from posttrain.checks import memory as checks
from posttrain.checks.registry import codes_of
from posttrain.errors import ModelError
from posttrain.metrics import MetricBuffer, mean, total
from posttrain.models import parallel
from posttrain.models.device_memory import available_memory, peak_in_use
from posttrain.models.flops import compute_flops_per_token, compute_mfu
from posttrain.types import Batch

__all__ = [
    "MemoryProfile",
    "PassRunner",
    "memory_limit",
]

logger = logging.getLogger(__name__)


MOST_HALVINGS = 3  # Of one pass; what does not fit in an eighth will not fit in a sixteenth.


class PassRunner:
    """Runs one forward and backward pass, in halves where the device has no room for it.

    The loss is a sum over completions divided by counts of the whole optimiser step, so that two halves add up to the
    gradient of the whole. A backward pass that broke off has left part of its gradient behind: then all passes of the
    step are run again. With several processes the error is passed on: the others would wait for this one.

    Args:
        loss: ``(model, batch) -> Tensor``, the scalar to call backward on; the batch is on any device.
        backward: Called with that scalar.
        halves: ``batch -> [batch, ...]``, one element where it cannot be divided.
        buffers: Metrics by mode; those of a pass that failed are dropped from ``train``.
        shards: Whether gradients are sharded over processes, so that a broken backward pass cannot be undone.
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Batch], Tensor],
        backward: Callable[[Tensor], None],
        halves: Callable[[Batch], list[Batch]],
        buffers: dict[str, MetricBuffer],
        *,
        shards: bool,
    ) -> None:
        self.loss, self.backward, self.halves, self.buffers, self.shards = loss, backward, halves, buffers, shards
        # Tokens of a pass, padding included; known once memory has run out.
        self.most_tokens: int | None = None
        self.step = -1
        self._done: tuple[tuple[Batch, float], ...] = ()

    def run(self, model: nn.Module, batch: Batch, weight: float = 1.0, *, step: int, halvings: int = 0) -> Tensor:
        """Forward and backward of one batch; returns its loss times ``weight``, detached.

        Args:
            model: Whose gradients are added to.
            batch: One pass.
            weight: 0 for a pass that only keeps collectives equal over ranks.
            step: The optimiser step that the pass belongs to.
            halvings: How often the pass has been divided already.

        Raises:
            torch.OutOfMemoryError: The pass does not fit, not even in an eighth.
        """
        if self.step != step:
            self._done, self.step = (), step
        if self.most_tokens is not None and batch.input_ids.numel() > self.most_tokens:
            parts = self.halves(batch)
            if len(parts) > 1:
                return self._parts(model, parts, weight, halvings)
        loss, problem = self._attempt(model, batch, weight)
        if problem is None:
            self._done = (*self._done, (batch, weight))
            return loss
        parts = self.halves(batch) if halvings < MOST_HALVINGS else [batch]
        if len(parts) == 1:
            raise problem
        size = batch.input_ids.numel()
        self.most_tokens = max(1, size // 2)
        logger.warning(
            "out of memory in a pass of %d tokens (step %d): it is divided, and later passes hold at most %d. The gradient does "
            "not change. Fix: lower max_row_tokens, per_device_train_batch_size or max_completion_length.",
            size, step + 1, self.most_tokens,
        )  # fmt: skip
        self.buffers["train"].add({"memory/halvings": total(1.0)})
        return self._parts(model, parts, weight, halvings + 1)

    def _parts(self, model: nn.Module, parts: list[Batch], weight: float, halvings: int) -> Tensor:
        return torch.stack([self.run(model, part, weight, step=self.step, halvings=halvings) for part in parts]).sum()

    def _attempt(
        self, model: nn.Module, batch: Batch, weight: float
    ) -> tuple[Tensor, None] | tuple[None, torch.OutOfMemoryError]:
        """The loss, or the error; after one, gradients and metrics are as they were before."""
        metrics, self.buffers["train"] = self.buffers["train"], MetricBuffer()
        began, problem, loss = False, None, torch.zeros(())
        try:
            loss = self.loss(model, batch) * weight
            began = True
            self.backward(loss)
            metrics.add(self.buffers["train"]._items)
        except torch.OutOfMemoryError as error:
            # The frames of the traceback hold the activations.
            problem = error.with_traceback(None)
        finally:
            self.buffers["train"] = metrics
        if problem is None:
            return loss.detach(), None
        del loss
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if began and not self.shards:
            self._again(model)
        return None, problem

    def _again(self, model: nn.Module) -> None:
        """Recompute the gradients of this step's earlier passes, which a broken backward pass has changed."""
        for parameter in model.parameters():
            parameter.grad = None
        metrics, self.buffers["train"] = self.buffers["train"], MetricBuffer()
        done, self._done = self._done, ()
        try:
            for batch, weight in done:
                self.run(model, batch, weight, step=self.step)
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
        tokens = self.trainer.checks.tokens_seen
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
        with trainer.checks.preflight.looking("log_step", codes_of("M", "log_step")):
            trainer.checks.tell(checks.check_profile(seen))

    def _profile(self, step: int, rate: float, padding: float, imbalance: float) -> checks.Profile:
        trainer, args = self.trainer, self.trainer.args
        device, peak = args.device, peak_in_use(args.device)
        has = available_memory(device, memory_limit(args))
        gpu = device.type == "cuda"
        largest = trainer.checks.largest_seen
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
            longest=trainer.checks.longest_of_data,
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


def memory_limit(args: Any) -> int | None:
    """Bytes that ``memory_limit_gib`` allows; None: what the device has."""
    limit = getattr(args, "memory_limit_gib", None)
    return None if limit is None else int(limit * 2**30)
