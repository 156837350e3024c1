"""Ulysses sequence parallelism: the tokens of a row are divided over the processes of a group, and so are the heads of attention.

Every process keeps rows of its own, as in data parallelism. A group of ``sp_size`` processes computes the batch of its first
process together, then that of its second, and so on: each process embeds, projects and scores ``1 / sp_size`` of the columns.
Attention alone needs whole rows. Around its call tokens are exchanged for heads::

    q, k, v   (B, heads, T / n, d)  --all-to-all-->  (B, heads / n, T, d)     whole rows, a share of the heads
    out       (B, T, heads / n, d)  --all-to-all-->  (B, T / n, heads, d)

so that the same call is answered, by parts of a trie or under a mask, which stay whole. Where there are fewer heads of keys and
values than processes, they are repeated. What the head reads of the last hidden states (a log-prob a token, a score a sequence)
goes to the process whose batch it is, which alone computes the objective, and the gradients of it come back: every other number
of a run (denominators, advantages, rewards, metrics, the state of samplers) is that of data parallelism.

A layer sends ``4 passes x (n - 1) / n x B T / n x d x (heads + KV heads)`` numbers from each process: its forward (queries, keys,
values, output), again where layers are recomputed, and backward, with the KV heads counted as they are repeated.

Reference: DeepSpeed-Ulysses, arXiv:2309.14509; Arctic Long Sequence Training (batches of a group in turns), arXiv:2506.13996.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import ModelError

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

logger = logging.getLogger(__name__)


@dataclass
class Traffic:
    """What this process sent, to be compared with the formula of the module.

    Attributes:
        calls: All-to-alls of attention, backward's too.
        sent: Bytes of them that left this process.
    """

    calls: int = 0
    sent: int = 0


@dataclass(slots=True)
class TokenSplit:
    """A group of processes that computes its batches together.

    Attributes:
        group: Of torch.distributed.
        ranks: Numbers of its processes in the whole run.
        rank: Of this process in the group.
        device: Where tensors are exchanged.
        in_turn: Whether a training pass of this process runs, in which the others of its group help.
        traffic: See `Traffic`.
    """

    group: Any
    ranks: list[int]
    rank: int
    device: torch.device
    in_turn: bool = False
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """Processes of the group."""
        return len(self.ranks)

    def columns(self, width: int) -> slice:
        """Columns of a row that this process computes.

        Raises:
            ModelError: ``width`` is no multiple of `size`.
        """
        if width % self.size:
            raise ModelError(
                f"a batch of {width} columns cannot be divided over sp_size={self.size} processes. Fix: lay it out with "
                f"pad_to_multiple_of={self.size}, as the trainer's own layout has it."
            )
        share = width // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    # Objects -----------------------------------------------------------------------------------------------------

    def tell(self, item: object) -> None:
        """Send an object to the others of the group, who `hear` it."""
        torch.distributed.broadcast_object_list([item], src=self.ranks[self.rank], group=self.group, device=self.device)

    def hear(self, owner: int) -> Any:
        """What process ``owner`` of the group tells."""
        shared: list[Any] = [None]
        torch.distributed.broadcast_object_list(shared, src=self.ranks[owner], group=self.group, device=self.device)
        return shared[0]

    def exchanged(self, item: object) -> list[Any]:
        """One object of each process of the group, in their order."""
        items: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(items, item, group=self.group)
        return items

    # Tensors -----------------------------------------------------------------------------------------------------

    def at_owner(self, owner: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Sums over the group of tensors of equal shapes; backward hands every process the gradients that ``owner`` has."""
        return _AtOwner.apply(self, owner, *tensors)

    def whole_rows(self, *tensors: Tensor) -> list[Tensor]:
        """``(B, heads, T / n, d)`` of all heads to ``(B, heads / n, T, d)`` of all columns; one all-to-all for all tensors."""
        parcels = []
        for x in tensors:
            rows, heads, share, size = x.shape
            parcels.append(x.reshape(rows, self.size, heads // self.size, share, size).movedim(1, 0).flatten(1))
        got = _Exchange.apply(torch.cat(parcels, 1), self).split([one.shape[1] for one in parcels], 1)
        shaped = []
        for x, y in zip(tensors, got, strict=True):
            rows, heads, share, size = x.shape
            y = y.view(self.size, rows, heads // self.size, share, size).movedim(0, 2)  # (B, heads / n, n, T / n, d)
            shaped.append(y.reshape(rows, heads // self.size, self.size * share, size))
        return shaped

    def own_columns(self, out: Tensor) -> Tensor:
        """``(B, T, heads / n, d)`` of all columns to ``(B, T / n, heads, d)`` of all heads."""
        rows, width, heads, size = out.shape
        parcels = out.reshape(rows, self.size, width // self.size, heads, size).movedim(1, 0).flatten(1)
        got = _Exchange.apply(parcels, self).view(self.size, rows, width // self.size, heads, size)
        return got.movedim(0, 2).reshape(rows, width // self.size, self.size * heads, size)

    @torch.compiler.disable
    def attention(
        self,
        whole: Callable[..., tuple[Tensor, Any]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ratio: int | None,
    ) -> Tensor:
        """Attention of this process's columns: heads for tokens, the call on whole rows, tokens for heads.

        Args:
            whole: ``(q, k, v, sinks) -> (out (B, T, heads, d), ...)`` on whole rows.
            q: ``(B, heads, T / n, d)``.
            k: ``(B, KV heads, T / n, d)``.
            v: Likewise.
            sinks: ``(heads,)``, see `posttrain.models.tree_attention.tree_attention`.
            ratio: Query heads of a KV head that the call takes for granted; None: any.

        Returns:
            ``(B, T / n, heads, d)``.
        """
        heads, kv = q.shape[1], repeated_heads(q.shape[1], k.shape[1], self.size)
        if ratio is not None and heads // kv != ratio:
            raise ModelError(
                f"sp_size={self.size} with a dense mask: the layer has {k.shape[1]} heads of keys and values, which its "
                f"backend repeats itself and {self.size} processes cannot divide. Fix: an sp_size that divides {k.shape[1]}."
            )
        if kv != k.shape[1]:
            k, v = (x.repeat_interleave(kv // k.shape[1], 1) for x in (k, v))
        if sinks is not None:
            sinks = sinks.view(self.size, -1)[self.rank]
        q, k, v = self.whole_rows(q, k, v)
        return self.own_columns(whole(q, k, v, sinks)[0])


def repeated_heads(heads: int, kv: int, size: int) -> int:
    """Heads of keys and values that ``size`` processes can divide: as they are, or the fewest repeats that queries allow.

    >>> [repeated_heads(8, 4, 2), repeated_heads(8, 2, 4), repeated_heads(6, 3, 2)]
    [4, 4, 6]
    """
    least = math.lcm(kv, size)
    return least if heads % least == 0 else heads


def layer_bytes(
    size: int, *, tokens: int, heads: int, kv: int, head_size: int, itemsize: int, recomputed: bool = False
) -> int:
    """Bytes that a process sends for one layer and one training pass; see the formula of the module.

    Args:
        size: Processes of the group.
        tokens: ``B * T`` of the whole batch.
        heads: Of queries.
        kv: Of keys and values.
        head_size: Numbers of a head.
        itemsize: Bytes of a number.
        recomputed: Whether the layer's forward runs twice.

    >>> layer_bytes(2, tokens=8, heads=4, kv=2, head_size=16, itemsize=4)
    3072
    """
    share = tokens // size * head_size * itemsize * (2 * heads + 2 * repeated_heads(heads, kv, size))
    return (3 if recomputed else 2) * share * (size - 1) // size


class _Exchange(torch.autograd.Function):
    """``(n, M)``: parcel i goes to process i, and what comes from process i is parcel i. Its own transpose."""

    @staticmethod
    def forward(ctx: FunctionCtx, parcels: Tensor, split: TokenSplit) -> Tensor:
        ctx.split = split
        return _all_to_all(parcels, split)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.split), None


def _all_to_all(parcels: Tensor, split: TokenSplit) -> Tensor:
    parcels = parcels.contiguous()
    got = torch.empty_like(parcels)
    torch.distributed.all_to_all_single(got, parcels, group=split.group)
    split.traffic.calls += 1
    split.traffic.sent += parcels.nbytes * (split.size - 1) // split.size
    return got


class _AtOwner(torch.autograd.Function):
    """See `TokenSplit.at_owner`."""

    @staticmethod
    def forward(ctx: FunctionCtx, split: TokenSplit, owner: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.split, ctx.owner = split, owner
        ctx.learns = [x.requires_grad for x in tensors]
        flat = torch.cat([x.detach().float().flatten() for x in tensors])
        torch.distributed.all_reduce(flat, group=split.group)
        pieces = flat.split([x.numel() for x in tensors])
        outputs = tuple(y.view_as(x).to(x.dtype) for x, y in zip(tensors, pieces, strict=True))
        # A piece of one storage may not be changed in place where another is needed.
        outputs = tuple(x.clone() for x in outputs)
        ctx.mark_non_differentiable(*(x for x, learns in zip(outputs, ctx.learns, strict=True) if not learns))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        split: TokenSplit = ctx.split
        kept = [grad for grad, learns in zip(grads, ctx.learns, strict=True) if learns]
        flat = torch.cat([grad.float().flatten() for grad in kept])
        torch.distributed.broadcast(flat, src=split.ranks[ctx.owner], group=split.group)
        pieces = iter(flat.split([grad.numel() for grad in kept]))
        gradients = [
            next(pieces).view_as(grad).to(grad.dtype) if learns else None
            for grad, learns in zip(grads, ctx.learns, strict=True)
        ]
        return None, None, *gradients


# The group of this process, which all of its trainers share, as they share accelerate's state.
_active: TokenSplit | None = None


def active() -> TokenSplit | None:
    """The group that computes batches together with this process; None: it computes its own alone."""
    return _active


def activate(split: TokenSplit | None) -> None:
    """From here on `posttrain.models.forward.forward` is computed by this group; None: by this process alone."""
    global _active
    _active = split


@contextmanager
def alone() -> Iterator[None]:
    """Inside, every process computes its own batches."""
    before = _active
    activate(None)
    try:
        yield
    finally:
        activate(before)


def make_group(size: int, *, world: int, rank: int, device: torch.device) -> TokenSplit:
    """The group of this process: ``size`` consecutive ranks. Every process of the run must call it."""
    mine: TokenSplit | None = None
    for first in range(0, world, size):
        ranks = list(range(first, first + size))
        group = torch.distributed.new_group(ranks)
        if rank in ranks:
            mine = TokenSplit(group, ranks, rank - first, device)
    assert mine is not None
    return mine


def turns(last: bool) -> Iterator[tuple[int | None, bool]]:
    """Whose batch a training pass is of, and whether it is the last pass before the update.

    Yields:
        Number in the group of the process that is helped, None for this one; and whether no pass follows.
    """
    split = _active
    if split is None:
        yield None, last
        return
    for turn in range(split.size):
        split.in_turn = turn == split.rank
        try:
            yield (None if turn == split.rank else turn), last and turn == split.size - 1
        finally:
            split.in_turn = False
