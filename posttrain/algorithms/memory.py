"""When memory runs out: a pass that does not fit is divided, and the step goes on with the same normalisers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.data.unforest import halves
from posttrain.metrics import MetricBuffer, total
from posttrain.models import parallel
from posttrain.types import Batch

__all__ = ["MemoryMixin"]

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
