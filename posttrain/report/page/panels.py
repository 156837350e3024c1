"""Which metrics are drawn together, under which heading: a new metric needs no entry here, it gets a panel of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.checks.online import Verdict
from posttrain.report.page.run import Run, Series

__all__ = ["Panel", "figures", "groups_of", "panel_of", "panels_of", "thinned"]

MOST_POINTS = 1500  # Of one curve in the page.

# Heading -> (title with its unit, pattern of metric names without ``eval_``), in the order of the page.
LAYOUT: dict[str, tuple[tuple[str, str], ...]] = {
    "Learning": (
        ("loss", r"loss"),
        ("token accuracy", r"mean_token_accuracy|accuracy"),
        ("parts of the loss", r"(loss/.*|.*_loss)"),
        ("preference accuracy", r"rewards/accuracies"),
        ("gradient norm", r"grad_norm"),
        ("learning rate", r"learning_rate"),
    ),
    "Rewards": (
        ("reward", r"reward"),
        ("rewards of chosen and rejected", r"rewards/(chosen|rejected)"),
        ("margin", r"rewards/margins"),
        ("spread of rewards in a group", r"reward_std"),
        ("groups without spread (share)", r"frac_reward_zero_std"),
        ("mean of each reward function", r"rewards/.*/mean"),
        ("spread of each reward function", r"rewards/.*/std"),
        ("least and most of each reward function", r"rewards/.*/(min|max)"),
        ("rows a reward function applies to (share)", r"rewards/.*/applicable"),
        ("share of the rewards' variance", r"rewards/.*/variance_share"),
        ("correlation of reward and length", r"rewards/length_corr"),
        ("largest advantage", r"advantages/.*"),
    ),
    "Distance from the start": (
        ("KL to the reference (nats)", r"kl|objective/kl"),
        ("entropy (nats a token)", r"entropy|objective/entropy|policy/entropy_avg"),
        ("log-probs of answers (nats)", r"logps/.*"),
        ("logits of answers", r"logits/.*"),
        ("clipped tokens (share)", r"clip_ratio/region_mean|cispo_clip_ratio|policy/clipfrac_avg"),
        ("clipped low and high (share)", r"clip_ratio/.*"),
        ("probability ratio", r"ratio/.*|val/ratio"),
        ("trainer and engine apart (nats)", r"sampling/sampling_logp_difference/.*"),
        ("importance weights of the engine's tokens", r"sampling/importance_sampling_ratio/.*"),
        ("age of the rollouts (updates)", r"staleness/.*"),
    ),
    "Lengths": (
        ("length of completions (tokens)", r"completions/(mean|min|max)_length"),
        ("length of ended completions (tokens)", r"completions/(mean|min|max)_terminated_length"),
        ("length of answers (tokens)", r"completions/(chosen|rejected)_length"),
        ("cut, masked and repeated completions (share)", r"completions/.*_ratio"),
    ),
    "Time and data": (
        ("seconds a step", r"step_time"),
        ("seconds of generation", r"rollouts/seconds"),
        ("tokens per second", r".*tokens_per_second.*"),
        ("seconds of each reward function", r"rewards/.*/seconds"),
        ("seconds inside a step", r"profiling/.*|.*seconds|.*_time|runtime"),
        ("per second", r".*_per_second"),
        ("tokens seen", r"num_tokens"),
        ("trained tokens a step", r"trained_tokens"),
        ("sequences a step", r"documents"),
        ("padding (share)", r"padding_share"),
    ),
}
OTHER = "More"


@dataclass
class Panel:
    """A few metrics with one axis.

    Attributes:
        key: Of its element.
        group: Heading that it stands under.
        title: With the unit.
        metrics: Names.
        signs: What may be wrong with them.
        spoken: The curves in words, for those who do not see them.
    """

    key: str
    group: str
    title: str
    metrics: list[str] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)
    spoken: str = ""


def panel_of(name: str) -> tuple[str, str]:
    """Heading and title of the panel that a metric belongs to.

    >>> panel_of("eval_loss"), panel_of("rewards/accuracy/mean")
    (('Learning', 'loss'), ('Rewards', 'mean of each reward function'))
    >>> panel_of("balance/busiest_rank")
    ('More', 'balance/busiest_rank')
    """
    bare = name.removeprefix("eval_")
    for group, entries in LAYOUT.items():
        for title, pattern in entries:
            if re.fullmatch(pattern, bare):
                return group, title
    return OTHER, bare


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Panels with all metrics of all runs, in the order of the page."""
    found: dict[tuple[str, str], Panel] = {}
    names = dict.fromkeys(name for run in runs for name in run.series)
    for name in names:
        place = panel_of(name)
        key = re.sub(r"[^a-z0-9]+", "-", place[1].lower()).strip("-") or "panel"
        panel = found.setdefault(place, Panel(f"{key}-{len(found)}", *place))
        panel.metrics.append(name)
    order = {(group, title): at for at, (group, title) in enumerate((g, e[0]) for g in LAYOUT for e in LAYOUT[g])}
    panels = sorted(found.values(), key=lambda panel: (order.get((panel.group, panel.title), len(order)), panel.title))
    for at, panel in enumerate(panels):
        panel.key = f"{panel.key.rsplit('-', 1)[0]}-{at}"
        panel.metrics.sort(key=lambda name: (name.startswith("eval_"), _rank(name)))
    return panels


def _rank(name: str) -> int:
    """Means before the ends of a range, so that they have the first colours."""
    return 1 if re.search(r"(^|[/_])(min|max|low|high)", name) else 0


def groups_of(
    panels: Sequence[Panel], runs: Sequence[Run], verdicts: Sequence[Sequence[Verdict]]
) -> dict[str, list[Panel]]:
    """Panels under their headings, with what may be wrong and with their curves in words."""
    seen = [verdict for found in verdicts for verdict in found if verdict.status == "seen"]
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
    """What the page's script draws, as JSON: panels with their curves, findings and shaded spans.

    Args:
        panels: See `panels_of`.
        runs: Their order is that of the colours.
        verdicts: Of each run.
    """
    of_metric = {name: panel for panel in panels for name in panel.metrics}
    marks: dict[str, list[dict[str, Any]]] = {panel.key: [] for panel in panels}
    spans: dict[str, list[dict[str, Any]]] = {panel.key: [] for panel in panels}
    for at, run in enumerate(runs):
        for mark in run.marks if panels else ():
            found, key = mark.finding, of_metric.get(mark.finding.where, panels[0]).key
            text = f"{found.code}: {found.what}"
            marks[key].append({"run": at, "step": mark.step, "severity": found.severity, "text": text})
        for verdict in verdicts[at]:
            # Two metrics of one panel shade it once.
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
    """A long curve with the least and the most of every stretch: what sticks out stays.

    >>> short = thinned(Series(list(range(9999)), [0.0] * 5000 + [7.0] + [0.0] * 4998, [0.0] * 9999), 100)
    >>> len(short.steps) <= 104, max(short.values)
    (True, 7.0)
    """
    size = len(series.steps)
    if size <= most:
        return series
    stretch = math.ceil(size / (most // 2))
    kept = {0, size - 1}
    for start in range(0, size, stretch):
        places = [at for at in range(start, min(start + stretch, size)) if math.isfinite(series.values[at])]
        places = places or [start]  # A gap stays a gap.
        kept |= {min(places, key=series.values.__getitem__), max(places, key=series.values.__getitem__)}
    order = sorted(kept)
    return Series([series.steps[i] for i in order], [series.values[i] for i in order], [series.times[i] for i in order])
