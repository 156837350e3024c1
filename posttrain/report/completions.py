"""Tables of completions that were sampled during training, for the terminal, trackers and the Hub."""

from __future__ import annotations

import functools
import logging
import math
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from posttrain import plugins
from posttrain.integrations import require
from posttrain.report.record import RunRecordCallback
from posttrain.values import accept_any_character, visible

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.methods.online_config import OnlineConfig


logger = logging.getLogger(__name__)


def _to_wandb(name: str, columns: list[str], data: list[list[Any]]) -> None:
    wandb: Any = require("wandb", "report_to='wandb'")
    if wandb.run is not None:
        wandb.log({name: wandb.Table(columns=columns, data=_with_images(wandb, columns, data))})


def _to_comet(name: str, columns: list[str], data: list[list[Any]]) -> None:
    experiment = require("comet_ml", "report_to='comet_ml'").get_running_experiment()
    if experiment is not None:
        columns, data = _without_images(columns, data)
        experiment.log_table(f"{name}.csv", tabular_data=data, headers=columns)


def _to_trackio(name: str, columns: list[str], data: list[list[Any]]) -> None:
    trackio: Any = require("trackio", "report_to='trackio'")
    trackio.log({name: trackio.Table(columns=columns, data=_with_images(trackio, columns, data))})


def _to_mlflow(name: str, columns: list[str], data: list[list[Any]]) -> None:
    mlflow: Any = require("mlflow", "report_to='mlflow'")
    if mlflow.active_run() is not None:
        columns, data = _without_images(columns, data)
        # Log only the latest rows, because mlflow appends to its existing table.
        latest = [row for row in data if row[0] == data[-1][0]]
        mlflow.log_table(dict(zip(columns, map(list, zip(*latest, strict=True)), strict=True)), f"{name}.json")


def _with_images(tracker: Any, columns: list[str], data: list[list[Any]]) -> list[list[Any]]:
    """Replace each row's thumbnails with a list of images of the tracker's type. Rows without images get an empty list."""
    if THUMBNAILS not in columns:
        return data
    place, read = columns.index(THUMBNAILS), plugins.module("extensions.images.picture").read_picture
    return [
        [*row[:place], [tracker.Image(read(img).load()) for img in row[place] or ()], *row[place + 1 :]] for row in data
    ]


def _without_images(columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Remove the column with thumbnails, for trackers whose tables support only text."""
    indices = [i for i, name in enumerate(columns) if name != THUMBNAILS]
    return [columns[i] for i in indices], [[row[i] for i in indices] for row in data]


TRACKERS: dict[str, Callable[[str, list[str], list[list[Any]]], None]] = {
    "wandb": _to_wandb,
    "comet_ml": _to_comet,
    "trackio": _to_trackio,
    "mlflow": _to_mlflow,
}


class Attempts:
    """Runner of actions whose errors must not stop training. After an error, a warning is logged, and later actions with the
    same destination are skipped.
    """

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def run(self, where: str, action: Callable[[], None]) -> None:
        """Run ``action``, which sends completions to the destination ``where``. Errors are only logged."""
        if where in self.failed:
            return
        try:
            action()
        except Exception as error:
            self.failed.add(where)
            logger.warning("completions could not be sent to %s: %s: %s", where, type(error).__name__, error)

    def track(self, args: TrainingArguments, name: str, columns: list[str], data: list[list[Any]]) -> None:
        """Send a table to the trackers in ``report_to`` that support tables."""
        for tracker in args.report_to or ():
            if tracker in TRACKERS:
                self.run(tracker, functools.partial(TRACKERS[tracker], name, columns, data))


MINUTES = 2  # Number of minutes between two pushes to the Hub.
PER_TOKEN = ("tokens", "logps")  # Columns of the completions table that only the HTML report uses.
# Name of the column of the completions table that contains images for trackers.
THUMBNAILS = "thumbnails"
WIDE = 400  # Maximum number of characters of a text in the printed table.


def print_prompt_completions_sample(
    prompts: list[Any],
    completions: list[Any],
    rewards: dict[str, list[float | None]],
    advantages: list[float],
    step: int,
    num_samples: int | None = None,
) -> None:
    """Print prompts, completions, rewards and advantages as a table.

    Args:
        prompts: Texts, or lists of messages.
        completions: Texts, or lists of messages.
        rewards: One list of rewards per function. A reward of None means that the function did not score the
            completion.
        advantages: One advantage per completion.
        step: Step that is shown in the title.
        num_samples: Number of randomly selected rows to print. None: all rows. 0 or less: no rows.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if num_samples is not None and num_samples <= 0:
        return
    order = list(range(len(prompts)))
    if num_samples is not None and num_samples < len(order):
        # Use a separate random generator, so that the random state of the run does not change.
        order = sorted(random.Random(step).sample(order, num_samples))
    table = Table(title=f"Step {step}", show_lines=True, expand=True)
    for name in ("prompt", "completion", *rewards, "advantage"):
        table.add_column(Text(visible(name)), justify="left" if name in ("prompt", "completion") else "right")
    for i in order:
        numbers = [column[i] for column in rewards.values()]
        texts = [Text(_cell_text(prompts[i])), Text(_cell_text(completions[i]))]
        table.add_row(*texts, *(_number(x) for x in numbers), _number(advantages[i]))
    accept_any_character()
    Console(file=sys.stdout).print(table)


def _cell_text(value: object) -> str:
    if isinstance(value, list):
        value = "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in value)
    return visible(value if len(value) <= WIDE else value[: WIDE // 2] + " ... " + value[-WIDE // 2 :])


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


class RolloutTableCallback(transformers.TrainerCallback):
    """Callback that prints the latest completions at each logging step, and sends them to trackers. Training and evaluation
    have separate tables.

    Args:
        record: Callback of the run record, which provides the completions of all ranks on the main process.
        names: Names of reward functions.
        rows: Maximum number of stored completions, i.e. the size of one generation.
        shown: Number of rows that are printed on the terminal. None: all rows.
        unique: Whether a tracker's table contains only one row per prompt.
    """

    def __init__(
        self, record: RunRecordCallback, names: list[str], *, rows: int, shown: int | None = None, unique: bool = False
    ) -> None:
        self.names, self.shown, self.unique = names, shown, unique
        self.rings: dict[str, deque[dict[str, Any]]] = {"": deque(maxlen=rows), "eval_": deque(maxlen=rows)}
        self._attempts = Attempts()
        record.listeners.append(self.add)

    def add(self, rows: list[dict[str, Any]], evaluation: bool) -> None:
        """Store rows of completions until the next logging step."""
        self.rings["eval_" if evaluation else ""].extend(rows)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Print the stored rows and send them to trackers. Errors do not stop training."""
        for prefix, ring in self.rings.items():
            rows = list(ring)
            ring.clear()
            if not rows:
                continue
            self._attempts.run("the terminal", functools.partial(self._print, rows, state.global_step))
            self._attempts.track(args, f"{prefix}completions", *self.table(rows))

    def _print(self, rows: list[dict[str, Any]], step: int) -> None:
        scored = [name for name in self.names if any(name in row for row in rows)]
        rewards = {name: [row.get(name) for row in rows] for name in scored}
        own = [[row.get(key) for row in rows] for key in ("prompt", "completion", "advantage")]
        print_prompt_completions_sample(own[0], own[1], rewards, [a or 0.0 for a in own[2]], step, self.shown)

    def table(self, rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
        """Convert rows of completions to column names and lists of values. Missing values are None. With ``unique``, only the
        first row of each prompt is included.
        """
        if self.unique:
            rows = list({row.get("prompt"): row for row in reversed(rows)}.values())[::-1]
        columns = list(dict.fromkeys(key for row in rows for key in row if key not in PER_TOKEN))
        return columns, [[_plain(row.get(key)) for key in columns] for row in rows]


def _plain(value: object) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def rollout_table(args: OnlineConfig, record: RunRecordCallback, names: list[str]) -> RolloutTableCallback:
    """Create the callback for the option ``log_completions``. The callback stores up to the number of completions of one
    generation.
    """
    rows = args.samples_per_step or args.generation_batch_size or 1
    options = {"shown": args.num_completions_to_print, "unique": args.log_unique_prompts}
    return RolloutTableCallback(record, names, rows=rows, **options)


class CompletionsHubCallback(transformers.TrainerCallback):
    """Callback that pushes ``completions/*.parquet`` to a dataset repository every two minutes and at the end.

    Args:
        repo_id: Id of the repository. If it does not exist, it is created, as a private repository if ``hub_private_repo`` is
            set.
    """

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self._scheduler: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Create the repository before the first step, so that missing permissions raise an error early."""
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
        """Push the remaining files. The trainer calls this method even if training fails."""
        if self._scheduler is not None:
            self._scheduler.trigger().result()
            self._scheduler.stop()
            self._scheduler = None
