"""What differs between runs: settings, versions and final numbers; and one run's manifest."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.report.page.markup import block, cell, details, number, table, text
from posttrain.report.page.panels import panels_of
from posttrain.report.page.run import Run

__all__ = ["comparison", "final", "flat", "manifests"]

TAIL = 0.1  # Share of the latest points whose mean is the final value.
ABSENT = "—"
BESIDE_THE_POINT = ("config.output_dir", "config.logging_dir", "config.run_name", "started", "first_started")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings with dotted names.

    >>> flat({"a": {"b": 1}, "c": []})
    {'a.b': 1, 'c': []}
    """
    if not isinstance(value, Mapping) or not value:
        return {name: value} if name else {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{name}.{key}" if name else str(key))
    return found


def final(run: Run, name: str) -> float | None:
    """Mean of the last tenth of a curve: one noisy step decides nothing."""
    points = run.series[name].finite if name in run.series else []
    if not points:
        return None
    return statistics.fmean(value for _, value in points[-max(1, round(TAIL * len(points))) :])


def comparison(runs: Sequence[Run]) -> str:
    """Settings that differ, and final values of every metric; for one run its final values alone."""
    parts = []
    if len(runs) > 1:
        parts.append(_settings(runs))
    parts.append(_finals(runs))
    return "\n".join(parts)


def _settings(runs: Sequence[Run]) -> str:
    manifests = [flat(run.manifest) for run in runs]
    names = dict.fromkeys(name for manifest in manifests for name in manifest)
    rows, same = [], 0
    for name in names:
        values = [_shown(m[name]) if name in m else ABSENT for m in manifests]
        if len(set(values)) == 1 or name in BESIDE_THE_POINT or name.startswith("resumed"):
            same += len(set(values)) == 1
            continue
        cells = [cell(v, kind="changed" if v != values[0] else "") for v in values]
        rows.append([f'<th scope="row"><code>{text(name)}</code></th>', *cells])
    head = ["setting", *(run.name for run in runs)]
    body = table(head, rows, "settings that differ") if rows else "<p>Every recorded setting is the same.</p>"
    return f"<h3>Settings that differ</h3>{body}<p class=soft>{same} others are the same.</p>"


def _finals(runs: Sequence[Run]) -> str:
    rows = []
    for panel in panels_of(runs):
        for name in panel.metrics:
            values = [final(run, name) for run in runs]
            cells = [cell(ABSENT if v is None else number(v), kind="number") for v in values[:1]]
            for value in values[1:]:
                shown = ABSENT if value is None else number(value)
                cells.append(f'<td class="number">{text(shown)}{_change(values[0], value)}</td>')
            if len(runs) == 1:
                points = [v for _, v in runs[0].series[name].finite]
                cells += [cell(number(v) if points else ABSENT, kind="number") for v in (
                    (points[0], min(points), max(points)) if points else (0.0, 0.0, 0.0))]  # fmt: skip
            rows.append([f'<th scope="row"><code>{text(name)}</code></th>', *cells])
    if not rows:
        return "<p>No metric was logged yet.</p>"
    more = ["first", "least", "most"] if len(runs) == 1 else []
    head = ["metric", *(["final"] if len(runs) == 1 else [run.name for run in runs]), *more]
    body = table(head, rows, "final values of every metric", numbers_from=1)
    note = "The mean of the last tenth of each curve." + (
        " In grey: the change against the first run." if len(runs) > 1 else ""
    )
    heading = "<h3>Final values</h3>" if len(runs) > 1 else ""  # The section's own name says it for one run.
    return f"{heading}<p class=soft>{note}</p>" + details(f"All {len(rows)} metrics", body, open_=len(runs) > 1)


def _change(first: float | None, value: float | None) -> str:
    if first is None or value is None:
        return ""
    change = value - first
    share = f" ({100 * change / abs(first):+.0f} %)" if abs(first) > 1e-12 and abs(change / first) < 100 else ""
    sign = "+" if change >= 0 else "−"
    return f' <span class="soft change">{sign}{number(abs(change))}{share}</span>'


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def manifests(runs: Sequence[Run]) -> str:
    """What identifies each run, and all its settings."""
    return "\n".join(details(run.name, _manifest(run), open_=len(runs) == 1) for run in runs)


def _manifest(run: Run) -> str:
    if not run.manifest:
        return "<p>No manifest was recorded.</p>"
    rest = {key: value for key, value in run.manifest.items() if key != "config"}
    command = rest.pop("command", None)
    parts = []
    if isinstance(command, list):
        parts.append(block(" ".join(map(str, command)), "command"))
    facts = flat(rest)
    parts.append(
        "<dl class=facts>"
        + "".join(f"<dt>{text(k)}</dt><dd>{text(_shown(v))}</dd>" for k, v in facts.items())
        + "</dl>"
    )
    config = flat(run.config)
    rows = [
        [f'<th scope="row"><code>{text(name)}</code></th>', cell(_shown(value))]
        for name, value in sorted(config.items())
    ]
    if rows:
        parts.append(details(f"All {len(rows)} settings", table(["setting", "value"], rows, "settings")))
    return "".join(parts)
