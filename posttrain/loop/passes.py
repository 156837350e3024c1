"""Forward and backward over the batches of a micro-batch; a pass that memory has no room for is divided."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from posttrain.data.forest import halves
from posttrain.loop.run import Run
from posttrain.metrics import total
from posttrain.models import memory, parallel, token_split
from posttrain.models.forward import help_with
from posttrain.types import Batch

logger = logging.getLogger(__name__)

MOST_HALVINGS = 3  # Of one pass; what does not fit in an eighth will not fit in a sixteenth.


class PassRunner:
    """Runs forward and backward passes, in halves where the device has no room for one.

    The loss is a sum over completions divided by counts of the whole optimiser step, so that two halves add up to the
    gradient of the whole. A backward pass that broke off has left part of its gradient behind: then all passes of the
    step are run again. With several processes the error is passed on: the others would wait for this one.

    Args:
        run: Whose losses are computed, by ``hooks.compute_loss``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        # Tokens of a pass, padding included; known once memory has run out.
        self.most_tokens: int | None = None
        self.step = -1
        self._done: tuple[tuple[Batch, float], ...] = ()

    def train(self, model: nn.Module, batches: list[Batch]) -> Tensor:
        """Forward and backward of one micro-batch; returns its summed loss, a scalar without a graph.

        Args:
            model: As the run wraps it.
            batches: One forward pass each.
        """
        run = self.run
        accelerator, device, split = run.accelerator, run.args.device, token_split.active()
        loss = torch.zeros((), device=device)
        offloading = memory.get_act_offloading_ctx_manager(model, enabled=run.args.activation_offloading)
        passes = parallel.equal_passes(len(batches), accelerator)
        with memory.gradients_first(model, passes=passes * (1 if split is None else split.size)):
            for index in range(passes):
                batch = batches[min(index, len(batches) - 1)]
                idle = index >= len(batches)  # Only to keep collectives equal over ranks.
                for helped, last in token_split.turns(index == passes - 1):
                    with offloading, parallel.no_sync(model, last=last):
                        if helped is not None:  # Columns of a pass of another process of the group.
                            parallel.backward(accelerator, help_with(model, helped, device))
                            continue
                        loss = loss + self.compute(model, batch, 0.0 if idle else 1.0, step=run.state.global_step)
        return loss

    def compute(self, model: nn.Module, batch: Batch, weight: float = 1.0, *, step: int, halvings: int = 0) -> Tensor:
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
        self.most_tokens = max(1, size // 2)
        logger.warning(
            "out of memory in a pass of %d tokens (step %d): it is divided, and later passes hold at most %d. The gradient does "
            "not change. Fix: lower max_row_tokens, per_device_train_batch_size or max_completion_length.",
            size, step + 1, self.most_tokens,
        )  # fmt: skip
        self.run.buffers["train"].add({"memory/halvings": total(1.0)})
        return self._parts(model, parts, weight, halvings + 1)

    def _parts(self, model: nn.Module, parts: list[Batch], weight: float, halvings: int) -> Tensor:
        return torch.stack(
            [self.compute(model, part, weight, step=self.step, halvings=halvings) for part in parts]
        ).sum()

    def _attempt(
        self, model: nn.Module, batch: Batch, weight: float
    ) -> tuple[Tensor, None] | tuple[None, torch.OutOfMemoryError]:
        """The loss, or the error; after one, gradients, metrics and the method are as they were before."""
        run, began = self.run, False
        undo = self._undo()
        try:
            loss = run.hooks.compute_loss(model, batch.to(run.args.device)) * weight
            began = True
            parallel.backward(run.accelerator, loss)
            if not weight:
                undo()
            return loss.detach(), None
        except torch.OutOfMemoryError as error:
            # The frames of the traceback hold the activations.
            problem = error.with_traceback(None)
        undo()
        loss = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if began and not parallel.shards_parameters(run.accelerator):
            self._again(model)
        return None, problem

    def _again(self, model: nn.Module) -> None:
        """Recompute the gradients of this step's earlier passes, which a broken backward pass has changed."""
        for parameter in model.parameters():
            parameter.grad = None
        undo, done = self._undo(), self._done
        self._done = ()
        try:
            for batch, weight in done:
                self.compute(model, batch, weight, step=self.step)
        finally:
            undo()

    def _undo(self) -> Callable[[], object]:
        """Takes back what is told to the log and to the method from here on."""
        train, method = self.run.buffers["train"], vars(self.run.method)
        said, known = train.snapshot(), dict(method)
        return lambda: (train.restore(said), method.update(known))

    def _halves(self, batch: Batch) -> list[Batch]:
        """The batch in parts; itself where the objective wants it whole, or where other processes would be left behind."""
        run, traits = self.run, self.run.method.traits
        # FSDP and DeepSpeed keep gradients where a pass that broke off cannot be taken back, and DeepSpeed steps after each.
        alone = run.accelerator.num_processes == 1 and not parallel.is_prepared_late(run.accelerator)
        if traits.single_pass or run.router_coefficient or not alone:
            return [batch]
        return halves(batch, pad_token_id=run.pad_token_id, layout=run.layout, whole_rows=traits.whole_rows)
