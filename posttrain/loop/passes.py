"""When memory runs out: a pass that does not fit is divided, and the step goes on with the same normalisers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.metrics import MetricBuffer, total
from posttrain.types import Batch

if TYPE_CHECKING:
    pass

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
            metrics.merge(self.buffers["train"])
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


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # fork_rng saves the CPU's numbers in any case.


def _devices(device: torch.device) -> list[Any]:
    return [] if device.type == "cpu" else [device]


def _is_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or ("alloc" in text and "memory" in text)
