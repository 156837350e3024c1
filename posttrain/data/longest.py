"""The longest examples of a dataset, which decide how much memory a run needs."""

from __future__ import annotations

import itertools
from typing import Any

import datasets

__all__ = ["longest_examples", "weight"]

LOOKED_AT = 20_000  # Rows whose lengths are read; of a longer set as many, spread over it.
STREAMED = 64


def longest_examples(dataset: Any, count: int) -> list[dict[str, Any]]:
    """By tokens where rows are tokenised, by characters where not; of a stream, of its first 64."""
    if isinstance(dataset, datasets.IterableDataset) or not hasattr(dataset, "__len__"):
        drawn = list(itertools.islice(dataset, STREAMED))
        return sorted(drawn, key=_tokens, reverse=True)[:count]
    total = len(dataset)
    places = range(0, total, max(1, -(-total // LOOKED_AT)))
    names = [name for name in dataset.column_names if name.endswith("ids")] or None
    part = dataset.select(places) if len(places) < total else dataset
    weights = [weight(row) for row in (part.select_columns(names) if names else part)]
    best = sorted(range(len(weights)), key=lambda i: weights[i], reverse=True)[:count]
    return [dataset[places[i]] for i in best]


def _tokens(example: dict[str, Any]) -> int:
    return weight({k: v for k, v in example.items() if k.endswith("ids")} or example)


def weight(example: Any) -> int:
    """Tokens or characters in a value, whatever holds them.

    >>> weight({"input_ids": [1, 2, 3]}), weight({"messages": [{"role": "user", "content": "Hello"}]})
    (3, 9)
    """
    if isinstance(example, str):
        return len(example)
    if isinstance(example, dict):
        return sum(map(weight, example.values()))
    if isinstance(example, list):
        return len(example) if not example or isinstance(example[0], int) else sum(map(weight, example))
    return 0
