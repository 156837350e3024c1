"""A live view of a run: how far, how well, how long still."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import transformers
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = [
    "RichProgressCallback",
    "use_rich_progress",
]


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
COLUMNS = 8  # Of the live table.


class RichProgressCallback(transformers.TrainerCallback):
    """Shows step, time left and the numbers that matter, live on a terminal and as plain lines elsewhere.

    Args:
        headline: Metric names to show with their labels; None shows the first eight of `MAIN` that the run logs.
        console: Where to write; None is the standard output.
    """

    def __init__(self, headline: dict[str, str] | None = None, console: Console | None = None) -> None:
        self.headline = headline or MAIN
        self.console = console or Console(file=sys.stdout)
        self.live: Live | None = None
        self.history: list[dict[str, Any]] = []
        self._started = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the display."""
        if not state.is_world_process_zero:
            return
        self._started, self._first = time.perf_counter(), state.global_step
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
        self.progress = Progress(*columns, TimeRemainingColumn(elapsed_when_finished=False), console=self.console)
        self.task = self.progress.add_task("train", total=state.max_steps, completed=state.global_step)
        if self.console.is_terminal:
            self.live = Live(self._view(), console=self.console, refresh_per_second=4)
            self.live.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Advance."""
        if self._started:
            self.progress.update(self.task, completed=state.global_step)
            self._refresh()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **_: Any
    ) -> None:
        """Show the newest numbers."""
        logs = logs or {}
        if not self._started or not state.is_world_process_zero or "train_runtime" in logs:
            return
        if any(key in logs for key in self.headline):
            self.history.append({"step": state.global_step, **logs})
        if self.live is None:
            done, total = state.global_step - self._first, state.max_steps - self._first
            spent = time.perf_counter() - self._started
            left = spent / max(done, 1) * (total - done)
            step = f"step {state.global_step}/{state.max_steps}"
            # One line a step, however narrow the console is.
            self.console.print(f"{step}  {self._numbers(logs)}  left {left:.0f} s", highlight=False, soft_wrap=True)
        self._refresh()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the last view on the screen."""
        self.stop()

    def stop(self) -> None:
        """End the display; safe to call twice, and called also when training raises."""
        if self.live is not None:
            self.live.update(self._view())
            self.live.stop()
        self.live, self._started = None, 0.0

    def _numbers(self, logs: dict[str, Any]) -> str:
        found = [f"{label} {float(logs[key]):.4g}" for key, label in self.headline.items() if key in logs]
        return "  ".join(found[:COLUMNS])

    def _refresh(self) -> None:
        if self.live is not None:
            self.live.update(self._view())

    def _view(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        logged = [(k, label) for k, label in self.headline.items() if any(k in row for row in self.history)]
        shown = dict(logged[:COLUMNS])
        if not shown:
            return Group(self.progress, Text("generating the first completions ...", style="dim"))
        table.add_column("step", justify="right")
        for label in shown.values():
            table.add_column(label, justify="right")
        for row in self.history[-8:]:
            table.add_row(str(row["step"]), *(f"{float(row[k]):.4g}" if k in row else "" for k in shown))
        return Group(self.progress, table)


def use_rich_progress(trainer: Any, headline: dict[str, str] | None = None) -> RichProgressCallback:
    """Replace a trainer's default progress output by the live view."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    callback = RichProgressCallback(headline)
    trainer.add_callback(callback)
    return callback
