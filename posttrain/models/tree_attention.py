"""Tree attention: attention over packed prefix trees that is computed by several flash attention calls without a mask.

A row contains the segments of a prefix tree in depth-first order (`posttrain.types.Segment`). The later tokens that attend to
a segment therefore form a contiguous range of columns. The results of several calls are merged by their log-sum-exp
(``lse``)::

    for each segment n:   (out, lse) of q[own(n)]   on k[own(n)], causal
    for each segment n:   (out, lse) of q[below(n)] on k[own(n)], without a mask
    merge:                lse = logaddexp over a token's parts;   out = sum of out_part * exp(lse_part - lse)

Attention scores are computed only for pairs of tokens that attend to each other, and memory is O(T). A token has one part per
segment on its path. On a CPU, each part is one call of torch's flash operator. On CUDA, all parts of one level of all trees
are one call of torch's variable-length attention.

In the backward pass, flash attention recomputes probabilities from ``lse``, and needs ``D = rowsum(grad_out * out)``. Each
call gets the *merged* ``out`` and ``lse`` and returns the contributions of one part to dq, dk and dv. These contributions are
summed over parts.

Reference: Hydragen, arXiv:2402.05099 (prefix and suffix merged by log-sum-exp); Ring Attention, arXiv:2310.01889 (the backward
pass of parts).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posttrain.errors import ModelError
from posttrain.models import llama4
from posttrain.models.architecture import OWN_NAMES
from posttrain.models.capped_attention import Capped, capped_attention, capped_attention_backward
from posttrain.models.heads import attention_renamed, rename_attention
from posttrain.models.token_split import TokenSplit
from posttrain.types import Batch, Segment

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

logger = logging.getLogger(__name__)

# Name of the eager attention function in transformers' modeling files.
PLAIN = "eager_attention_forward"
# Backends of transformers that tree attention wraps, and that compute calls without a `Forest`.
BACKENDS = tuple(OWN_NAMES.values())
# Two sets of argument names of attention backends: arguments that tree attention supports, and arguments that do not change
# the result.
UNDERSTOOD = {
    "sliding_window",
    "s_aux",
    "softcap",
    "is_causal",
    "output_attentions",
    "output_router_logits",
    "use_cache",
    "cache_position",
    "position_ids",
}


class Part(NamedTuple):
    """One block of attention: a range of queries and a range of keys. The block contains either all pairs or only causal
    pairs.

    Attributes:
        row: Row of the batch.
        queries, keys: Ranges of columns.
        causal: Whether queries and keys are the same columns, so that attention is causal. If False, each query attends to
            all keys.
        ahead: Position of the first query minus position of the first key. None: no sliding window ends inside the part.
    """

    row: int
    queries: slice
    keys: slice
    causal: bool
    ahead: int | None = None


def parts_of(segments: Sequence[Segment], window: int | None = None, chunk: int | None = None) -> list[Part]:
    """Divide the attention of a batch into parts, i.e. blocks of queries and keys. The parts inside segments come first.

    Args:
        segments: Segments in depth-first order.
        window: Number of positions to which a token attends, including its own. None: no limit.
        chunk: Size of chunks of positions (Llama 4). A token attends only to its own chunk. None: no chunks.
    """
    if chunk is not None:
        inside = [part for segment in segments for part in _own_chunks(segment, chunk)]
        return inside + [part for segment in segments for part in _chunks_below(segment, segments, chunk)]
    own = [part for segment in segments for part in _own(segment, window)]
    return own + [part for segment in segments for part in _below(segment, segments, window)]


def _own(one: Segment, window: int | None) -> Iterator[Part]:
    size = one.stop - one.start if window is None else window
    for start in range(one.start, one.stop, size):
        stop = min(start + size, one.stop)
        yield Part(one.row, slice(start, stop), slice(start, stop), True)
        # In this part, a block of queries attends to the block of keys directly before it. The first query attends to all of
        # these keys except the first key. The second-last query attends only to the last key.
        seeing = min(stop, start + size - 1)
        if start > one.start and seeing > start:
            yield Part(one.row, slice(start, seeing), slice(start - size, start), False, size)


def _below(one: Segment, segments: Sequence[Segment], window: int | None) -> Iterator[Part]:
    if one.end == one.stop:
        return
    if window is None:
        yield Part(one.row, slice(one.stop, one.end), slice(one.start, one.stop), False)
        return
    last = one.position + one.stop - one.start - 1
    for other in segments:
        if other.row != one.row or not one.stop <= other.start < one.end:
            continue
        # Queries before column ``stop`` attend to the last key of the segment. The first query attends to keys from position
        # ``first`` on.
        stop = min(other.stop, other.start + last + window - other.position)
        first = max(one.position, other.position - window + 1)
        if stop <= other.start or first > last:
            continue
        keys = slice(one.start + first - one.position, one.stop)
        whole = other.position + (stop - other.start) - 1 - first < window
        yield Part(one.row, slice(other.start, stop), keys, False, None if whole else other.position - first)


def _own_chunks(one: Segment, chunk: int) -> Iterator[Part]:
    start = one.start
    while start < one.stop:
        stop = min(one.stop, start + chunk - (one.position + start - one.start) % chunk)
        yield Part(one.row, slice(start, stop), slice(start, stop), True)
        start = stop


def _chunks_below(one: Segment, segments: Sequence[Segment], chunk: int) -> Iterator[Part]:
    # ``after`` is the position after the end of the segment. A later segment can continue the last chunk from this position.
    after = one.position + one.stop - one.start
    first, end = after // chunk * chunk, -(-after // chunk) * chunk
    if one.end == one.stop or first == after:
        return
    keys = slice(max(one.start, one.stop - (after - first)), one.stop)
    for other in segments:
        if other.row == one.row and one.stop <= other.start < one.end and other.position < end:
            stop = min(other.stop, other.start + end - other.position)
            if stop > other.start and keys.stop > keys.start:
                yield Part(one.row, slice(other.start, stop), keys, False)


class Forest:
    """A batch and the cached data that all attention layers share when they compute tree attention for it. The object is
    passed as an argument of the model's forward call.

    The class is deliberately not a dataclass. FSDP2 copies dataclasses in the arguments of a layer to cast their tensors, and
    each layer would then recompute the cached values.

    Args:
        batch: The batch.
        split: Sequence-parallel group over which the columns are split. None: one process has all columns.
    """

    __slots__ = ("_kept", "_parts", "batch", "split")

    def __init__(self, batch: Batch, split: TokenSplit | None = None) -> None:
        self.batch, self.split = batch, split
        self._parts: dict[Any, list[Part]] = {}
        self._kept: dict[Any, Any] = {}

    def parts(self, window: int | None, chunk: int | None = None) -> list[Part]:
        """Return the parts of the batch's attention; see `parts_of`. The result is cached."""
        if (window, chunk) not in self._parts:
            self._parts[window, chunk] = parts_of(self.batch.segments, window, chunk)
        return self._parts[window, chunk]

    def mask(self, part: Part, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the mask of a part (see `_mask`), or None if no window ends in it. Parts of equal size and position
        difference share one mask.
        """
        if part.ahead is None:
            return None
        queries, keys = (side.stop - side.start for side in (part.queries, part.keys))
        return self.kept((queries, keys, part.ahead, window, dtype), lambda: _mask(part, window, dtype))

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the cached value of ``key``. If no value is cached, call ``make`` and cache its result. All layers of a
        pass share the cache.
        """
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @property
    def longest(self) -> int:
        """Length of the longest path of any tree, in positions."""
        return max((segment.position + segment.stop - segment.start for segment in self.batch.segments), default=0)


def _mask(part: Part, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of a part in which a sliding window ends. The mask covers only the part, not the whole row."""
    assert window is not None and part.ahead is not None
    queries = torch.arange(part.queries.stop - part.queries.start)
    keys = torch.arange(part.keys.stop - part.keys.start)
    hidden = queries[:, None] + part.ahead - keys >= window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


class Call(NamedTuple):
    """Attention options of one layer; see the arguments of `tree_attention`."""

    forest: Forest
    window: int | None
    scale: float
    softcap: float | None = None
    chunk: int | None = None


class _TreeAttention(torch.autograd.Function):
    """Compute ``softmax(scale * q k^T) v``. Each token attends to the tokens on its path; see the module's docstring."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        product = _by_parts if q.device.type == "cpu" else _by_levels
        out, lse = product(q, k, v, call)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse)[None, :, None])
            out = out * torch.sub(lse, total).exp_()[..., None].to(out.dtype)
            lse = total
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        product = _parts_backward if q.device.type == "cpu" else _levels_backward
        shares = product(grad, q, k, v, out, lse, ctx.call)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # A sink is an additional logit whose value vector is 0. Therefore d out / d sink = -p_sink * out.
            share = torch.sub(sinks.to(lse)[None, :, None], lse).exp_()
            dsinks = -(share * (grad * out).sum(-1).to(lse)).sum((0, 2)).to(sinks.dtype)
        return *shares, dsinks, None


def _by_parts(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compute tree attention with one call of torch's flash operator for CPUs per part. Return the output
    ``(B, heads, T, d)`` and the log-sum-exp ``(B, heads, T)``.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype).transpose(1, 2)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide).transpose(1, 2)
    for part in call.forest.parts(call.window, call.chunk):
        row, queries, keys = slice(part.row, part.row + 1), part.queries, part.keys
        mask, tensors = (
            call.forest.mask(part, call.window, q.dtype),
            (q[row, :, queries], k[row, :, keys], v[row, :, keys]),
        )
        if call.softcap is None:
            value, z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *tensors, 0.0, part.causal, attn_mask=mask, scale=call.scale
            )
        else:
            value, z = capped_attention(*tensors, Capped(part.causal, mask, call.scale, call.softcap))
        o, merged = out[row, :, queries], lse[row, :, queries]
        if part.causal:
            o.copy_(value)
            merged.copy_(z)
        else:
            _merge(o, merged, value, z)
    return out, lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the output of a part into ``out`` and ``lse``, in place. Half precision is computed in float32 and rounded once
    per part.
    """
    total = torch.logaddexp(lse, part_lse)
    scale, added = torch.sub(lse, total).exp_()[..., None], torch.sub(part_lse, total).exp_()[..., None]
    if out.dtype == scale.dtype:
        out.mul_(scale).addcmul_(part, added)
    else:
        out.copy_(out * scale + part * added)
    lse.copy_(total)


def _parts_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for part in call.forest.parts(call.window, call.chunk):
        row, queries, keys = slice(part.row, part.row + 1), part.queries, part.keys
        mask = call.forest.mask(part, call.window, q.dtype)
        tensors = *(x[row, :, queries] for x in (grad, q)), *(x[row, :, keys] for x in (k, v))
        tensors += tuple(x[row, :, queries] for x in (out, lse))
        if call.softcap is None:
            shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors, 0.0, part.causal, attn_mask=mask, scale=call.scale
            )
        else:
            shares = capped_attention_backward(*tensors, Capped(part.causal, mask, call.scale, call.softcap))
        dq[row, :, queries] += shares[0]
        dk[row, :, keys] += shares[1]
        dv[row, :, keys] += shares[2]
    return dq, dk, dv


class Level(NamedTuple):
    """Parts of attention that one call of variable-length attention computes. Each part is a sequence of queries and a
    sequence of keys.

    Attributes:
        queries, keys: ``(N,)`` indices into the ``B * T`` tokens of the batch.
        query_ends, key_ends: ``(parts + 1,)`` int32 cumulative lengths of the parts. Both start with 0.
        most_queries, most_keys: Maximum length of a part in queries and in keys.
        causal: Whether attention is causal; see `Part`.
    """

    queries: Tensor
    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int
    causal: bool


def levels_of(segments: Sequence[Segment], width: int, device: torch.device | str) -> list[Level]:
    """Group the attention of a batch into levels, each computed by one call. The first level is the attention inside all
    segments. Each further level belongs to one depth of the trees: later tokens attend to the segments at this depth.

    Args:
        segments: Segments in depth-first order.
        width: Number of columns of a row.
        device: Device of the tensors.
    """
    depths: list[int] = []
    for segment in segments:
        depths.append(0 if segment.parent < 0 else depths[segment.parent] + 1)
    levels = [_level([(segment, segment.start, segment.stop) for segment in segments], width, device, True)]
    for depth in range(max(depths, default=0)):
        pairs = zip(segments, depths, strict=True)
        parents = [
            (segment, segment.stop, segment.end) for segment, at in pairs if at == depth and segment.end > segment.stop
        ]
        levels.append(_level(parents, width, device, False))
    return levels


def _level(parts: Sequence[tuple[Segment, int, int]], width: int, device: torch.device | str, causal: bool) -> Level:
    runs = ([(segment.row * width + a, segment.row * width + b) for segment, a, b in parts], [])
    runs[1].extend((segment.row * width + segment.start, segment.row * width + segment.stop) for segment, _, _ in parts)
    places = [torch.cat([torch.arange(a, b) for a, b in side]).to(device, non_blocking=True) for side in runs]
    sizes = [[b - a for a, b in side] for side in runs]
    ends = [torch.tensor([0, *accumulate(side)], dtype=torch.int32).to(device, non_blocking=True) for side in sizes]
    return Level(places[0], places[1], ends[0], ends[1], max(sizes[0]), max(sizes[1]), causal)


def _levels(forest: Forest, device: torch.device | str) -> list[Level]:
    return forest.kept("levels", lambda: levels_of(forest.batch.segments, forest.batch.input_ids.shape[1], device))


def _flat(x: Tensor) -> Tensor:
    """Reshape ``(B, heads, T, d)`` to ``(B * T, heads, d)``."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _by_levels(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compute tree attention with one call of torch's variable-length attention per level. `_by_parts` computes the same
    results.
    """
    rows, heads, width, size = q.shape
    flat = [_flat(x) for x in (q, k, v)]
    out = torch.zeros(rows * width, heads, size, dtype=torch.float32, device=q.device)
    lse = torch.full((rows * width, heads), -torch.inf, dtype=torch.float32, device=q.device)
    for level in _levels(call.forest, q.device):
        value, z = varlen_forward(flat[0][level.queries], *(x[level.keys] for x in flat[1:]), level, call)
        o, merged = out[level.queries], lse[level.queries]
        _merge(o, merged, value.float(), z.T)
        out[level.queries], lse[level.queries] = o, merged
    shape = (rows, width, heads)
    return out.to(q.dtype).view(*shape, size).transpose(1, 2), lse.view(shape).transpose(1, 2)


def _levels_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    flat = [_flat(x) for x in (q, k, v, out, grad)]
    flat_lse = lse.transpose(1, 2).reshape(-1, q.shape[1])
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in flat[:3]]
    for level in _levels(call.forest, q.device):
        at, keys = level.queries, level.keys
        tensors = flat[0][at], flat[1][keys], flat[2][keys], flat[3][at], flat_lse[at].T.contiguous(), flat[4][at]
        shares = varlen_backward(*tensors, level, call)
        for total, share, where in zip(sums, shares, (at, keys, keys), strict=True):
            total.index_add_(0, where, share.float())
    shaped = zip(sums, (q, k, v), strict=True)
    dq, dk, dv = (
        total.to(x.dtype).view(x.shape[0], x.shape[2], *total.shape[1:]).transpose(1, 2) for total, x in shaped
    )
    return dq, dk, dv


def varlen_forward(q: Tensor, k: Tensor, v: Tensor, level: Level, call: Call) -> tuple[Tensor, Tensor]:
    """Run torch's variable-length flash attention. Return output ``(N, heads, d)`` and log-sum-exp ``(heads, N)``."""
    left, right = _sides(level, call.window)
    value, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, level.query_ends, level.key_ends, level.most_queries, level.most_keys, 0.0, level.causal, False,
        scale=call.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return value, lse


def varlen_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, level: Level, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contributions of one level to dq, dk and dv from the merged ``out`` and ``lse``."""
    left, right = _sides(level, call.window)
    # The kernel requires the random state of dropout as an argument, but dropout is 0.
    nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, level.query_ends, level.key_ends, level.most_queries, level.most_keys, 0.0, level.causal,
        nothing, nothing, scale=call.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip


def _sides(level: Level, window: int | None) -> tuple[int, int]:
    """Return the number of keys before, and the number of keys after, the position of a query to which the query attends.
    The value -1 means all keys.
    """
    if not level.causal:
        return -1, -1
    return (-1 if window is None else window - 1), 0


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forest: Forest,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute attention over packed prefix trees. Each token attends to itself and to earlier tokens of its path.

    Args:
        q: ``(B, heads, T, d)`` queries.
        k: ``(B, KV heads, T, d)`` keys. The number of query heads is a multiple of the number of KV heads.
        v: ``(B, KV heads, T, d_v)`` values. d_v may differ from d.
        forest: The prefix trees of the batch.
        scale: Factor of the scores.
        window: Number of positions to which a token attends, including its own. None: no limit.
        sinks: ``(heads,)`` additional logit per head, whose value vector is zero. None: no additional logits.
        softcap: Cap of the scaled scores, ``softcap * tanh(scores / softcap)``. Supported only on a CPU. None: no cap.
        chunk: Size of chunks of positions. A token attends only to its own chunk. Supported only on a CPU. None: no
            chunks.

    Returns:
        ``(B, heads, T, d_v)`` outputs. Outputs of padding tokens are 0.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    elif not q.dtype == k.dtype == v.dtype:
        q, k = q.to(v.dtype), k.to(v.dtype)
    # Kernels need equal head sizes, so pad the shorter tensors. In latent attention (DeepSeek), keys are longer than values.
    size = v.shape[-1]
    most = max(size, q.shape[-1])
    q, k, v = (x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        return _TreeAttention.apply(q, k, v, sinks, Call(forest, window, scale, softcap, chunk))[..., :size]


# Do not compile tree attention, because its calls depend on the prefix trees, which differ in every pass.
_uncompiled: Any = torch.compiler.disable(tree_attention)


def refusal(
    module: nn.Module, q: Tensor, dropout: float, forest: Forest, rest: dict[str, Any], chunk: int | None
) -> str:
    """Return the reason why tree attention does not support an attention layer. Return "" if the layer is supported."""
    if q.device.type != "cpu" and (fault := no_varlen(q, forest, rest.get("sliding_window"))):
        return fault
    if q.device.type != "cpu" and rest.get("softcap"):
        return f"softcap={rest['softcap']}"
    if q.device.type != "cpu" and chunk is not None:
        return "it uses chunked attention"
    if dropout:
        return f"attention_dropout={dropout}"
    if rest.get("is_causal", getattr(module, "is_causal", True)) is False:
        return "its attention is bidirectional"
    unknown = sorted(name for name, value in rest.items() if value is not None and name not in UNDERSTOOD)
    return f"it uses the options {unknown}" if unknown else ""


def no_kernel(device: str, dtype: torch.dtype) -> str:
    """Return the reason why a device has no kernel for tree attention. Return "" if the device has a kernel."""
    if device == "cpu":
        return ""
    if device != "cuda":
        return f"there is no kernel for {device}"
    halves = (torch.bfloat16, torch.float16)
    return "" if dtype in halves else f"flash kernels need bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"


def no_varlen(q: Tensor, forest: Forest, window: int | None) -> str:
    """Return the reason why variable-length attention does not support a layer's queries. Return "" if they are supported."""
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    if reason := no_kernel(q.device.type, dtype):
        return reason
    shared = any(segment.end > segment.stop for segment in forest.batch.segments)
    if window is not None and window < forest.longest and shared:
        return f"a window of {window} tokens can end inside a shared prefix"
    return ""


@cache
def _attention(own: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the function that transformers calls for an attention backend. For calls with a `Forest`, the function computes
    tree attention. For other calls, the function calls the backend ``own``.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        forest: Forest | None = None,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if forest is not None and forest.split is not None:
            if module.config.model_type == llama4.MODEL_TYPE and llama4.has_temperature(module):
                raise ModelError(
                    f"sp_size={forest.split.size} does not support Llama 4, which scales queries by their column, because each "
                    "process has only some columns. Fix: set sp_size=1."
                )
            masked = attention_mask is not None and attention_mask.shape[-1] > 1
            rows = forest.kept("whole rows", lambda: Forest(forest.batch))
            sinks = rest.pop("s_aux", None)

            def whole(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
                more = {} if sinks is None else {"s_aux": sinks}
                return attention(module, q, k, v, attention_mask, dropout, scaling, rows, **rest, **more)

            ratio = query.shape[1] // key.shape[1] if masked else None
            return forest.split.attention(whole, query, key, value, sinks, ratio), None
        # A mask is only passed if tree attention does not support the batch (see `attention_inputs`).
        if forest is None or attention_mask is None or attention_mask.shape[-1] > 1:
            return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest)
        window, chunk = rest.get("sliding_window"), None
        if module.config.model_type == llama4.MODEL_TYPE:
            query, chunk = llama4.placed(module, query, forest.batch.position_ids)
        reason = refusal(module, query, dropout, forest, rest, chunk)
        if reason and _strict:
            raise ModelError(reason)
        if reason:
            name = (reason, window, chunk, query.dtype)
            mask = forest.kept(name, lambda: forest_bias(forest, window, query.dtype, reason, chunk))
            return own(module, query, key, value, mask, dropout=dropout, scaling=scaling, **rest)
        window = window if window is not None and window < forest.longest else None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        more = {"sinks": rest.get("s_aux"), "softcap": rest.get("softcap"), "chunk": chunk}
        out = _uncompiled(query, key, value, forest, scale=scale, window=window, **more)
        return out.transpose(1, 2).contiguous(), None

    return attention


@torch.enable_grad()
def kernel_fault(device: torch.device, dtype: torch.dtype, heads: int, kv: int, size: int) -> str:
    """Compare output and gradients of tree attention on a device with an explicit softmax. Return a message with the
    difference, or "" if they agree.

    Args:
        device: Device of the model.
        dtype: Dtype of the model's attention.
        heads: Number of query heads.
        kv: Number of key and value heads.
        size: Head size.
    """
    ends = [(0, 9, 40, -1, 0), (9, 20, 20, 0, 9), (20, 31, 40, 0, 9), (31, 33, 33, 2, 20), (33, 40, 40, 2, 20)]
    segments = tuple(Segment(0, *segment) for segment in ends)
    until = torch.zeros(1, 40, dtype=torch.long)
    for segment in segments:
        until[0, segment.start : segment.stop] = segment.end
    none = torch.zeros_like(until)
    batch = Batch(none, none, until, none, none.bool(), none, 0, segments)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 40, count, size) for count in (heads, kv, kv, heads)]
    drawn = [torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes]
    merged, truth = [], []
    for kind, results in ((dtype, merged), (torch.float64, truth)):
        at = device if kind == dtype else torch.device("cpu")
        q, k, v = (x.to(dtype).to(at, kind).requires_grad_() for x in drawn[:3])
        if results is merged:
            out = tree_attention(q, k, v, Forest(batch), scale=size**-0.5)
        else:
            keys, values = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
            scores = (q @ keys.transpose(2, 3)) * size**-0.5
            out = scores.masked_fill(~forest_mask(batch), -torch.inf).softmax(-1) @ values
        results += [out.detach(), *torch.autograd.grad(out, (q, k, v), drawn[3].to(at, kind))]
    share = 1e-4 if dtype in (torch.float32, torch.float64) else 0.05
    for name, mine, exact in zip(("the output", "dq", "dk", "dv"), merged, truth, strict=True):
        gap, most = float((mine.double().cpu() - exact).abs().max()), float(exact.abs().max())
        if not gap <= share * most:
            return f"{name} of tree attention differs by {gap:.2g}, allowed {share * most:.2g}"
    return ""


def _plain_attention(module: nn.Module, *tensors: Tensor | None, **rest: Any) -> tuple[Tensor, Tensor | None]:
    return _written_out(type(module))(module, *tensors, **rest)


@cache
def _written_out(kind: type) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the eager attention function from the modeling file of a layer's class. transformers does not register this
    function.
    """
    files = (inspect.unwrap(vars(base)["forward"]).__globals__ for base in kind.__mro__ if "forward" in vars(base))
    if eager := next((names[PLAIN] for names in files if PLAIN in names), None):
        return eager
    raise ModelError(
        f"attn_implementation='eager' is not supported for {kind.__name__}, because its source file has no function "
        f"{PLAIN} for calls without segments. Fix: set attn_implementation='sdpa'."
    )


def install(model: nn.Module) -> None:
    """Register tree attention in transformers, and set its name in the configs of a model's text layers.

    The names stay in the configs until `uninstall`, because a backward pass with checkpointing calls the layers again. Calls
    without a `Forest` use the previous backend.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if model.config.get_text_config()._attn_implementation not in BACKENDS:
        return
    for name, backend in OWN_NAMES.items():
        ALL_ATTENTION_FUNCTIONS.register(name, _attention(ALL_ATTENTION_FUNCTIONS.get(backend, _plain_attention)))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[backend])
    rename_attention(model, lambda backend: f"posttrain_{backend}" if backend in BACKENDS else backend)


def uninstall(model: nn.Module) -> None:
    """Restore the names of transformers' own backends in the configs of a model's text layers. transformers' continuous
    batching compares these names.
    """
    rename_attention(model, _without_own)


def _without_own(name: str) -> str:
    return OWN_NAMES.get(name, name)


def uninstalled(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the model uses only transformers' own attention backends."""
    return attention_renamed(model, _without_own)


def forest_mask(
    batch: Batch, window: int | None = None, chunk: int | None = None, span: Tensor | None = None
) -> Tensor:
    """Return the attention mask of packed prefix trees. A token attends to itself, to earlier tokens of its segment,
    and to all tokens of its prefix segments.

    Args:
        batch: The batch.
        window: Size of the sliding window, in positions along a path. The window of a branch can therefore include
            tokens of its prefix.
        chunk: Size of chunks of positions (Llama 4). A token attends only to its own chunk.
        span: ``(B, T)`` index of a block. Tokens of the same block attend to each other in both directions, even
            outside of the window. -1: the token is in no block.

    Returns:
        Bool mask ``(B, 1, T, T)``. True means that the token at the index of the third dimension attends to the token at the
        index of the last dimension. Padding tokens attend to themselves, because a softmax over no tokens would be NaN.
    """
    until, position = batch.seen_until, batch.position_ids
    index = torch.arange(until.shape[1], device=until.device)
    allowed = (index[:, None] >= index[None, :]) & (index[:, None] < until[:, None, :])
    if window is not None:
        allowed &= position[:, :, None] - position[:, None, :] < window
    if chunk is not None:
        allowed &= position[:, :, None] // chunk == position[:, None, :] // chunk
    if span is not None:
        allowed |= (span[:, :, None] == span[:, None, :]) & (span[:, None, :] >= 0)
    allowed |= (index[:, None] == index[None, :]) & (until[:, :, None] == 0)
    return allowed[:, None]


def block_mask(batch: Batch, window: int | None, chunk: int | None, span: Tensor | None) -> Any:
    """Return the mask of `forest_mask` as a block-sparse mask for FlexAttention. The lists of blocks are computed on the
    CPU.
    """
    from torch.nn.attention.flex_attention import BlockMask

    until, position, size = batch.seen_until, batch.position_ids, 128
    block = torch.full_like(until, -1) if span is None else span

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (q < until[b, k])
        near = seen if window is None else seen & (position[b, q] - position[b, k] < window)
        near = near if chunk is None else near & (position[b, q] // chunk == position[b, k] // chunk)
        return near | ((block[b, q] == block[b, k]) & (block[b, k] >= 0)) | ((q == k) & (until[b, q] == 0))

    rows, width = batch.input_ids.shape
    count = -(-width // size)
    some, whole = (torch.zeros(rows, count, count, dtype=torch.bool) for _ in range(2))
    index = torch.arange(count)
    some |= index[:, None] == index  # Padding tokens attend to themselves.
    for segment in batch.segments:
        first, last = segment.start // size, -(-segment.stop // size)
        some[segment.row, first : -(-segment.end // size), first:last] |= (index[:, None] >= index)[
            first : -(-segment.end // size), first:last
        ]
        # Mark blocks of keys that are completely inside the segment. All later queries on its path attend to all keys of such a
        # block.
        inside = slice(-(-segment.start // size), segment.stop // size)
        for column in range(inside.start, inside.stop):
            whole[segment.row, column + 1 : segment.end // size, column] = True
    if span is not None:
        # Bidirectional blocks of tokens are short, so only mask blocks near the diagonal are added.
        some |= (index[:, None] - index).abs() <= -(-int(torch.unique(span, return_counts=True)[1].max()) // size)
    if window is not None or chunk is not None or span is not None:
        whole &= False
    some &= ~whole
    # Join the numbers and the indices of the key blocks of each query block, so that only one copy to the device is needed.
    both = torch.stack([some, whole]).int()
    listed = torch.cat([both.sum(-1, keepdim=True), both.argsort(dim=-1, descending=True, stable=True)], -1)
    numbers, order = listed.int()[:, :, None].to(until.device).split([1, count], -1)
    lists = (numbers[0, ..., 0], order[0], numbers[1, ..., 0], order[1])
    lists = tuple(blocks.contiguous() for blocks in lists)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=rule, seq_lengths=(width, width))


def forest_bias(
    forest: Forest, window: int | None, dtype: torch.dtype, reason: str = "", chunk: int | None = None
) -> Tensor:
    """Return the mask of `forest_mask` as an additive mask, for a layer without tree attention. Log each ``reason`` once."""
    if reason and reason not in _logged:
        _logged.add(reason)
        logger.warning(
            "Attention uses a mask of %d x %d instead of tree attention: %s. Time and memory grow with the square "
            "of the row length.",
            forest.batch.input_ids.shape[1],
            forest.batch.input_ids.shape[1],
            reason,
        )
    return added(forest_mask(forest.batch, window, chunk), dtype, torch.finfo(dtype).min)


def added(allowed: Tensor, dtype: torch.dtype, never: float) -> Tensor:
    """Convert a bool mask to an additive mask with the value ``never`` where the bool mask is False."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, never)


_logged: set[str] = set()
_strict = False


@contextmanager
def refusing() -> Iterator[None]:
    """Make layers that tree attention does not support raise an error inside the context. Outside of the context, these
    layers use a mask.
    """
    global _strict
    former, _strict = _strict, True
    try:
        yield
    finally:
        _strict = former
