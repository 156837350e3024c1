"""Recurrent layers during sampling (`States`). Each sequence continues from the states of earlier forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.models.recurrent.chunks import SIZE, Chunks, chunks_of
from posttrain.models.recurrent.kda import SIZE as KDA_SIZE
from posttrain.models.recurrent.kda import kda
from posttrain.models.recurrent.scan import scan_from
from posttrain.types import Segment


class States:
    """Convolutions and recurrences of a forward pass during sampling. Each row is one sequence, and no gradients are
    computed.

    Args:
        tensors: States ``(rows, ...)`` in the order in which layers use them. A state is the last inputs of a convolution, or
            the matrix of a recurrence. If the list is empty, states start at 0 and are appended to the list. The pass changes
            states in place. If states have more rows than the pass, the first rows are used.
        lengths: Number of tokens of each row. Later columns of a row are padding. None: each row has one token.
    """

    def __init__(self, tensors: list[Tensor], lengths: Sequence[int] | None = None) -> None:
        self.tensors, self.lengths = tensors, lengths
        self._used = 0
        self._layouts: dict[int, tuple[Tensor, Chunks]] = {}
        self._columns: dict[int, Tensor] = {}

    def _next(self, like: Tensor, *shape: int) -> Tensor:
        """Return the state of the next layer. If the layer has no state yet, create a state of zeros."""
        if self._used == len(self.tensors):
            self.tensors.append(like.new_zeros(shape))
        self._used += 1
        return self.tensors[self._used - 1][: shape[0]]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the causal convolution of ``(rows, D, T)`` inputs with a kernel ``(D, K)``."""
        x, before = x.to(weight.dtype), weight.shape[1] - 1
        state = self._next(x, x.shape[0], x.shape[1], before)
        inputs = torch.cat([state, x], 2)
        out = x * weight[:, -1:]
        for i in range(before):
            out.addcmul_(inputs[:, :, i : i + x.shape[2]], weight[:, i : i + 1])
        if self.lengths is None:
            state.copy_(inputs[:, :, 1:])
        else:
            state.copy_(inputs.gather(2, self._ends(before, x.device)[:, None].expand(-1, x.shape[1], -1)))
        return out if bias is None else out + bias[:, None]

    def scan(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        """Compute a linear recurrence and return its outputs; see `posttrain.models.recurrent.scan`."""
        q, k, v, log_decay, beta = _wide(q, k, v, log_decay, beta)
        groups, repeats = q.shape[2], v.shape[2] // q.shape[2]
        state = self._next(v, len(v), groups, k.shape[3], repeats, v.shape[3])
        with torch.autocast(q.device.type, enabled=False):
            if self.lengths is None:
                decay = log_decay[:, 0].view(-1, groups, 1, repeats, 1)
                return _step(state, q, k, v, decay, beta)
            rows, chunks = self._layout(q, SIZE)
            out, state[rows] = scan_from(state[rows], q, k, v, log_decay, beta, chunks)
            return out

    def kda(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Compute Kimi delta attention and return its outputs; see `posttrain.models.recurrent.kda`."""
        q, k, v, log_decay, beta = _wide(q, k, v, log_decay, beta)
        state = self._next(v, len(v), k.shape[2], k.shape[3], 1, v.shape[3])
        with torch.autocast(q.device.type, enabled=False):
            if self.lengths is None:
                return _step(state, q, k, v, log_decay[:, 0, :, :, None, None], beta)
            rows, chunks = self._layout(q, KDA_SIZE)
            out, after = kda(q, k, v, log_decay, beta, chunks, state[rows, :, :, 0])
            state[rows, :, :, 0] = after
            return out

    def _ends(self, count: int, device: torch.device) -> Tensor:
        """Return the ``(rows, count)`` column indices of the last ``count`` inputs of each row. Columns 0 to ``count - 1``
        contain inputs of earlier passes.
        """
        if count not in self._columns:
            assert self.lengths is not None
            self._columns[count] = (torch.tensor(self.lengths)[:, None] + torch.arange(count)).to(device)
        return self._columns[count]

    def _layout(self, x: Tensor, size: int) -> tuple[Tensor, Chunks]:
        """Return the indices of rows that have tokens in this pass, and the chunks of these rows."""
        if size not in self._layouts:
            assert self.lengths is not None
            segments = [Segment(i, 0, n, n, -1, 0) for i, n in enumerate(self.lengths) if n]
            rows = torch.tensor([segment.row for segment in segments]).to(x.device)
            self._layouts[size] = rows, chunks_of(segments, x.shape[:2], x.device, size)
        return self._layouts[size]


def _wide(*tensors: Any) -> list[Any]:
    """Cast tensors to float32, or to float64 if the third tensor is float64."""
    wide = torch.float64 if tensors[2].dtype == torch.float64 else torch.float32
    return [x if x is None else x.to(wide) for x in tensors]


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
    """Compute one token of a recurrence. The state ``(n, G, dk, r, dv)`` is changed in place.

    Args:
        state: ``(n, G, dk, r, dv)`` state. Must be contiguous.
        q: ``(n, 1, G, dk)`` queries.
        k: ``(n, 1, G, dk)`` keys.
        v: ``(n, 1, G * r, dv)`` values.
        log_decay: Logs of decays, expandable to the shape of the state.
        beta: ``(n, 1, G * r)`` step sizes. None: a state space model, which has no delta rule.

    Returns:
        ``(n, 1, G * r, dv)`` outputs.
    """
    n, groups, size, repeats, width = state.shape
    state.mul_(log_decay.exp())
    matrices = state.view(n * groups, size, repeats * width)
    keys, queries = k.reshape(-1, 1, size), q.reshape(-1, 1, size)
    values = v.reshape(-1, 1, repeats * width)
    if beta is not None:
        values = torch.baddbmm(values, keys, matrices, alpha=-1)
        values = (values.view(n, groups, repeats, width) * beta.view(n, groups, repeats, 1)).view_as(values)
    matrices.baddbmm_(keys.mT, values)
    return (queries @ matrices).view(v.shape)
