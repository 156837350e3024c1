"""Recovery from out-of-memory errors. The step is repeated with smaller forward passes, which give the same gradient."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from posttrain.data.forest import halves
from posttrain.loop import step
from posttrain.loop.run import Run
from posttrain.losses.reduce import Denominators
from posttrain.metrics import total
from posttrain.models import parallel
from posttrain.types import Batch

logger = logging.getLogger(__name__)

# Maximum number of times that the passes of a step are halved. If an eighth of a pass does not fit into memory, smaller
# passes are unlikely to fit either.
MOST_HALVINGS = 3


def divided(run: Run, batches: Sequence[Batch], most_tokens: int) -> list[Batch]:
    """Split batches until each has at most ``most_tokens`` tokens, including padding.

    A batch is not split if the objective compares its rows. A batch is also not split if its gradient cannot be computed a
    second time. This is the case in runs on several processes and in runs in which FSDP or DeepSpeed stores the gradients.
    """
    traits = run.method.traits
    alone = run.accelerator.num_processes == 1 and not parallel.is_prepared_late(run.accelerator)
    if traits.single_pass or run.router_coefficient or not alone:
        return list(batches)
    how = {"pad_token_id": run.pad_token_id, "layout": run.layout, "whole_rows": traits.whole_rows}
    parts: list[Batch] = []
    for batch in batches:
        smaller = halves(batch, **how) if batch.input_ids.numel() > most_tokens else [batch]
        parts += divided(run, smaller, most_tokens) if len(smaller) > 1 else smaller
    return parts


def run_again(
    run: Run, model: nn.Module, micro_batches: Sequence[Sequence[Batch]], counts: Denominators, problem: Exception
) -> step.Loss:
    """Recompute the gradient of an optimizer step with smaller passes, after its last micro-batch ran out of device memory.

    The loss is a sum over completions, divided by counts of the whole step. The gradients of smaller passes therefore add up
    to the gradient of the step. `Progress.max_tokens` stores the pass size that fits.

    Args:
        run: Run of the trainer.
        model: Model, wrapped as in the run. Its current gradients are discarded.
        micro_batches: Micro-batches of the step, including the one that ran out of memory.
        counts: Counts of the whole optimizer step.
        problem: The out-of-memory error.

    Returns:
        The loss of the last micro-batch.

    Raises:
        torch.OutOfMemoryError: Smaller passes do not fit into memory either.
    """
    for _ in range(MOST_HALVINGS):
        last = micro_batches[-1]
        before = last if run.progress.max_tokens is None else divided(run, last, run.progress.max_tokens)
        size = max(batch.input_ids.numel() for batch in before)
        if len(divided(run, before, max(1, size // 2))) == len(before):
            raise problem
        run.progress.max_tokens = max(1, size // 2)
        logger.warning(
            "out of memory in a pass of %d tokens (step %d). The pass is split, and later passes have at most %d tokens. "
            "The gradient does not change. Fix: lower max_row_tokens, per_device_train_batch_size or "
            "max_completion_length.",
            size, run.progress.state.global_step + 1, run.progress.max_tokens,
        )  # fmt: skip
        run.log({"memory/halvings": total(1.0)})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for parameter in model.parameters():
            parameter.grad = None
        try:
            results = [
                step.forward_backward(run, model, divided(run, micro, run.progress.max_tokens), counts, run.now())
                for micro in micro_batches
            ]
            return results[-1]
        except torch.OutOfMemoryError as error:
            # Remove the traceback. Its frames would keep the activations in memory.
            problem = error.with_traceback(None)
    raise problem
