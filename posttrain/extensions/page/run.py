"""Reads run records. Incomplete files do not raise an error, because they are normal during training and after a crash."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, DataError
from posttrain.report.files import read_line, read_rows
from posttrain.report.lock import LOCK, FolderLock
from posttrain.report.record import SUMMARY, step_of_part
from posttrain.types import Finding

NOT_CURVES = {"step", "time", "epoch"}
FILES = ("manifest.json", "metrics.jsonl", "findings.jsonl", "preflight.json", "data.json", "completions.parquet")

SEVERITIES = ("error", "warning", "info")
SHADED = 4000  # Maximum number of tokens of a completion that are shown with a shade for their log-prob.
# Maximum number of steps whose completions are shown. The steps are evenly spaced, including the first and the last step.
STEPS = 16
GROUPS = 2  # Maximum number of prompts per step.
# Maximum number of completions per prompt. If there are more, they are sorted by reward, and evenly spaced completions are
# kept.
MEMBERS = 4
KNOWN = (
    "step", "prompt", "completion", "advantage", "tokens", "logps", "image_digests", "image_sizes", "thumbnails",
    "episode",
)  # fmt: skip


@dataclass
class Series:
    """Metric of a run: its optimizer steps, values and Unix times, as lists of equal length. Values can be NaN or infinite."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, step: int, value: float, time: float) -> None:
        """Append a point. If the last point has the same step, replace it."""
        if self.steps and self.steps[-1] == step:
            self.values[-1], self.times[-1] = value, time
            return
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)

    @property
    def finite(self) -> list[tuple[int, float]]:
        """Points with finite values, as pairs (step, value)."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]


@dataclass(frozen=True)
class Mark:
    """A finding and the optimizer step at which it was logged."""

    step: int
    finding: Finding


@dataclass(frozen=True)
class Sample:
    """A completion from a run record.

    Attributes:
        prompt, completion: Texts of prompt and completion.
        advantage: Advantage of the completion. None: not recorded.
        scores: Values of all other columns of the table: the reward of each function, and values that functions logged.
        tokens, logps: Text and log-prob (in nats) of each token. The lists are empty if log-probs were not recorded.
        pictures: Images of the prompt, as pairs of a thumbnail (``data:`` URL) and a text with size and digest.
        episode: Tree of a harness episode, see `posttrain.extensions.agents.tree.episode_tree`. Empty for other completions.
    """

    prompt: str
    completion: str
    advantage: float | None
    scores: dict[str, Any]
    tokens: list[str] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    episode: dict[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Sum of the numeric columns. Completions without an advantage are sorted by it."""
        values = [v for v in self.scores.values() if isinstance(v, int | float) and not isinstance(v, bool)]
        return sum(v for v in values if math.isfinite(v))

    @property
    def chips(self) -> list[tuple[str, str]]:
        """Scores as pairs of a text and its CSS class."""
        chips = []
        for name, value in self.scores.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                chips.append((f"{name} {value:.4g}", ""))
            else:
                text = "not scored" if value is None else str(value)
                chips.append((f"{name}: {text if len(text) <= 60 else text[:57] + '…'}", "faint"))
        return chips

    @property
    def shades(self) -> list[tuple[str, float, float | None]]:
        """Tokens with their log-prob and shade (0 to 1). The shade is None if the log-prob is not finite."""
        pairs = list(zip(self.tokens, self.logps, strict=True))[:SHADED]
        depths = [min(max(-logp / 4, 0.0), 1.0) if math.isfinite(logp) else None for _, logp in pairs]
        return [(token.replace("\n", "↵\n"), logp, d) for (token, logp), d in zip(pairs, depths, strict=True)]


Moment = tuple[int, list[list[Sample]]]  # A step with its completions, which are grouped by prompt.


@dataclass
class Run:
    """Content of the record of one run, for the report page.

    Attributes:
        name: Name of the run, unique among the runs that are shown together.
        folder: ``output_dir`` of the run.
        manifest: Content of ``manifest.json``. Empty if the file does not exist.
        series: Metrics by name, in the order in which they first occur.
        summary: Last line that the trainer logged (``train_runtime`` etc.). Empty while the run is training.
        marks: Findings in the order of their steps.
        samples: Completions of a few steps, in order. For each step, the prompts with the largest differences in rewards
            are kept.
        rows: Numeric values of each line of ``metrics.jsonl``.
        seen: Content of ``data.json``: the first batch as the model received it. Empty if it was not recorded.
        state: ``running``, ``finished``, ``interrupted`` (by Ctrl-C or SIGTERM) or ``stopped``.
        notes: Problems in reading the files of the record, as sentences.
    """

    name: str
    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    samples: list[Moment] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    state: str = "stopped"
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Latest logged step."""
        return max((s.steps[-1] for s in self.series.values()), default=0)

    @property
    def max_steps(self) -> int | None:
        """Planned number of optimizer steps. None if the manifest does not contain it."""
        steps = self.manifest.get("max_steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def end(self) -> str:
        """State of the run. A run without a summary line is finished if all steps were logged."""
        whole = self.max_steps is not None and self.step >= self.max_steps
        if self.state == "finished" and "interrupted" in self.manifest:
            return "interrupted"
        return "finished" if self.state == "stopped" and whole else self.state

    @property
    def duration(self) -> str:
        """Time between the first and the last log line, as text. Empty if it is unknown."""
        times = [time for series in self.series.values() for time in series.times if math.isfinite(time)]
        minutes = (max(times) - min(times)) / 60 if len(times) > 1 else 0.0
        return "" if len(times) < 2 else f" · {minutes / 60:.1f} h" if minutes >= 90 else f" · {minutes:.1f} min"

    @property
    def kinds(self) -> list[list[Mark]]:
        """Findings grouped by their code and place. Groups with errors come first."""
        kinds: dict[tuple[str, str], list[Mark]] = {}
        for mark in self.marks:
            kinds.setdefault((mark.finding.code, mark.finding.where), []).append(mark)
        return sorted(kinds.values(), key=lambda marks: SEVERITIES.index(marks[0].finding.severity))

    @property
    def shaded(self) -> bool:
        """Whether the log-probs of any completion were recorded. The tokens of such a completion are shaded."""
        return any(sample.logps for _, groups in self.samples for group in groups for sample in group)

    def last(self, name: str) -> float | None:
        """Return the latest value of a metric. The value can be NaN. Return None if the metric was not logged."""
        return self.series[name].values[-1] if name in self.series else None


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read the records of several runs. The name of a run consists of the last parts of its path. Enough parts are used to
    make all names unique.

    Raises:
        DataError: A path is not a folder, or contains no run record.
        ConfigError: A folder is passed twice.
    """
    paths = [Path(folder).expanduser().resolve() for folder in folders]
    twice = next((path for at, path in enumerate(paths) if path in paths[:at]), None)
    if twice is not None:
        raise ConfigError(f"the folder {str(twice)!r} is passed twice. Fix: pass each folder once.")
    runs = [read_run(path) for path in paths]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    for run, path in zip(runs, paths, strict=True):
        run.name = "/".join(path.parts[-depth:])
    return runs


def read_run(folder: str | Path) -> Run:
    """Read the record of one run. If a file is damaged or missing, add a note to ``notes``.

    Raises:
        DataError: The folder does not exist, or contains no file of a run record.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(f"{str(folder)!r} is not a folder. Fix: pass the output_dir of a run.")
    run = Run(path.resolve().name, path)
    if not any((path / name).is_file() for name in FILES) and not (path / "completions").is_dir():
        inner = sorted(p.parent.name for p in path.glob("*/metrics.jsonl") if not p.parent.name.startswith("record-"))
        hint = f" It contains these runs: {', '.join(inner[:5])}." if inner else ""
        raise DataError(f"{str(folder)!r} contains no run record (metrics.jsonl, manifest.json).{hint}")
    run.manifest = _json(path / "manifest.json", run.notes)
    run.seen = _json(path / "data.json", run.notes, optional=True)
    _read_metrics(run)
    _read_findings(run)
    run.samples = read_samples(path, run.notes)
    run.state = _state(run)
    return run


def _json(path: Path, notes: list[str], *, optional: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        if not optional:
            notes.append(f"{path.name} does not exist, so the settings of the run are unknown.")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path.name} is not a JSON object.")
        return {}
    odd = [
        name for name, shape in SHAPES.get(path.name, {}).items() if name in content and not _has(content[name], shape)
    ]
    if odd:
        notes.append(f"{path.name}: {', '.join(odd)} was ignored, because the format is not that of a run record.")
    return {name: value for name, value in content.items() if name not in odd}


# Expected structure of the files that the page reads. A dict maps possible keys to the structure of their values. A list
# contains the structure of every item. A tuple contains one structure per item.
SHAPES: dict[str, dict[str, Any]] = {
    "manifest.json": {"command": [str], "config": {}},
    "data.json": {
        "facts": {}, "lengths": [int], "sequences": [{"title": str, "pieces": [(str, object)], "pictures": [str]}],
    },
}  # fmt: skip


def _has(value: object, shape: Any) -> bool:
    """Return whether a JSON value has the structure ``shape``. See `SHAPES`."""
    if isinstance(shape, type):
        return isinstance(value, shape) and (shape is object or not isinstance(value, bool))
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(_has(value[name], shape[name]) for name in shape.keys() & value.keys())
    if not isinstance(value, list):
        return False
    if isinstance(shape, tuple):
        return len(value) == len(shape) and all(map(_has, value, shape))
    return all(_has(item, shape[0]) for item in value)


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSON Lines file. Invalid lines are skipped, and a note reports their number."""
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
        row = read_line(line)
        if row is not None:
            yield row
        elif line.strip():
            broken, cut = broken + 1, place == len(lines)
    if broken:
        which = ", including a truncated last line, because the run was killed or is still writing" if cut else ""
        notes.append(f"{path.name}: {broken} invalid line{'s' if broken > 1 else ''} ignored{which}.")


def number(value: object) -> float | None:
    """Convert a logged value to a number. NaN and infinity are logged as text. Return None for other values."""
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
        run.rows.append(numbers)
        for name, value in numbers.items():
            if name not in NOT_CURVES:
                run.series.setdefault(name, Series()).add(int(step), value, numbers.get("time", math.nan))


def _read_findings(run: Run) -> None:
    rows: list[Any] = list(_json(run.folder / "preflight.json", run.notes, optional=True).get("findings", []))
    rows += _lines(run.folder / "findings.jsonl", run.notes)
    names = [item.name for item in dataclasses.fields(Finding)]
    seen = set()
    for row in rows:
        if not isinstance(row, Mapping) or "code" not in row:
            continue
        text: dict[str, Any] = {name: str(row.get(name, "")) for name in names}
        if text["severity"] not in SEVERITIES:
            text["severity"] = "warning"
        step = number(row.get("step", 0)) or 0.0
        mark = Mark(int(step) if math.isfinite(step) else 0, Finding(**text))
        if mark not in seen:
            seen.add(mark)
            run.marks.append(mark)
    run.marks.sort(key=lambda mark: mark.step)


def _state(run: Run) -> str:
    try:
        FolderLock(run.folder).check()
    except ConfigError:
        return "running"
    # Without write permission, the lock cannot be tested. Derive the state from the other files.
    except OSError:
        return "running" if (run.folder / LOCK).exists() else "finished" if run.summary else "stopped"
    return "finished" if run.summary else "stopped"


# Completions -----------------------------------------------------------------------------------------------------


def read_samples(folder: Path, notes: list[str]) -> list[Moment]:
    """Read completions of up to 16 steps of a run. If a file cannot be read, add a note to ``notes``.

    Args:
        folder: Folder of the run.
        notes: List to which problems are appended.
    """
    parts = sorted((folder / "completions").glob("completions_*.parquet"), key=step_of_part)
    if not parts and (folder / "completions.parquet").is_file():
        parts = [folder / "completions.parquet"]
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for part in _spread(parts, STEPS):
        try:
            rows = read_rows(part)
        except Exception as error:  # Catch all exceptions, so that a damaged file does not hide the other files.
            notes.append(f"{part.name} cannot be read: {type(error).__name__}.")
            continue
        for row in rows:
            step = row.get("step")
            by_step.setdefault(int(step) if isinstance(step, int | float) else step_of_part(part), []).append(row)
    steps = _spread(sorted(by_step), STEPS)
    return [(step, _groups([_sample(row) for row in by_step[step]])) for step in steps]


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return up to ``most`` evenly spaced items of a list, including the first and the last item.

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
        pictures=_pictures(row),
        episode=_episode(row),
    )


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    read = read_line(str(row.get("episode") or "")) or {}
    whole = isinstance(read.get("branches"), list) and all(isinstance(branch, dict) for branch in read["branches"])
    return read if whole else {}


def _pictures(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    columns = [row.get(name) for name in ("thumbnails", "image_sizes", "image_digests")]
    addresses, sizes, digests = (column if isinstance(column, list) else [] for column in columns)
    whole = zip(addresses, sizes, digests, strict=False)
    return [
        (str(address), f"{'×'.join(map(str, size))}, {digest}")
        for address, size, digest in whole
        if str(address).startswith("data:image/jpeg;base64,")
    ]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    """Group samples by prompt. Prompts with the largest differences in rewards come first. The best and the worst
    completion of a prompt are always kept.
    """
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt, []).append(sample)
    groups = [sorted(group, key=_rank, reverse=True) for group in by_prompt.values()]
    groups.sort(key=lambda group: _rank(group[0]) - _rank(group[-1]), reverse=True)
    return [_members(group) for group in groups[:GROUPS]]


def _members(group: list[Sample]) -> list[Sample]:
    """Return completions at evenly spaced ranks from best to worst. If log-probs of any completion were recorded, the
    result contains such a completion.
    """
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
