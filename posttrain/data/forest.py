"""From rows to token forests: share each prompt, fill rows to a token budget, pad nothing that need not be padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.errors import DataError
from posttrain.types import Batch, Row

PADDED_MOST = 0.05  # Share of a stacked pass that may be padding: less than what another pass costs.
FIELDS = ("advantages", "old_logp", "ref_logp", "rollout_logp")  # Columns that are fields of `Batch` by name.


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows are laid out for one model and attention backend.

    Attributes:
        kind: ``tree`` shares prompts and packs several trees into a row; ``padded`` gives every sequence its own padded
            row with its own copy of the prompt, for models whose attention cannot be masked freely.
        row_tokens: Trees are packed into a row while they fit this many tokens. Short on backends with a dense mask,
            where attention costs the square of the row; long where the mask is block-sparse.
        pass_tokens: Rows of about one width are stacked into one forward pass up to this many tokens, because every pass
            has a fixed cost (gradients are added up, weights are read); at most 5 % of a pass may be padding.
        max_tree_tokens: A group whose tree would be longer is split, its prompt repeated.
        pad_to_multiple_of: Rounds T up.
        rope_switch: Sequences longer than this are computed with other rotary frequencies (longrope), which a pass takes for all
            of its sequences: longer and shorter ones never share a pass. None: there is no such length.
        rope_end: Longer sequences are refused: what a pass computes of them depends on the passes before it (``dynamic``).
    """

    kind: Literal["tree", "padded"] = "tree"
    row_tokens: int = 512
    pass_tokens: int = 0
    max_tree_tokens: int = 8192
    pad_to_multiple_of: int | None = None
    rope_switch: int | None = None
    rope_end: int | None = None


@dataclass(slots=True)
class _Tree:
    """A prompt with some of the completions of one row; ``first`` is the flat index of its first completion."""

    row: Row
    members: range
    first: int
    shared: bool

    @property
    def size(self) -> int:
        prompt = len(self.row.prompt_ids)
        lengths = [len(self.row.completions[i]) for i in self.members]
        return prompt + sum(lengths)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return len(self.row.prompt_ids) + max(len(self.row.completions[i]) for i in self.members)


def share_prompts(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """Rows with equal prompts as one row, whose prompt is then computed once.

    Returns:
        The rows, in the order in which their prompts come first; and for each of their completions, in order, its index in
        the flat list of those that were given. Rows with ``model_kwargs`` stay alone.

    >>> rows, places = share_prompts([Row([1], [[2]], [[1]]), Row([3], [[4]], [[1]]), Row([1], [[5]], [[1]])])
    >>> [row.completions for row in rows], places
    ([[[2], [5]], [[4]]], [0, 2, 1])
    """
    found: dict[Any, tuple[Row, list[int]]] = {}
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
        whole, places = found.setdefault(number if row.model_kwargs else key, (empty, []))
        whole.completions.extend(row.completions)
        whole.loss_masks.extend(row.loss_masks)
        whole.pictures.extend(pictures[1:])
        for name, numbers in row.sequence_columns.items():
            whole.sequence_columns.setdefault(name, []).extend(numbers)
        for name, lists in row.token_columns.items():
            whole.token_columns.setdefault(name, []).extend(lists)
        places.extend(range(count, count + len(row.completions)))
        count += len(row.completions)
    return [row for row, _ in found.values()], [place for _, places in found.values() for place in places]


def collate(
    rows: Sequence[Row],
    *,
    pad_token_id: int,
    layout: Layout = Layout(),
    whole_rows: bool = False,
    together: bool = False,
) -> list[Batch]:
    """Lay rows out as batches, each one forward pass.

    Args:
        rows: Examples; the flat list of their completions, in order, is what ``Batch.origin`` indexes.
        pad_token_id: Written to padding; never read back (padding is known by position).
        layout: See `Layout`.
        whole_rows: Keep all completions of a row in one batch, for losses that compare them.
        together: Keep all rows in one batch, for losses that sort them.

    Returns:
        Batches that hold every completion exactly once. ``num_sequences`` over all of them is the number of completions.

    Raises:
        DataError: No rows, a row without completions, a mask, column or id list of the wrong length, or sequences that the
            loss compares and the rotary frequencies keep apart; see `Layout`.
    """
    if not rows:
        raise DataError("collate got an empty list of rows; a batch needs at least one.")
    for index, row in enumerate(rows):
        _check(row, index, layout.rope_end)
    trees = list(_grow(rows, layout))
    parts = _by_rope(trees, layout.rope_switch)
    if len(parts) > 1 and (together or whole_rows):
        _refuse_mixed(parts, layout, together)
    options: dict[str, Any] = {
        "pad_token_id": pad_token_id,
        "layout": layout,
        "whole_rows": whole_rows,
        "together": together,
    }
    return [batch for part in parts for batch in _batches(part, **options)]


def _batches(trees: list[_Tree], *, pad_token_id: int, layout: Layout, whole_rows: bool, together: bool) -> list[Batch]:
    """Batches of trees that may share a pass; see `collate`."""
    if together:
        packed = [[tree] for tree in trees] if layout.kind == "padded" else _best_fit(trees, layout.row_tokens)
        return [_lay_out(packed, pad_token_id, layout)]
    if layout.kind == "padded":
        units = _units(trees) if whole_rows else [[tree] for tree in trees]
        bins = _by_length(units, layout.row_tokens)
        return [_lay_out([[tree] for unit in group for tree in unit], pad_token_id, layout) for group in bins]
    split = [unit for unit in _units(trees) if len(unit) > 1] if whole_rows else []  # Too long for one tree.
    apart = {id(tree) for unit in split for tree in unit}
    whole = [tree for tree in trees if id(tree) not in apart]
    # Where one tree is longer than a row anyway, the others fill rows of its length, up to twice the budget.
    longest = max((tree.size for tree in whole), default=0)
    packed = _best_fit(whole, max(layout.row_tokens, min(longest, 2 * layout.row_tokens)))
    batches = [_lay_out(stack, pad_token_id, layout) for stack in _stacks(packed, layout.pass_tokens)]
    return batches + [_lay_out([[tree] for tree in unit], pad_token_id, layout) for unit in split]


def split_by_sequence(values: Tensor, batch: Batch) -> list[Tensor]:
    """Cut a per-token ``(B, T)`` tensor into one 1-D tensor a sequence, in the order of ``batch.origin``.

    Only completion tokens are returned; a sequence's tensor is as long as its completion.
    """
    inside = batch.sequence >= 0
    lengths = torch.bincount(batch.sequence[inside], minlength=batch.num_sequences)
    return list(values[inside].split(lengths.tolist()))


def _check(row: Row, index: int, rope_end: int | None) -> None:
    count = len(row.completions)
    if count == 0:
        raise DataError(f"row {index} has no completion; every row needs at least one.")
    for i, (ids, mask) in enumerate(zip(row.completions, row.loss_masks, strict=True)):
        if len(ids) != len(mask):
            raise DataError(f"row {index}, completion {i}: {len(ids)} token ids but a loss mask of length {len(mask)}.")
        if rope_end is not None and len(row.prompt_ids) + len(ids) > rope_end:
            raise DataError(
                f"row {index}, completion {i} has {len(row.prompt_ids) + len(ids)} tokens with its prompt, and "
                f"rope_type='dynamic' computes up to {rope_end} (max_position_embeddings) alike in all passes. Beyond that, "
                f"log-probs depend on what else the process has computed. Fix: at most {rope_end} tokens (max_length, "
                "max_completion_length), or rope_type='linear' or 'yarn' with the same factor."
            )
    for name, column in row.sequence_columns.items():
        if len(column) != count:
            raise DataError(f"row {index}, column {name!r}: {len(column)} values for {count} completions.")
    for name, lists in row.token_columns.items():
        lengths, wanted = [len(x) for x in lists], [len(x) for x in row.completions]
        if lengths != wanted:
            raise DataError(f"row {index}, column {name!r}: lengths {lengths} do not match the completions' {wanted}.")


def _by_rope(trees: list[_Tree], switch: int | None) -> list[list[_Tree]]:
    """Trees of sequences up to ``switch`` tokens, and those of longer ones."""
    if switch is None:
        return [trees]
    parts = [[tree for tree in trees if (tree.longest > switch) is beyond] for beyond in (False, True)]
    return [part for part in parts if part]


def _refuse_mixed(parts: list[list[_Tree]], layout: Layout, together: bool) -> None:
    """Raise where sequences that the loss compares lie on both sides of ``rope_switch``."""
    short, long = ({id(tree.row): tree for tree in part} for part in parts)
    shared = [number for number in short if number in long] or ([next(iter(short))] if together else [])
    if shared:
        a, b = short[shared[0]], long.get(shared[0], next(iter(long.values())))
        raise DataError(
            f"the loss compares sequences of {a.longest} and {b.longest} tokens (prompt {a.row.prompt_ids[:8]}...), and the "
            f"model's rotary frequencies change for a whole pass beyond {layout.rope_switch} tokens (rope_type='longrope'): in "
            f"one pass the shorter one would get the frequencies of the longer. Fix: max_length={layout.rope_switch}, or leave "
            "out such rows."
        )


def _grow(rows: Sequence[Row], layout: Layout) -> Iterator[_Tree]:
    """One tree a row, or several where the layout is padded, the tree would be too long, or the rope changes in between."""
    first, switch = 0, layout.rope_switch
    for row in rows:
        count, prompt = len(row.completions), len(row.prompt_ids)
        beyond = [switch is not None and prompt + len(ids) > switch for ids in row.completions]
        start = 0
        while start < count:
            stop, size = start + 1, prompt + len(row.completions[start])
            while (
                layout.kind == "tree"
                and stop < count
                and beyond[stop] is beyond[start]
                and size + len(row.completions[stop]) <= layout.max_tree_tokens
            ):
                size += len(row.completions[stop])
                stop += 1
            yield _Tree(row, range(start, stop), first + start, shared=stop - start > 1)
            start = stop
        first += count


def _best_fit(trees: list[_Tree], budget: int) -> list[list[_Tree]]:
    """Best-fit decreasing: the longest tree first, each into the fullest row that still has room."""
    bins: list[list[_Tree]] = []
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


def _stacks(rows: list[list[_Tree]], budget: int) -> Iterator[list[list[_Tree]]]:
    """Rows that go through the model together: of similar width, so that hardly anything is padding."""
    stack: list[list[_Tree]] = []
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


def _units(trees: list[_Tree]) -> list[list[_Tree]]:
    """Trees of one row together."""
    units: dict[int, list[_Tree]] = {}
    for tree in trees:
        units.setdefault(id(tree.row), []).append(tree)
    return list(units.values())


def _by_length(units: list[list[_Tree]], budget: int) -> list[list[list[_Tree]]]:
    """Similar lengths together, so that padding stays small; rows times width stays within the budget."""

    def width(unit: list[_Tree]) -> int:
        return max(tree.size for tree in unit)

    groups: list[list[list[_Tree]]] = []
    for unit in sorted(units, key=lambda u: -width(u)):
        if groups and sum(map(len, [*groups[-1], unit])) * width(groups[-1][0]) <= budget:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


class _Canvas:
    """Column-wise lists of one batch while it is being written."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[list[float]]] = {
            name: [] for name in ("input_ids", "position_ids", "tree", "branch", "predictor", "loss_mask", "sequence")
        }
        self.origin: list[int] = []
        self.columns: dict[str, list[float]] = {}
        self.pictures: list[tuple[int, int, Any]] = []

    def new_row(self) -> None:
        for column in self.tokens.values():
            column.append([])

    def write(self, **values: Sequence[float]) -> None:
        for name, value in values.items():
            self.tokens[name][-1].extend(value)

    def place(self, pictures: Sequence[Any], at: int) -> None:
        row = len(self.tokens["input_ids"]) - 1
        self.pictures += [(row, at + picture.start, picture) for picture in pictures]

    @property
    def width(self) -> int:
        return len(self.tokens["input_ids"][-1])


def _lay_out(groups: list[list[_Tree]], pad_token_id: int, layout: Layout) -> Batch:
    canvas = _Canvas()
    token_names = {name for trees in groups for tree in trees for name in tree.row.token_columns}
    for name in sorted(token_names):
        canvas.tokens[name] = []
    for trees in groups:
        canvas.new_row()
        for index, tree in enumerate(trees):
            _write_tree(canvas, tree, index, token_names)
    return _to_batch(canvas, token_names, pad_token_id, layout, _model_kwargs(groups))


def _write_tree(canvas: _Canvas, tree: _Tree, index: int, token_names: set[str]) -> None:
    row, prompt = tree.row, tree.row.prompt_ids
    start, p = canvas.width, len(prompt)
    canvas.write(
        input_ids=prompt,
        position_ids=range(p),
        tree=[index] * p,
        branch=[0] * p,
        predictor=range(start - 1, start + p - 1),
    )
    pictures = row.pictures or [[], *([] for _ in row.completions)]
    canvas.place(pictures[0], start)
    # A prompt that is trained is trained once: where its first completion is; its own first token follows nothing.
    trained = row.prompt_mask is not None and tree.members.start == 0
    prompt_mask = [0, *row.prompt_mask[1:]] if trained and row.prompt_mask else [0] * p
    canvas.write(loss_mask=prompt_mask, sequence=[-1] * p, **{name: [0.0] * p for name in token_names})
    for number, i in enumerate(tree.members, start=1):
        ids, mask, at = row.completions[i], list(row.loss_masks[i]), canvas.width
        n = len(ids)
        canvas.place(pictures[1 + i], at)
        predictor = list(range(at - 1, at + n - 1))
        if n and p:
            predictor[0] = start + p - 1  # The prompt's last token predicts the first token of every branch.
        elif n:
            predictor[0], mask[0] = at, 0  # Nothing precedes the first token of a row without a prompt.
        canvas.write(input_ids=ids, position_ids=range(p, p + n), tree=[index] * n, predictor=predictor, loss_mask=mask)
        canvas.write(branch=[number if tree.shared else 0] * n, sequence=[len(canvas.origin)] * n)
        canvas.write(**{name: row.token_columns.get(name, {i: [0.0] * n})[i] for name in token_names})
        canvas.origin.append(tree.first + i - tree.members.start)
        for name, column in row.sequence_columns.items():
            canvas.columns.setdefault(name, []).append(column[i])


def _to_batch(
    canvas: _Canvas, token_names: set[str], pad_token_id: int, layout: Layout, model_kwargs: dict[str, Any]
) -> Batch:
    width = max(len(ids) for ids in canvas.tokens["input_ids"])
    if layout.pad_to_multiple_of:
        width += -width % layout.pad_to_multiple_of
    fill = {"input_ids": pad_token_id, "tree": -1, "sequence": -1}
    tensors = {
        name: torch.tensor(
            [values + [fill.get(name, 0)] * (width - len(values)) for values in column],
            dtype=torch.float32 if name in token_names else torch.long,
        )
        for name, column in canvas.tokens.items()
    }
    tensors["loss_mask"] = tensors["loss_mask"].bool()
    tensors["predictor"] = tensors["predictor"].clamp_min(0)
    extra = {name: tensors.pop(name) for name in token_names}
    for name, column in canvas.columns.items():
        if len(column) != len(canvas.origin):
            raise DataError(f"column {name!r} is present in some rows of a batch and absent in others; give it in all.")
        extra[name] = torch.tensor(column, dtype=torch.float32)
    named = {name: extra.pop(name) for name in FIELDS if name in extra}
    return Batch(
        **tensors,
        num_sequences=len(canvas.origin),
        origin=canvas.origin,
        columns=extra,
        model_kwargs=model_kwargs,
        pictures=canvas.pictures,
        **named,
    )


def _model_kwargs(groups: list[list[_Tree]]) -> dict[str, Any]:
    """Opaque model inputs of the batch: tensors are concatenated in row order, anything else must agree."""
    merged: dict[str, Any] = {}
    for tree in (tree for trees in groups for tree in trees):
        for name, value in tree.row.model_kwargs.items():
            if name in merged and isinstance(value, Tensor):
                merged[name] = torch.cat([merged[name], value])
            else:
                merged[name] = value
    return merged


def to_rows(batch: Batch) -> list[Row]:
    """One row a tree, in the order of the batch: what `collate` laid out.

    A prompt that was repeated for several trees comes back as often.
    """
    columns = {name: value for name in FIELDS if (value := getattr(batch, name)) is not None} | batch.columns
    return [_row(batch, columns, b, tree) for b, tree in _trees(batch)]


def _trees(batch: Batch) -> Iterator[tuple[int, int]]:
    for b, most in enumerate(batch.tree.amax(1).tolist()):
        for tree in range(most + 1):
            yield b, tree


def _row(batch: Batch, columns: dict[str, Tensor], b: int, tree: int) -> Row:
    inside = batch.tree[b] == tree
    sequence, ids, mask = batch.sequence[b], batch.input_ids[b], batch.loss_mask[b]
    prefix = inside & (sequence < 0)
    members = list(dict.fromkeys(sequence[inside & (sequence >= 0)].tolist()))
    row = Row(ids[prefix].tolist(), [], [])
    if bool(mask[prefix].any()):
        row.prompt_mask = mask[prefix].long().tolist()
    for number in members:
        tokens = sequence == number
        row.completions.append(ids[tokens].tolist())
        row.loss_masks.append(mask[tokens].long().tolist())
        for name, value in columns.items():
            if value.shape == batch.input_ids.shape:
                row.token_columns.setdefault(name, []).append(value[b][tokens].tolist())
            else:
                row.sequence_columns.setdefault(name, []).append(float(value[number]))
    placed = [(int(sequence[column]), one) for at, column, one in batch.pictures if at == b and inside[column]]
    if placed:
        row.pictures = [[one for owner, one in placed if owner == number] for number in (-1, *members)]
    return row


def halves(batch: Batch, *, pad_token_id: int, layout: Layout, whole_rows: bool = False) -> list[Batch]:
    """The batch as smaller ones that hold the same completions; itself alone where it cannot be divided.

    Trees are dealt to two parts of about equal size. A single tree is divided between its completions, and its prompt
    repeated, unless the loss compares them (``whole_rows``) or the prompt itself is trained.

    Args:
        batch: On any device; the parts are on the host.
        pad_token_id: As in `collate`.
        layout: As in `collate`.
        whole_rows: Keep the completions of a tree together.
    """
    if batch.model_kwargs or (whole_rows and layout.kind == "padded"):
        return [batch]  # Images cannot be told apart any more; nor can the rows of a padded batch.
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
    """Two lists of about equal size, the longest rows first, each to the smaller list."""
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
    """Rows with ``input_ids`` (and ``labels``) of a padded or concatenated batch; padding is told by position.

    Args:
        batch: ``input_ids (B, L)``, and ``attention_mask (B, L)`` or ``position_ids (1, T)`` that begin at 0 in every document;
            ``labels`` likewise where there are any.

    Raises:
        DataError: It is no such batch; without mask and positions, padding could not be told from text.

    >>> unbatched({"input_ids": torch.tensor([[1, 2], [3, 9]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])})
    [{'input_ids': [1, 2]}, {'input_ids': [3]}]
    """
    names = [name for name in ("input_ids", "labels", "completion_mask") if _has(batch, name)]
    if "input_ids" not in names or not (_has(batch, "attention_mask") or _has(batch, "position_ids")):
        keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(
            f"data_collator gave {keys}; it must give input_ids with an attention_mask (or position_ids that begin at 0 in "
            "every document), and labels where not everything is trained."
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
    """Examples with what a collator made of them: all rows with the first answer, then all with the second one, and so on.

    Args:
        batch: As `unbatched` reads it; with ``completion_mask (B, L)`` prompts are told from answers. Columns with one number
            an example, ``(len(examples),)``, take the place of the example's.
        examples: What the collator got.
        branches: Names of the answers, in order.

    Raises:
        DataError: It is no such batch, or answers of an example have different prompts.
    """
    rows, count = unbatched(batch), len(examples)
    if len(rows) != len(branches) * count:
        raise DataError(
            f"data_collator gave {len(rows)} rows for {count} examples with {len(branches)} answers each "
            f"({', '.join(branches)}). Fix: give all rows with the first answer, then as many with the next."
        )
    columns = {name: value.tolist() for name, value in batch.items() if getattr(value, "shape", None) == (count,)}
    found = [{**example, **{name: c[i] for name, c in columns.items()}} for i, example in enumerate(examples)]
    for index, row in enumerate(rows):
        branch, at = divmod(index, count)
        ids, mask = row["input_ids"], row.get("completion_mask")
        start = 0 if mask is None else (*mask, 1).index(1)
        if branch and mask is not None and found[at]["prompt_ids"] != ids[:start]:
            raise DataError(
                f"data_collator gave example {at} of a batch another prompt with its {branches[branch]} answer than with the "
                "first one; a prompt is computed once for all of them. Fix: cut or change prompts in train_dataset."
            )
        found[at][f"{branches[branch]}_ids"] = ids[start:]
        if mask is not None:
            found[at] |= {"prompt_ids": ids[:start], f"{branches[branch]}_mask": mask[start:]}
    return found


def _has(batch: Any, name: str) -> bool:
    return isinstance(batch, Mapping) and isinstance(batch.get(name), Tensor)
