"""A run on a terminal: a line at each log, and a bar with the time left."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


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
