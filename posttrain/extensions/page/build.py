"""Builds the report page: one HTML file that needs no network and cannot execute recorded text.

Texts are escaped. Data is embedded as JSON that cannot close its HTML element. A content security policy allows only the
page's own script, which is identified by its hash. HTML in a completion is therefore shown as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from markupsafe import Markup

from posttrain.checks.rules import Rule, Verdict, review
from posttrain.errors import ConfigError
from posttrain.extensions.page.inspect import TEMPLATES, histogram
from posttrain.extensions.page.run import Run, Series
from posttrain.report.files import whole_file
from posttrain.report.progress import MAIN, logged_labels
from posttrain.report.record import flat
from posttrain.report.templates import environment

LONGEST = 4000  # Maximum number of characters of a completion. For a longer completion, the middle is omitted.
TAIL = 0.1  # The final value of a metric is the mean over this fraction of its latest points.
ABSENT = "—"
BESIDE_THE_POINT = ("config.output_dir", "config.logging_dir", "config.run_name", "started", "first_started")
TITLES = {
    "findings": "Findings",
    "pathologies": "Possible problems",
    "curves": "Curves",
    "completions": "Completions",
    "data": "Data",
    "compare": "Final values",
    "manifest": "Manifest",
}


MOST_POINTS = 1500  # Maximum number of points per curve on the page.

# Panels of the page in order: each heading maps to {panel title with unit: pattern of metric names}.
LAYOUT: dict[str, dict[str, str]] = yaml.safe_load((TEMPLATES / "layout.yaml").read_text(encoding="utf-8"))
OTHER = "More"


# Filters of the templates ----------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Format a number with four significant digits or thousands separators.

    >>> number(1234567.0), number(0.000012345), number(3.0)
    ('1,234,567', '1.234e-05', '3')
    """
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"


def middle_out(value: str) -> str:
    """Omit the middle of a text with more than `LONGEST` characters."""
    half = LONGEST // 2
    if len(value) <= LONGEST:
        return value
    return f"{value[:half]}\n[… {len(value) - 2 * half:,} characters omitted …]\n{value[-half:]}"


def shown(value: object) -> str:
    """Format the value of a setting as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def steps(spans: Sequence[tuple[int, int]]) -> str:
    """Format ranges of steps as text.

    >>> steps([(3, 3)]), steps([(1, 4), (7, 7)])
    ('step 3', 'steps 1 to 4, 7')
    """
    words = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in spans]
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    return ("step " if words[1:] == [] and "to" not in words[0] else "steps ") + ", ".join(words[:4]) + more


environment(TEMPLATES).filters.update({f.__name__: f for f in (number, middle_out, shown, steps, histogram, flat)})


# Curves ------------------------------------------------------------------------------------------------------------


@dataclass
class Panel:
    """Chart of several metrics that share one axis.

    Attributes:
        key: Id of the HTML element.
        group: Heading above the panel.
        title: Title including the unit.
        metrics: Names of the metrics in the chart.
        signs: Titles of problems for which these metrics show signs.
        spoken: Text that describes the curves for screen readers.
    """

    key: str
    group: str
    title: str
    metrics: list[str] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)
    spoken: str = ""


def panel_of(name: str) -> tuple[str, str]:
    """Return the heading and the title of the panel to which a metric belongs.

    >>> panel_of("eval_loss"), panel_of("rewards/accuracy/mean")
    (('Learning', 'loss'), ('Rewards', 'mean of each reward function'))
    >>> panel_of("images/reused")
    ('Images', 'images encoded and reused')
    >>> panel_of("balance/busiest_rank")
    ('More', 'balance/busiest_rank')
    """
    bare = name.removeprefix("eval_")
    for group, entries in LAYOUT.items():
        for title, pattern in entries.items():
            if re.fullmatch(pattern, bare):
                return group, title
    return OTHER, bare


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels for all metrics of all runs, in the order of the page."""
    by_panel: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.series):
        by_panel.setdefault(panel_of(name), []).append(name)
    order = [(group, title) for group, entries in LAYOUT.items() for title in entries]
    places = sorted(by_panel, key=lambda place: (order.index(place) if place in order else len(order), place[1]))
    panels = []
    for at, (group, title) in enumerate(places):
        key = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "panel"
        metrics = sorted(by_panel[group, title], key=lambda name: (name.startswith("eval_"), _rank(name)))
        panels.append(Panel(f"{key}-{at}", group, title, metrics))
    return panels


def _rank(name: str) -> int:
    """Return a sort key that places minima and maxima after all other metrics. Means then get the first colors."""
    return 1 if re.search(r"(^|[/_])(min|max|low|high)", name) else 0


def groups_of(
    panels: Sequence[Panel], runs: Sequence[Run], verdicts: Sequence[Sequence[Verdict]]
) -> dict[str, list[Panel]]:
    """Group panels by heading. Also set ``signs`` and ``spoken`` of each panel."""
    seen = [verdict for of_run in verdicts for verdict in of_run if verdict.status == "seen"]
    groups: dict[str, list[Panel]] = {}
    for panel in sorted(panels, key=lambda panel: panel.group == OTHER):
        panel.signs = list(dict.fromkeys(v.title for v in seen if set(v.rule.metrics) & set(panel.metrics)))
        panel.spoken = "; ".join(_spoken(run, name) for name in panel.metrics for run in runs if name in run.series)
        groups.setdefault(panel.group, []).append(panel)
    return groups


def _spoken(run: Run, name: str) -> str:
    points = run.series[name].finite
    if not points:
        return f"{name} of {run.name}: no finite value"
    first, last = points[0], points[-1]
    return f"{name} of {run.name}: {first[1]:.4g} at step {first[0]}, {last[1]:.4g} at step {last[0]}"


def figures(panels: Sequence[Panel], runs: Sequence[Run], verdicts: Sequence[Sequence[Verdict]]) -> dict[str, Any]:
    """Return the data that the page's script draws, as JSON-compatible values: panels with curves, findings and shaded ranges.

    Args:
        panels: Panels from `panels_of`.
        runs: Runs. Colors are assigned in this order.
        verdicts: Verdicts of the log rules for each run.
    """
    of_metric = {name: panel for panel in panels for name in panel.metrics}
    marks: dict[str, list[dict[str, Any]]] = {panel.key: [] for panel in panels}
    spans: dict[str, list[dict[str, Any]]] = {panel.key: [] for panel in panels}
    for at, run in enumerate(runs):
        for mark in run.marks if panels else ():
            finding, key = mark.finding, of_metric.get(mark.finding.where, panels[0]).key
            text = f"{finding.code}: {finding.what}"
            marks[key].append({"run": at, "step": mark.step, "severity": finding.severity, "text": text})
        for verdict in verdicts[at]:
            # Use a set, so that a panel is shaded once even if two of its metrics are affected.
            for key in {of_metric[name].key for name in verdict.rule.metrics if verdict.spans and name in of_metric}:
                spans[key].append({"run": at, "text": verdict.title, "spans": verdict.spans})
    drawn = [
        {
            "key": panel.key,
            "title": panel.title,
            "traces": [
                {"run": at, "metric": name, **_points(run, name)}
                for name in panel.metrics
                for at, run in enumerate(runs)
                if name in run.series
            ],
            "marks": marks[panel.key],
            "spans": spans[panel.key],
        }
        for panel in panels
    ]
    return {"runs": [{"name": run.name} for run in runs], "panels": drawn}


def _points(run: Run, name: str) -> dict[str, Any]:
    series = thinned(run.series[name])
    begin = next((t for s in run.series.values() for t in s.times if math.isfinite(t)), math.nan)
    return {
        "step": series.steps,
        "value": [_short(value) for value in series.values],
        "minutes": [_short((time - begin) / 60) for time in series.times],
    }


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """Reduce the points of a long curve. Keep the minimum and the maximum of every interval, so that outliers stay visible.

    >>> short = thinned(Series(list(range(9999)), [0.0] * 5000 + [7.0] + [0.0] * 4998, [0.0] * 9999), 100)
    >>> len(short.steps) <= 104, max(short.values)
    (True, 7.0)
    """
    size = len(series.steps)
    if size <= most:
        return series
    stretch = math.ceil(size / (most // 2))
    selected = {0, size - 1}
    for start in range(0, size, stretch):
        places = [at for at in range(start, min(start + stretch, size)) if math.isfinite(series.values[at])]
        places = places or [start]  # Keep a point without a value, so that the gap remains visible.
        selected |= {min(places, key=series.values.__getitem__), max(places, key=series.values.__getitem__)}
    order = sorted(selected)
    return Series([series.steps[i] for i in order], [series.values[i] for i in order], [series.times[i] for i in order])


# Contents of the sections ----------------------------------------------------------------------------------------


class Card(NamedTuple):
    """A log rule with its verdicts in the runs on the page. ``status`` is the worst status of all runs. Each verdict is
    stored together with the index of its run.
    """

    rule: Rule
    status: str
    title: str
    verdicts: list[tuple[int, Verdict]]


def _cards(verdicts: Sequence[Sequence[Verdict]]) -> list[Card]:
    by_rule: dict[str, list[tuple[int, Verdict]]] = {}
    for at, of_run in enumerate(verdicts):
        for verdict in of_run:
            by_rule.setdefault(verdict.rule.code, []).append((at, verdict))
    order = ("seen", "clear", "unknown").index
    cards = []
    for of_run in by_rule.values():
        first, status = of_run[0][1], min((verdict.status for _, verdict in of_run), key=order)
        cards.append(Card(first.rule, status, first.title[0].upper() + first.title[1:], of_run))
    return sorted(cards, key=lambda card: order(card.status))


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the content of the page as a dict. ``sections`` maps names to HTML, and ``data`` contains the data of the
    charts.
    """
    verdicts = [review(run.rows) for run in runs]
    panels = panels_of(runs)
    make: Any = environment(TEMPLATES).get_template("sections.html.jinja").module
    sections = {
        "overview": make.overview(
            runs, logged_labels(MAIN, dict.fromkeys(name for run in runs for name in run.series))
        ),
        "findings": make.findings(runs),
        "pathologies": make.pathologies(runs, _cards(verdicts)),
        "curves": make.curves(groups_of(panels, runs, verdicts)),
        "completions": make.completions(runs),
        "data": make.data(runs),
        "compare": make.comparison(runs, *_settings(runs), _finals(runs, panels)),
        "manifest": make.manifests(runs),
    }
    return {"sections": {name: str(html) for name, html in sections.items()}, "data": figures(panels, runs, verdicts)}


def _settings(runs: Sequence[Run]) -> tuple[dict[str, list[str]], int]:
    """Return the settings that differ between the runs, with one value per run. Also return the number of settings that are
    equal in all runs.
    """
    manifests = [flat(run.manifest) for run in runs]
    differ, same = {}, 0
    for name in dict.fromkeys(name for manifest in manifests for name in manifest):
        values = [shown(manifest[name]) if name in manifest else ABSENT for manifest in manifests]
        if len(set(values)) == 1:
            same += 1
        elif name not in BESIDE_THE_POINT and not name.startswith("resumed"):
            differ[name] = values
    return differ, same


def final(run: Run, name: str) -> float | None:
    """Return the mean over the last tenth of a curve, so that a single noisy step has little effect. Return None for no
    points.
    """
    points = run.series[name].finite if name in run.series else []
    if not points:
        return None
    return statistics.fmean(value for _, value in points[-max(1, round(TAIL * len(points))) :])


def _finals(runs: Sequence[Run], panels: Sequence[Panel]) -> dict[str, list[tuple[str, str]]]:
    """Return table cells ``(value, change)`` for every metric. There is one cell per run with the final value. For a single
    run, further cells contain the first value, the minimum and the maximum.
    """
    rows = {}
    for name in (name for panel in panels for name in panel.metrics):
        values = [final(run, name) for run in runs]
        cells = [
            (ABSENT if v is None else number(v), _change(values[0], v) if at else "") for at, v in enumerate(values)
        ]
        if len(runs) == 1:
            points = [value for _, value in runs[0].series[name].finite]
            ends = (points[0], min(points), max(points)) if points else ()
            cells += [(number(value), "") for value in ends] or [(ABSENT, "")] * 3
        rows[name] = cells
    return rows


def _change(first: float | None, value: float | None) -> str:
    if first is None or value is None:
        return ""
    change = value - first
    share = f" ({100 * change / abs(first):+.0f} %)" if abs(first) > 1e-12 and abs(change / first) < 100 else ""
    return f"{'+' if change >= 0 else '−'}{number(abs(change))}{share}"


# The file --------------------------------------------------------------------------------------------------------


def render(runs: Sequence[Run]) -> str:
    """Return the HTML page for runs that `posttrain.extensions.page.run.read_runs` returned."""
    page = content(runs)
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        environment(TEMPLATES)
        .get_template("page.html.jinja")
        .render(
            runs=runs,
            title=" · ".join(run.name for run in runs) or "no run",
            titles=TITLES | ({"compare": "Comparison"} if len(runs) > 1 else {}),
            sections={name: Markup(html) for name, html in page["sections"].items()},
            data=Markup(_json(page["data"])),
            script=Markup(script),
            style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
            policy=Markup(
                f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
                "connect-src 'none'; base-uri 'none'; form-action 'none'"
            ),
        )
    )


def _json(value: object) -> str:
    """Serialize a value to JSON that cannot close the surrounding HTML element."""
    dumped = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_page(runs: Sequence[Run], path: str | Path) -> Path:
    """Write the HTML page for runs to a file atomically, and return its path.

    Raises:
        ConfigError: The file cannot be written.
    """
    target = Path(path).expanduser()
    page = render(runs)
    try:
        with whole_file(target) as part:
            part.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written to {str(path)!r}: {error.strerror or error}. Fix: choose another file with --out."
        ) from error
    return target
