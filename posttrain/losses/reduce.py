"""From unreduced terms to one number: the only mean over tokens in the package.

Denominators are counts of the **whole optimiser step**, over all micro-batches and ranks. Splitting a batch differently
therefore never changes the gradient. ``local_token`` (the loss type ``bnpo``) is local by definition and the one exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, did_you_mean
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
    """What an optimiser step holds, counted before its first forward pass.

    Attributes:
        tokens: Tokens that carry loss, over all micro-batches and ranks.
        sequences: Sequences, likewise; the branches of an episode are one (`posttrain.types.Batch.shares`).
        passes: Forward passes, likewise (only ``local_token`` divides by it).
        world_size: Ranks; the loss is multiplied by it because data parallelism averages gradients.
        named: Other counts that an objective divides by (tokens of the chosen answers), likewise.
    """

    tokens: float
    sequences: float
    passes: float
    world_size: int = 1
    named: Mapping[str, float] = field(default_factory=dict)

    def over(self, num_items_in_batch: Any, *, allowed: bool) -> Denominators:
        """These counts with other tokens: those that a subclass says the sum over label tokens is divided by.

        Args:
            num_items_in_batch: A number or a tensor of one; None: as they are.
            allowed: Whether the loss is such a sum.

        Raises:
            ConfigError: It is none, or the count is not above 0.
        """
        count = self.tokens if num_items_in_batch is None else float(num_items_in_batch)
        if num_items_in_batch is not None and not allowed:
            raise ConfigError(
                f"num_items_in_batch={count:g} is given to a loss that is no sum over label tokens, which it could divide. Fix: "
                "pass None, and scale what super().compute_loss(...) returns."
            )
        if count == self.tokens:
            return self
        if not 0 < count < math.inf:
            raise ConfigError(f"num_items_in_batch={count:g} must be above 0: the loss is divided by it.")
        return replace(self, tokens=count)


def sequence_sum(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sum ``(B, T)`` values over the masked tokens of each sequence, ``(S,)``."""
    # One place more takes what is left out: picking the others by a mask would make the host wait for their number.
    place = torch.where(mask & (sequence >= 0), sequence, num_sequences)
    return values.new_zeros(num_sequences + 1).index_add(0, place.flatten(), values.flatten())[:num_sequences]


def sequence_lengths(mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Masked tokens of each sequence, at least 1, ``(S,)`` float32."""
    return sequence_sum(mask.float(), mask, sequence, num_sequences).clamp_min(1.0)


def sequence_mean(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Mean of ``(B, T)`` values over the masked tokens of each sequence, ``(S,)``; 0 where none is masked in."""
    sums = sequence_sum(values, mask, sequence, num_sequences)
    return sums / sequence_lengths(mask, sequence, num_sequences).to(sums)


def spread(values: Tensor, sequence: Tensor) -> Tensor:
    """Give every token its sequence's value: ``(S,)`` to ``(B, T)``, 0 outside sequences. ``(B, T)`` passes unchanged."""
    if values.shape == sequence.shape:
        return values
    return values[sequence.clamp_min(0)] * (sequence >= 0).to(values.dtype)


def _masked_sum(terms: LossTerms) -> Tensor:
    return torch.where(terms.mask, terms.terms, 0.0).sum()


def _token(terms: LossTerms, counts: Denominators) -> Tensor:
    """``sum l*m / N``: every token of the step weighs the same (DAPO)."""
    tokens = counts.tokens if terms.count is None else counts.named.get(terms.count, 1.0)
    return _masked_sum(terms) / (tokens or 1.0)


def _sequence_token(terms: LossTerms, counts: Denominators) -> Tensor:
    """``mean_i sum_t l*m / |o_i|``: every sequence weighs the same (GRPO)."""
    assert terms.sequence is not None
    means = sequence_mean(terms.terms, terms.mask, terms.sequence, terms.num_sequences)
    means = means if terms.share is None else means * terms.share
    return means.sum() / (counts.sequences or 1.0)


def _sequence(terms: LossTerms, counts: Denominators) -> Tensor:
    """``mean_i l_i`` of per-sequence terms."""
    total = _masked_sum(terms if terms.share is None else replace(terms, terms=terms.terms * terms.share))
    return total / (counts.sequences or 1.0)


def _constant(terms: LossTerms, counts: Denominators) -> Tensor:
    """``sum l*m / (S * L)`` with a fixed length L: no length bias (Dr. GRPO)."""
    assert terms.constant is not None
    return _masked_sum(terms) / ((counts.sequences or 1.0) * terms.constant)


def _local_token(terms: LossTerms, counts: Denominators) -> Tensor:
    """``sum l*m / sum m`` of this pass alone, averaged over passes (BNPO)."""
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
    """One term a collated row, ``(S / branches,)``, whose mean is that over the rows of the whole optimiser step.

    Every completion of a row carries the row's term, so that the mean over sequences is the mean over rows.

    Args:
        batch: Collated with ``whole_rows=True`` where ``branches`` is above 1.
        values: Terms in the order of the rows; for ``branches=1`` in the order of the batch's sequences.
        branches: Completions of a row.
        metrics: What to log.
    """
    terms = values if branches == 1 else batch.spread_rows(values, branches)
    return LossTerms(terms, torch.ones_like(terms, dtype=torch.bool), "sequence", metrics=metrics or {})


def reduce(terms: LossTerms, denominators: Denominators) -> Tensor:
    """The scalar to call backward on: this pass's share of the step's loss, times ``world_size``.

    A pass without any token gives 0 that still depends on its terms, so that collectives in backward do not hang.

    Raises:
        ConfigError: ``terms.reduction`` is not in `REDUCTIONS`.

    >>> terms = LossTerms(torch.tensor([[1.0, 5.0]]), torch.tensor([[True, False]]), "token")
    >>> float(reduce(terms, Denominators(tokens=4, sequences=1, passes=1)))
    0.25
    """
    if terms.reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={terms.reduction!r} is not known{did_you_mean(terms.reduction, REDUCTIONS)}.")
    loss = REDUCTIONS[terms.reduction](terms, denominators) * denominators.world_size
    for extra in terms.extra:
        loss = loss + reduce(extra, denominators)
    return loss
