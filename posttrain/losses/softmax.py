"""Log-probabilities of chosen tokens and entropies from logits that already exist.

Where the hidden states are at hand, ``token_logprobs`` is the better choice: it never builds the logits. These functions
are for logits that somebody else made. All of them read the logits once, a chunk of rows at a time, in float32 (float64
for float64 logits), and compute the chunk again in the backward pass instead of keeping an ``(N, V)`` softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, DataError

__all__ = ["entropy_from_logits", "selective_log_softmax", "selective_log_softmax_and_entropy"]

# Float32 logits at a time. On a CPU 1 to 16 MiB were equally fast and 64 MiB took twice as long; an accelerator wants fewer,
# larger launches.
CHUNK_BYTES = {"cpu": 16 * 2**20}
ACCELERATOR_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the rows are read: which of them, how many at a time, divided by what, and what is wanted."""

    chunk: int
    temperature: float
    entropy: bool
    entropy_grad: bool

    def parts(self, rows: Tensor | None, n: int) -> list[Any]:
        """Selectors of chunks of rows: slices, or the indices of the rows that count."""
        if rows is None:
            return [slice(i, i + self.chunk) for i in range(0, n, self.chunk)]
        return list(rows.split(self.chunk)) if rows.numel() else []

    def read(self, logits: Tensor, part: Any, wide: torch.dtype) -> Tensor:
        """A fresh, tempered copy of a chunk that may be written to."""
        x = logits[part].to(wide, copy=True)
        return x if self.temperature == 1.0 else x.div_(self.temperature)


def _clamped(x: Tensor) -> Tensor:
    """-inf made finite, in place: its probability stays 0, and 0 times it is 0 instead of NaN."""
    return x.clamp_(min=torch.finfo(x.dtype).min)


class _SelectiveLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, rows: Tensor | None, plan: _Plan) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        n = logits.shape[0]
        logp = logits.new_zeros(index.shape, dtype=wide)  # (N, K)
        log_z = logits.new_zeros(n, dtype=wide)
        entropy = logits.new_zeros(n if plan.entropy else 0, dtype=wide)
        for part in plan.parts(rows, n):
            x = plan.read(logits, part, wide)
            top = x.amax(1, keepdim=True)
            x.sub_(top)
            chosen = x.gather(1, index[part])
            e = _clamped(x).exp()
            z = e.sum(1, keepdim=True)
            log_sum = z.log()
            logp[part] = chosen - log_sum
            log_z[part] = (top + log_sum).squeeze(1)
            if plan.entropy:
                entropy[part] = log_sum.squeeze(1) - torch.linalg.vecdot(e, x) / z.squeeze(1)
        ctx.save_for_backward(logits, index, rows, log_z, entropy)
        ctx.plan = plan
        if not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, index, rows, log_z, entropy = ctx.saved_tensors
        plan: _Plan = ctx.plan
        grad = torch.empty_like(logits) if rows is None else torch.zeros_like(logits)
        for part in plan.parts(rows, logits.shape[0]):
            lp = _clamped(plan.read(logits, part, log_z.dtype).sub_(log_z[part].unsqueeze(1)))
            g = grad_logp[part]
            # d logp_y / dx_v = [v = y] - p_v        d H / dx_v = -p_v (log p_v + H)
            slope = g.sum(1, keepdim=True)
            if plan.entropy_grad:
                weight = grad_entropy[part].unsqueeze(1)
                slope = (lp + entropy[part].unsqueeze(1)).mul_(weight).add_(slope)
            dx = lp.exp_().mul_(slope).neg_()
            dx.scatter_add_(1, index[part], g)
            grad[part] = (dx if plan.temperature == 1.0 else dx.div_(plan.temperature)).to(grad.dtype)
        return grad, None, None, None


def _check(logits: Tensor, temperature: float, row_mask: Tensor | None) -> None:
    if logits.dim() < 1 or not logits.is_floating_point():
        raise DataError(
            f"logits of shape {tuple(logits.shape)} and dtype {logits.dtype}: expected floating-point numbers (..., V)."
        )
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0: logits are divided by it.")
    if row_mask is not None and row_mask.shape != logits.shape[:-1]:
        raise DataError(
            f"row_mask has shape {tuple(row_mask.shape)}, and the logits have rows {tuple(logits.shape[:-1])}; they must "
            "be the same."
        )


def _columns(logits: Tensor, index: Tensor, row_mask: Tensor | None) -> Tensor:
    """The index as ``(N, K)``, its masked rows made harmless."""
    rows = logits.shape[:-1]
    if index.shape[: len(rows)] != rows or index.dim() not in (len(rows), len(rows) + 1):
        raise DataError(
            f"index has shape {tuple(index.shape)}, and the logits {tuple(logits.shape)}; index must be {tuple(rows)}, or "
            f"{tuple(rows)} and one more dimension of chosen tokens."
        )
    k = 1 if index.dim() == len(rows) else index.shape[-1]
    index = index.reshape(rows.numel(), k)
    if row_mask is not None:
        index = index.masked_fill(~row_mask.reshape(-1, 1).bool(), 0)
    # On an accelerator the check would wait for the device; there a bad index fails in the gather.
    if (
        index.device.type == "cpu"
        and index.numel()
        and not 0 <= int(index.min()) <= int(index.max()) < logits.shape[-1]
    ):
        raise DataError(
            f"index spans {int(index.min())}..{int(index.max())}, and the vocabulary has {logits.shape[-1]} entries. "
            "Positions without a target (-100) belong in row_mask."
        )
    return index


def _run(logits: Tensor, index: Tensor, row_mask: Tensor | None, plan: _Plan) -> tuple[Tensor, Tensor]:
    rows = None if row_mask is None else row_mask.reshape(-1).bool().nonzero().squeeze(1)
    flat = logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])
    with torch.autocast(logits.device.type, enabled=False):  # It would round the products of the entropy.
        return _SelectiveLogSoftmax.apply(flat, index, rows, plan)


def _chunk(logits: Tensor) -> int:
    return max(1, CHUNK_BYTES.get(logits.device.type, ACCELERATOR_CHUNK_BYTES) // (4 * max(1, logits.shape[-1])))


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    *,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``logits[index] / T - logsumexp(logits / T)`` over the last axis: what ``log_softmax`` and ``gather`` would give.

    Args:
        logits: ``(..., V)`` floating point.
        index: ``(...)`` or ``(..., K)`` int64 in ``[0, V)``.
        temperature: T > 0.
        row_mask: ``(...)``; rows where it is false return 0, get no gradient, and neither their logits nor their index are
            read.
        out_dtype: Of the result; None is the dtype of the logits. Log-probs rounded to half precision make noisy ratios,
            so pass ``torch.float32`` for those.

    Returns:
        Log-probabilities in nats, in the shape of ``index``; ``-inf`` where the chosen logit is.

    Raises:
        ConfigError: ``temperature`` is not above 0. DataError: Shapes that do not fit, or an index outside the vocabulary.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    >>> selective_log_softmax(logits, torch.tensor([0, 1]))
    tensor([-0.6931, -0.3133])
    """
    _check(logits, temperature, row_mask)
    plan = _Plan(_chunk(logits), temperature, entropy=False, entropy_grad=False)
    logp, _ = _run(logits, _columns(logits, index, row_mask), row_mask, plan)
    return logp.reshape(index.shape).to(out_dtype or logits.dtype)


def entropy_from_logits(
    logits: Tensor,
    chunk_size: int = 128,
    *,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``H = -sum_v p_v log p_v`` in nats, with ``p = softmax(logits / T)``; a logit of ``-inf`` contributes 0.

    Args:
        logits: ``(..., V)`` floating point.
        chunk_size: Rows at a time.
        temperature: T > 0.
        row_mask: ``(...)``; rows where it is false return 0 and are not read.
        out_dtype: Of the result; None is the dtype of the logits.

    Returns:
        ``(...)`` entropies.

    Raises:
        ConfigError: ``chunk_size`` below 1, or ``temperature`` not above 0. DataError: Shapes that do not fit.

    >>> entropy_from_logits(torch.zeros(4))
    tensor(1.3863)
    """
    _check(logits, temperature, row_mask)
    if chunk_size < 1:
        raise ConfigError(f"chunk_size={chunk_size} must be at least 1: it is how many rows are read at a time.")
    none = torch.empty(logits.shape[:-1].numel(), 0, dtype=torch.long, device=logits.device)
    plan = _Plan(chunk_size, temperature, entropy=True, entropy_grad=True)
    _, entropy = _run(logits, none, row_mask, plan)
    return entropy.reshape(logits.shape[:-1]).to(out_dtype or logits.dtype)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`selective_log_softmax` and `entropy_from_logits` in one pass over the logits.

    Args:
        logits: ``(..., V)`` floating point.
        index: ``(...)`` or ``(..., K)`` int64.
        entropy_requires_grad: False returns an entropy without gradient, for logging.
        temperature: T > 0, of both.
        row_mask: ``(...)``, of both.
        out_dtype: Of both results; None is the dtype of the logits.

    Returns:
        Log-probabilities in the shape of ``index``, and entropies ``(...)``, both in nats.

    Raises:
        ConfigError, DataError: As `selective_log_softmax`.
    """
    _check(logits, temperature, row_mask)
    plan = _Plan(_chunk(logits), temperature, entropy=True, entropy_grad=entropy_requires_grad)
    logp, entropy = _run(logits, _columns(logits, index, row_mask), row_mask, plan)
    dtype = out_dtype or logits.dtype
    return logp.reshape(index.shape).to(dtype), entropy.reshape(logits.shape[:-1]).to(dtype)
