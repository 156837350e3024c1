"""Ulysses sequence parallelism. A group of processes computes each row together. Tokens and attention heads are split over
the group.

Each process loads its own rows, as in data parallelism. A group of ``sp_size`` processes computes the batch of its first
process together, then the batch of its second process, and so on. Each process computes ``1 / sp_size`` of the columns in
all operations except attention. Attention needs whole rows. Therefore, tokens are exchanged for heads before attention, and
heads are exchanged for tokens after it::

    q, k, v   (B, heads, T / n, d)  --all-to-all-->  (B, heads / n, T, d)     whole rows, some heads
    out       (B, T, heads / n, d)  --all-to-all-->  (B, T / n, heads, d)

The attention function does not change, because tree attention and masks apply to whole rows. Key-value heads are repeated
if there are fewer heads than processes. The outputs of the model's head (one log-prob per token, or one score per sequence)
are sent to the process that owns the batch. Only this process computes the objective. The gradients of the outputs are sent
back to the group. All other numbers of a run (denominators, advantages, rewards, metrics, the state of samplers) are the
same as in data parallelism.

For each layer, a process sends ``4 passes x (n - 1) / n x B T / n x d x (heads + KV heads)`` numbers. Queries, keys, values
and outputs are sent in the forward pass, again if layers are recomputed, and in the backward pass. Repeated KV heads are
included.

Reference: DeepSpeed-Ulysses, arXiv:2309.14509; Arctic Long Sequence Training (batches of a group in turns), arXiv:2506.13996.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, ModelError
from posttrain.models import token_split
from posttrain.models.forward import Pass, call, prepared, run
from posttrain.models.heads import PER_TOKEN, ScoreHead, TokenHead, install_token_head
from posttrain.models.parallel import gathers_in_forward

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

Compare = Callable[..., dict[str, Any]]


@dataclass
class Traffic:
    """Measured attention traffic of this process, to compare it with the formula in the module's docstring.

    Attributes:
        calls: Number of all-to-all calls for attention, including the calls in backward passes.
        sent: Number of bytes sent to other processes in these calls.
    """

    calls: int = 0
    sent: int = 0


@dataclass(slots=True)
class TokenSplit:
    """Sequence-parallel group of processes, which compute their batches together.

    Attributes:
        group: Process group of torch.distributed.
        ranks: Global ranks of the group's processes.
        rank: Rank of this process in the group.
        device: Device on which tensors are exchanged.
        in_turn: Whether the group is computing a training pass over this process's batch.
        traffic: Measured attention traffic of this process.
    """

    group: Any
    ranks: list[int]
    rank: int
    device: torch.device
    in_turn: bool = False
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return len(self.ranks)

    def columns(self, width: int) -> slice:
        """Return the columns of a row that this process computes.

        Raises:
            ModelError: ``width`` is not a multiple of `size`.
        """
        if width % self.size:
            raise ModelError(
                f"a batch of {width} columns cannot be divided over sp_size={self.size} processes. Fix: use a layout with "
                f"pad_to_multiple_of={self.size}, like the trainer's own layout."
            )
        share = width // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    # Objects -----------------------------------------------------------------------------------------------------

    def broadcast(self, item: object) -> None:
        """Broadcast an object to all other processes of the group. They must call `receive`."""
        torch.distributed.broadcast_object_list([item], src=self.ranks[self.rank], group=self.group, device=self.device)

    def receive(self, owner: int) -> Any:
        """Receive the object that process ``owner`` of the group sends with `broadcast`."""
        shared: list[Any] = [None]
        torch.distributed.broadcast_object_list(shared, src=self.ranks[owner], group=self.group, device=self.device)
        return shared[0]

    def exchanged(self, item: object) -> list[Any]:
        """Gather one object from each process of the group. Return the objects in rank order."""
        items: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(items, item, group=self.group)
        return items

    # Tensors -----------------------------------------------------------------------------------------------------

    def at_owner(self, owner: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Sum tensors over the group. In the backward pass, the gradients of process ``owner`` are broadcast to the group."""
        return _AtOwner.apply(self, owner, *tensors)

    def whole_rows(self, *tensors: Tensor) -> list[Tensor]:
        """Exchange columns for heads: convert ``(B, heads, T / n, d)`` to ``(B, heads / n, T, d)``, which has all columns.
        All tensors are sent in one all-to-all call.
        """
        parcels = []
        for x in tensors:
            rows, heads, share, size = x.shape
            parcels.append(x.reshape(rows, self.size, heads // self.size, share, size).movedim(1, 0).flatten(1))
        got = _Exchange.apply(torch.cat(parcels, 1), self).split([parcel.shape[1] for parcel in parcels], 1)
        shaped = []
        for x, y in zip(tensors, got, strict=True):
            rows, heads, share, size = x.shape
            y = y.view(self.size, rows, heads // self.size, share, size).movedim(0, 2)  # (B, heads / n, n, T / n, d)
            shaped.append(y.reshape(rows, heads // self.size, self.size * share, size))
        return shaped

    def own_columns(self, out: Tensor) -> Tensor:
        """Exchange heads for columns: convert ``(B, T, heads / n, d)`` to ``(B, T / n, heads, d)``, which has all heads."""
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
        """Compute attention for this process's columns.

        Tokens are exchanged for heads, attention is computed for whole rows, and heads are exchanged for tokens.

        Args:
            whole: Attention function for whole rows, ``(q, k, v, sinks) -> (out (B, T, heads, d), ...)``.
            q: Queries ``(B, heads, T / n, d)``.
            k: Keys ``(B, KV heads, T / n, d)``.
            v: Values of the same shape as ``k``.
            sinks: Attention sinks ``(heads,)`` or None. See `posttrain.models.tree_attention.tree_attention`.
            ratio: Number of query heads per KV head that ``whole`` requires. None: any number.

        Returns:
            Attention output for this process's columns, ``(B, T / n, heads, d)``.
        """
        heads, kv = q.shape[1], repeated_heads(q.shape[1], k.shape[1], self.size)
        if ratio is not None and heads // kv != ratio:
            raise ModelError(
                f"sp_size={self.size} with a dense mask: the {k.shape[1]} key-value heads of the layer, which its backend "
                f"repeats, cannot be divided over {self.size} processes. Fix: set an sp_size that divides {k.shape[1]}."
            )
        if kv != k.shape[1]:
            k, v = (x.repeat_interleave(kv // k.shape[1], 1) for x in (k, v))
        if sinks is not None:
            sinks = sinks.view(self.size, -1)[self.rank]
        q, k, v = self.whole_rows(q, k, v)
        return self.own_columns(whole(q, k, v, sinks)[0])

    # Passes ------------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, request: Pass, compare: Compare | None) -> dict[str, Any]:
        """Run a forward pass together with the group. `posttrain.models.forward.forward` calls this method.

        In a training pass over this process's batch, the other processes of the group compute their columns with
        `help_with`. Passes without gradients run for each process of the group in turn. A pass without gradients inside a
        training pass, for example of a reference model, runs on this process alone.
        """
        training = torch.is_grad_enabled()
        if self.in_turn and training:
            self.broadcast(_bare(request))
            return self._run(model, request, compare, self.rank)
        if self.in_turn:
            with token_split.alone(model):
                return run(model, request, compare)
        if training:
            return run(model, request, compare)
        result: dict[str, Any] = {}
        for owner, other in enumerate(self.exchanged(_bare(request))):
            batch = other.batch.to(request.batch.input_ids.device)
            mine = owner == self.rank
            outputs = self._run(model, replace(other, batch=batch), compare if mine else None, owner)
            result = outputs if mine else result
        return result

    def help_with(self, model: nn.Module, owner: int) -> Tensor:
        """Compute this process's columns in a training pass of process ``owner``. The caller must call ``backward`` on the
        result.
        """
        install_token_head(model)
        request = self.receive(owner)
        result = self._run(model, replace(request, batch=request.batch.to(self.device)), None, owner)
        tensors = [x for x in result.values() if isinstance(x, Tensor) and x.requires_grad]
        return torch.stack([0.0 * x.float().sum() for x in tensors]).sum()

    def _run(self, model: nn.Module, request: Pass, compare: Compare | None, owner: int) -> dict[str, Any]:
        """Compute this process's columns of the batch of process ``owner``, and gather the results of the group on
        ``owner``.
        """
        columns = self.columns(request.batch.input_ids.shape[1])
        head, inputs = prepared(model, request, compare, self, columns)
        inputs |= {name: inputs[name][..., columns] for name in ("input_ids", "position_ids")}
        head, own = _piece(head, columns, self, owner, compares=request.compares)
        result = call(model, request.batch, head, inputs)
        # Values of a comparison are complete, because the inputs of the comparison were gathered on the owner.
        return result if request.compares else _at_owner(result, own, self, owner)

    def turns(self, last: bool) -> Iterator[tuple[int | None, bool]]:
        """Iterate over the processes of the group, whose batches are computed in turn. See
        `posttrain.models.token_split.turns`.
        """
        for turn in range(self.size):
            self.in_turn = turn == self.rank
            try:
                yield (None if turn == self.rank else turn), last and turn == self.size - 1
            finally:
                self.in_turn = False

    def check_alone(self, model: nn.Module) -> None:
        """Raise an error if the model is sharded. The forward pass runs on this process alone, which cannot gather the
        shards of other processes.

        Raises:
            ModelError: A module gathers its shards in the forward pass.
        """
        if gathers_in_forward(model.modules()):
            raise ModelError(
                f"sp_size={self.size}: the model is sharded, but its forward pass runs on one process of the group only, so it "
                "cannot gather its shards. Fix: use a teacher that is not sharded (no self-distillation with FSDP), or "
                "sp_size=1."
            )

    def refuse_predict(self) -> None:
        """Raise an error, because ``predict`` needs the full logits of whole rows on one process.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"sp_size={self.size}: predict() needs full logits of whole rows. Fix: call predict in a run with sp_size=1."
        )


def repeated_heads(heads: int, kv: int, size: int) -> int:
    """Return the smallest number of KV heads, after repetition, that ``size`` processes can share equally.

    >>> [repeated_heads(8, 4, 2), repeated_heads(8, 2, 4), repeated_heads(6, 3, 2)]
    [4, 4, 6]
    """
    least = math.lcm(kv, size)
    return least if heads % least == 0 else heads


def layer_bytes(
    size: int, *, tokens: int, heads: int, kv: int, head_size: int, itemsize: int, recomputed: bool = False
) -> int:
    """Return the number of bytes that a process sends for one layer in one training pass. The module's docstring has the
    formula.

    Args:
        size: Number of processes in the group.
        tokens: Number of tokens ``B * T`` of the whole batch.
        heads: Number of query heads.
        kv: Number of KV heads of the model, before repetition.
        head_size: Number of dimensions of a head.
        itemsize: Number of bytes per element.
        recomputed: Whether the forward pass of the layer is recomputed in the backward pass.

    >>> layer_bytes(2, tokens=8, heads=4, kv=2, head_size=16, itemsize=4)
    3072
    """
    share = tokens // size * head_size * itemsize * (2 * heads + 2 * repeated_heads(heads, kv, size))
    return (3 if recomputed else 2) * share * (size - 1) // size


class _Exchange(torch.autograd.Function):
    """All-to-all of a tensor ``(n, M)``. Row i is sent to process i, and replaced by the row that process i sends. The
    backward pass is the same exchange.
    """

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
    """Autograd function of `TokenSplit.at_owner`."""

    @staticmethod
    def forward(ctx: FunctionCtx, split: TokenSplit, owner: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.split, ctx.owner = split, owner
        ctx.learns = [x.requires_grad for x in tensors]
        flat = torch.cat([x.detach().float().flatten() for x in tensors])
        torch.distributed.all_reduce(flat, group=split.group)
        pieces = flat.split([x.numel() for x in tensors])
        outputs = tuple(y.view_as(x).to(x.dtype) for x, y in zip(tensors, pieces, strict=True))
        # Clone the views, because autograd does not allow in-place changes of a view if other views share its storage.
        outputs = tuple(x.clone() for x in outputs)
        ctx.mark_non_differentiable(*(x for x, learns in zip(outputs, ctx.learns, strict=True) if not learns))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        split: TokenSplit = ctx.split
        selected = [grad for grad, learns in zip(grads, ctx.learns, strict=True) if learns]
        flat = torch.cat([grad.float().flatten() for grad in selected])
        torch.distributed.broadcast(flat, src=split.ranks[ctx.owner], group=split.group)
        pieces = iter(flat.split([grad.numel() for grad in selected]))
        gradients = [
            next(pieces).view_as(grad).to(grad.dtype) if learns else None
            for grad, learns in zip(grads, ctx.learns, strict=True)
        ]
        return None, None, *gradients


def make_group(size: int, *, world: int, rank: int, device: torch.device) -> TokenSplit:
    """Create groups of ``size`` consecutive ranks, and return this process's group. All processes of the run must call it."""
    mine: TokenSplit | None = None
    for first in range(0, world, size):
        ranks = list(range(first, first + size))
        group = torch.distributed.new_group(ranks)
        if rank in ranks:
            mine = TokenSplit(group, ranks, rank - first, device)
    assert mine is not None
    return mine


def _bare(request: Pass) -> Pass:
    """Return a copy of the pass whose batch is on the CPU. Tensors that only the objective needs are removed."""
    empty = dict.fromkeys(("advantages", "old_logp", "ref_logp", "rollout_logp", "expected_grad"))
    return replace(request, batch=replace(request.batch, **empty, columns={}).to("cpu"))


def _piece(
    head: TokenHead | ScoreHead, columns: slice, split: TokenSplit, owner: int, *, compares: bool
) -> tuple[TokenHead | ScoreHead, tuple[Tensor, int]]:
    """Return the head restricted to the positions that are predicted from ``columns``. Also return the indices of these
    positions and the number of all positions.
    """
    inside = (head.columns >= columns.start) & (head.columns < columns.stop)
    own = (inside.nonzero()[:, 0], len(head.columns))
    moved = {"rows": head.rows[inside], "columns": head.columns[inside] - columns.start}
    if isinstance(head, ScoreHead):
        return replace(head, **moved), own
    piece = replace(head, **moved, targets=head.targets[inside], expected_grad=None)
    if head.balance_over is not None:
        piece.balance_over = head.balance_over[:, columns]
        piece.total = lambda sums: split.at_owner(owner, [sums])[0]
    if compares:
        piece.compare = _compared_at_owner(head, own, split, owner)
    return piece, own


def _compared_at_owner(head: TokenHead, own: tuple[Tensor, int], split: TokenSplit, owner: int) -> Compare:
    """Return a comparison function that gathers the last hidden states on the process that owns the batch. This process
    compares them with the hidden states of another model.
    """

    def compare(hidden: Tensor, layer: nn.Module, rule: Any, piece: TokenHead) -> dict[str, Any]:
        (whole,) = split.at_owner(owner, [_all_positions(hidden, *own)])
        if owner == split.rank:
            assert head.compare is not None
            return head.compare(whole, layer, rule, head)
        # Include every weight of the layer in the graph, because the averaging of gradients waits until each
        # weight has a gradient.
        weights = () if layer is None else [p for p in layer.parameters() if p.requires_grad]
        return {"hidden": whole, **{f"weight {i}": p.flatten()[:1] for i, p in enumerate(weights)}}

    return compare


def _all_positions(values: Tensor, where: Tensor, count: int) -> Tensor:
    """Return a tensor for all ``count`` positions. It contains ``values (n, ...)`` at the positions ``where``, which this
    process computes, and zeros at all other positions.
    """
    return values.new_zeros(count, *values.shape[1:]).index_put((where,), values)


def _at_owner(result: dict[str, Any], own: tuple[Tensor, int], split: TokenSplit, owner: int) -> dict[str, Any]:
    """Gather the results on the process that owns the batch. Results without a value per position, such as the router's
    loss term, are complete and stay unchanged.
    """
    names = [name for name in ("logp", "log_mass", *PER_TOKEN, "logits", "scores") if name in result]
    if not names:
        return result
    placed = [_all_positions(result[name].float(), *own) for name in names]
    whole = zip(names, split.at_owner(owner, placed), strict=True)
    return result | {name: value.to(result[name].dtype) for name, value in whole}
