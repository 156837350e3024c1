"""A run while it trains: sparklines of the main metrics, the latest findings, the latest completion, on a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.report.page.run import Run, read_run, version
from posttrain.report.progress import MAIN
from posttrain.report.templates import visible

__all__ = [
    "sparkline",
    "view",
    "watch",
]


BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 28  # Of a sparkline.
FINDINGS = 3
LINES = 8  # Of the latest completion.

COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """A curve in one line; what is not finite is a gap, marked by ``×``.

    >>> sparkline([0.0, 1.0, 2.0, 3.0], 4), sparkline([1.0, float("nan"), 1.0], 4)
    ('▁▃▆█', '▄×▄')
    """
    stretch = max(1, math.ceil(len(values) / width))
    parts = [values[at : at + stretch] for at in range(0, len(values), stretch)]
    means = [sum(part) / len(part) for part in parts]  # A stretch with one NaN is NaN: it must show.
    finite = [value for value in means if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return "×"
        return BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] if high > low else BLOCKS[3]

    return "".join(map(block, means))


def view(run: Run, now: float | None = None) -> RenderableType:
    """What the terminal shows of a run.

    Args:
        run: As read.
        now: Unix time that ages are counted from; None is the present.
    """
    parts: list[RenderableType] = [_head(run, time.time() if now is None else now)]
    if run.max_steps:
        parts.append(ProgressBar(total=run.max_steps, completed=min(run.step, run.max_steps), width=60))
    parts += [_metrics(run), *_findings(run), *_completion(run)]
    parts += [Text(note, style="yellow") for note in run.notes]
    return Group(*parts)


def _head(run: Run, now: float) -> Text:
    colour = {"running": "green", "finished": "green", "stopped": "yellow"}[run.state]
    head = Text.assemble((visible(run.name), "bold"), "  ", (run.state, colour), f"  step {run.step}")
    if run.max_steps:
        head.append(f"/{run.max_steps}")
    times = sorted({(s, t) for series in run.series.values() for s, t in zip(series.steps, series.times, strict=True)})
    times = [(step, moment) for step, moment in times if math.isfinite(moment)]
    if not times:
        return head.append("  nothing logged yet", style="dim")
    (first, begin), (last, end) = times[0], times[-1]
    if run.state == "running":
        if run.max_steps and last > first:
            head.append(f"  left {_duration((end - begin) / (last - first) * (run.max_steps - last))}")
        head.append(f"  last log {_duration(now - end)} ago", style="dim")
    else:
        head.append(f"  took {_duration(run.summary.get('train_runtime', end - begin))}", style="dim")
    return head


def _duration(seconds: float) -> str:
    """Seconds as one would say them.

    >>> _duration(42), _duration(600), _duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _metrics(run: Run) -> RenderableType:
    shown = [name for name in MAIN if name in run.series]
    shown += [name for name in run.series if name.startswith("rewards/") and name.endswith("/mean")]
    if not shown:
        return Text("waiting for the first log ...", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("last", "least", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in shown:
        values, finite = run.series[name].values, [v for _, v in run.series[name].finite]
        ends = (min(finite), max(finite)) if finite else (math.nan, math.nan)
        last = Text(f"{values[-1]:.4g}", style="bold" if math.isfinite(values[-1]) else "bold red")
        label = Text(MAIN.get(name, visible(name.removesuffix("/mean"))))
        table.add_row(label, Text(sparkline(values), style="cyan"), last, *(f"{v:.4g}" for v in ends))
    return table


def _findings(run: Run) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for mark in run.marks[-FINDINGS:]:
        finding = mark.finding
        lines.append(
            Text.assemble(
                (f"step {mark.step} {finding.severity} {visible(finding.code)}: ", COLOURS[finding.severity]),
                visible(finding.what),
                ("  do: " + visible(finding.fix) if finding.fix else "", "dim"),
            )
        )
    return lines


def _completion(run: Run) -> list[RenderableType]:
    sample = run.latest
    if sample is None:
        return []
    lines = visible(sample.completion).splitlines() or ["(empty)"]
    more = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    advantage = "" if sample.advantage is None else f", advantage {sample.advantage:+.3g}"
    title = Text(f"best completion of step {run.samples[-1][0]}{advantage}")
    text = "\n".join([*lines[:LINES], *more])
    return [Panel(Text(text[:2000]), title=title, title_align="left", border_style="dim")]


def watch(folder: str, *, once: bool = False, every: float = 2.0, console: Console | None = None) -> Run:
    """Show a run until it ends or Ctrl-C is pressed; one that does not run, or no terminal, is shown once.

    Args:
        folder: ``output_dir`` of the run.
        once: Show it once even while it runs.
        every: Seconds between two looks at the folder; it is read again only where it changed.
        console: Where to show it; None is the standard output.

    Returns:
        The run as it was shown last.
    """
    console = console or Console()
    run = read_run(folder)
    if once or run.state != "running" or not console.is_terminal:
        console.print(view(run))
        return run
    with Live(view(run), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        seen = version(run.folder)
        while run.state == "running":
            time.sleep(every)
            latest = version(run.folder)
            if latest != seen or ".posttrain.lock" not in {name for name, *_ in latest}:
                run, seen = read_run(folder), latest
            live.update(view(run), refresh=True)
    return run
