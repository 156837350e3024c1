"""A run on a terminal: a live view in the process that trains, and any run watched from its record."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import transformers
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.report.record import LOCK
from posttrain.report.templates import visible

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.report.page.run import Run

__all__ = ["RichProgressCallback", "sparkline", "use_rich_progress", "view", "watch"]


# Shown in this order where the run logs them; what else it logs is in the page of `posttrain report`.
MAIN: dict[str, str] = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "reward": "reward",
    "eval_reward": "held-out reward",
    "reward_std": "reward spread",
    "frac_reward_zero_std": "groups without spread",
    "rewards/chosen": "reward of chosen",
    "rewards/rejected": "reward of rejected",
    "rewards/accuracies": "preference accuracy",
    "mean_token_accuracy": "token accuracy",
    "kl": "KL (nats)",
    "objective/kl": "KL (nats)",
    "entropy": "entropy (nats)",
    "completions/mean_length": "mean length",
    "completions/clipped_ratio": "cut at the limit",
    "clip_ratio/region_mean": "clipped tokens",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "rollouts/tokens_per_second": "tokens/s",
    "step_time": "seconds a step",
    "rewards/margins": "margin",
    "num_tokens": "tokens seen",
}
# Metrics of a line.
COLUMNS = 8


class RichProgressCallback(transformers.TrainerCallback):
    """Writes a line of the numbers that matter at each log; a terminal has a bar with the time left below them.

    Args:
        headline: Metric names to show with their labels; None shows the first eight of `MAIN` that the run logs.
        console: Where to write; None is the standard output.
    """

    def __init__(self, headline: dict[str, str] | None = None, console: Console | None = None) -> None:
        self.headline = headline or MAIN
        self.console = console or Console(file=sys.stdout)
        self.progress: Progress | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the display."""
        if not state.is_world_process_zero:
            return
        self._started, self._first = time.perf_counter(), state.global_step
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
        left = TimeRemainingColumn(elapsed_when_finished=False)
        self.progress = Progress(*columns, left, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("train", total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Advance."""
        if self.progress is not None:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **_: Any
    ) -> None:
        """Write the newest numbers."""
        logs = logs or {}
        if self.progress is None or "train_runtime" in logs:
            return
        found = [f"{label} {float(logs[key]):.4g}" for key, label in self.headline.items() if key in logs]
        done, total = state.global_step - self._first, state.max_steps - self._first
        left = (time.perf_counter() - self._started) / max(done, 1) * (total - done)
        step = f"step {state.global_step}/{state.max_steps}"
        # One line a step, however narrow the console is.
        line = f"{step}  {'  '.join(found[:COLUMNS])}  left {left:.0f} s"
        self.console.print(line, highlight=False, soft_wrap=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the last view on the screen."""
        self.stop()

    def stop(self) -> None:
        """End the display; safe to call twice, and called also when training raises."""
        if self.progress is not None:
            self.progress.stop()
        self.progress = None


def use_rich_progress(trainer: Any, headline: dict[str, str] | None = None) -> RichProgressCallback:
    """Replace a trainer's default progress output by the live view."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    callback = RichProgressCallback(headline)
    trainer.add_callback(callback)
    return callback


# A run watched from its record ---------------------------------------------------------------------------------------------

BLOCKS = "▁▂▃▄▅▆▇█"
# Columns of a sparkline, findings, and lines of the latest completion.
WIDTH, FINDINGS, LINES = 28, 3, 8
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
    from posttrain.report.page.run import read_run, version

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
            if latest != seen or LOCK not in {name for name, *_ in latest}:
                run, seen = read_run(folder), latest
            live.update(view(run), refresh=True)
    return run
