"""The page: one HTML file that asks nothing of the network, and in which recorded text can run nothing.

Texts are escaped, data is JSON that cannot end its element, and a policy in the head names the hashes of the only scripts
that may run: a completion that holds HTML is shown as what it is.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.integrations import require
from posttrain.report.page import compare, sections
from posttrain.report.page.markup import text
from posttrain.report.page.panels import OTHER, figures, panels_of
from posttrain.report.page.pathologies import Verdict, diagnose
from posttrain.report.page.run import Run

__all__ = ["content", "render", "write_page"]


@cache
def plotly_script() -> str:
    """plotly.js, as its package brings it."""
    return require("plotly.offline", "the page of a run").get_plotlyjs()


@cache
def _static(name: str) -> str:
    return resources.files("posttrain.report.page").joinpath("static", name).read_text(encoding="utf-8")


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """What changes while a run goes on: ``sections``, HTML by name, and ``data``, what is drawn."""
    verdicts = [diagnose(run.series) for run in runs]
    return {
        "sections": {
            "overview": sections.overview(runs),
            "findings": sections.findings(runs),
            "pathologies": sections.pathologies(runs, verdicts),
            "curves": _panels(runs, verdicts),
            "completions": sections.completions(runs),
            "data": sections.data(runs),
            "compare": compare.comparison(runs),
            "manifest": compare.manifests(runs),
        },
        "data": figures(runs, verdicts),
    }


def _panels(runs: Sequence[Run], verdicts: Sequence[Sequence[Verdict]]) -> str:
    """Places of the plots under their headings, each with a sentence for those who do not see them."""
    panels = panels_of(runs)
    if not panels:
        return "<p>No metric was logged yet.</p>"
    ill = {name: v.title for found in verdicts for v in found if v.status == "seen" for name in v.metrics}
    groups = dict.fromkeys(panel.group for panel in panels)
    parts = []
    for group in sorted(groups, key=lambda name: name == OTHER):
        plots = []
        for panel in (p for p in panels if p.group == group):
            spoken = "; ".join(_spoken(run, name) for name in panel.metrics for run in runs if name in run.series)
            signs = dict.fromkeys(ill[name] for name in panel.metrics if name in ill)
            note = "".join(f'<span class="chip seen">{text(sign)}</span>' for sign in signs)
            plots.append(
                f'<figure class="plot" tabindex="-1"><figcaption>{text(panel.title)} {note}</figcaption>'
                f'<div class="canvas" data-panel="{panel.key}" role="img" aria-label="{text(panel.title)}. {text(spoken)}">'
                "</div></figure>"
            )
        parts.append(f'<h3>{text(group)}</h3><div class="plots">{"".join(plots)}</div>')
    return "\n".join(parts)


def _spoken(run: Run, name: str) -> str:
    points = run.series[name].finite
    if not points:
        return f"{name} of {run.name}: no finite value"
    first, last = points[0], points[-1]
    return f"{name} of {run.name}: {first[1]:.4g} at step {first[0]}, {last[1]:.4g} at step {last[0]}"


TITLES = {
    "findings": "Findings",
    "pathologies": "What may be wrong",
    "curves": "Curves",
    "completions": "Completions",
    "data": "Data",
    "compare": "Final values",
    "manifest": "Manifest",
}


def render(runs: Sequence[Run], *, live: bool = False) -> str:
    """The whole page.

    Args:
        runs: See `posttrain.report.page.read_runs`.
        live: Whether the page asks the server it came from for news; else it may connect to nothing.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    made = content(runs)
    titles = TITLES | ({"compare": "Comparison"} if len(runs) > 1 else {})
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>{_controls() if name == "curves" else ""}'
        f'<div data-section="{name}">{made["sections"][name]}</div></section>'
        for name, title in titles.items()
    )
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in titles.items())
    title = text(" · ".join(run.name for run in runs) or "no run")
    scripts = [plotly_script(), _static("page.js")]
    allowed = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    shown = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_static('page.css')}</style>\n</head>\n"
        f'<body{" data-live" if live else ""}>\n<a class="skip" href="#curves">Skip to the curves</a>\n<header><h1>{title}</h1>'
        '<span id="live" class="soft" role="status"></span><button type="button" id="theme" aria-label="light or dark">◐</button>'
        f'</header>\n<nav aria-label="sections">{links}</nav>\n<main>\n'
        f'<div data-section="overview">{made["sections"]["overview"]}</div>\n'
        "<noscript><p class=note>Curves need JavaScript; the final values stand in a table below.</p></noscript>\n"
        f'{body}\n</main>\n<script type="application/json" id="page-data">{_json(made["data"])}</script>\n'
        f"{shown}</body>\n</html>\n"
    )


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    dumped = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _controls() -> str:
    return (
        '<form class="controls" aria-label="how curves are drawn"><label>smoothing '
        '<input id="smooth" type="range" min="0" max="0.95" step="0.05" value="0"><output for="smooth">0</output></label>'
        '<label>x axis <select id="axis"><option value="step">optimiser steps</option><option value="minutes">minutes</option>'
        '</select></label><label><input id="log" type="checkbox"> logarithmic</label>'
        '<label><input id="marks" type="checkbox" checked> findings</label>'
        '<button type="button" id="reset">whole run</button><span id="runs" role="group" aria-label="runs shown"></span></form>'
    )


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
