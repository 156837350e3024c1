"""NEFTune: noise on the input embeddings during training. `noisy_embeddings` adds the noise to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.forward import forward
from posttrain.models.heads import causal_lm
from posttrain.types import Batch, ModelOutputs


@dataclass(slots=True)
class Noise:
    """Forward hook that adds NEFTune's uniform noise to input embeddings. With document length L and embedding width d, the
    noise is at most ``alpha / sqrt(L d)``.

    Attributes:
        alpha: Magnitude of the noise.
        inverse_lengths: ``(B, T)`` values 1/L for the current pass. If ``inverse_lengths`` is None or has another
            shape, L is the number of columns.

    Reference: NEFTune, arXiv:2310.05914.
    """

    alpha: float
    inverse_lengths: Tensor | None = None

    def __call__(self, embeddings: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Add noise to the embeddings ``(B, T, d)`` if the model is in training mode."""
        if not embeddings.training:
            return output
        inverse = self.inverse_lengths
        if inverse is None or inverse.shape != output.shape[:-1]:
            inverse = torch.full(output.shape[:-1], 1 / output.shape[1], device=output.device)
        most = self.alpha * (inverse / output.shape[-1]).sqrt()  # (B, T)
        return output + torch.empty_like(output).uniform_(-1, 1) * most[..., None].to(output.dtype)

    def forward(self, model: nn.Module, batch: Batch, *args: Any, **kwargs: Any) -> ModelOutputs:
        """Run `posttrain.models.forward.forward` with noise whose magnitude depends on the lengths of the batch's documents."""
        self.inverse_lengths = inverse_lengths(batch)
        try:
            return forward(model, batch, *args, **kwargs)
        finally:
            self.inverse_lengths = None


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float) -> Iterator[Callable[..., ModelOutputs]]:
    """Add `Noise` to the input embeddings inside the context. Yield the forward function that the caller must use there."""
    noise, inner = Noise(alpha), causal_lm(model)
    handle = inner.get_input_embeddings().register_forward_hook(noise)
    try:
        yield noise.forward
    finally:
        handle.remove()


def inverse_lengths(batch: Batch) -> Tensor:
    """Return ``(B, T)`` values 1/L, where L is the length of the token's document in tokens. A document is a prompt with one
    completion.

    The value of padding is 0. If a token belongs to several documents, its value is the mean of the values 1/L of these
    documents. The variance of the token's noise is then the mean of the variances that the documents would have separately.
    """
    total, count = torch.zeros(2, *batch.input_ids.shape)
    for index, leaf in enumerate(batch.leaves):
        if leaf.length > leaf.prompt:
            row = batch.segments[leaf.segment].row
            for run in batch.path(index):
                total[row, run.start : run.stop] += 1 / leaf.length
                count[row, run.start : run.stop] += 1
    for segment in batch.segments:
        # If all completions of a prompt are empty, the prompt alone is the document.
        columns = slice(segment.start, segment.stop)
        lonely = count[segment.row, columns] == 0
        total[segment.row, columns] += lonely / (segment.position + segment.stop - segment.start)
    return (total / count.clamp_min(1)).to(batch.input_ids.device)
