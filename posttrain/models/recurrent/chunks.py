"""Chunk layout of packed prefix trees for recurrent layers: `Chunks`, `chunks_of` and `predecessors`.

The rows of a batch are concatenated along the token axis, and each segment is split into chunks of `SIZE` tokens. The
parent of a chunk is the chunk before it in its segment, or the last chunk of the parent segment. Products inside chunks are
computed for all chunks together. Only the recurrent states are computed sequentially, in one step per depth of the chunk
tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.types import Segment

SIZE = 32


class Chunks(NamedTuple):
    """Layout that assigns the tokens of a batch to chunks. Chunks are ordered by depth.

    Attributes:
        tokens: ``(N, C)`` flat index of the token at each position of each chunk. At positions without a token, the index is
            the total number of tokens.
        places: ``(tokens,)`` index of each token in ``tokens.flatten()``. For padding, the index is ``N * C``.
        levels: For each depth, the slice of the chunks at this depth.
        parents: For each depth after the first, the ``(n,)`` indices of the chunks' parents within the previous depth.
        ends: ``(segments,)`` index of the last chunk of the path that ends with each segment.
    """

    tokens: Tensor
    places: Tensor
    levels: list[slice]
    parents: list[Tensor]
    ends: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """Rearrange ``(tokens, ...)`` values to ``(N, C, ...)``. Positions of a chunk without a token are 0."""
        return _rows(x, self.tokens.flatten()).view(*self.tokens.shape, *x.shape[1:])

    def scatter(self, x: Tensor) -> Tensor:
        """Rearrange ``(N, C, ...)`` values of chunks to ``(tokens, ...)``. This method inverts `gather`. Padding is 0."""
        return _rows(x.flatten(0, 1), self.places)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, index)


def chunks_of(segments: Sequence[Segment], shape: torch.Size, device: torch.device, size: int = SIZE) -> Chunks:
    """Divide the segments of a batch into chunks.

    Args:
        segments: Packed prefix trees in depth-first order.
        shape: ``(B, T)`` of the batch.
        device: Device of the tensors.
        size: Maximum number of tokens of a chunk.
    """
    rows, width = shape
    count = rows * width
    # Chunks at each depth. Each chunk is described by its first token, its number of tokens, and the index of its parent in
    # the previous depth.
    levels: list[list[tuple[int, int, int]]] = []
    # For each segment, the depth and the index of its last chunk. For an empty segment, depth and index are those of the
    # preceding chunk.
    last: list[tuple[int, int]] = []
    for segment in segments:
        depth, parent = last[segment.parent] if segment.parent >= 0 else (-1, 0)
        for start in range(segment.start, segment.stop, size):
            depth += 1
            if depth == len(levels):
                levels.append([])
            levels[depth].append((segment.row * width + start, min(size, segment.stop - start), parent))
            parent = len(levels[depth]) - 1
        last.append((depth, parent))
    starts, lengths, parents = (torch.tensor([chunk[i] for level in levels for chunk in level]) for i in range(3))
    offsets = torch.arange(size)
    tokens = torch.where(offsets < lengths[:, None], starts[:, None] + offsets, count)
    places = torch.full((count + 1,), tokens.numel()).index_copy_(0, tokens.flatten(), torch.arange(tokens.numel()))
    sizes = [len(level) for level in levels]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
    moved = [parents[span].to(device) for span in spans[1:]]
    final = torch.tensor([spans[depth].start + index if depth >= 0 else 0 for depth, index in last])
    return Chunks(tokens.to(device), places[:count].to(device), spans, moved, final.to(device))


def predecessors(segments: Sequence[Segment], shape: torch.Size, device: torch.device, count: int) -> list[Tensor]:
    """Return the flat indices of each token's predecessors on its path: the tokens 0, 1, ..., ``count - 1`` positions before
    it.

    Args:
        segments: Packed prefix trees in depth-first order.
        shape: ``(B, T)`` of the batch.
        device: Device of the tensors.
        count: Number of indices per token.

    Returns:
        List of ``count`` tensors ``(B * T + 1,)``. The index is ``B * T`` for padding, and for predecessors before the first
        token of a tree.
    """
    rows, width = shape
    none = rows * width
    before = torch.full((none + 1,), none)
    last: list[int] = []
    for segment in segments:
        start, stop = segment.row * width + segment.start, segment.row * width + segment.stop
        earlier = last[segment.parent] if segment.parent >= 0 else none
        if stop > start:
            before[start] = earlier
            before[start + 1 : stop] = torch.arange(start, stop - 1)
        last.append(stop - 1 if stop > start else earlier)
    before = before.to(device)
    indices = [torch.arange(none + 1, device=device)]
    for _ in range(count - 1):
        indices.append(before[indices[-1]])
    return indices
