"""Reading the log of a run: the rows of training, and windows of them that are measured in optimiser steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

__all__ = ["History", "columns", "ends", "training_rows", "window"]

History = Sequence[Mapping[str, float]]


def training_rows(history: History) -> list[Mapping[str, float]]:
    """The rows that training logged, without those of evaluations and the summary at the end."""
    return [row for row in history if "loss" in row and "step" in row]


def window(history: History, name: str, steps: int) -> list[float] | None:
    """Values of the latest rows that together speak of at least ``steps`` optimiser steps; None where there are fewer.

    >>> rows = [{"loss": 0.0, "step": 5, "kl": 1.0}, {"loss": 0.0, "step": 10, "kl": 2.0}]
    >>> window(rows, "kl", 5), window(rows, "kl", 10), window(rows, "kl", 11)
    ([2.0], [1.0, 2.0], None)
    """
    rows = training_rows(history)
    values: list[float] = []
    for index in range(len(rows) - 1, -1, -1):
        if name not in rows[index]:
            return None
        values.append(rows[index][name])
        if rows[-1]["step"] - (rows[index - 1]["step"] if index else 0) >= steps:
            return values[::-1]
    return None


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last fifth."""
    fifth = max(1, len(values) // 5)
    return statistics.fmean(values[:fifth]), statistics.fmean(values[-fifth:])


def columns(history: History, ending: str) -> list[str]:
    """Names of the reward functions that the newest row has ``rewards/<name>/<ending>`` of."""
    rows = training_rows(history)
    keys = [key for key in (rows[-1] if rows else {}) if key.startswith("rewards/") and key.endswith(f"/{ending}")]
    return [key.removeprefix("rewards/").removesuffix(f"/{ending}") for key in keys]
