"""Reductions of the loss terms of tokens to a scalar. All averages of losses over tokens are computed in this module.

Loss terms are divided by counts over the **whole optimizer step**, i.e. over all micro-batches and ranks. The gradient
therefore does not depend on how a batch is split into micro-batches. The only exception is ``local_token`` (loss type
``bnpo``), which divides by the number of tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, check_choice
from posttrain.metrics import Metric
from posttrain.types import Batch, LossTerms

__all__ = [
    "REDUCTIONS",
    "Denominators",
    "reduce",
    "row_terms",
    "sequence_lengths",
    "sequence_mean",
    "sequence_sum",
    "spread",
]


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts by which the loss of an optimizer step is divided. The counts are computed before the first forward pass.

    Attributes:
        tokens: Number of loss tokens over all micro-batches and ranks.
        sequences: Number of sequences over all micro-batches and ranks. All branches of an episode together are counted as
            one sequence (`posttrain.types.Batch.shares`).
        passes: Number of forward passes over all micro-batches and ranks. Only ``local_token`` divides by this number.
        world_size: Number of ranks. The loss is multiplied by this number, because data parallelism averages gradients.
        named: Additional counts by which a method divides, for example the number of tokens of chosen answers.
    """

    tokens: float
    sequences: float
    passes: float
    world_size: int = 1
    named: Mapping[str, float] = field(default_factory=dict)

    def over(self, num_items_in_batch: Any, *, allowed: bool) -> Denominators:
        """Replace the number of tokens with the divisor that a subclass has passed to ``compute_loss``.

        Args:
            num_items_in_batch: The divisor, as a number or a tensor with one element. None keeps the counts unchanged.
            allowed: Whether the loss is a sum over label tokens. Only such losses can be divided by a number of tokens.

        Raises:
            ConfigError: The loss is not a sum over label tokens, or the divisor is not above 0.
        """
        count = self.tokens if num_items_in_batch is None else float(num_items_in_batch)
        if num_items_in_batch is not None and not allowed:
            raise ConfigError(
                f"num_items_in_batch={count:g} was passed to compute_loss, but this loss is not a sum over label tokens, so it "
                "cannot be divided by their number. Fix: pass None, and scale the result of super().compute_loss(...) "
                "instead."
            )
        if count == self.tokens:
            return self
        if not 0 < count < math.inf:
            raise ConfigError(f"num_items_in_batch={count:g} must be above 0, because the loss is divided by it.")
        return replace(self, tokens=count)


def sequence_sum(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sum ``(B, T)`` values over the tokens of each sequence at which the mask is True. Return ``(S,)`` sums."""
    # Add the values of masked-out tokens to index S, which is then dropped. Boolean indexing would synchronize with the
    # device.
    place = torch.where(mask & (sequence >= 0), sequence, num_sequences)
    return values.new_zeros(num_sequences + 1).index_add(0, place.flatten(), values.flatten())[:num_sequences]


def sequence_lengths(mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Count the tokens of each sequence at which the mask is True. Return ``(S,)`` counts in float32, at least 1."""
    return sequence_sum(mask.float(), mask, sequence, num_sequences).clamp_min(1.0)


def sequence_mean(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Average ``(B, T)`` values over the tokens of each sequence at which the mask is True. Return ``(S,)`` means. The mean
    of a sequence without such tokens is 0.
    """
    sums = sequence_sum(values, mask, sequence, num_sequences)
    return sums / sequence_lengths(mask, sequence, num_sequences).to(sums)


def spread(values: Tensor, sequence: Tensor) -> Tensor:
    """Copy the ``(S,)`` values of sequences to all tokens of each sequence. Return ``(B, T)`` values, which are 0 for tokens
    that belong to no sequence. If the argument already has the shape ``(B, T)``, it is returned unchanged.
    """
    if values.shape == sequence.shape:
        return values
    return values[sequence.clamp_min(0)] * (sequence >= 0).to(values.dtype)


def _masked_sum(terms: LossTerms) -> Tensor:
    return torch.where(terms.mask, terms.terms, 0.0).sum()


def _token(terms: LossTerms, counts: Denominators) -> Tensor:
    """Compute ``sum l*m / N``, where N is the number of loss tokens of the optimizer step. All tokens have the same weight
    (DAPO).
    """
    tokens = counts.tokens if terms.count is None else counts.named.get(terms.count, 1.0)
    return _masked_sum(terms) / (tokens or 1.0)


def _sequence_token(terms: LossTerms, counts: Denominators) -> Tensor:
    """Compute ``mean_i sum_t l*m / |o_i|``, where ``|o_i|`` is the length of sequence i. All sequences have the same weight
    (GRPO).
    """
    assert terms.sequence is not None
    means = sequence_mean(terms.terms, terms.mask, terms.sequence, terms.num_sequences)
    means = means if terms.share is None else means * terms.share
    return means.sum() / (counts.sequences or 1.0)


def _sequence(terms: LossTerms, counts: Denominators) -> Tensor:
    """Compute the mean ``mean_i l_i`` of loss terms that belong to whole sequences."""
    total = _masked_sum(terms if terms.share is None else replace(terms, terms=terms.terms * terms.share))
    return total / (counts.sequences or 1.0)


def _constant(terms: LossTerms, counts: Denominators) -> Tensor:
    """Compute ``sum l*m / (S * L)`` for S sequences. L is a constant, so the loss has no length bias (Dr. GRPO)."""
    assert terms.constant is not None
    return _masked_sum(terms) / ((counts.sequences or 1.0) * terms.constant)


def _local_token(terms: LossTerms, counts: Denominators) -> Tensor:
    """Compute the mean ``sum l*m / sum m`` over the loss tokens of one micro-batch. The means are averaged over micro-batches
    (BNPO).
    """
    return _masked_sum(terms) / terms.mask.sum().clamp_min(1) / (counts.passes or 1.0)


REDUCTIONS: dict[str, Callable[[LossTerms, Denominators], Tensor]] = {
    "token": _token,
    "sequence_token": _sequence_token,
    "sequence": _sequence,
    "constant": _constant,
    "local_token": _local_token,
}


def row_terms(
    batch: Batch, values: Tensor, *, branches: int = 1, metrics: dict[str, Metric] | None = None
) -> LossTerms:
    """Create the `LossTerms` of a loss with one term per dataset row. `reduce` averages the terms over the rows of the
    optimizer step.

    The term of a row is repeated for all of its completions, so that the mean over sequences equals the mean over rows.

    Args:
        batch: Batch of the terms. If ``branches`` is above 1, the batch must be collated with ``whole_rows=True``.
        values: ``(S / branches,)`` loss terms in the order of the rows. For ``branches=1``, the terms are in the order of the
            batch's sequences.
        branches: Number of completions per row.
        metrics: Metrics to log.
    """
    terms = values if branches == 1 else batch.spread_rows(values, branches)
    return LossTerms(terms, torch.ones_like(terms, dtype=torch.bool), "sequence", metrics=metrics or {})


def reduce(terms: LossTerms, denominators: Denominators) -> Tensor:
    """Compute the contribution of one forward pass to the loss of the optimizer step, times ``world_size``. The trainer calls
    ``backward()`` on the result.

    Without loss tokens, the result is 0. It still depends on the loss terms, so that its backward pass runs the same
    collective operations as on other ranks.

    Raises:
        ConfigError: ``terms.reduction`` is not in `REDUCTIONS`.

    >>> terms = LossTerms(torch.tensor([[1.0, 5.0]]), torch.tensor([[True, False]]), "token")
    >>> float(reduce(terms, Denominators(tokens=4, sequences=1, passes=1)))
    0.25
    """
    check_choice("reduction", terms.reduction, REDUCTIONS)
    loss = REDUCTIONS[terms.reduction](terms, denominators) * denominators.world_size
    for extra in terms.extra:
        loss = loss + reduce(extra, denominators)
    return loss
