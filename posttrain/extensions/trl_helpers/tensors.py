"""Helpers on tensors by TRL's names: padding, masked statistics, log-softmax of chosen tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.errors import ArgumentTypeError, ConfigError, DataError, check_choice

WHITEN_EPS = 1e-8  # Keeps the division finite when all values are equal.


def pad(
    tensors: Sequence[Tensor],
    padding_value: float = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> Tensor:
    """Stack N tensors of equal rank, each dimension as long as the longest of them.

    Args:
        tensors: N tensors of one rank (at least 1), dtype and device.
        padding_value: What fills the rest; must be a number that the dtype can hold.
        padding_side: ``left`` or ``right``, of the first dimension; the others are always filled on the right.
        pad_to_multiple_of: Rounds the first dimension up; None leaves it.

    Returns:
        ``(N, D0, D1, ...)`` in the dtype and on the device of the tensors.

    Raises:
        ConfigError: An unknown side, or a multiple below 1. DataError: No tensors, or tensors that do not belong together.
        ArgumentTypeError: Something that is no tensor.

    >>> pad([torch.tensor([1, 2, 3]), torch.tensor([4])], padding_value=9, padding_side="left")
    tensor([[1, 2, 3],
            [9, 9, 4]])
    """
    check_choice("padding_side", padding_side, ("left", "right"))
    if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
        raise ConfigError(f"pad_to_multiple_of={pad_to_multiple_of} must be at least 1, or None for no rounding.")
    _check_alike(tensors)
    first = tensors[0]
    if not first.is_floating_point() and not float(padding_value).is_integer():
        raise DataError(f"padding_value={padding_value} does not fit the tensors' dtype {first.dtype}.")
    shape = [max(t.shape[d] for t in tensors) for d in range(first.dim())]
    if pad_to_multiple_of is not None:
        shape[0] = math.ceil(shape[0] / pad_to_multiple_of) * pad_to_multiple_of
    out = torch.full((len(tensors), *shape), padding_value, dtype=first.dtype, device=first.device)
    for i, t in enumerate(tensors):
        start = shape[0] - t.shape[0] if padding_side == "left" else 0
        out[(i, slice(start, start + t.shape[0]), *(slice(size) for size in t.shape[1:]))] = t
    return out


def _check_alike(tensors: Sequence[Tensor]) -> None:
    if len(tensors) == 0:
        raise DataError("pad got no tensors; it needs at least one.")
    first = tensors[0]
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise ArgumentTypeError(f"pad: item {i} is a {type(t).__name__}; every item must be a torch.Tensor.")
        if t.dim() == 0:
            raise DataError(
                f"pad: tensor {i} is a scalar (0 dimensions); there is nothing to pad. Stack scalars instead."
            )
        for what, mine, theirs in (
            ("dimensions", t.dim(), first.dim()),
            ("dtype", t.dtype, first.dtype),
            ("device", t.device, first.device),
        ):
            if mine != theirs:
                raise DataError(
                    f"pad: tensor {i} has {what} {mine}, and tensor 0 has {theirs}. Convert them first; padding would "
                    "otherwise change values silently."
                )


def pad_to_length(tensor: Tensor, length: int, pad_value: float, dim: int = -1) -> Tensor:
    """Fill ``dim`` on the right up to ``length``; a tensor that is as long or longer is returned as it is, never cut.

    >>> pad_to_length(torch.tensor([[1, 2]]), 4, 0)
    tensor([[1, 2, 0, 0]])
    """
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=dim)


def flush_left(mask: Tensor, *tensors: Tensor, fill_value: float | Sequence[float] = 0) -> Tensor | tuple[Tensor, ...]:
    """Move what the mask keeps to the left of each row, in order, and cut the columns that no row needs.

    Gaps in a row close; no kept entry is ever lost.

    Args:
        mask: ``(N, M)`` of 0 and 1, any integer, floating or bool dtype.
        *tensors: ``(N, M, ...)`` each, moved the same way.
        fill_value: Written where the result is masked; one number for all tensors, or one for each.

    Returns:
        The mask ``(N, W)``, W the largest number of ones in a row; with tensors the tuple ``(mask, *tensors)``.

    Raises:
        DataError: A mask that is not two-dimensional or holds something else than 0 and 1, or shapes that do not fit.

    >>> flush_left(torch.tensor([[0, 1, 0, 1]]), torch.tensor([[7, 20, 7, 21]]))
    (tensor([[1, 1]]), tensor([[20, 21]]))
    """
    if mask.dim() != 2:
        raise DataError(f"flush_left: the mask has shape {tuple(mask.shape)}; it must be (N, M).")
    kept = mask.bool()
    if not torch.equal(kept.to(mask.dtype), mask):
        raise DataError("flush_left: the mask holds values other than 0 and 1.")
    width = int(kept.sum(1).max()) if kept.numel() else 0
    order = (~kept).int().argsort(dim=1, stable=True)[:, :width]
    moved = kept.gather(1, order)
    if not tensors:
        return moved.to(mask.dtype)
    fills = list(fill_value) if isinstance(fill_value, Sequence) else [fill_value] * len(tensors)
    if len(fills) != len(tensors):
        raise DataError(f"flush_left: {len(fills)} fill values for {len(tensors)} tensors; give one, or one for each.")
    out = [moved.to(mask.dtype)]
    for i, (tensor, fill) in enumerate(zip(tensors, fills, strict=True)):
        if tensor.shape[:2] != mask.shape:
            raise DataError(
                f"flush_left: tensor {i} has shape {tuple(tensor.shape)}, and the mask {tuple(mask.shape)}; the first two "
                "dimensions must be the same."
            )
        trailing = (1,) * (tensor.dim() - 2)
        index = order.reshape(*order.shape, *trailing).expand(*order.shape, *tensor.shape[2:])
        hidden = ~moved.reshape(*moved.shape, *trailing)
        out.append(tensor.gather(1, index).masked_fill(hidden, fill))
    return tuple(out)


def first_true_indices(bools: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Index of the first true entry along the last axis, or the axis' length where there is none.

    >>> first_true_indices(torch.tensor([[False, True, True], [False, False, False]]))
    tensor([1, 3])
    """
    length = bools.shape[-1]
    positions = torch.arange(length, device=bools.device).expand(bools.shape)
    padded = torch.nn.functional.pad(positions.masked_fill(~bools.bool(), length), (0, 1), value=length)
    return padded.amin(-1).to(dtype)


def truncate_right(
    input_ids: Tensor, stop_token_id: int | Sequence[int] | Tensor, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Keep each row up to and including its first stop token; the rest becomes padding.

    Args:
        input_ids: ``(..., L)`` integer.
        stop_token_id: One id, or several: a model may have more than one that ends a turn.
        pad_token_id: Written behind the stop token; may equal it.

    Returns:
        The ids, and a mask in their dtype with 1 on what was kept; both in the shape of ``input_ids``.

    Raises:
        DataError: An empty list of stop tokens.

    >>> truncate_right(torch.tensor([[5, 8, 6, 8]]), stop_token_id=8, pad_token_id=0)
    (tensor([[5, 8, 0, 0]]), tensor([[1, 1, 0, 0]]))
    """
    stops = torch.as_tensor(stop_token_id, device=input_ids.device).reshape(-1)
    if stops.numel() == 0:
        raise DataError("truncate_right: stop_token_id is an empty list, so nothing would ever be cut. Give an id.")
    ends = first_true_indices(torch.isin(input_ids, stops)).unsqueeze(-1)
    kept = torch.arange(input_ids.shape[-1], device=input_ids.device) <= ends
    return input_ids.masked_fill(~kept, pad_token_id), kept.to(input_ids.dtype)


def nanstd(tensor: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Standard deviation of what is not NaN: ``sqrt(n / (n - 1) * mean((x - mu)^2))``.

    Args:
        tensor: Any shape; integers are computed in the default floating dtype.
        dim: Dimension or dimensions to reduce, negative ones counted from the end; None is all.
        keepdim: Keep reduced dimensions with size 1.

    Returns:
        NaN where fewer than two numbers are left.

    >>> nanstd(torch.tensor([2.0, 4.0, float("nan"), 9.0]))
    tensor(3.6056)
    """
    x = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
    dims = tuple(range(x.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    known = ~wide.isnan()
    n = known.sum(dims, keepdim=keepdim)
    squares = (wide - wide.nanmean(dims, keepdim=True)).square().masked_fill(~known, 0.0)
    variance = squares.sum(dims, keepdim=keepdim) / (n - 1).clamp_min(1)
    return variance.sqrt().masked_fill(n < 2, math.nan).to(x.dtype)


def _nan_extreme(tensor: Tensor, largest: bool) -> Tensor:
    x = tensor[~tensor.isnan()]
    if x.numel() == 0:
        dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
        return torch.full((), math.nan, dtype=dtype, device=tensor.device)
    return x.max() if largest else x.min()


def nanmin(tensor: Tensor) -> Tensor:
    """The smallest value that is not NaN; NaN, in the dtype and on the device of the tensor, when there is none."""
    return _nan_extreme(tensor, largest=False)


def nanmax(tensor: Tensor) -> Tensor:
    """The largest value that is not NaN; NaN, in the dtype and on the device of the tensor, when there is none."""
    return _nan_extreme(tensor, largest=True)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """``sum(v m) / sum(m)``; NaN where the mask is empty. What the mask leaves out is not read, so it may be NaN.

    Args:
        values: Any shape.
        mask: Same shape, bool or weights.
        axis: Dimension or dimensions to reduce; None is all.

    >>> masked_mean(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0]))
    tensor(2.5000)
    """
    weighted = values.masked_fill(~mask.bool(), 0) * mask
    if axis is None:
        return weighted.sum() / mask.sum()
    return weighted.sum(axis) / mask.sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance about the masked mean, times ``n / (n - 1)`` when ``unbiased``; 0 for a single value.

    Args:
        values: Any shape.
        mask: Same shape, of 0 and 1.
        unbiased: Apply Bessel's correction.

    Raises:
        DataError: The mask is empty.

    >>> masked_var(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0]))
    tensor(0.5000)
    """
    n = mask.sum()
    if n == 0:
        raise DataError(f"masked_var: the mask of shape {tuple(mask.shape)} keeps none of its {mask.numel()} values.")
    values = values.masked_fill(~mask.bool(), 0)
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return variance * n / (n - 1).clamp_min(1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """``(v - mean) / sqrt(var + 1e-8)`` with the statistics of what the mask keeps.

    Args:
        values: Any shape.
        mask: Same shape, of 0 and 1.
        shift_mean: False adds the mean back: only the scale changes.

    Returns:
        Same shape as ``values``; a mask with a single value leaves them unchanged, since one value has no spread.

    Raises:
        DataError: The mask is empty.
    """
    variance = masked_var(values, mask)
    if mask.sum() < 2:
        return values
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(variance + WHITEN_EPS)
    return whitened if shift_mean else whitened + mean


# Float32 logits at a time. On a CPU 1 to 16 MiB were equally fast and 64 MiB took twice as long; an accelerator wants fewer,
# larger launches.
CHUNK_BYTES = {"cpu": 16 * 2**20}
ACCELERATOR_CHUNK_BYTES = 256 * 2**20


def _chunk_of(logits: Tensor, index: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs ``(n, K)`` and entropies ``(n,)`` of a chunk of rows ``(n, V)``, at least in float32."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    x = x - x.amax(-1, keepdim=True).detach()
    log_z = x.logsumexp(-1)
    # A logit of -inf has probability 0, and 0 times it must be 0 instead of NaN.
    weighted = x.softmax(-1) * x.masked_fill(x == -math.inf, 0.0)
    return x.gather(-1, index) - log_z.unsqueeze(-1), log_z - weighted.sum(-1)


def _in_chunks(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs ``(N, K)`` and entropies ``(N,)``; backward computes each chunk's softmax again, so that none is kept."""
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0: logits are divided by it.")
    if logits.dim() < 1 or not logits.is_floating_point():
        raise DataError(
            f"logits of shape {tuple(logits.shape)} and dtype {logits.dtype}: expected floating-point numbers (..., V)."
        )
    rows, vocabulary = logits.shape[:-1], logits.shape[-1]
    if index.shape[: len(rows)] != rows or index.dim() not in (len(rows), len(rows) + 1):
        raise DataError(
            f"index has shape {tuple(index.shape)}, and the logits {tuple(logits.shape)}; index must be {tuple(rows)}, or "
            f"{tuple(rows)} and one more dimension of chosen tokens."
        )
    if row_mask is not None and row_mask.shape != rows:
        raise DataError(f"row_mask has shape {tuple(row_mask.shape)}, and the logits have rows {tuple(rows)}.")
    n = rows.numel()
    flat, index = (
        logits.reshape(n, vocabulary),
        index.reshape(n, -1 if index.numel() else index.shape[len(rows) :].numel()),
    )
    kept = None if row_mask is None else row_mask.reshape(-1).bool().nonzero().squeeze(1)
    if kept is not None:
        flat, index = flat[kept], index[kept]
    size = chunk or max(1, CHUNK_BYTES.get(logits.device.type, ACCELERATOR_CHUNK_BYTES) // (4 * max(1, vocabulary)))
    parts = zip(flat.split(size), index.split(size), strict=True)
    chunks = [checkpoint(_chunk_of, part, chosen, temperature, use_reentrant=False) for part, chosen in parts]
    logp, entropy = (torch.cat(one) for one in zip(*chunks, strict=True))
    if kept is None:
        return logp, entropy
    return logp.new_zeros(n, index.shape[1]).index_copy(0, kept, logp), entropy.new_zeros(n).index_copy(
        0, kept, entropy
    )


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
        ConfigError: ``temperature`` is not above 0. DataError: Shapes that do not fit.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    >>> selective_log_softmax(logits, torch.tensor([0, 1]))
    tensor([-0.6931, -0.3133])
    """
    logp, _ = _in_chunks(logits, index, temperature, row_mask)
    return logp.reshape(index.shape).to(out_dtype or logits.dtype)


def entropy_from_logits(
    logits: Tensor,
    chunk_size: int = 128,
    *,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``H = -sum_v p_v log p_v`` in nats, ``(...)``, with ``p = softmax(logits / T)``; a logit of ``-inf`` contributes 0.

    ``chunk_size`` rows are computed at a time; the other arguments are those of `selective_log_softmax`.

    Raises:
        ConfigError: ``chunk_size`` below 1, or ``temperature`` not above 0. DataError: Shapes that do not fit.

    >>> entropy_from_logits(torch.zeros(4))
    tensor(1.3863)
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size={chunk_size} must be at least 1: it is how many rows are read at a time.")
    none = torch.empty(*logits.shape[:-1], 0, dtype=torch.long, device=logits.device)
    _, entropy = _in_chunks(logits, none, temperature, row_mask, chunk_size)
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

    With ``entropy_requires_grad=False`` the entropy has no gradient, for logging.
    """
    logp, entropy = _in_chunks(logits, index, temperature, row_mask)
    entropy = entropy if entropy_requires_grad else entropy.detach()
    dtype = out_dtype or logits.dtype
    return logp.reshape(index.shape).to(dtype), entropy.reshape(logits.shape[:-1]).to(dtype)
