"""The page: one HTML file that asks nothing of the network, and in which recorded text can run nothing.

Texts are escaped, data is JSON that cannot end its element, and a policy in the head names the hash of the only script
that may run: a completion that holds HTML is shown as what it is.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from posttrain.checks.online import Rule, Verdict, review
from posttrain.errors import ConfigError
from posttrain.report.page.panels import Panel, figures, groups_of, panels_of
from posttrain.report.page.run import Run, flat
from posttrain.report.templates import TEMPLATES, environment

__all__ = ["content", "final", "render", "write_page"]

LONGEST = 4000  # Characters of a completion before its middle is left out.
TAIL = 0.1  # Share of the latest points whose mean is the final value.
ABSENT = "—"
BESIDE_THE_POINT = ("config.output_dir", "config.logging_dir", "config.run_name", "started", "first_started")
HEADLINE = {
    "loss": "loss",
    "reward": "reward",
    "rewards/accuracies": "preference accuracy",
    "rewards/margins": "margin",
    "mean_token_accuracy": "token accuracy",
    "kl": "KL (nats)",
    "entropy": "entropy (nats)",
    "completions/mean_length": "mean length",
    "grad_norm": "gradient norm",
    "num_tokens": "tokens seen",
}
TITLES = {
    "findings": "Findings",
    "pathologies": "What may be wrong",
    "curves": "Curves",
    "completions": "Completions",
    "data": "Data",
    "compare": "Final values",
    "manifest": "Manifest",
}


# Filters of the templates ----------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Four digits, thousands apart.

    >>> number(1234567.0), number(0.000012345), number(3.0)
    ('1,234,567', '1.234e-05', '3')
    """
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"


def middle_out(value: str) -> str:
    """A long text without its middle."""
    half = LONGEST // 2
    if len(value) <= LONGEST:
        return value
    return f"{value[:half]}\n[… {len(value) - 2 * half:,} characters left out …]\n{value[-half:]}"


def shown(value: Any) -> str:
    """A setting as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def steps(spans: Sequence[tuple[int, int]]) -> str:
    """Stretches of steps in words.

    >>> steps([(3, 3)]), steps([(1, 4), (7, 7)])
    ('step 3', 'steps 1 to 4, 7')
    """
    words = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in spans]
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    return ("step " if words[1:] == [] and "to" not in words[0] else "steps ") + ", ".join(words[:4]) + more


def histogram(lengths: Sequence[int], bins: int = 10) -> list[tuple[str, int, int]]:
    """Bins as text, with counts and with percentages of the largest count.

    >>> histogram([3, 3, 4])
    [('3', 2, 100), ('4', 1, 50)]
    """
    low, high = min(lengths), max(lengths)
    width = max(1, math.ceil((high - low + 1) / bins))
    counts = [(at, sum(at <= n < at + width for n in lengths)) for at in range(low, high + 1, width)]
    most = max(count for _, count in counts)
    spans = [f"{at}" if width == 1 else f"{at}–{min(at + width - 1, high)}" for at, _ in counts]
    return [(span, count, round(100 * count / most)) for span, (_, count) in zip(spans, counts, strict=True)]


environment().filters.update({f.__name__: f for f in (number, middle_out, shown, steps, histogram)})


# What stands in the sections -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """One rule with what each run shows of it."""

    rule: Rule
    verdicts: list[tuple[int, Verdict]]

    @property
    def key(self) -> str:
        """Of the element that opens."""
        return self.rule.code

    @property
    def title(self) -> str:
        """What is wrong when the rule holds, as a heading."""
        title = self.verdicts[0][1].title
        return title[0].upper() + title[1:]

    @property
    def status(self) -> str:
        """The worst of the runs."""
        return min((verdict.status for _, verdict in self.verdicts), key=("seen", "clear", "unknown").index)


def _cards(verdicts: Sequence[Sequence[Verdict]]) -> list[Card]:
    by_rule: dict[str, Card] = {}
    for at, found in enumerate(verdicts):
        for verdict in found:
            by_rule.setdefault(verdict.rule.code, Card(verdict.rule, [])).verdicts.append((at, verdict))
    return sorted(by_rule.values(), key=lambda card: ("seen", "clear", "unknown").index(card.status))


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """What changes while a run goes on: ``sections``, HTML by name, and ``data``, what is drawn."""
    verdicts = [review(run.rows) for run in runs]
    panels = panels_of(runs)
    make: Any = environment().get_template("sections.html.jinja").module
    sections = {
        "overview": make.overview(runs, HEADLINE),
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
    """Settings that differ, with the value of each run, and how many are the same."""
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
    """Mean of the last tenth of a curve: one noisy step decides nothing."""
    points = run.series[name].finite if name in run.series else []
    if not points:
        return None
    return statistics.fmean(value for _, value in points[-max(1, round(TAIL * len(points))) :])


def _finals(runs: Sequence[Run], panels: Sequence[Panel]) -> dict[str, list[tuple[str, str]]]:
    """Cells ``(value, change)`` of every metric: final values of all runs; of one run also its first, least and most."""
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


def render(runs: Sequence[Run], *, live: bool = False) -> str:
    """The whole page.

    Args:
        runs: See `posttrain.report.page.read_runs`.
        live: Whether the page asks the server it came from for news; else it may connect to nothing.
    """
    made = content(runs)
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            runs=runs,
            live=live,
            title=" · ".join(run.name for run in runs) or "no run",
            titles=TITLES | ({"compare": "Comparison"} if len(runs) > 1 else {}),
            sections={name: Markup(html) for name, html in made["sections"].items()},
            data=Markup(_json(made["data"])),
            script=Markup(script),
            style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
            policy=Markup(
                f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
                f"connect-src '{'self' if live else 'none'}'; base-uri 'none'; form-action 'none'"
            ),
        )
    )


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    dumped = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_page(runs: Sequence[Run], path: str | Path) -> Path:
    """Write the page; the file appears whole or not at all.

    Raises:
        ConfigError: The system refuses to write there.
    """
    target = Path(path).expanduser()
    page = render(runs)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(page, encoding="utf-8")
        os.replace(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ConfigError(
            f"the page cannot be written to {str(path)!r}: {error.strerror or error}. Name another file with --out."
        ) from error
    return target
