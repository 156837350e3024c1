"""The record of a run as it lies on the disk, read without ever failing on what a crash or a running trainer left."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, DataError
from posttrain.report.lock import FolderLock
from posttrain.report.page.samples import Samples, read_samples
from posttrain.types import Finding

__all__ = ["Mark", "Run", "Series", "read_run", "read_runs", "version"]

NOT_CURVES = {"step", "time", "epoch"}
SUMMARY = "train_runtime"  # The line that a trainer logs last.
FILES = ("manifest.json", "metrics.jsonl", "findings.jsonl", "preflight.json", "data.json", "completions.parquet")


@dataclass
class Series:
    """One metric over a run: optimiser steps, values (NaN and infinities included) and Unix times, all equally long."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, step: int, value: float, time: float) -> None:
        """Append a point; a step that was logged again replaces the earlier one."""
        if self.steps and self.steps[-1] == step:
            self.values[-1], self.times[-1] = value, time
            return
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)

    @property
    def finite(self) -> list[tuple[int, float]]:
        """Points that can be drawn."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]


@dataclass(frozen=True)
class Mark:
    """A finding, and the optimiser step at which it was told."""

    step: int
    finding: Finding


@dataclass
class Run:
    """Everything a page or a terminal shows of one run.

    Attributes:
        name: Unique among the runs shown together.
        folder: Where it lies.
        manifest: ``manifest.json``; empty when there is none.
        series: Metrics by name, in the order in which they first appeared.
        summary: The trainer's last line (``train_runtime`` and the like); empty while it runs.
        marks: Findings in the order of their steps.
        samples: Completions over time.
        seen: ``data.json``, the first batch as the model saw it; empty when it was not recorded.
        state: ``running``, ``finished`` or ``stopped``.
        notes: What could not be read, in sentences.
    """

    name: str
    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)
    seen: dict[str, Any] = field(default_factory=dict)
    state: str = "stopped"
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The latest step that logged anything."""
        return max((s.steps[-1] for s in self.series.values()), default=0)

    @property
    def max_steps(self) -> int | None:
        """Steps the run was to take; None where the manifest does not say."""
        steps = self.manifest.get("max_steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the trainer."""
        config = self.manifest.get("config")
        return config if isinstance(config, dict) else {}

    def last(self, name: str) -> float | None:
        """The latest value of a metric; NaN where that is what was logged."""
        return self.series[name].values[-1] if name in self.series else None


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Runs with names that tell them apart: as few of the last parts of their paths as that needs.

    Raises:
        DataError: A folder that is none, or holds no record.
        ConfigError: The same folder twice.
    """
    paths = [Path(folder).expanduser().resolve() for folder in folders]
    twice = next((path for at, path in enumerate(paths) if path in paths[:at]), None)
    if twice is not None:
        raise ConfigError(f"{str(twice)!r} is named twice. Runs are compared with other runs: name each folder once.")
    runs = [read_run(path) for path in paths]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    for run, path in zip(runs, paths, strict=True):
        run.name = "/".join(path.parts[-depth:])
    return runs


def read_run(folder: str | Path) -> Run:
    """Read one run; a broken or missing part is a note, not an error.

    Raises:
        DataError: There is no such folder, or it holds nothing of a record.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(f"{str(folder)!r} is not a folder. Give the output_dir of a run.")
    run = Run(path.resolve().name, path)
    if not any((path / name).is_file() for name in FILES) and not (path / "completions").is_dir():
        inner = sorted(p.parent.name for p in path.glob("*/metrics.jsonl") if not p.parent.name.startswith("record-"))
        hint = f" Runs inside it: {', '.join(inner[:5])}." if inner else ""
        raise DataError(f"{str(folder)!r} holds no record of a run (metrics.jsonl, manifest.json).{hint}")
    run.manifest = _json(path / "manifest.json", run.notes)
    run.seen = _json(path / "data.json", run.notes, optional=True)
    _read_metrics(run)
    _read_findings(run)
    run.samples = read_samples(path, run.notes)
    run.state = _state(run)
    return run


def version(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files that a page is made of: equal as long as nothing new was written."""
    found = []
    for name in (*FILES, "completions", ".posttrain.lock"):
        try:
            stat = os.stat(folder / name)
        except OSError:
            continue
        # A lock's time is its owner's sign of life: whether there is one is all that shows.
        found.append((name, stat.st_size, 0 if name.startswith(".") else stat.st_mtime_ns))
    return tuple(found)


def _json(path: Path, notes: list[str], *, optional: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        if not optional:
            notes.append(f"There is no {path.name}: what identifies the run is unknown.")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return {}
    if isinstance(content, dict):
        return content
    if isinstance(content, list) and optional:
        return {"findings": content}
    notes.append(f"{path.name} is not a mapping.")
    return {}


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Lines of a file that is only ever appended to; those that cannot be read are counted, a cut last one too."""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return
    broken, cut = 0, False
    lines = content.split("\n")
    for place, line in enumerate(lines, 1):
        row = _row(line)
        if row is not None:
            yield row
        elif line.strip():
            broken, cut = broken + 1, place == len(lines)
    if broken:
        which = ", the last of them cut short: its run was killed, or is still writing it" if cut else ""
        notes.append(f"{path.name}: {broken} broken line{'s' if broken > 1 else ''} left out{which}.")


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def number(value: Any) -> float | None:
    """A logged value as a number; NaN and infinities are written as text. None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_metrics(run: Run) -> None:
    for row in _lines(run.folder / "metrics.jsonl", run.notes):
        numbers = {str(key): value for key, raw in row.items() if (value := number(raw)) is not None}
        step = numbers.get("step")
        if step is None or not math.isfinite(step):
            continue
        if SUMMARY in numbers:
            run.summary = {k: v for k, v in numbers.items() if k not in NOT_CURVES}
            continue
        for name, value in numbers.items():
            if name not in NOT_CURVES:
                run.series.setdefault(name, Series()).add(int(step), value, numbers.get("time", math.nan))


def _read_findings(run: Run) -> None:
    before = _json(run.folder / "preflight.json", run.notes, optional=True).get("findings")
    rows: list[Any] = list(before) if isinstance(before, list) else []
    rows += _lines(run.folder / "findings.jsonl", run.notes)
    names = [item.name for item in dataclasses.fields(Finding)]
    seen = set()
    for row in rows:
        if not isinstance(row, Mapping) or "code" not in row:
            continue
        text = {name: str(row.get(name, "")) for name in names}
        if text["severity"] not in ("info", "warning", "error"):
            text["severity"] = "warning"
        step = number(row.get("step", 0)) or 0.0
        mark = Mark(int(step) if math.isfinite(step) else 0, Finding(**text))  # type: ignore[arg-type]
        if mark not in seen:
            seen.add(mark)
            run.marks.append(mark)
    run.marks.sort(key=lambda mark: mark.step)


def _state(run: Run) -> str:
    try:
        FolderLock(run.folder).check()
    except ConfigError:
        return "running"
    except OSError:
        pass
    return "finished" if run.summary else "stopped"
