"""Completions for people: a table on the terminal and in the trackers at each log, and copies on the hub."""

from __future__ import annotations

import logging
import math
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from posttrain.integrations import require
from posttrain.report.record import RunRecordCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["CompletionsHubCallback", "RolloutTableCallback", "print_prompt_completions_sample"]

logger = logging.getLogger(__name__)

MINUTES = 2  # Between two pushes to the hub.
PER_TOKEN = ("tokens", "logps")  # For the report, not for tables.
WIDE = 400  # Characters of a text in the table.


def print_prompt_completions_sample(
    prompts: list[Any],
    completions: list[Any],
    rewards: dict[str, list[float | None]],
    advantages: list[float],
    step: int,
    num_samples: int | None = None,
) -> None:
    """Show prompts, completions, each reward and the advantage as a table on the terminal.

    Args:
        prompts: Texts, or lists of messages.
        completions: Likewise.
        rewards: One list a function; None where it did not apply.
        advantages: One a completion.
        step: For the title.
        num_samples: Rows, chosen at random; None shows all, 0 or less nothing.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if num_samples is not None and num_samples <= 0:
        return
    order = list(range(len(prompts)))
    if num_samples is not None and num_samples < len(order):
        order = sorted(random.Random(step).sample(order, num_samples))  # Not the run's own random numbers.
    table = Table(title=f"Step {step}", show_lines=True, expand=True)
    for name in ("prompt", "completion", *rewards, "advantage"):
        table.add_column(name, justify="left" if name in ("prompt", "completion") else "right")
    for i in order:
        numbers = [column[i] for column in rewards.values()]
        texts = [Text(_text(prompts[i])), Text(_text(completions[i]))]
        table.add_row(*texts, *(_number(x) for x in numbers), _number(advantages[i]))
    Console(file=sys.stdout).print(table)


def _text(value: Any) -> str:
    if isinstance(value, list):
        value = "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in value)
    return value if len(value) <= WIDE else value[: WIDE // 2] + " ... " + value[-WIDE // 2 :]


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


class RolloutTableCallback(transformers.TrainerCallback):
    """Shows the latest completions at each log, in training and in evaluation, each from rows of its own.

    Args:
        record: Hands over the rows of all ranks; only the main process gets any.
        names: Reward functions.
        rows: How many completions to remember, those of one generation.
        shown: Rows of the terminal's table; None is all.
        unique: Drop prompts that a tracker's table has already.
    """

    def __init__(
        self, record: RunRecordCallback, names: list[str], *, rows: int, shown: int | None = None, unique: bool = False
    ) -> None:
        self.names, self.shown, self.unique = names, shown, unique
        self.rings: dict[str, deque[dict[str, Any]]] = {"": deque(maxlen=rows), "eval_": deque(maxlen=rows)}
        self._failed: set[str] = set()
        record.listeners.append(self.add)

    def add(self, rows: list[dict[str, Any]], evaluation: bool) -> None:
        """Remember rows until the next log."""
        self.rings["eval_" if evaluation else ""].extend(rows)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Print and send what there is; a table must never stop training."""
        for prefix, ring in self.rings.items():
            rows = list(ring)
            ring.clear()
            if not rows:
                continue
            self._try("the terminal", lambda rows=rows: self._print(rows, state.global_step))
            for tracker in args.report_to or ():
                if tracker in TRACKERS:
                    columns, data = self.table(rows)
                    self._try(
                        tracker, lambda t=tracker, c=columns, d=data, p=prefix: TRACKERS[t](f"{p}completions", c, d)
                    )

    def _print(self, rows: list[dict[str, Any]], step: int) -> None:
        rewards = {name: [row.get(name) for row in rows] for name in self.names}
        own = [[row.get(key) for row in rows] for key in ("prompt", "completion", "advantage")]
        print_prompt_completions_sample(own[0], own[1], rewards, [a or 0.0 for a in own[2]], step, self.shown)

    def table(self, rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
        """Columns, and rows with None where one lacks a column; one row a prompt where that is asked for."""
        if self.unique:
            rows = list({row.get("prompt"): row for row in reversed(rows)}.values())[::-1]
        columns = list(dict.fromkeys(key for row in rows for key in row if key not in PER_TOKEN))
        return columns, [[_plain(row.get(key)) for key in columns] for row in rows]

    def _try(self, where: str, action: Callable[[], None]) -> None:
        if where in self._failed:
            return
        try:
            action()
        except Exception as error:
            self._failed.add(where)
            logger.warning("completions could not be shown on %s: %s: %s", where, type(error).__name__, error)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _to_wandb(name: str, columns: list[str], data: list[list[Any]]) -> None:
    wandb: Any = require("wandb", "report_to='wandb'")
    if wandb.run is not None:
        wandb.log({name: wandb.Table(columns=columns, data=data)})


def _to_trackio(name: str, columns: list[str], data: list[list[Any]]) -> None:
    trackio: Any = require("trackio", "report_to='trackio'")
    trackio.log({name: trackio.Table(columns=columns, data=data)})


TRACKERS: dict[str, Callable[[str, list[str], list[list[Any]]], None]] = {"wandb": _to_wandb, "trackio": _to_trackio}


class CompletionsHubCallback(transformers.TrainerCallback):
    """Pushes ``completions/*.parquet`` to a dataset repository every two minutes, and once more at the end.

    Args:
        repo_id: Made when it does not exist, private if ``hub_private_repo`` says so.
    """

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self._scheduler: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Make the repository now, so that a missing right is known before the first step."""
        if not state.is_world_process_zero:
            return
        from huggingface_hub import CommitScheduler

        folder = Path(args.output_dir or ".") / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        self._scheduler = CommitScheduler(
            repo_id=self.repo_id,
            repo_type="dataset",
            folder_path=folder,
            every=MINUTES,
            private=args.hub_private_repo,
            token=args.hub_token,
            allow_patterns=["*.parquet"],
        )

    def stop(self) -> None:
        """Push what is left, however training ended."""
        if self._scheduler is not None:
            self._scheduler.trigger().result()
            self._scheduler.stop()
            self._scheduler = None
