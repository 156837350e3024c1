"""One optimiser step: count what it holds; then, pass by pass, forward, objective and reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.loop.evaluation import full_logits, predicted_metrics
from posttrain.losses.reduce import Denominators, reduce
from posttrain.models import parallel
from posttrain.models.forward import forward, with_router_term
from posttrain.types import WHOLE, Batch, LossTerms, ModelOutputs, Truncation

if TYPE_CHECKING:
    from posttrain.loop.run import Run


def count(run: Run, micro_batches: Sequence[Sequence[Batch]]) -> tuple[Denominators, float]:
    """Tokens and sequences of the whole optimiser step, over micro-batches and ranks; the checks of a step look at them.

    Returns:
        What terms are divided by, and the tokens of all sequences, trained or not.
    """
    batches = [batch for micro in micro_batches for batch in micro]
    named = run.hooks.named_counts(batches)
    local = [
        sum(batch.num_loss_tokens for batch in batches),
        sum(batch.num_episodes for batch in batches),
        sum(batch.num_sequence_tokens for batch in batches),
        len(batches),
        run.checks.has_overlong_sequence(batches),
        *named.values(),
    ]
    tokens, sequences, seen, passes, overlong, *rest = parallel.all_reduce_sum(local, run.accelerator)
    run.log(run.checks.step(batches, tokens, sequences, overlong, run.state))
    totals = dict(zip(named, rest, strict=True))
    return Denominators(tokens, sequences, passes, run.accelerator.num_processes, totals), seen


def compute_terms(
    run: Run, model: nn.Module, batch: Batch, truncation: Truncation = WHOLE
) -> tuple[LossTerms, ModelOutputs]:
    """Forward and objective; a mixture of experts adds its load-balancing term, averaged over passes.

    Args:
        run: Of the trainer.
        model: As the run wraps it.
        batch: One forward pass.
        truncation: What the sampler leaves out, of which the objective wants the mass that is left.
    """
    outputs = forward(
        model,
        batch,
        run.method.traits.needs | ({"aux"} if run.router_coefficient else set()),
        temperature=run.method.temperature,
        truncation=truncation,
        chunk_size=run.args.logits_chunk_size,
        expected_grad=expected_gradient(run, batch) if model.training else None,
        compare=run.hooks.comparison(batch),
    )
    terms = run.hooks.objective(outputs, batch)
    if batch.shares is not None:
        terms = replace(terms, share=batch.shares)
    if model.training:
        run.method.observe(terms, outputs, run.denominators)
    if run.router_coefficient and outputs.aux_loss is not None:
        terms = with_router_term(terms, outputs.aux_loss, run.router_coefficient)
    return terms, outputs


def expected_gradient(run: Run, batch: Batch) -> Tensor | None:
    """``(B, T)``: the gradient of the loss with respect to the log-probs, where the method knows it before the pass.

    It is taken of the objective itself, at the reference's log-probs or 0. A subclass's objective may do more than compute: it is
    called once. For the output layer's use on a CPU, see `posttrain.models.logprob.token_logprobs`.
    """
    own = run.hooks.objective != run.method.objective
    if own or batch.input_ids.device.type != "cpu" or not run.method.knows_gradient(batch):
        return None
    with torch.enable_grad():
        grid = torch.zeros(batch.input_ids.shape)
        logp = (grid if batch.ref_logp is None else batch.ref_logp).clone().requires_grad_()
        numbers = dict.fromkeys(run.method.traits.needs - {"logp"}, grid)
        terms = run.method.objective(ModelOutputs(logp=logp, **numbers), batch)
        terms = replace(terms, share=batch.shares)
        return torch.autograd.grad(reduce(terms, run.denominators), logp)[0]


def no_comparison(batch: Batch) -> None:
    """What the output layer compares log-probs with, where a method compares nothing."""


def loss_of_pass(run: Run, model: nn.Module, batch: Batch) -> Tensor:
    """`compute_loss` alone, as the loop calls it where no subclass has one of its own."""
    return compute_loss(run, model, batch)[0]


def function_loss(run: Run, model: nn.Module, batch: Batch, count: Any) -> tuple[Tensor, Any]:
    """The user's ``compute_loss_func(outputs, labels, num_items_in_batch)`` on full logits, and the model's outputs."""
    assert run.loss_function is not None
    output, labels = full_logits(model, batch)
    run.log(predicted_metrics(output.logits, labels), "train" if model.training else "eval")
    run.reduced_by = "token"
    tokens = run.denominators.over(count, allowed=True).tokens
    return run.loss_function(output, labels, num_items_in_batch=tokens) * run.denominators.world_size, output


def compute_loss(run: Run, model: nn.Module, batch: Batch, count: Any = None) -> tuple[Tensor, Any]:
    """Batch to scalar: the sum of a pass's terms over counts of the whole optimiser step, so that passes add up.

    Args:
        run: Of the trainer.
        model: As the run wraps it.
        batch: One forward pass.
        count: Given by the user in place of the step's label tokens, see `Denominators.over`.
    """
    if run.loss_function is not None:
        return function_loss(run, model, batch, count)
    terms, outputs = run.hooks.compute_loss_terms(model, batch)
    run.log(terms.metrics, "train" if model.training else "eval")
    run.reduced_by = terms.count or terms.reduction
    return reduce(terms, run.denominators.over(count, allowed=run.method.traits.takes_loss_func)), outputs
