"""References that a reward of this package cannot read: their rows are scored by nobody."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from posttrain.checks.core import Context, finding, probe, register
from posttrain.types import Finding

__all__ = ["check_references", "reference_column"]

register("PT-R030", "references-unread", moment="data", title="reference answers that say nothing", page="d")

MANY = 0.05  # Share of the rows.
ROWS = 100_000  # That are read.


def reference_column(function: Callable) -> tuple[str, str] | None:
    """Column and mode (see `answers_match`) of a reward of this package that compares with a reference; None of any other.

    >>> from posttrain.rewards import string_match_reward
    >>> reference_column(string_match_reward("gold", mode="number"))
    ('gold', 'number')
    """
    from posttrain.rewards import accuracy_reward, reasoning_accuracy_reward
    from posttrain.rewards.answers import StringMatchReward
    from posttrain.rewards.length import CosineScaledReward

    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, StringMatchReward):
        return function.column, function.mode
    reads = function in (accuracy_reward, reasoning_accuracy_reward) or isinstance(function, CosineScaledReward)
    return ("solution", "auto") if reads else None


def check_references(name: str, column: str, golds: Sequence[Any], *, mode: str = "auto") -> Finding | None:
    """Rows whose reference scores no answer: over 5 % is a warning, all of them an error.

    Args:
        name: Of the reward function.
        column: Where references stand.
        golds: Their values.
        mode: How the function compares, see `answers_match`.
    """
    from posttrain.rewards.answers import answers_match

    unread = [row for row, gold in enumerate(golds) if answers_match(None, gold, mode) is None]  # type: ignore[arg-type]
    if len(unread) <= MANY * len(golds):
        return None
    shown = ", ".join(f"row {row}: {golds[row]!r:.60}" for row in unread[:3])
    return finding(
        "PT-R030",
        "error" if len(unread) == len(golds) else "warning",
        f"{len(unread)} of {len(golds)} references in `{column}` cannot be read by {name} ({shown}).",
        f"column {column!r}",
        "such a row gets None from it: no completion of it is right or wrong, and it teaches nothing.",
        f"drop these rows, mend the column, or give {name} the column that holds the answers.",
    )


@probe("data", "PT-R030")
def references_of_rewards(context: Context) -> Iterable[Finding | None]:
    """The reference column of each reward function that says which one it reads."""
    rewards: Any = context.parts.get("rewards")
    dataset: Any = context.train_dataset
    names = getattr(dataset, "column_names", None) or ()
    if rewards is None or not hasattr(dataset, "select"):  # A stream is read as it comes.
        return
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        column, mode = reference_column(function) or (None, "")
        if column in names:
            head = dataset.select(range(min(ROWS, len(dataset)))).select_columns([column]).with_format(None)
            yield check_references(name, str(column), head[column][:], mode=mode)
