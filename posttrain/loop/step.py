"""Functions for one optimizer step: count tokens and sequences, then compute loss and gradient of each forward pass."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.errors import PosttrainError
from posttrain.loop.evaluation import full_logits, predicted_metrics
from posttrain.losses.reduce import Denominators, reduce
from posttrain.metrics import Metric, mean
from posttrain.models import memory, parallel, token_split
from posttrain.models.forward import with_router_term
from posttrain.types import Batch, LossTerms, ModelOutputs, State, TokenLoss

if TYPE_CHECKING:
    from posttrain.loop.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loss:
    """Result of one or several forward passes.

    Attributes:
        value: Scalar on which backward is called. For several passes, it is the detached sum of their losses.
        metrics: Metrics to log, one dict per call of an objective.
        sums: Statistics of the method over the optimizer step, see `Method.step_sums`.
        terms: Unreduced loss terms of one pass. None: a function of the user computed the loss.
        outputs: Outputs of the model in one pass.
    """

    value: Tensor
    metrics: tuple[dict[str, Metric], ...] = ()
    sums: Tensor | None = None
    terms: LossTerms | None = None
    outputs: Any = None


def add_sums(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add the ``sums`` of two losses. Each of the two ``sums`` may be None."""
    return other if one is None else one if other is None else one + other


def commit(run: Run, found: Loss, mode: str = "train") -> None:
    """Log the metrics of completed passes, and add their ``sums`` to the ``sums`` of the optimizer step."""
    for metrics in found.metrics:
        run.log(metrics, mode)
    run.progress.sums = add_sums(run.progress.sums, found.sums)


def count(run: Run, batches: Sequence[Batch], overlong: float = 0.0) -> tuple[Denominators, float, float]:
    """Count tokens and sequences of the whole optimizer step, over micro-batches and ranks.

    Args:
        run: Run of the trainer.
        batches: Batches of all micro-batches of this rank.
        overlong: 1.0 if this rank has a sequence that is too long, else 0.0.

    Returns:
        The denominators of the loss terms, the number of all tokens (including tokens without loss), and the sum of
        ``overlong`` over ranks.
    """
    named = run.method.counts(batches)
    local = [
        sum(batch.num_loss_tokens for batch in batches),
        sum(batch.num_episodes for batch in batches),
        sum(batch.num_sequence_tokens for batch in batches),
        len(batches),
        overlong,
        *named.values(),
    ]
    tokens, sequences, seen, passes, overlong, *rest = parallel.all_reduce_sum(local, run.accelerator)
    totals = dict(zip(named, rest, strict=True))
    return Denominators(tokens, sequences, passes, run.accelerator.num_processes, totals), seen, overlong


def count_tokens(run: Run, batches: Sequence[Batch], counts: Denominators) -> None:
    """Log the token counts of an optimizer step.

    Args:
        run: Run of the trainer.
        batches: Batches of all micro-batches of this rank.
        counts: Counts over all ranks.
    """
    real = sum(batch.num_tokens for batch in batches)
    computed = sum(batch.input_ids.numel() for batch in batches)
    run.progress.tokens_seen = run.progress.tokens_seen[0] + real, run.progress.tokens_seen[1] + computed
    padding = mean(1 - real / computed if computed else 0.0, weight=float(computed))
    run.log({"documents": mean(counts.sequences), "trained_tokens": mean(counts.tokens), "padding_share": padding})


def loss_of(run: Run, model: nn.Module, batch: Batch, counts: Denominators, state: State) -> Loss:
    """Compute the loss of one pass: run the forward pass, compute the objective, and reduce its terms.

    For a mixture of experts, the load-balancing loss is added to the loss. The load-balancing loss is averaged over passes.

    Args:
        run: Run of the trainer.
        model: Model, wrapped as in the run.
        batch: Batch of one forward pass.
        counts: Counts of the whole optimizer step. The losses of all passes with these counts add up to the loss of the
            step.
        state: Progress of the run, see `Run.now`.
    """
    hooks, method = run.hooks, run.method
    outputs = run.forward(
        model,
        batch,
        method.traits.needs | ({"aux"} if run.router_coefficient else set()),
        temperature=method.temperature,
        truncation=run.progress.truncation,
        chunk_size=run.args.logits_chunk_size,
        compare=None if hooks.comparison is None else hooks.comparison(batch),
    )
    own = hooks.objective
    terms = method.objective(outputs, batch, state) if own is None else own(outputs, batch)
    if batch.shares is not None:
        terms = replace(terms, share=batch.shares)
    run.watch("pass", batch, terms, outputs)
    sums = method.step_sums(terms, outputs, counts) if model.training else None
    if run.router_coefficient and outputs.aux_loss is not None:
        terms = with_router_term(terms, outputs.aux_loss, run.router_coefficient)
    metrics = terms.metrics if hooks.observe is None else terms.metrics | hooks.observe(run, batch, outputs)
    return Loss(reduce(terms, counts), (metrics,), sums, terms, outputs)


def with_expected_gradient(run: Run, batch: Batch, counts: Denominators, state: State) -> Batch:
    """Return the batch with `Batch.expected_grad`. This field is set only if the gradient of the loss with respect to the
    log-probs can be computed before the pass, or for each token separately.

    The gradient is computed by calling the objective with the reference's log-probs, or with 0. An objective of a subclass
    is not called for this purpose, because it may have side effects. `posttrain.models.logprob.token_logprobs` describes how
    the output layer uses this gradient on a CPU.
    """
    own = run.hooks.objective or run.loss_function
    if own or batch.input_ids.device.type != "cpu" or not (gradient := run.method.knows_gradient(batch)):
        return batch
    with torch.enable_grad():
        start = torch.zeros(batch.input_ids.shape) if batch.ref_logp is None else batch.ref_logp
        logp = start.clone().requires_grad_()
        numbers = dict.fromkeys(run.method.traits.needs, start) | {"logp": logp}
        terms = run.method.objective(ModelOutputs(**numbers), batch, state)
        loss = reduce(replace(terms, share=batch.shares), counts)
        if isinstance(gradient, TokenLoss):
            return replace(batch, expected_grad=replace(gradient, scale=torch.autograd.grad(loss, terms.terms)[0]))
        return replace(batch, expected_grad=torch.autograd.grad(loss, logp)[0])


def function_loss(run: Run, model: nn.Module, batch: Batch, counts: Denominators, state: State) -> Loss:
    """Compute the loss with the user's ``compute_loss_func(outputs, labels, num_items_in_batch)``. This function receives
    full logits.
    """
    assert run.loss_function is not None
    output, labels = full_logits(model, batch)
    value = run.loss_function(output, labels, num_items_in_batch=counts.tokens) * counts.world_size
    return Loss(value, (predicted_metrics(output.logits, labels),), outputs=output)


def forward_backward(run: Run, model: nn.Module, batches: Sequence[Batch], counts: Denominators, state: State) -> Loss:
    """Run forward and backward for several passes, and accumulate their gradients. No other state is changed.

    Args:
        run: Run of the trainer.
        model: Model in training mode, wrapped as in the run.
        batches: Batches, each for one forward pass.
        counts: Counts of the whole optimizer step. The gradients of several calls with the same counts add up to the
            gradient of the step.
        state: Progress of the run, see `Run.now`.

    Returns:
        The sum of the losses (detached), the metrics, and the statistics of the method.
    """
    accelerator, device, split = run.accelerator, run.args.device, token_split.active()
    value, metrics, sums = torch.zeros((), device=device), [], None
    offloading = memory.get_act_offloading_ctx_manager(model, enabled=run.args.activation_offloading)
    passes = parallel.equal_passes(len(batches), accelerator)
    with memory.gradients_first(model, passes=passes * (1 if split is None else split.size)):
        for index in range(passes):
            # A forward pass may be a collective operation. A rank without further batches therefore repeats its last batch
            # with weight 0.
            batch, weight = batches[min(index, len(batches) - 1)], 1.0 if index < len(batches) else 0.0
            for helped, last in token_split.turns(index == passes - 1):
                with offloading, parallel.no_sync(model, last=last):
                    # With sequence parallelism, this process computes its columns of a pass that belongs to another process.
                    if split is not None and helped is not None:
                        parallel.backward(accelerator, split.help_with(model, helped))
                        continue
                    batch = with_expected_gradient(run, batch.to(device), counts, state)
                    result = run.hooks.loss_of(run, model, batch, counts, state)
                    loss = result.value * weight
                    parallel.backward(accelerator, loss)
                    value = value + loss.detach()
                    if weight:
                        metrics += result.metrics
                        sums = add_sums(sums, result.sums)
    return Loss(value, tuple(metrics), sums)


def optim_step(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, sums: Tensor | None = None
) -> dict[str, Metric]:
    """Run one optimizer step: clip the gradient, update the weights, reset the gradient, and end the step of the method. Use
    this function in your own training loop.

    Args:
        run: Run of a trainer, or of `posttrain.loop.build.build`.
        model: Model whose gradients `forward_backward` computed.
        optimizer: Optimizer of the model's parameters.
        sums: Sum of `Loss.sums` over the passes of the step.

    Returns:
        The gradient norm before clipping (``grad_norm``), and the metrics of the method for this step.

    Raises:
        PosttrainError: The gradient is not finite for the third consecutive time.
    """
    norm = run.accelerator.clip_grad_norm_(model.parameters(), max(run.args.max_grad_norm or 0, 0) or math.inf)
    is_finite(run, model, norm)
    optimizer.step()
    optimizer.zero_grad()
    run.progress.state.global_step += 1
    run.progress.own, metrics = run.method.end_step(run.now(), sums)
    return {"grad_norm": mean(float(norm))} | metrics


# The run ends after BAD_STEPS consecutive gradients that are not finite.
BAD_STEPS = 3


def is_finite(run: Run, model: nn.Module, norm: Any) -> bool:
    """Return whether the gradient of a step is finite. A gradient that is not finite is not applied.

    Args:
        run: Run of the trainer.
        model: Model with the gradients.
        norm: Gradient norm before clipping, or None if it was not computed.

    Raises:
        PosttrainError: The gradient is not finite for the third consecutive time.
    """
    if norm is None or bool(torch.isfinite(torch.as_tensor(norm))):
        run.progress.bad_steps = 0
        return True
    # With fp16, the gradient scaler skips the step and reduces its scale.
    if run.accelerator.mixed_precision != "fp16":
        skip(run, model, norm)
    return False


def skip(run: Run, model: nn.Module, norm: Any) -> None:
    """Discard the gradient of a step. After three consecutive discarded steps, raise an error that ends the run."""
    run.progress.bad_steps += 1
    logger.warning(
        "step %d: the gradient norm is %s, so this step is skipped (%d in a row).",
        run.progress.state.global_step + 1, float(norm), run.progress.bad_steps,
    )  # fmt: skip
    if run.progress.bad_steps == BAD_STEPS:
        raise PosttrainError(
            f"{BAD_STEPS} consecutive steps had a gradient norm of {norm}. Fix: lower learning_rate or max_grad_norm, try "
            "bf16=False, and inspect the rows of these steps. The last checkpoint is intact."
        )
    for parameter in model.parameters():
        parameter.grad = None
