"""The way back: a laid-out batch as rows, and in halves, for when it did not fit in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from posttrain.data.forest import Layout, collate
from posttrain.types import Batch, Row

__all__ = ["halves", "to_rows"]

NAMES = ("advantages", "old_logp", "ref_logp", "rollout_logp")


def to_rows(batch: Batch) -> list[Row]:
    """One row a tree, in the order of the batch: what `collate` laid out.

    A prompt that was repeated for several trees comes back as often.
    """
    columns = {name: value for name in NAMES if (value := getattr(batch, name)) is not None} | batch.columns
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
    )
