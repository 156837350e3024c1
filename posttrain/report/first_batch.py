"""The first optimiser step as the model sees it, for the report: facts, lengths, and some sequences with their trained tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from posttrain.data.unforest import to_rows
from posttrain.types import Batch, Row

__all__ = ["describe_batches"]

SHOWN, LONGEST = 6, 2000  # Sequences, and tokens of each.


def describe_batches(batches: Sequence[Batch], tokenizer: Any) -> dict[str, Any]:
    """What ``data.json`` of a run holds.

    Args:
        batches: This rank's batches of an optimiser step.
        tokenizer: Decodes ids.

    Returns:
        ``facts`` by name; ``lengths`` of all sequences, prompts included; ``sequences`` with a ``title`` and ``pieces``, pairs of
        text and whether it is trained.
    """
    rows = [row for batch in batches for row in to_rows(batch)]
    lengths = [len(row.prompt_ids) + len(completion) for row in rows for completion in row.completions]
    trained = sum(batch.num_loss_tokens for batch in batches)
    computed = sum(batch.input_ids.numel() for batch in batches)
    real = sum(batch.num_tokens for batch in batches)
    shown = itertools.islice(
        itertools.chain.from_iterable(_sequences(i, row, tokenizer) for i, row in enumerate(rows)), SHOWN
    )
    return {
        "facts": {
            "prompts and documents": len(rows),
            "sequences": len(lengths),
            "forward passes": len(batches),
            "tokens computed": real,
            "tokens of all sequences": sum(lengths),
            "tokens trained": trained,
            "padding": f"{1 - real / computed:.1%}" if computed else "-",
        },
        "lengths": lengths,
        "sequences": list(shown),
    }


def _sequences(number: int, row: Row, tokenizer: Any) -> list[dict[str, Any]]:
    several = len(row.completions) > 1
    made = []
    for index, (ids, mask) in enumerate(zip(row.completions, row.loss_masks, strict=True)):
        title = f"row {number}" + (f", completion {index}" if several else "")
        tokens = [*row.prompt_ids, *ids][:LONGEST]
        flags = [*(row.prompt_mask or [0] * len(row.prompt_ids)), *mask][:LONGEST]
        pieces = []
        for learnt, group in itertools.groupby(zip(tokens, flags, strict=True), key=lambda pair: bool(pair[1])):
            pieces.append([tokenizer.decode([token for token, _ in group]), learnt])
        made.append({"title": f"{title} ({len(row.prompt_ids) + len(ids)} tokens)", "pieces": pieces})
    return made
