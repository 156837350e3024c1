"""What a user's own collator made, taken apart into rows again: batches are filled to a token budget afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import DataError

__all__ = ["unbatched", "unbatched_pairs"]


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
    names = [name for name in ("input_ids", "labels") if _has(batch, name)]
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


def unbatched_pairs(batch: Any) -> list[dict[str, Any]]:
    """Pairs with ``chosen_ids`` and ``rejected_ids`` (and ``margin``) of a batch whose first half is chosen.

    Raises:
        DataError: It is no such batch.
    """
    ids = [row["input_ids"] for row in unbatched(batch)]
    if len(ids) % 2:
        raise DataError(f"data_collator gave {len(ids)} rows; pairs are all chosen rows, then as many rejected ones.")
    half = len(ids) // 2
    pairs: list[dict[str, Any]] = [
        {"chosen_ids": chosen, "rejected_ids": rejected}
        for chosen, rejected in zip(ids[:half], ids[half:], strict=True)
    ]
    if _has(batch, "margin"):
        for pair, margin in zip(pairs, batch["margin"].tolist(), strict=True):
            pair["margin"] = margin
    return pairs


def _has(batch: Any, name: str) -> bool:
    return isinstance(batch, Mapping) and isinstance(batch.get(name), Tensor)
