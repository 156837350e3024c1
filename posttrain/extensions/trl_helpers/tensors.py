"""Tensor helpers with TRL's names: padding, masked statistics, and log-softmax of selected tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.errors import ArgumentTypeError, ConfigError, DataError, check_choice

WHITEN_EPS = 1e-8  # Constant that is added to the variance, so that equal values do not cause a division by zero.


def pad(
    tensors: Sequence[Tensor],
    padding_value: float = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> Tensor:
    """Stack N tensors with the same number of dimensions. Each dimension is padded to its maximum over all tensors.

    Args:
        tensors: N tensors with the same number of dimensions (at least 1), dtype and device.
        padding_value: Padding value. The tensors' dtype must be able to represent this value.
        padding_side: ``left`` or ``right``, for the first dimension. All other dimensions are padded on the right.
        pad_to_multiple_of: Round the first dimension up to a multiple of this number. None: no rounding.

    Returns:
        A tensor ``(N, D0, D1, ...)`` with the dtype and device of the given tensors.

    Raises:
        ConfigError: ``padding_side`` is unknown, or ``pad_to_multiple_of`` is below 1.
        DataError: ``tensors`` is empty, or the tensors' dimensions, dtypes or devices differ.
        ArgumentTypeError: An item is not a tensor.

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
        raise DataError(f"padding_value={padding_value} cannot be represented in the tensors' dtype {first.dtype}.")
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
                f"pad: tensor {i} is a scalar (0 dimensions), which cannot be padded. Stack scalars instead."
            )
        for what, mine, theirs in (
            ("dimensions", t.dim(), first.dim()),
            ("dtype", t.dtype, first.dtype),
            ("device", t.device, first.device),
        ):
            if mine != theirs:
                raise DataError(
                    f"pad: tensor {i} has {what} {mine}, but tensor 0 has {theirs}. Convert them first. Otherwise padding "
                    "would silently change values."
                )


def pad_to_length(tensor: Tensor, length: int, pad_value: float, dim: int = -1) -> Tensor:
    """Pad dimension ``dim`` on the right to ``length``. A tensor of this length or longer is returned unchanged.

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
    """Move the entries whose mask is 1 to the left of each row. Remove the columns at the end that are empty in every row.

    The order of the entries whose mask is 1 does not change.

    Args:
        mask: Mask ``(N, M)`` of 0 and 1, with any integer, floating-point or bool dtype.
        *tensors: Tensors ``(N, M, ...)`` whose entries are moved with the mask.
        fill_value: Value of entries whose mask is 0: one number for all tensors, or one number per tensor.

    Returns:
        The moved mask ``(N, W)``. W is the largest number of ones in a row. With tensors, the result is the tuple ``(mask,
        *tensors)``.

    Raises:
        DataError: The mask is not two-dimensional or has other values than 0 and 1, or the shape of a tensor does not match.

    >>> flush_left(torch.tensor([[0, 1, 0, 1]]), torch.tensor([[7, 20, 7, 21]]))
    (tensor([[1, 1]]), tensor([[20, 21]]))
    """
    if mask.dim() != 2:
        raise DataError(f"flush_left: the mask has shape {tuple(mask.shape)}; it must be (N, M).")
    valid = mask.bool()
    if not torch.equal(valid.to(mask.dtype), mask):
        raise DataError("flush_left: the mask has values other than 0 and 1.")
    width = int(valid.sum(1).max()) if valid.numel() else 0
    order = (~valid).int().argsort(dim=1, stable=True)[:, :width]
    moved = valid.gather(1, order)
    if not tensors:
        return moved.to(mask.dtype)
    fills = list(fill_value) if isinstance(fill_value, Sequence) else [fill_value] * len(tensors)
    if len(fills) != len(tensors):
        raise DataError(
            f"flush_left: {len(fills)} fill values for {len(tensors)} tensors. Pass one value, or one per tensor."
        )
    out = [moved.to(mask.dtype)]
    for i, (tensor, fill) in enumerate(zip(tensors, fills, strict=True)):
        if tensor.shape[:2] != mask.shape:
            raise DataError(
                f"flush_left: tensor {i} has shape {tuple(tensor.shape)}, but the mask has {tuple(mask.shape)}. The "
                "first two dimensions must be equal."
            )
        trailing = (1,) * (tensor.dim() - 2)
        index = order.reshape(*order.shape, *trailing).expand(*order.shape, *tensor.shape[2:])
        hidden = ~moved.reshape(*moved.shape, *trailing)
        out.append(tensor.gather(1, index).masked_fill(hidden, fill))
    return tuple(out)


def first_true_indices(bools: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Return the index of the first true entry along the last axis, or the length of the axis if no entry is true.

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
    """Keep each row up to and including its first stop token, and replace all later tokens by padding.

    Args:
        input_ids: Integer token ids, ``(..., L)``.
        stop_token_id: One or several ids of stop tokens.
        pad_token_id: Id that replaces the tokens after the stop token. It may equal the stop token.

    Returns:
        The truncated ids, and a mask that is 1 for kept tokens. Both have the shape and dtype of ``input_ids``.

    Raises:
        DataError: The list of stop tokens is empty.

    >>> truncate_right(torch.tensor([[5, 8, 6, 8]]), stop_token_id=8, pad_token_id=0)
    (tensor([[5, 8, 0, 0]]), tensor([[1, 1, 0, 0]]))
    """
    stops = torch.as_tensor(stop_token_id, device=input_ids.device).reshape(-1)
    if stops.numel() == 0:
        raise DataError("truncate_right: stop_token_id is an empty list, so nothing would be truncated. Pass an id.")
    ends = first_true_indices(torch.isin(input_ids, stops)).unsqueeze(-1)
    mask = torch.arange(input_ids.shape[-1], device=input_ids.device) <= ends
    return input_ids.masked_fill(~mask, pad_token_id), mask.to(input_ids.dtype)


def nanstd(tensor: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Compute the standard deviation of values that are not NaN: ``sqrt(n / (n - 1) * mean((x - mu)^2))``.

    Args:
        tensor: Tensor of any shape. Integers are converted to the default floating-point dtype.
        dim: Dimension or dimensions to reduce. None: all dimensions.
        keepdim: Whether to keep reduced dimensions with size 1.

    Returns:
        The standard deviation, or NaN for fewer than two values.

    >>> nanstd(torch.tensor([2.0, 4.0, float("nan"), 9.0]))
    tensor(3.6056)
    """
    x = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
    dims = tuple(range(x.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    valid = ~wide.isnan()
    n = valid.sum(dims, keepdim=keepdim)
    squares = (wide - wide.nanmean(dims, keepdim=True)).square().masked_fill(~valid, 0.0)
    variance = squares.sum(dims, keepdim=keepdim) / (n - 1).clamp_min(1)
    return variance.sqrt().masked_fill(n < 2, math.nan).to(x.dtype)


def _nan_extreme(tensor: Tensor, largest: bool) -> Tensor:
    x = tensor[~tensor.isnan()]
    if x.numel() == 0:
        dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
        return torch.full((), math.nan, dtype=dtype, device=tensor.device)
    return x.max() if largest else x.min()


def nanmin(tensor: Tensor) -> Tensor:
    """Return the smallest value of a tensor that is not NaN. Return NaN if all values are NaN."""
    return _nan_extreme(tensor, largest=False)


def nanmax(tensor: Tensor) -> Tensor:
    """Return the largest value of a tensor that is not NaN. Return NaN if all values are NaN."""
    return _nan_extreme(tensor, largest=True)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Compute the mean ``sum(v m) / sum(m)`` of values v with mask m. The result is NaN if all entries of the mask are 0.

    Args:
        values: Tensor of any shape. Values whose mask is 0 may be NaN.
        mask: Mask or weights with the shape of ``values``.
        axis: Dimension or dimensions to reduce. None: all dimensions.

    >>> masked_mean(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0]))
    tensor(2.5000)
    """
    weighted = values.masked_fill(~mask.bool(), 0) * mask
    if axis is None:
        return weighted.sum() / mask.sum()
    return weighted.sum(axis) / mask.sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Compute the variance of the values whose mask is 1. With ``unbiased``, multiply it by ``n / (n - 1)``. The variance
    of a single value is 0.

    Args:
        values: Tensor of any shape.
        mask: Mask with the shape of ``values``. Its entries are 0 and 1.
        unbiased: Whether to apply Bessel's correction.

    Raises:
        DataError: All entries of the mask are 0.

    >>> masked_var(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0]))
    tensor(0.5000)
    """
    n = mask.sum()
    if n == 0:
        raise DataError(f"masked_var: the mask of shape {tuple(mask.shape)} selects none of its {mask.numel()} values.")
    values = values.masked_fill(~mask.bool(), 0)
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return variance * n / (n - 1).clamp_min(1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Compute ``(v - mean) / sqrt(var + 1e-8)``. Mean and variance are computed from the values whose mask is 1.

    Args:
        values: Tensor of any shape.
        mask: Mask with the shape of ``values``. Its entries are 0 and 1.
        shift_mean: Whether to subtract the mean. False: only change the scale.

    Returns:
        Tensor with the shape of ``values``. If the mask selects only one value, ``values`` is returned unchanged,
        because the variance of one value is undefined.

    Raises:
        DataError: All entries of the mask are 0.
    """
    variance = masked_var(values, mask)
    if mask.sum() < 2:
        return values
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(variance + WHITEN_EPS)
    return whitened if shift_mean else whitened + mean


# Maximum number of bytes of float32 logits per chunk. On a CPU, chunks of 1 to 16 MiB are equally fast, and chunks of 64 MiB
# take twice as long. On an accelerator, larger chunks are faster, because fewer kernels are launched.
CHUNK_BYTES = {"cpu": 16 * 2**20}
ACCELERATOR_CHUNK_BYTES = 256 * 2**20


def _chunk_of(logits: Tensor, index: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute log-probs ``(n, K)`` and entropies ``(n,)`` of a chunk of logits ``(n, V)`` in float32 or a wider dtype."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    x = x - x.amax(-1, keepdim=True).detach()
    log_z = x.logsumexp(-1)
    # A logit of -inf has probability 0. Replace it with 0, because 0 * -inf would be NaN.
    weighted = x.softmax(-1) * x.masked_fill(x == -math.inf, 0.0)
    return x.gather(-1, index) - log_z.unsqueeze(-1), log_z - weighted.sum(-1)


def _in_chunks(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute log-probs ``(N, K)`` and entropies ``(N,)`` chunk by chunk. The backward pass recomputes the softmax of each
    chunk.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0: logits are divided by it.")
    if logits.dim() < 1 or not logits.is_floating_point():
        raise DataError(
            f"logits of shape {tuple(logits.shape)} and dtype {logits.dtype}: expected floating-point numbers (..., V)."
        )
    rows, vocabulary = logits.shape[:-1], logits.shape[-1]
    if index.shape[: len(rows)] != rows or index.dim() not in (len(rows), len(rows) + 1):
        raise DataError(
            f"index has shape {tuple(index.shape)}, but the logits have {tuple(logits.shape)}. index must have the "
            f"shape {tuple(rows)}, optionally with one more dimension of selected tokens."
        )
    if row_mask is not None and row_mask.shape != rows:
        raise DataError(f"row_mask has shape {tuple(row_mask.shape)}, but the logits have rows {tuple(rows)}.")
    n = rows.numel()
    flat, index = (
        logits.reshape(n, vocabulary),
        index.reshape(n, -1 if index.numel() else index.shape[len(rows) :].numel()),
    )
    selected = None if row_mask is None else row_mask.reshape(-1).bool().nonzero().squeeze(1)
    if selected is not None:
        flat, index = flat[selected], index[selected]
    size = chunk or max(1, CHUNK_BYTES.get(logits.device.type, ACCELERATOR_CHUNK_BYTES) // (4 * max(1, vocabulary)))
    parts = zip(flat.split(size), index.split(size), strict=True)
    chunks = [checkpoint(_chunk_of, part, chosen, temperature, use_reentrant=False) for part, chosen in parts]
    logp, entropy = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
    if selected is None:
        return logp, entropy
    return logp.new_zeros(n, index.shape[1]).index_copy(0, selected, logp), entropy.new_zeros(n).index_copy(
        0, selected, entropy
    )


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    *,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``logits[index] / T - logsumexp(logits / T)`` over the last axis. The result equals ``log_softmax`` followed
    by ``gather``, but needs less memory.

    Args:
        logits: Floating-point logits, ``(..., V)``.
        index: Selected token ids in ``[0, V)``, int64 ``(...)`` or ``(..., K)``.
        temperature: Temperature T, above 0.
        row_mask: Bool mask ``(...)``. Rows whose mask is False return 0 and get no gradient. Their logits and indices are
            not read.
        out_dtype: Dtype of the result. None: the dtype of the logits. Use ``torch.float32`` for importance ratios,
            which are noisy in half precision.

    Returns:
        Log-probs in nats with the shape of ``index``. A logit of ``-inf`` has the log-prob ``-inf``.

    Raises:
        ConfigError: ``temperature`` is not above 0.
        DataError: The shapes of the arguments do not match.

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
    """Compute the entropy ``H = -sum_v p_v log p_v`` in nats of ``p = softmax(logits / T)``. The result has the shape
    ``(...)``. A logit of ``-inf`` contributes 0.

    ``chunk_size`` is the number of rows per chunk. See `selective_log_softmax` for all other arguments.

    Raises:
        ConfigError: ``chunk_size`` is below 1, or ``temperature`` is not above 0.
        DataError: The shapes do not match.

    >>> entropy_from_logits(torch.zeros(4))
    tensor(1.3863)
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size={chunk_size}, the number of rows per chunk, must be at least 1.")
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
    """Compute `selective_log_softmax` and `entropy_from_logits` in one pass over the logits.

    With ``entropy_requires_grad=False``, the entropy has no gradient. Use this setting if the entropy is only logged.
    """
    logp, entropy = _in_chunks(logits, index, temperature, row_mask)
    entropy = entropy if entropy_requires_grad else entropy.detach()
    dtype = out_dtype or logits.dtype
    return logp.reshape(index.shape).to(dtype), entropy.reshape(logits.shape[:-1]).to(dtype)
