"""Completions over time: a few steps of the table, and of each the groups that say most, without reading all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.report.record import read_rows

__all__ = ["Sample", "Samples", "read_samples"]

STEPS = 16  # Moments shown, evenly spread, the first and the last among them.
GROUPS = 2  # Prompts of a moment.
MEMBERS = 4  # Completions of a prompt: the best, the worst, and what lies between.
KNOWN = ("step", "prompt", "completion", "advantage", "tokens", "logps")


@dataclass(frozen=True)
class Sample:
    """One completion.

    Attributes:
        prompt, completion: Texts.
        advantage: None where the table has none.
        scores: The table's other columns: rewards by function, and whatever functions logged.
        tokens, logps: Text and log-probability (nats) of each token; empty where they were not recorded.
    """

    prompt: str
    completion: str
    advantage: float | None
    scores: dict[str, Any]
    tokens: list[str] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """Sum of the numeric columns that are rewards; what orders completions of one prompt."""
        values = [v for v in self.scores.values() if isinstance(v, int | float) and not isinstance(v, bool)]
        return sum(v for v in values if math.isfinite(v))


@dataclass
class Samples:
    """Moments ``(step, groups of one prompt)`` in order, and how many completions the files read hold."""

    moments: list[tuple[int, list[list[Sample]]]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)

    @property
    def latest(self) -> Sample | None:
        """The best completion of the latest moment."""
        return self.moments[-1][1][0][0] if self.moments else None


def read_samples(folder: Path, notes: list[str]) -> Samples:
    """Some of a run's completions; a file that cannot be read is a note.

    Args:
        folder: Of the run.
        notes: Takes what could not be read.
    """
    parts = sorted((folder / "completions").glob("completions_*.parquet"), key=_number)
    if not parts and (folder / "completions.parquet").is_file():
        parts = [folder / "completions.parquet"]
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for part in _spread(parts, STEPS):
        try:
            rows = read_rows(part)
        except Exception as error:  # A file of any kind of brokenness must not hide the others.
            notes.append(f"{part.name} cannot be read: {type(error).__name__}.")
            continue
        for row in rows:
            step = row.get("step")
            by_step.setdefault(int(step) if isinstance(step, int | float) else _number(part), []).append(row)
    samples = Samples(columns=list(dict.fromkeys(key for rows in by_step.values() for row in rows[:1] for key in row)))
    for step in _spread(sorted(by_step), STEPS):
        samples.moments.append((step, _groups([_sample(row) for row in by_step[step]])))
    return samples


def _number(path: Path) -> int:
    ending = path.stem.rsplit("_", 1)[-1]
    return int(ending) if ending.isdigit() else 0


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """Up to ``most`` items, evenly spread, the ends among them.

    >>> _spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def _sample(row: Mapping[str, Any]) -> Sample:
    tokens, logps = row.get("tokens"), row.get("logps")
    whole = isinstance(tokens, list) and isinstance(logps, list) and len(tokens) == len(logps)
    advantage = row.get("advantage")
    return Sample(
        prompt=_text(row.get("prompt")),
        completion=_text(row.get("completion")),
        advantage=float(advantage) if isinstance(advantage, int | float) else None,
        scores={key: value for key, value in row.items() if key not in KNOWN},
        tokens=[str(token) for token in tokens] if whole and tokens else [],
        logps=[math.nan if value is None else float(value) for value in logps] if whole and logps else [],
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    """Prompts with the widest spread of rewards first: there the run learns; each with its best and worst completions."""
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt, []).append(sample)
    groups = [sorted(group, key=_rank, reverse=True) for group in by_prompt.values()]
    groups.sort(key=lambda group: _rank(group[0]) - _rank(group[-1]), reverse=True)
    return [_members(group) for group in groups[:GROUPS]]


def _members(group: list[Sample]) -> list[Sample]:
    """The best, the worst, what lies between, and one with shading where any has it."""
    chosen = _spread(group, MEMBERS)
    if not any(sample.logps for sample in chosen):
        shaded = next((sample for sample in group if sample.logps), None)
        if shaded is not None:
            chosen[len(chosen) // 2] = shaded
            chosen.sort(key=_rank, reverse=True)
    return chosen


def _rank(sample: Sample) -> float:
    value = sample.advantage
    return value if value is not None and math.isfinite(value) else sample.reward
