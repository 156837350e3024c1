"""Tables of completions: of a fixed set of prompts (`LogCompletionsCallback`), and of completions sampled in training."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers

from posttrain.data.chat import inner_tokenizer, terminal_token_ids, tokenize_prompts
from posttrain.data.samplers import check_prompts
from posttrain.errors import ConfigError, DataError
from posttrain.integrations import require
from posttrain.models import parallel
from posttrain.models.architecture import context_length, generation_config_of
from posttrain.models.load import resolve_pad_token
from posttrain.report.files import read_line, whole_file
from posttrain.report.record import RunRecordCallback
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.engines import create_engine
from posttrain.types import Request, Sampling
from posttrain.values import accept_any_character, visible

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig, TrainerControl, TrainerState, TrainingArguments

    from posttrain.methods.online_config import OnlineConfig
    from posttrain.types import AnyDataset, Tokenizer


logger = logging.getLogger(__name__)


FILE = "logged_completions.jsonl"
COLUMNS = ["step", "prompt", "completion"]
PROMPT_COLUMNS = ("prompt", "tools", "chat_template_kwargs")
MAX_NEW_TOKENS = 256
# Default of transformers if a generation config enables sampling but sets no top_k.
TOP_K = 50
# Fields of a generation config that are supported, or that do not affect which tokens are sampled.
KNOWN = (
    "bos_token_id", "cache_implementation", "do_sample", "eos_token_id", "max_new_tokens", "min_p", "output_attentions",
    "output_hidden_states", "pad_token_id", "repetition_penalty", "temperature", "top_k", "top_p", "transformers_version",
    "use_cache",
)  # fmt: skip


def to_sampling(config: GenerationConfig | None, tokenizer: Tokenizer, model: nn.Module, *, seed: int) -> Sampling:
    """Convert a generation config of transformers. None uses the model's generation config with up to 256 new tokens.

    Raises:
        ConfigError: The passed config contains a setting that engines do not support (beams, stop strings, ...).
    """
    own = generation_config_of(model)
    asked = {} if config is None else config.to_diff_dict()
    for name in [name for name in asked if name not in KNOWN and not name.startswith("_")]:
        raise ConfigError(
            f"generation_config.{name}={asked[name]!r} is not supported here. Fix: remove it"
            f"{', and set max_new_tokens' if name == 'max_length' else ''}."
        )
    used = config if config is not None else own

    def setting(name: str, default: Any) -> Any:
        value = getattr(used, name, None)
        return default if value is None else value

    settings = {"max_new_tokens": MAX_NEW_TOKENS, "repetition_penalty": 1.0}
    if setting("do_sample", False):
        settings |= {"temperature": 1.0, "top_k": TOP_K, "top_p": 1.0, "min_p": None}
    stops = dict.fromkeys([*terminal_token_ids(tokenizer, used), *terminal_token_ids(tokenizer, own)])
    greedy = {} if "temperature" in settings else {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    fields = {name: setting(name, default) for name, default in settings.items()}
    return Sampling(**fields, **greedy, stop_token_ids=tuple(stops), seed=seed)


class EvalPrompts:
    """Tokenized prompts of an evaluation set, for completion with the current model.

    Engines get token ids, and run in eval mode without gradients. Dropout, gradient checkpointing, the tokenizer's padding side
    and the random state of training are not changed.

    Args:
        trainer: Trainer with a tokenizer. Its ``eval_dataset`` contains the prompts.
        generation_config: Sampling settings; see `to_sampling`.
        num_prompts: Number of rows to use, from the start of the dataset. None uses all rows.
        dataset: Dataset to use instead of ``eval_dataset``.

    Raises:
        ConfigError: There is no evaluation set, there are several, or it is a stream and ``num_prompts`` is None.
        DataError: A row has no prompt, or a prompt is so long that no completion fits into the context.
    """

    def __init__(
        self,
        trainer: Any,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        *,
        dataset: AnyDataset | None = None,
    ) -> None:
        self.trainer = trainer
        tokenizer = trainer.processing_class
        self.tokenizer = inner_tokenizer(tokenizer)
        name = "dataset" if dataset is not None else "eval_dataset"
        rows = _rows(trainer.eval_dataset if dataset is None else dataset, name, num_prompts)
        check_prompts(rows, name, self.tokenizer)
        self.rows = [{key: row[key] for key in PROMPT_COLUMNS if row.get(key) is not None} for row in rows]
        # Read the option with a default, because the trainer can be any trainer of transformers.
        kwargs = getattr(trainer.args, "chat_template_kwargs", None)
        self.ids = tokenize_prompts(
            self.rows, self.tokenizer, chat_template_kwargs=kwargs if isinstance(kwargs, dict) else None
        )
        self.sampling = to_sampling(generation_config, self.tokenizer, trainer.model, seed=trainer.args.seed)
        self._check_room(name)
        self._engine: RolloutEngine | None = None

    @property
    def prompts(self) -> list[Any]:
        """Prompts in the format of the dataset."""
        return [row["prompt"] for row in self.rows]

    def _check_room(self, name: str) -> None:
        config = self.trainer.accelerator.unwrap_model(self.trainer.model).config.get_text_config()
        context, new = context_length(config), self.sampling.max_new_tokens
        for index, ids in enumerate(self.ids):
            if context is not None and len(ids) + new > context:
                raise DataError(
                    f"{name} row {index}: a prompt of {len(ids)} tokens and max_new_tokens={new} exceed the model's "
                    f"context of {context} tokens. Fix: shorten the prompt, or set max_new_tokens in generation_config."
                )

    def complete(self) -> list[str]:
        """Generate one completion per prompt. Return all completions in order on every rank. Every rank must call this."""
        trainer = self.trainer
        accelerator, size = trainer.accelerator, trainer.args.per_device_eval_batch_size
        if self._engine is None:
            self._engine = create_engine(
                "auto", accelerator.unwrap_model(trainer.model), pad_token_id=resolve_pad_token(self.tokenizer)
            )
        share = -(-len(self.ids) // accelerator.num_processes)
        first = share * accelerator.process_index
        # This list can be empty. The rank then still takes part in the collective operation below.
        mine = list(range(len(self.ids)))[first : first + share]
        texts: list[str] = []
        with torch.no_grad(), accelerator.autocast(), parallel.whole_parameters(trainer.model_wrapped, accelerator):
            for start in range(0, len(mine), size):
                texts += self._batch(mine[start : start + size])
        return parallel.all_gather_objects(texts, accelerator)

    def _batch(self, indices: list[int]) -> list[str]:
        # Each batch has its own seed, which is the same at every step. Differences between steps are then caused only by the
        # model.
        sampling = replace(self.sampling, seed=(self.sampling.seed or 0) + indices[0])
        assert self._engine is not None
        rollouts = self._engine.generate([Request(self.ids[i]) for i in indices], sampling)
        return self.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)


def _rows(dataset: AnyDataset, name: str, num_prompts: int | None) -> datasets.Dataset:
    if dataset is None:
        raise ConfigError(
            "completions are sampled from the prompts of eval_dataset, but the trainer has no eval_dataset. Fix: pass one."
        )
    if num_prompts is not None and num_prompts < 1:
        raise ConfigError(f"num_prompts={num_prompts} must be at least 1, or None for all prompts.")
    if isinstance(dataset, dict):
        raise ConfigError(
            f"{name} contains several datasets ({', '.join(map(str, dataset))}). Fix: pass one with dataset=eval_dataset[name]."
        )
    if isinstance(dataset, datasets.IterableDataset):
        if num_prompts is None:
            raise ConfigError(f"{name} is a stream. Fix: set num_prompts to the number of rows to read from its start.")
        dataset = datasets.Dataset.from_list(list(itertools.islice(dataset, num_prompts)))
    columns = list(dataset.column_names)
    if "prompt" not in columns and len(dataset):
        raise DataError(
            f"{name} has no 'prompt' column. Its columns are {columns}. Tokenization and packing remove the prompt. Fix: pass "
            "the raw rows, which have a prompt, with dataset=...."
        )
    kept = dataset.select_columns([column for column in PROMPT_COLUMNS if column in columns])
    return kept if num_prompts is None else kept.select(range(min(num_prompts, len(kept))))


class LogCompletionsCallback(transformers.TrainerCallback):
    """Callback that completes evaluation prompts every ``freq`` steps, and logs the completions as a growing table.

    Rows ``step, prompt, completion`` are appended to ``<output_dir>/logged_completions.jsonl``. The whole table is sent to the
    trackers in ``report_to`` that support tables (wandb, comet, trackio, mlflow). A resumed run continues the table of its
    checkpoint. Only the main process writes.

    Args:
        trainer: Trainer to which the callback is added.
        generation_config: Sampling settings of transformers (``max_new_tokens``, ``do_sample``, ``temperature``, ...). None uses
            the model's generation config with up to 256 new tokens.
        num_prompts: Number of rows to use, from the start of the dataset. None uses all rows.
        freq: Number of optimizer steps after which completions are sampled again. None uses the evaluation interval.
        dataset: Dataset to use instead of ``trainer.eval_dataset``.

    Raises:
        ConfigError, DataError: See `EvalPrompts`.

    >>> trainer.add_callback(LogCompletionsCallback(trainer, num_prompts=8, freq=50))  # doctest: +SKIP
    """

    def __init__(
        self,
        trainer: Any,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
        *,
        dataset: AnyDataset | None = None,
    ) -> None:
        if freq is not None and freq < 1:
            raise ConfigError(f"freq={freq} must be at least 1 (optimizer steps), or None for the evaluation interval.")
        self.source = EvalPrompts(trainer, generation_config, num_prompts, dataset=dataset)
        self.freq = freq
        self.table: list[dict[str, Any]] = []
        self._last_step = -1
        self._attempts = _Attempts()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Load the table of a resumed run, or move the table of an earlier run to another file."""
        self.table, self._last_step = [], -1
        path = Path(args.output_dir or ".") / FILE
        if not (state.is_world_process_zero and path.is_file()):
            return
        if state.global_step == 0:
            numbers = itertools.count(1)
            os.replace(path, next(p for n in numbers if not (p := path.with_stem(f"{path.stem}-{n}")).exists()))
            return
        # Do not use splitlines, because completions can contain other line separators than \n.
        rows = filter(None, map(read_line, path.read_text(encoding="utf-8", errors="replace").split("\n")))
        self.table = [row for row in rows if row["step"] <= state.global_step]
        with whole_file(path) as part:
            part.write_text("".join(map(_line, self.table)), encoding="utf-8")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Sample and log completions if the interval has passed, once per step."""
        step = state.global_step
        if step == self._last_step or step % (self.freq or state.eval_steps or 1) != 0:
            return
        self._last_step = step
        completions = self.source.complete()
        if not state.is_world_process_zero:
            return
        pairs = zip(self.source.prompts, completions, strict=True)
        rows = [{"step": step, "prompt": prompt, "completion": text} for prompt, text in pairs]
        self.table += rows
        path = Path(args.output_dir or ".") / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, rows))
        texts = [
            row["prompt"] if isinstance(row["prompt"], str) else _line(row["prompt"]).strip() for row in self.table
        ]
        data = [[row["step"], text, row["completion"]] for row, text in zip(self.table, texts, strict=True)]
        self._attempts.track(args, "completions", COLUMNS, data)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


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
    """Replace thumbnails with lists of the tracker's image type. The list is empty for rows without images."""
    if THUMBNAILS not in columns:
        return data
    from posttrain.pictures.picture import read_picture

    place = columns.index(THUMBNAILS)
    return [
        [*row[:place], [tracker.Image(read_picture(one).load()) for one in row[place] or ()], *row[place + 1 :]]
        for row in data
    ]


def _without_images(columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Remove thumbnails, for trackers whose tables support only text."""
    kept = [i for i, name in enumerate(columns) if name != THUMBNAILS]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in data]


TRACKERS: dict[str, Callable[[str, list[str], list[list[Any]]], None]] = {
    "wandb": _to_wandb,
    "comet_ml": _to_comet,
    "trackio": _to_trackio,
    "mlflow": _to_mlflow,
}


class _Attempts:
    """Runner of actions whose errors must not stop training. After an error, it warns and skips this destination."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def run(self, where: str, action: Callable[[], None]) -> None:
        """Run ``action``, which sends completions to ``where``."""
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


MINUTES = 2  # Interval between two pushes to the Hub, in minutes.
PER_TOKEN = ("tokens", "logps")  # Columns that are used only by the report page.
# Column of `completion_rows` that holds images for trackers.
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
        rewards: One list of rewards per function. None means that the function did not score the completion.
        advantages: One advantage per completion.
        step: Step that is shown in the title.
        num_samples: Number of rows to print, selected at random. None prints all rows; 0 or less prints nothing.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if num_samples is not None and num_samples <= 0:
        return
    order = list(range(len(prompts)))
    if num_samples is not None and num_samples < len(order):
        # Use a separate generator, so that the random state of the run does not change.
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
    """Callback that shows the latest completions at each log, separately for training and for evaluation.

    Args:
        record: Run record, which provides the rows of all ranks on the main process.
        names: Names of reward functions.
        rows: Maximum number of stored completions, which is the number of one generation.
        shown: Number of rows printed on the terminal. None prints all rows.
        unique: Whether a tracker's table contains only one row per prompt.
    """

    def __init__(
        self, record: RunRecordCallback, names: list[str], *, rows: int, shown: int | None = None, unique: bool = False
    ) -> None:
        self.names, self.shown, self.unique = names, shown, unique
        self.rings: dict[str, deque[dict[str, Any]]] = {"": deque(maxlen=rows), "eval_": deque(maxlen=rows)}
        self._attempts = _Attempts()
        record.listeners.append(self.add)

    def add(self, rows: list[dict[str, Any]], evaluation: bool) -> None:
        """Store rows until the next log."""
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
        """Return columns and rows. Missing values are None. With ``unique``, only the first row of each prompt is returned."""
        if self.unique:
            rows = list({row.get("prompt"): row for row in reversed(rows)}.values())[::-1]
        columns = list(dict.fromkeys(key for row in rows for key in row if key not in PER_TOKEN))
        return columns, [[_plain(row.get(key)) for key in columns] for row in rows]


def _plain(value: object) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def rollout_table(args: OnlineConfig, record: RunRecordCallback, names: list[str]) -> RolloutTableCallback:
    """Create the callback for ``log_completions``. It stores the completions of one generation."""
    rows = args.samples_per_step or args.generation_batch_size or 1
    options = {"shown": args.num_completions_to_print, "unique": args.log_unique_prompts}
    return RolloutTableCallback(record, names, rows=rows, **options)


class CompletionsHubCallback(transformers.TrainerCallback):
    """Callback that pushes ``completions/*.parquet`` to a dataset repository every two minutes and at the end.

    Args:
        repo_id: Id of the repository. A missing repository is created, and is private if ``hub_private_repo`` is set.
    """

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self._scheduler: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Create the repository now, so that missing permissions raise an error before the first step."""
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
        """Push the remaining files. This is called even if training fails."""
        if self._scheduler is not None:
            self._scheduler.trigger().result()
            self._scheduler.stop()
            self._scheduler = None
