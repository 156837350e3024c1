"""`LogCompletionsCallback`: samples completions of a fixed set of prompts at intervals during training, and logs these
completions.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers

from posttrain.data.chat import inner_tokenizer, terminal_token_ids, tokenize_prompts
from posttrain.data.samplers import check_prompts
from posttrain.errors import ConfigError, DataError
from posttrain.models import parallel
from posttrain.models.architecture import context_length, generation_config_of
from posttrain.models.load import resolve_pad_token
from posttrain.report.completions import Attempts
from posttrain.report.files import read_line, whole_file
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.engines import create_engine
from posttrain.types import Request, Sampling

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig, TrainerControl, TrainerState, TrainingArguments

    from posttrain.types import AnyDataset, Tokenizer


FILE = "logged_completions.jsonl"
COLUMNS = ["step", "prompt", "completion"]
PROMPT_COLUMNS = ("prompt", "tools", "chat_template_kwargs")
MAX_NEW_TOKENS = 256
# Value of top_k that transformers uses if a generation config enables sampling without setting top_k.
TOP_K = 50
# Fields of a generation config that are converted, or that have no influence on the sampled tokens.
KNOWN = (
    "bos_token_id", "cache_implementation", "do_sample", "eos_token_id", "max_new_tokens", "min_p", "output_attentions",
    "output_hidden_states", "pad_token_id", "repetition_penalty", "temperature", "top_k", "top_p", "transformers_version",
    "use_cache",
)  # fmt: skip


def to_sampling(config: GenerationConfig | None, tokenizer: Tokenizer, model: nn.Module, *, seed: int) -> Sampling:
    """Convert a generation config of transformers to `Sampling`. None: use the model's generation config and 256 new tokens.

    Raises:
        ConfigError: ``config`` contains a setting that engines do not support, such as beams or stop strings.
    """
    own = generation_config_of(model)
    options = {} if config is None else config.to_diff_dict()
    for name in [name for name in options if name not in KNOWN and not name.startswith("_")]:
        raise ConfigError(
            f"generation_config.{name}={options[name]!r} is not supported here. Fix: remove it"
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
    """Tokenized prompts of an evaluation set, and a method that completes them with the current model.

    During sampling, the model is in eval mode and computes no gradients. Afterwards, dropout, gradient checkpointing, the
    tokenizer's padding side and the random state of training are restored.

    Args:
        trainer: Trainer with a tokenizer and an ``eval_dataset`` with prompts.
        generation_config: Sampling settings. See `to_sampling`.
        num_prompts: Number of rows to use, from the start of the dataset. None: all rows.
        dataset: Dataset to use instead of ``eval_dataset``.

    Raises:
        ConfigError: The evaluation set is missing, or contains several datasets. The error is also raised if the evaluation
            set is a stream and ``num_prompts`` is None.
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
        # The trainer may be any trainer of transformers, so its config may lack this option.
        kwargs = getattr(trainer.args, "chat_template_kwargs", None)
        self.ids = tokenize_prompts(
            self.rows, self.tokenizer, chat_template_kwargs=kwargs if isinstance(kwargs, dict) else None
        )
        self.sampling = to_sampling(generation_config, self.tokenizer, trainer.model, seed=trainer.args.seed)
        self._check_room(name)
        self._engine: RolloutEngine | None = None

    @property
    def prompts(self) -> list[Any]:
        """Prompts in the form that the dataset contains."""
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
        """Generate one completion per prompt. All ranks must call this method, and all ranks get all completions in order."""
        trainer = self.trainer
        accelerator, size = trainer.accelerator, trainer.args.per_device_eval_batch_size
        if self._engine is None:
            self._engine = create_engine(
                "auto", accelerator.unwrap_model(trainer.model), pad_token_id=resolve_pad_token(self.tokenizer)
            )
        share = -(-len(self.ids) // accelerator.num_processes)
        first = share * accelerator.process_index
        # Indices of this rank's prompts. A rank without prompts takes part in the collective operations too.
        mine = list(range(len(self.ids)))[first : first + share]
        texts: list[str] = []
        with torch.no_grad(), accelerator.autocast(), parallel.whole_parameters(trainer.model_wrapped, accelerator):
            for start in range(0, len(mine), size):
                texts += self._batch(mine[start : start + size])
        return parallel.all_gather_objects(texts, accelerator)

    def _batch(self, indices: list[int]) -> list[str]:
        # Use the same seed for a batch at every step, so that only the weights cause differences between completions of
        # different steps.
        sampling = replace(self.sampling, seed=(self.sampling.seed or 0) + indices[0])
        assert self._engine is not None
        rollouts = self._engine.generate([Request(self.ids[i]) for i in indices], sampling)
        return self.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)


def _rows(dataset: AnyDataset, name: str, num_prompts: int | None) -> datasets.Dataset:
    if dataset is None:
        raise ConfigError(
            "completions are sampled from the prompts of eval_dataset, but the trainer has no eval_dataset. Fix: set dataset."
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
    selected = dataset.select_columns([column for column in PROMPT_COLUMNS if column in columns])
    return selected if num_prompts is None else selected.select(range(min(num_prompts, len(selected))))


class LogCompletionsCallback(transformers.TrainerCallback):
    """Samples completions of evaluation prompts every ``freq`` steps, and logs them in a table that grows during
    training.

    Rows ``step, prompt, completion`` are appended to ``<output_dir>/logged_completions.jsonl``. The whole table is sent to the
    trackers in ``report_to`` that support tables (wandb, comet, trackio, mlflow). A resumed run continues the table of its
    checkpoint. Only the main process writes.

    Args:
        trainer: Trainer to which the callback is added.
        generation_config: Sampling settings of transformers (``max_new_tokens``, ``do_sample``, ``temperature``, ...).
            None: use the model's generation config and 256 new tokens.
        num_prompts: Number of rows to use, from the start of the dataset. None: all rows.
        freq: Number of optimizer steps between two samplings. None: the evaluation interval.
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
        self._attempts = Attempts()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Load the table of a resumed run. In a new run, rename the file of an earlier run's table."""
        self.table, self._last_step = [], -1
        path = Path(args.output_dir or ".") / FILE
        if not (state.is_world_process_zero and path.is_file()):
            return
        if state.global_step == 0:
            numbers = itertools.count(1)
            os.replace(path, next(p for n in numbers if not (p := path.with_stem(f"{path.stem}-{n}")).exists()))
            return
        # Do not use splitlines. It also splits at line separators other than \n, which completions can contain.
        rows = filter(None, map(read_line, path.read_text(encoding="utf-8", errors="replace").split("\n")))
        self.table = [row for row in rows if row["step"] <= state.global_step]
        with whole_file(path) as part:
            part.write_text("".join(map(_line, self.table)), encoding="utf-8")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Sample and log completions every ``freq`` steps."""
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
