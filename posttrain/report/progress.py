"""Live display of a run. On a terminal, the display shows metrics and a progress bar. In a notebook, the display shows a
table. A summary is printed at the end of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import is_in_notebook as in_notebook

from posttrain.redaction import hide_secrets
from posttrain.report.templates import environment
from posttrain.values import accept_any_character

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


# Metrics that are displayed if the run logs them, in this order, with their labels. "*" stands for the name of each reward
# function. All other metrics are shown only in the HTML report.
MAIN: dict[str, str] = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "reward": "reward",
    "eval_reward": "held-out reward",
    "rewards/*/mean": "*",
    "eval_rewards/*/mean": "held-out *",
    "accuracy": "accuracy",
    "eval_accuracy": "held-out accuracy",
    "margin": "margin",
    "eval_margin": "held-out margin",
    "rewards/accuracies": "preference accuracy",
    "eval_rewards/accuracies": "held-out preference accuracy",
    "rewards/margins": "margin",
    "eval_rewards/margins": "held-out margin",
    "rewards/chosen": "reward of chosen",
    "rewards/rejected": "reward of rejected",
    "distill/divergence": "divergence (nats)",
    "eval_distill/divergence": "held-out divergence (nats)",
    "frac_reward_zero_std": "groups with equal rewards",
    "mean_token_accuracy": "token accuracy",
    "eval_mean_token_accuracy": "held-out token accuracy",
    "grad_norm": "gradient norm",
    "completions/mean_length": "mean length",
    "kl": "KL (nats)",
    "objective/kl": "KL (nats)",
    "completions/clipped_ratio": "truncated",
    "reward_std": "reward std",
    "entropy": "entropy (nats)",
    "clip_ratio/region_mean": "clipped tokens",
    "learning_rate": "learning rate",
    "rollouts/tokens_per_second": "tokens/s",
    "step_time": "seconds per step",
    "num_tokens": "tokens seen",
}
# Maximum number of metrics per line. The metrics of all reward functions together are counted as one metric. A metric of
# several evaluation sets is counted as one metric too.
COLUMNS = 8
SILENCE = 30.0  # Without a terminal, the remaining time is printed after this number of seconds without any output.
ROWS = 40  # Number of rows in the table in a notebook. The latest rows are shown.


def duration(seconds: float) -> str:
    """Format a duration in seconds as text.

    >>> duration(42.4), duration(600), duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def shell_command(*words: str) -> str:
    """Return a `posttrain` command for the shell. If the shell would not find `posttrain`, the command contains its path."""
    beside = Path(sys.executable).with_name("posttrain")
    on_path = shutil.which("posttrain")
    name = "posttrain" if on_path and Path(on_path).resolve() == beside.resolve() else str(beside)
    if not beside.exists():
        name = f"{sys.executable} -m posttrain"
    return f"{name} {shlex.join(words)}"


def resume_command() -> str:
    """Return the command that resumes this run. It is the run's command line with ``--resume_from_checkpoint true``, or a
    line of Python.

    Secrets in the command are replaced. A shell comment lists the options whose values the user must fill in.
    """
    program, *words = sys.argv
    if Path(program).name not in ("posttrain", "main.py", "__main__.py") or not words:
        return "trainer.train(resume_from_checkpoint=True)"
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--resume_from_checkpoint", "--resume-from-checkpoint")
    flags.add_argument("--resume", action="store_true")
    _, words = flags.parse_known_args(words)
    shown, flag, hidden = hide_secrets(words), "", []
    for raw, word in zip(words, shown, strict=True):
        flag = word.partition("=")[0] if word.startswith("--") else flag
        hidden += [flag] if raw != word else []
    command = shell_command(*shown, *(["--resume"] if words[0] == "demo" else ["--resume_from_checkpoint", "true"]))
    return f"{command}  # Fill in {', '.join(hidden)}: secrets are hidden here." if hidden else command


# Metrics that measure the success of a run. Higher values are better, except for metrics that are losses.
JUDGED = (
    "reward", "eval_reward", "accuracy", "eval_accuracy", "rewards/accuracies", "eval_rewards/accuracies", "loss", "eval_loss",
)  # fmt: skip
NOISE = 1e-6  # Rounding error in float32 of a loss that is close to 0.


def logged_labels(labels: Mapping[str, str], logged: Iterable[str]) -> dict[str, str]:
    """Expand "*" in metric names to the names of logged reward functions, and add the metrics of named evaluation sets.

    Args:
        labels: Labels by metric name.
        logged: Names of logged metrics. An evaluation set is recognized by its metric ``eval_NAME_runtime``.

    >>> logged_labels({"loss": "loss", "eval_loss": "held-out loss"}, ["eval_a_loss", "eval_a_runtime", "eval_runtime"])
    {'loss': 'loss', 'eval_loss': 'held-out loss', 'eval_a_loss': 'held-out loss of a'}
    >>> logged_labels({"rewards/*/mean": "*"}, ["rewards/length/mean", "rewards/length/std"])
    {'rewards/length/mean': 'length'}
    """
    logged = list(logged)
    sets = [name[len("eval_") : -len("_runtime")] for name in logged if re.fullmatch("eval_.+_runtime", name)]
    expanded = {}
    for name, label in labels.items():
        kinds = {name: label}
        if name.startswith("eval_"):
            kinds |= {f"eval_{dataset}{name.removeprefix('eval')}": f"{label} of {dataset}" for dataset in sets}
        for kind, text in kinds.items():
            pattern = re.compile(re.escape(kind).replace(r"\*", "(.+)"))
            matches = {m[0]: text.replace("*", m[1]) for m in map(pattern.fullmatch, logged) if m and m.groups()}
            expanded |= matches if "*" in kind else {kind: text}
    return expanded


def learned(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that compare the values of the metrics in `JUDGED` at the start and at the end of a run.

    The start value is the mean of the first tenth of the logged values, and the end value is the mean of the last tenth. If
    the run logs a reward, the training loss is omitted, because it does not show whether the policy has improved.

    >>> learned([{"reward": 0.0, "frac_reward_zero_std": 1.0}] * 2)
    ['reward 0 -> 0: all groups had equal rewards, so nothing was learned from it']
    >>> learned([{"loss": 2.0}, {"loss": 1.5}])
    ['loss 2 -> 1.5']
    """
    lines, rewarded = [], any("reward" in line for line in history)
    if not any("reward" in line or "loss" in line for line in history):
        # If no step was logged, use the mean loss over all steps, which trainers log at the end.
        means = [float(line["train_loss"]) for line in history if "train_loss" in line]
        lines = [f"loss {mean:.3g} (mean over all steps: no step was logged, see logging_steps)" for mean in means[-1:]]
    labels = logged_labels(
        {name: MAIN[name] for name in JUDGED}, dict.fromkeys(name for line in history for name in line)
    )
    for name, label in labels.items():
        values = [float(line[name]) for line in history if name in line]
        if not values or (rewarded and name == "loss"):
            continue
        tenth = max(1, len(values) // 10)
        first, last = (sum(part) / tenth for part in (values[:tenth], values[-tenth:]))
        text, more_is_better = f"{label} {first:.3g} -> {last:.3g}", not name.endswith("loss")
        flat = [float(line["frac_reward_zero_std"]) for line in history if "frac_reward_zero_std" in line]
        if name == "reward" and flat and min(flat) >= 1:
            text += ": all groups had equal rewards, so nothing was learned from it"
        elif name == "reward" and (since := _unrewarded(history)) is not None:
            text += f": no completion has been scored since step {since}, so nothing was learned"
        elif math.isnan(last):
            text += ": it is now NaN"
        elif (
            len(values) > 1
            and not math.isclose(first, last, rel_tol=1e-3, abs_tol=NOISE)
            and (last > first) != more_is_better
        ):
            text += f": it {'decreased' if more_is_better else 'increased'}"
        lines.append(text)
    return lines


def _unrewarded(history: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first step of the final period in which all rewards are None or NaN. Return None if the last rewards are
    numbers.
    """
    since = None
    for line in history:
        shares = [float(v) for k, v in line.items() if k.startswith("rewards/") and k.endswith("/applicable")]
        if shares:
            since = None if any(shares) else line["step"] if since is None else since
    return since


def _best(args: TrainingArguments, state: TrainerState) -> list[str]:
    """Return a line about the best evaluation. The line contains the metric, the checkpoint, and whether this checkpoint was
    loaded.
    """
    if state.best_metric is None or args.metric_for_best_model is None:
        return []
    metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')} {state.best_metric:.4g}"
    if state.best_model_checkpoint is None:
        return [f"Best evaluation: {metric}. No checkpoint was saved at its step."]
    loaded = "loaded" if args.load_best_model_at_end else "not loaded (load_best_model_at_end=False)"
    return [f"Best checkpoint: {state.best_model_checkpoint} ({metric}), {loaded}."]


def summary(args: TrainingArguments, state: TrainerState, *, seconds: float, interrupted: bool) -> list[str]:
    """Return the lines that are shown at the end of a run. The lines contain the run's end, metrics, best checkpoint, files,
    and next commands.

    Args:
        args: Training arguments with ``output_dir``.
        state: Trainer state with the step and the log history.
        seconds: Duration of the run.
        interrupted: Whether Ctrl-C or SIGTERM stopped the run.
    """
    folder = str(args.output_dir)
    at = f"at step {state.global_step} of {state.max_steps}"
    ended = f"Interrupted {at}" if interrupted else f"Ended {at}" if state.global_step < state.max_steps else "Finished"
    lines = [f"{ended} after {duration(seconds)}.", *learned(state.log_history), *_best(args, state)]
    lines.append(f"{folder}: metrics.jsonl, manifest.json, and checkpoints that from_pretrained can load.")
    if state.global_step < state.max_steps:
        lines.append(f"To continue:  {resume_command()}")
    return [*lines, f"To view:   {shell_command('report', folder)}"]


class RichProgressCallback(transformers.TrainerCallback):
    """Callback that prints a line of metrics at each logging step. On a terminal, the callback shows a progress bar with the
    remaining time as well.

    In a notebook, the callback shows a growing table instead. Findings are shown in a collapsed section below the table.

    Args:
        headline: Names and labels of the metrics to show. None: the first eight metrics of `MAIN` that the run logs.
        console: Console for the output. None: the standard output.
    """

    def __init__(self, headline: dict[str, str] | None = None, console: Console | None = None) -> None:
        self.headline = headline or MAIN
        accept_any_character()
        self.console = console or Console(file=sys.stdout)
        self.progress: Progress | None = None
        # Function that returns whether Ctrl-C or SIGTERM stopped the run. `use_rich_progress` replaces this function.
        self.interrupted: Callable[[], bool] = lambda: False
        self._table: Any = None
        self._rows: list[dict[str, str]] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the display."""
        if not state.is_world_process_zero:
            return
        self._started, self._first = time.perf_counter(), state.global_step
        self._printed = self._started
        self._rows, self._table = [], None
        # The callback computes the remaining time itself. rich would estimate it only from the last 30 seconds, but a step
        # can take minutes.
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
        left = TextColumn("left {task.fields[left]}")
        hidden = in_notebook() or not self.console.is_terminal
        self.progress = Progress(*columns, left, console=self.console, disable=hidden)
        self.task = self.progress.add_task("train", total=state.max_steps, completed=state.global_step, left="-")
        self.progress.start()

    def _left(self, state: TrainerState) -> str:
        done, total = state.global_step - self._first, state.max_steps - self._first
        return duration((time.perf_counter() - self._started) / max(done, 1) * (total - done))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Advance the progress bar. Without a progress bar, print the remaining time after `SILENCE` seconds without output."""
        if self.progress is None:
            return
        self.progress.update(self.task, completed=state.global_step, left=self._left(state))
        silent = time.perf_counter() - self._printed >= SILENCE and not control.should_log
        if self.progress.disable and not in_notebook() and silent:
            self._print(state, "")

    def _print(self, state: TrainerState, numbers: str) -> None:
        """Print the step, the metrics and the remaining time as one line, regardless of the console's width."""
        self._printed = time.perf_counter()
        step = f"step {state.global_step}/{state.max_steps}"
        self.console.print(
            f"{step}  {numbers}  left {self._left(state)}", highlight=False, soft_wrap=True, markup=False
        )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **_: Any
    ) -> None:
        """Print the latest metrics, or add them to the notebook's table."""
        logs = logs or {}
        if self.progress is None or "train_runtime" in logs:
            return
        shown = [logged_labels({name: label}, logs) for name, label in self.headline.items()]
        shown = [labels for labels in shown if any(key in logs for key in labels)][:COLUMNS]
        numbers = [
            (label, f"{float(logs[key]):.4g}") for labels in shown for key, label in labels.items() if key in logs
        ]
        if in_notebook():
            self._rows.append({"step": str(state.global_step), **dict(numbers)})
            return self._show(f"step {state.global_step} of {state.max_steps}, left {self._left(state)}", args)
        self._print(state, "  ".join(map(" ".join, numbers)))

    def _show(self, title: str, args: TrainingArguments) -> None:
        """Update the notebook's table in place."""
        from IPython.display import HTML, display

        page = environment().get_template("notebook.html.jinja")
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        findings = Path(str(args.output_dir), "findings.jsonl")
        findings_shown = (
            [json.loads(line) for line in findings.read_text(encoding="utf-8").splitlines()]
            if findings.is_file()
            else []
        )
        content = HTML(page.render(title=title, columns=columns, rows=self._rows[-ROWS:], findings=findings_shown))
        if self._table is None:
            self._table = display(content, display_id=True)
        else:
            self._table.update(content)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop the display and print the summary."""
        shown, interrupted = self.progress is not None, self.interrupted()
        self.stop()
        if shown:
            seconds = time.perf_counter() - self._started
            lines = summary(args, state, seconds=seconds, interrupted=interrupted)
            if in_notebook():
                self._show("  \n".join(lines), args)
            else:
                self.console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)

    def stop(self) -> None:
        """Stop the display. The trainer calls this method after an error in training too. Repeated calls have no effect."""
        if self.progress is not None:
            self.progress.stop()
        self.progress = None


def use_rich_progress(trainer: Any, headline: dict[str, str] | None = None) -> RichProgressCallback:
    """Replace the default progress output of a trainer with the live view."""
    from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    for default in (PrinterCallback, ProgressCallback, DEFAULT_PROGRESS_CALLBACK):
        trainer.remove_callback(default)
    callback = RichProgressCallback(headline)
    callback.interrupted = lambda: trainer.interrupt.requested
    trainer.add_callback(callback)
    return callback
