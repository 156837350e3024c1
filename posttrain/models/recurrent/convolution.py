"""Short causal convolution along the paths of packed prefix trees (`short_convolution`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, before: list[Tensor]) -> Tensor:
    """Convolve each channel with a separate kernel. The output at a token depends on the token and the K - 1 tokens before
    it on its path.

    Args:
        x: ``(B, D, T)`` inputs.
        weight: ``(D, K)`` kernels. The last column applies to the token itself.
        bias: ``(D,)``. None: no bias.
        before: Flat indices of the K inputs of each output; see `posttrain.models.recurrent.chunks.predecessors`.

    Returns:
        ``(B, D, T)`` outputs. Inputs before the first token of a tree are 0.
    """
    rows, channels, width = x.shape
    flat = x.transpose(1, 2).reshape(rows * width, channels)
    out = _ShortConvolution.apply(flat, weight.T, before)
    out = out if bias is None else out + bias
    return out.view(rows, width, channels).transpose(1, 2)


class _ShortConvolution(torch.autograd.Function):
    """Autograd function that saves its input once, instead of K shifted copies of it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, before: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.before = before
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        out = x * weight[-1]
        for tap, index in zip(weight.flip(0)[1:], before[1:], strict=True):
            out.addcmul_(padded[index[:-1]], tap)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        dx, dweight = torch.zeros_like(padded), []
        for tap, index in zip(weight.flip(0), ctx.before, strict=True):
            dx.index_add_(0, index[:-1], grad * tap)
            dweight.append((grad * padded[index[:-1]]).sum(0))
        return dx[:-1], torch.stack(dweight[::-1]), None
