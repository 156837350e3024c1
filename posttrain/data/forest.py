"""Collation of rows into batches of packed prefix trees. The sequences of a prompt share the prompt's tokens, so each prompt
is computed only once. Batches contain little padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.data import trie
from posttrain.data.trie import Member, Node, Tree
from posttrain.errors import DataError
from posttrain.types import Batch, Leaf, Row, Segment

# Maximum fraction of padding in a forward pass with several batch rows. With more padding, a separate pass would be cheaper.
PADDED_MOST = 0.05
# Names of row columns that become fields of `Batch` instead of items of ``Batch.columns``.
FIELDS = ("advantages", "old_logp", "ref_logp", "rollout_logp")


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrangement of sequences in a batch. The layout depends on the model and the attention backend.

    Attributes:
        kind: With ``tree``, common prefixes are computed once, and several prefix trees are packed into a batch row. With
            ``padded``, every sequence has its own padded batch row with a copy of the prompt. ``padded`` is for models whose
            attention cannot separate several sequences in a row.
        dense_mask: Whether attention over prefix trees uses a dense mask instead of segments (see
            `posttrain.models.tree_attention`). Time and memory of a dense mask grow with the square of the row length.
        row_tokens: Maximum number of tokens of a packed batch row. The limit applies to prefix trees that join several
            dataset rows too. With a dense mask, the limit should be small.
        pass_tokens: Maximum number of tokens of a forward pass with a dense mask. Batch rows of similar length are stacked into
            one pass, because every pass has a fixed cost (reading weights, accumulating gradients). At most 5 % of the tokens
            of a pass are padding.
        max_tree_tokens: Maximum number of tokens of a prefix tree. If the sequences of a dataset row need more tokens, they are
            distributed to several trees, each with a copy of the prompt. Without a dense mask, trees longer than ``row_tokens``
            are also split if the copies add few tokens (see `posttrain.data.trie.REPEATED_MOST`).
        joins_rows: Whether dataset rows with a common prefix are joined into one tree. This must be False for models with
            bidirectional attention in prompts or over all images of a row.
        pad_to_multiple_of: The length T of batch rows is rounded up to a multiple of this number.
        rope_switch: Sequence length above which a model with longrope uses different rotary frequencies. All sequences of a
            forward pass use the same frequencies, so shorter and longer sequences are computed in separate passes. None: the
            frequencies do not depend on the length.
        rope_end: Maximum sequence length of a model with ``dynamic`` rotary embeddings. Longer sequences raise an error,
            because their log-probs would depend on earlier forward passes. None: no limit.
    """

    kind: Literal["tree", "padded"] = "tree"
    dense_mask: bool = False
    row_tokens: int = 512
    pass_tokens: int = 0
    max_tree_tokens: int = 8192
    joins_rows: bool = True
    pad_to_multiple_of: int | None = None
    rope_switch: int | None = None
    rope_end: int | None = None

    def adjusted(self, row_tokens: int | None, pad_to_multiple_of: int | None = None) -> Layout:
        """Return a copy of the layout with new settings. Arguments that are None change nothing. If the layout's
        ``row_tokens`` is 1, it stays 1.

        The limit ``pass_tokens``, which is used with a dense mask, is reduced to ``row_tokens`` too, but not below 512.
        """
        changes = {"pad_to_multiple_of": pad_to_multiple_of} if pad_to_multiple_of else {}
        if row_tokens is not None and self.row_tokens > 1:
            changes |= {"row_tokens": row_tokens, "pass_tokens": min(self.pass_tokens, max(row_tokens, 512))}
        return dataclasses.replace(self, **changes)


def share_prompts(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """Merge rows with equal prompts into one row, so that each prompt is computed only once.

    Rows with ``model_kwargs`` are not merged.

    Returns:
        The merged rows, in the order in which their prompts first occur, and a list with one index per completion of the merged
        rows. The index is the position of the completion in the flat list of all input completions.

    >>> rows, places = share_prompts([Row([1], [[2]], [[1]]), Row([3], [[4]], [[1]]), Row([1], [[5]], [[1]])])
    >>> [row.completions for row in rows], places
    ([[[2], [5]], [[4]]], [0, 2, 1])
    """
    by_prompt: dict[Any, tuple[Row, list[int]]] = {}
    count = 0
    for number, row in enumerate(rows):
        columns = (*sorted(row.sequence_columns), *sorted(row.token_columns))
        pictures = row.pictures or [[], *([] for _ in row.completions)]
        key = (
            tuple(row.prompt_ids),
            None if row.prompt_mask is None else tuple(row.prompt_mask),
            columns,
            tuple(pictures[0]),
        )
        empty = Row(
            row.prompt_ids, [], [], model_kwargs=row.model_kwargs, prompt_mask=row.prompt_mask, pictures=pictures[:1]
        )
        whole, places = by_prompt.setdefault(number if row.model_kwargs else key, (empty, []))
        whole.completions.extend(row.completions)
        whole.loss_masks.extend(row.loss_masks)
        whole.pictures.extend(pictures[1:])
        for name, numbers in row.sequence_columns.items():
            whole.sequence_columns.setdefault(name, []).extend(numbers)
        for name, lists in row.token_columns.items():
            whole.token_columns.setdefault(name, []).extend(lists)
        places.extend(range(count, count + len(row.completions)))
        count += len(row.completions)
    return [row for row, _ in by_prompt.values()], [place for _, places in by_prompt.values() for place in places]


def collate(
    rows: Sequence[Row],
    *,
    pad_token_id: int,
    layout: Layout = Layout(),
    whole_rows: bool = False,
    together: bool = False,
) -> list[Batch]:
    """Collate rows into batches. Each batch is one forward pass.

    Args:
        rows: Examples. ``Batch.origin`` contains indices into the flat list of their completions.
        pad_token_id: Id of padding tokens. Padding is identified by position, so the value does not matter.
        layout: Arrangement of the sequences.
        whole_rows: Whether all completions of a row must be in one batch, which losses that compare completions require.
        together: Whether all rows must be in one batch, which losses that sort the rows of a micro-batch require.

    Returns:
        Batches that together contain every completion exactly once.

    Raises:
        DataError: ``rows`` is empty, or a row has no completions. The error is also raised if a mask, column or id list has
            the wrong length, or if the loss compares sequences that need different rotary frequencies (see
            `Layout.rope_switch`).
    """
    if not rows:
        raise DataError("collate got an empty list of rows. Fix: pass at least one row.")
    for index, row in enumerate(rows):
        _check(row, index, layout.rope_end)
    parts = _by_rope(_members(rows), layout.rope_switch)
    if len(parts) > 1 and (together or whole_rows):
        _refuse_mixed(parts, layout, together)
    forests = [_grow(part, layout, splits=not (whole_rows or together)) for part in parts]
    options: dict[str, Any] = {
        "pad_token_id": pad_token_id,
        "layout": layout,
        "whole_rows": whole_rows,
        "together": together,
    }
    return [batch for forest in forests for batch in _batches(forest, **options)]


def _batches(trees: list[Tree], *, pad_token_id: int, layout: Layout, whole_rows: bool, together: bool) -> list[Batch]:
    """Pack trees into batches. All of these trees may be in the same forward pass. See `collate` for the arguments."""
    if together:
        packed = [[tree] for tree in trees] if layout.kind == "padded" else _best_fit(trees, layout.row_tokens)
        return [_lay_out(packed, pad_token_id, layout)]
    if layout.kind == "padded":
        units = _units(trees) if whole_rows else [[tree] for tree in trees]
        bins = _by_length(units, layout.row_tokens)
        return [_lay_out([[tree] for unit in group for tree in unit], pad_token_id, layout) for group in bins]
    # ``split`` contains the units that consist of several trees. Such a unit is one dataset row that is too long for a
    # single tree.
    split = [unit for unit in _units(trees) if len(unit) > 1] if whole_rows else []
    apart = {id(tree) for unit in split for tree in unit}
    whole = [tree for tree in trees if id(tree) not in apart]
    # If a tree is longer than the token budget of a batch row, other batch rows may be as long as this tree, up to twice the
    # budget.
    longest = max((tree.size for tree in whole), default=0)
    packed = _best_fit(whole, max(layout.row_tokens, min(longest, 2 * layout.row_tokens)))
    batches = [_lay_out(stack, pad_token_id, layout) for stack in _stacks(packed, layout.pass_tokens)]
    return batches + [_lay_out([[tree] for tree in unit], pad_token_id, layout) for unit in split]


def split_by_sequence(values: Tensor, batch: Batch) -> list[Tensor]:
    """Split a per-token ``(B, T)`` tensor into one 1-D tensor per sequence, in the order of ``batch.origin``.

    Only the values of completion tokens are returned, so each tensor is as long as its completion.
    """
    inside = batch.sequence >= 0
    lengths = torch.bincount(batch.sequence[inside], minlength=batch.num_sequences)
    return list(values[inside].split(lengths.tolist()))


def _check(row: Row, index: int, rope_end: int | None) -> None:
    count = len(row.completions)
    if count == 0:
        raise DataError(f"row {index} has no completion. Fix: give every row at least one completion.")
    for i, (ids, mask) in enumerate(zip(row.completions, row.loss_masks, strict=True)):
        if len(ids) != len(mask):
            raise DataError(
                f"row {index}, completion {i} has {len(ids)} token ids, but {len(mask)} mask values. Fix: pass one mask "
                "value per token id."
            )
        if rope_end is not None and len(row.prompt_ids) + len(ids) > rope_end:
            raise DataError(
                f"row {index}, completion {i} has {len(row.prompt_ids) + len(ids)} tokens including its prompt. With "
                f"rope_type='dynamic', sequences longer than max_position_embeddings={rope_end} get log-probs that depend on "
                f"earlier passes of the process. Fix: limit sequences to {rope_end} tokens (max_length, "
                "max_completion_length), or use rope_type='linear' or 'yarn' with the same factor."
            )
    for name, column in row.sequence_columns.items():
        if len(column) != count:
            raise DataError(f"row {index}, column {name!r}: it has {len(column)} values for {count} completions.")
    for name, lists in row.token_columns.items():
        lengths, wanted = [len(x) for x in lists], [len(x) for x in row.completions]
        if lengths != wanted:
            raise DataError(
                f"row {index}, column {name!r}: its lists have the lengths {lengths}, but the completions have the lengths "
                f"{wanted}."
            )


def _members(rows: Sequence[Row]) -> list[Member]:
    """Return a `Member` for each completion of the rows, in order."""
    members: list[Member] = []
    for number, row in enumerate(rows):
        members += [Member(row, number, index, len(members) + index) for index in range(len(row.completions))]
    return members


def _length(member: Member) -> int:
    return len(member.row.prompt_ids) + len(member.ids)


def _by_rope(members: list[Member], switch: int | None) -> list[list[Member]]:
    """Split sequences into a group of sequences of up to ``switch`` tokens and a group of longer sequences. Empty groups are
    not returned.
    """
    if switch is None:
        return [members]
    parts = [[member for member in members if (_length(member) > switch) is beyond] for beyond in (False, True)]
    return [part for part in parts if part]


def _refuse_mixed(parts: list[list[Member]], layout: Layout, together: bool) -> None:
    """Raise an error if the loss compares sequences that are longer than ``rope_switch`` with sequences that are not. Such
    sequences cannot be in one forward pass.
    """
    short, long = ({member.number: member for member in part} for part in parts)
    shared = [number for number in short if number in long] or ([next(iter(short))] if together else [])
    if shared:
        a, b = short[shared[0]], long.get(shared[0], next(iter(long.values())))
        raise DataError(
            f"the loss compares sequences of {_length(a)} and {_length(b)} tokens (prompt {a.row.prompt_ids[:8]}...). With "
            f"rope_type='longrope', a pass that contains a sequence longer than {layout.rope_switch} tokens uses different "
            f"rotary frequencies for all of its sequences. Fix: set max_length={layout.rope_switch}, or remove "
            "such rows."
        )


def _grow(members: list[Member], layout: Layout, *, splits: bool) -> list[Tree]:
    """Build prefix trees from sequences that can be in the same forward pass."""
    if layout.kind == "padded":
        return trie.alone(members)
    joined = layout.row_tokens if layout.joins_rows else 0
    comfortable = layout.row_tokens if splits and not layout.dense_mask else 0
    most = layout.max_tree_tokens
    return trie.grow(members, most=most, joined=min(joined, most), comfortable=comfortable)


def _best_fit(trees: list[Tree], budget: int) -> list[list[Tree]]:
    """Pack trees into rows with the best-fit-decreasing algorithm. Trees are placed in order of decreasing length, each into
    the fullest row that has enough space.
    """
    bins: list[list[Tree]] = []
    space: list[int] = []
    for tree in sorted(trees, key=lambda t: -t.size):
        fits = [i for i, room in enumerate(space) if room >= tree.size]
        if fits:
            best = min(fits, key=lambda i: space[i])
            bins[best].append(tree)
            space[best] -= tree.size
        else:
            bins.append([tree])
            space.append(budget - tree.size)
    return bins


def _stacks(rows: list[list[Tree]], budget: int) -> Iterator[list[list[Tree]]]:
    """Yield groups of packed rows of similar width. Each group is one forward pass with little padding."""
    stack: list[list[Tree]] = []
    real = width = 0
    for row in sorted(rows, key=lambda row: -sum(tree.size for tree in row)):
        size = sum(tree.size for tree in row)
        area = max(width, size) * (len(stack) + 1)
        if stack and (area > budget or area > (1 + PADDED_MOST) * (real + size)):
            yield stack
            stack, real, width = [], 0, 0
        stack.append(row)
        real, width = real + size, max(width, size)
    if stack:
        yield stack


def _units(trees: list[Tree]) -> list[list[Tree]]:
    """Group trees into units. If a dataset row was split into several trees, these trees form one unit. Every other tree is a
    separate unit.
    """
    units: dict[int, list[Tree]] = {}
    for tree in trees:
        units.setdefault(tree.members[0].number, []).append(tree)
    return list(units.values())


def _by_length(units: list[list[Tree]], budget: int) -> list[list[list[Tree]]]:
    """Group units of similar length, so that batches contain little padding and each group stays within the token budget."""

    def width(unit: list[Tree]) -> int:
        return max(tree.size for tree in unit)

    groups: list[list[list[Tree]]] = []
    for unit in sorted(units, key=lambda u: -width(u)):
        if groups and sum(map(len, [*groups[-1], unit])) * width(groups[-1][0]) <= budget:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


class _Canvas:
    """Batch under construction, with one list per column."""

    def __init__(self, token_names: Sequence[str]) -> None:
        names = ("input_ids", "position_ids", "seen_until", "predictor", "loss_mask", "sequence", *token_names)
        self.tokens: dict[str, list[list[float]]] = {name: [] for name in names}
        self.token_names = token_names
        self.segments: list[Segment] = []
        self.leaves: list[Leaf] = []
        self.origin: list[int] = []
        self.columns: dict[str, list[float]] = {}
        self.pictures: list[tuple[int, int, Any]] = []

    def new_row(self) -> None:
        for column in self.tokens.values():
            column.append([])

    @property
    def row(self) -> int:
        return len(self.tokens["input_ids"]) - 1

    @property
    def width(self) -> int:
        return len(self.tokens["input_ids"][-1])

    def tree(self, tree: Tree) -> None:
        """Append a prefix tree to the current row in depth-first order. If a node has a single child, the child continues the
        node's segment.
        """
        self._segment([tree.root], -1, 0, -1)

    def _segment(self, run: list[Node], parent: int, position: int, last: int) -> None:
        """Append a segment (a run of consecutive nodes) and the subtrees below it.

        Args:
            run: List with the first node of the run.
            parent: Index of the parent segment.
            position: Position of the run's first token.
            last: Column of the token that precedes the run in the tree, or -1 if the run starts a tree.
        """
        while len(run[-1].children) == 1:
            run.append(run[-1].children[0])
        start = self.width
        index = len(self.segments) if any(node.ids for node in run) else parent
        if index != parent:
            self.segments.append(Segment(self.row, start, start, start, parent, position))
        for node in run:
            self._node(node, position, last, index)
            position, last = position + len(node.ids), self.width - 1 if node.ids else last
        stop = self.width
        for child in run[-1].children:
            self._segment([child], index, position, last)
        for node in run:
            for member in node.empty:
                self._number(member, 0, index)
        if index != parent:
            self.segments[index] = self.segments[index]._replace(stop=stop, end=self.width)
            row = self.tokens["seen_until"][-1]
            row[start:stop] = [self.width] * (stop - start)

    def _node(self, node: Node, position: int, last: int, segment: int) -> None:
        start, count, member, row = self.width, len(node.ids), node.member, node.row
        predictor = list(range(start - 1, start + count - 1))
        if count:
            predictor[0] = last
        part = slice(node.start, node.start + count)
        self.pictures += [(self.row, start + at, picture) for at, picture in trie.pictures_of(node)]
        if member is None:
            mask = list(row.prompt_mask[part]) if node.trained and row.prompt_mask is not None else [0] * count
            sequence = -1
        else:
            mask, sequence = list(row.loss_masks[member.index][part]), self._number(member, node.start, segment)
        if count and last < 0:
            # The first token of a sequence without a prompt cannot be predicted, because no token precedes it.
            predictor[0], mask[0] = start, 0
        self._write(
            input_ids=node.ids,
            position_ids=range(position, position + count),
            seen_until=[0] * count,
            predictor=predictor,
            loss_mask=mask,
            sequence=[sequence] * count,
        )
        for name in self.token_names:
            lists = row.token_columns.get(name) if member is not None else None
            self.tokens[name][-1].extend(
                [0.0] * count if lists is None or member is None else lists[member.index][part]
            )

    def _number(self, member: Member, start: int, segment: int) -> int:
        """Register a sequence in the batch with its last segment ``segment``, and return its index."""
        row = member.row
        leaf = Leaf(segment, len(row.prompt_ids), _length(member), member.number)
        if start:
            # Register the completion only once. The completion consists of two consecutive nodes if the prompt of another
            # row ends inside it.
            self.leaves[-1] = leaf
            return len(self.leaves) - 1
        self.leaves.append(leaf)
        self.origin.append(member.origin)
        for name, column in row.sequence_columns.items():
            self.columns.setdefault(name, []).append(column[member.index])
        return len(self.leaves) - 1

    def _write(self, **values: Sequence[float]) -> None:
        for name, value in values.items():
            self.tokens[name][-1].extend(value)


def _lay_out(groups: list[list[Tree]], pad_token_id: int, layout: Layout) -> Batch:
    members = [member for trees in groups for tree in trees for member in tree.members]
    canvas = _Canvas(sorted({name for member in members for name in member.row.token_columns}))
    for trees in groups:
        canvas.new_row()
        for tree in trees:
            canvas.tree(tree)
    return _to_batch(canvas, pad_token_id, layout, _model_kwargs(groups))


def _to_batch(canvas: _Canvas, pad_token_id: int, layout: Layout, model_kwargs: dict[str, Any]) -> Batch:
    width = max(len(ids) for ids in canvas.tokens["input_ids"])
    if layout.pad_to_multiple_of:
        width += -width % layout.pad_to_multiple_of
    fill = {"input_ids": pad_token_id, "sequence": -1}
    tensors = {
        name: torch.tensor(
            [values + [fill.get(name, 0)] * (width - len(values)) for values in column],
            dtype=torch.float32 if name in canvas.token_names else torch.long,
        )
        for name, column in canvas.tokens.items()
    }
    tensors["loss_mask"] = tensors["loss_mask"].bool()
    extra = {name: tensors.pop(name) for name in canvas.token_names}
    for name, column in canvas.columns.items():
        if len(column) != len(canvas.origin):
            raise DataError(f"column {name!r} is missing in some rows of a batch. Fix: add the column to all rows.")
        extra[name] = torch.tensor(column, dtype=torch.float32)
    named = {name: extra.pop(name) for name in FIELDS if name in extra}
    return Batch(
        **tensors,
        num_sequences=len(canvas.origin),
        segments=tuple(canvas.segments),
        leaves=tuple(canvas.leaves),
        dense_mask=layout.dense_mask,
        origin=canvas.origin,
        columns=extra,
        model_kwargs=model_kwargs,
        pictures=canvas.pictures,
        **named,
    )


def _model_kwargs(groups: list[list[Tree]]) -> dict[str, Any]:
    """Merge the additional model inputs of all rows. Tensors are concatenated in row order. Values that are not tensors must
    be equal in all rows.
    """
    merged: dict[str, Any] = {}
    for tree in (tree for trees in groups for tree in trees):
        # Rows with model_kwargs are never merged with other rows, so each tree contains a single row.
        for name, value in tree.members[0].row.model_kwargs.items():
            if name in merged and isinstance(value, Tensor):
                merged[name] = torch.cat([merged[name], value])
            else:
                merged[name] = value
    return merged


def to_rows(batch: Batch) -> list[Row]:
    """Reconstruct the rows of a batch in their original order. The rows contain only columns that were collated.

    If a prompt was repeated in several trees, the result contains one row per repetition.
    """
    numbers: dict[int, list[int]] = {}
    # The order of completions identifies pairs. Trees store empty completions last, so restore the original order.
    for index in sorted(range(batch.num_sequences), key=batch.origin.__getitem__):
        numbers.setdefault(batch.leaves[index].row, []).append(index)
    return _rows(batch, list(numbers.values()))


def sequences(batch: Batch) -> list[Row]:
    """Convert every sequence of a batch to a separate row, in the order of the loss positions."""
    return _rows(batch, [[index] for index in range(batch.num_sequences)])


def _rows(batch: Batch, groups: Sequence[Sequence[int]]) -> list[Row]:
    named = {name: value for name in FIELDS if (value := getattr(batch, name)) is not None} | batch.columns
    columns = {name: value.tolist() for name, value in named.items()}
    per_token = {name for name, value in named.items() if value.shape == batch.input_ids.shape}
    ids, mask, owner = batch.input_ids.tolist(), batch.loss_mask.tolist(), batch.sequence.tolist()
    placed = {(b, column): picture for b, column, picture in batch.pictures}
    # Positions of prompt tokens whose loss is already part of an earlier row.
    earlier: set[tuple[int, int]] = set()
    rows = []
    for group in groups:
        leaf = batch.leaves[group[0]]
        b = batch.segments[leaf.segment].row if leaf.segment >= 0 else 0
        paths = [[column for run in batch.path(index) for column in run] for index in group]
        prompt = paths[0][: leaf.prompt]
        trained = [int(mask[b][c] and owner[b][c] < 0 and (b, c) not in earlier) for c in prompt]
        earlier.update((b, column) for column, in_loss in zip(prompt, trained, strict=True) if in_loss)
        row = Row([ids[b][column] for column in prompt], [], [], prompt_mask=trained if any(trained) else None)
        parts = [prompt, *(path[leaf.prompt :] for path in paths)]
        for index, own in zip(group, parts[1:], strict=True):
            # The trees of one example may be in different batch rows.
            at = batch.segments[batch.leaves[index].segment].row if own else b
            row.completions.append([ids[at][column] for column in own])
            row.loss_masks.append([int(mask[at][column]) for column in own])
            for name, value in columns.items():
                if name in per_token:
                    row.token_columns.setdefault(name, []).append([value[at][column] for column in own])
                else:
                    row.sequence_columns.setdefault(name, []).append(float(value[index]))
        if placed:
            rows_of = [b, *(batch.segments[batch.leaves[index].segment].row for index in group)]
            pairs = zip(rows_of, parts, strict=True)
            pictures = [
                [placed[where, column] for column in part if (where, column) in placed] for where, part in pairs
            ]
            row = dataclasses.replace(row, pictures=pictures if any(pictures) else [])
        rows.append(row)
    return rows


def halves(batch: Batch, *, pad_token_id: int, layout: Layout, whole_rows: bool = False) -> list[Batch]:
    """Split a batch into smaller batches that together contain the same completions. If the batch cannot be split, return it
    unchanged.

    The trees are distributed to two groups of about equal size. If the batch has only one tree, the tree's completions are
    distributed to two trees, each with a copy of the prompt. A single tree cannot be split if the loss compares the
    completions (``whole_rows``) or if prompt tokens have a loss.

    Args:
        batch: Batch on any device. The returned batches are on the CPU.
        pad_token_id: Same as in `collate`.
        layout: Same as in `collate`.
        whole_rows: Whether the completions of a tree must stay in one batch.
    """
    if batch.model_kwargs or (whole_rows and layout.kind == "padded"):
        return [batch]  # Concatenated images cannot be separated. Padded batches are not split either.
    rows = to_rows(batch.to("cpu"))
    if len(rows) > 1:
        parts = _dealt(rows)
    elif len(rows[0].completions) > 1 and not whole_rows and rows[0].prompt_mask is None:
        middle = len(rows[0].completions) // 2
        parts = [[_part(rows[0], slice(None, middle))], [_part(rows[0], slice(middle, None))]]
    else:
        return [batch]
    narrow = dataclasses.replace(layout, pass_tokens=min(layout.pass_tokens, batch.input_ids.numel() // 2))
    return [
        small
        for part in parts
        for small in collate(part, pad_token_id=pad_token_id, layout=narrow, whole_rows=whole_rows)
    ]


def _dealt(rows: list[Row]) -> list[list[Row]]:
    """Distribute rows to two lists of similar size. Rows are assigned in order of decreasing length, each to the list with
    fewer tokens.
    """
    parts: list[list[Row]] = [[], []]
    sizes = [0, 0]
    for row in sorted(rows, key=_size, reverse=True):
        smaller = sizes.index(min(sizes))
        parts[smaller].append(row)
        sizes[smaller] += _size(row)
    return parts


def _size(row: Row) -> int:
    return len(row.prompt_ids) + sum(map(len, row.completions))


def _part(row: Row, chosen: slice) -> Row:
    return Row(
        row.prompt_ids,
        row.completions[chosen],
        row.loss_masks[chosen],
        {name: column[chosen] for name, column in row.sequence_columns.items()},
        {name: column[chosen] for name, column in row.token_columns.items()},
        pictures=[row.pictures[0], *row.pictures[1:][chosen]] if row.pictures else [],
    )


def unbatched(batch: Any) -> list[dict[str, Any]]:
    """Split a padded or concatenated batch into rows with ``input_ids`` and, if present, ``labels``.

    Args:
        batch: ``input_ids (B, L)`` with ``attention_mask (B, L)``, or with ``position_ids (1, T)`` that restart at 0 in every
            document. ``labels`` and ``completion_mask`` of the same shape are optional.

    Raises:
        DataError: The batch has no ``input_ids``, or it has neither ``attention_mask`` nor ``position_ids``, so padding cannot
            be identified.

    >>> unbatched({"input_ids": torch.tensor([[1, 2], [3, 9]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])})
    [{'input_ids': [1, 2]}, {'input_ids': [3]}]
    """
    names = [name for name in ("input_ids", "labels", "completion_mask") if _has(batch, name)]
    if "input_ids" not in names or not (_has(batch, "attention_mask") or _has(batch, "position_ids")):
        keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(
            f"data_collator returned {keys}. Fix: return input_ids with an attention_mask, or with position_ids that restart at "
            "0 in every document. Also return labels if some tokens are not trained."
        )
    if _has(batch, "attention_mask"):
        real = batch["attention_mask"].bool()
        return [{name: batch[name][row][mask].tolist() for name in names} for row, mask in enumerate(real)]
    rows = []
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
        for start, end in pairwise(starts):
            rows.append({name: batch[name][row, start:end].tolist() for name in names})
    return rows


def unbatched_answers(batch: Any, examples: Sequence[dict[str, Any]], branches: Sequence[str]) -> list[dict[str, Any]]:
    """Replace the tokens of examples with the tokens of a batch from a custom data collator.

    Args:
        batch: Batch in one of the forms that `unbatched` accepts. The batch contains the first answers of all examples, then
            the second answers, and so on. ``completion_mask (B, L)`` marks the answers. Columns of shape ``(len(examples),)``
            replace the examples' values.
        examples: Examples that were passed to the collator.
        branches: Names of the answers, in order.

    Raises:
        DataError: The number of rows is wrong, the answers of an example have different prompts, or ``completion_mask`` is
            missing.
    """
    rows, count = unbatched(batch), len(examples)
    if len(rows) != len(branches) * count:
        raise DataError(
            f"data_collator returned {len(rows)} rows for {count} examples with {len(branches)} answers each "
            f"({', '.join(branches)}). Fix: return the first answers of all examples, then the second answers of all examples."
        )
    if "completion_mask" not in rows[0] and "prompt_ids" in examples[0]:
        raise DataError(
            "data_collator returned no completion_mask. Fix: return a mask that is 0 on prompts and 1 on answers."
        )
    columns = {name: value.tolist() for name, value in batch.items() if getattr(value, "shape", None) == (count,)}
    answers = [{**example, **{name: c[i] for name, c in columns.items()}} for i, example in enumerate(examples)]
    for index, row in enumerate(rows):
        branch, at = divmod(index, count)
        ids, mask = row["input_ids"], row.get("completion_mask")
        start = 0 if mask is None else (*mask, 1).index(1)
        if branch and mask is not None and answers[at]["prompt_ids"] != ids[:start]:
            raise DataError(
                f"data_collator returned different prompts for the {branches[branch]} answer and the first answer of example "
                f"{at} of a batch, but all answers of an example share one prompt. Fix: change prompts in train_dataset instead."
            )
        answers[at][f"{branches[branch]}_ids"] = ids[start:]
        if mask is not None:
            answers[at] |= {"prompt_ids": ids[:start], f"{branches[branch]}_mask": mask[start:]}
    return answers


def _has(batch: Any, name: str) -> bool:
    return isinstance(batch, Mapping) and isinstance(batch.get(name), Tensor)
