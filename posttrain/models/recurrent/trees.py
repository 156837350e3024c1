"""Recurrent layers on packed prefix trees (`Trees`)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.models.recurrent import chunks
from posttrain.models.recurrent.convolution import short_convolution
from posttrain.models.recurrent.kda import SIZE as KDA_SIZE
from posttrain.models.recurrent.kda import kda
from posttrain.models.recurrent.scan import scan
from posttrain.models.tree_attention import Forest


class Trees:
    """Convolutions and recurrences along every path of packed prefix trees, with gradients.

    Args:
        forest: The prefix trees. The chunk layout is cached in ``forest``, so that it is computed once for all layers.
    """

    def __init__(self, forest: Forest) -> None:
        self.forest = forest

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of ``(B, D, T)`` inputs with a kernel ``(D, K)``; see `short_convolution`."""
        batch, count = self.forest.batch, weight.shape[1]
        key = ("before", count, x.device)
        shape = batch.input_ids.shape
        before = self.forest.kept(key, lambda: chunks.predecessors(batch.segments, shape, x.device, count))
        return short_convolution(x.to(weight.dtype), weight, bias, before)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        """Compute a linear recurrence along each path; see `posttrain.models.recurrent.scan.scan`."""
        return scan(q, k, v, log_decay, beta, self._chunks(q.device, chunks.SIZE))

    def kda(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Compute Kimi delta attention along each path; see `posttrain.models.recurrent.kda.kda`."""
        return kda(q, k, v, log_decay, beta, self._chunks(q.device, KDA_SIZE))[0]

    def _chunks(self, device: torch.device, size: int) -> chunks.Chunks:
        batch = self.forest.batch
        return self.forest.kept(
            ("chunks", size, device), lambda: chunks.chunks_of(batch.segments, batch.input_ids.shape, device, size)
        )
