"""Components of a training command (arguments, tokenizer, data) for the commands ``check``, ``inspect`` and ``estimate``,
which do not train. Each component is loaded only once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.cli import train
from posttrain.cli.commands import TRAINING
from posttrain.errors import DataError, check_choice
from posttrain.types import Finding, Row

if TYPE_CHECKING:
    from posttrain.types import AnyDataset

# Training commands whose rows can be prepared without a model.
ROWS = (
    "sft", "reward", "dpo", "cpo", "orpo", "tpo", "kto", "bco",
    "grpo", "async-grpo", "gmpo", "a2po", "rloo", "online-dpo",
)  # fmt: skip


class Prepared(NamedTuple):
    """Training rows that a command creates from dataset examples.

    Attributes:
        rows: Rows in the order of the examples.
        findings: Problems that were found during preparation.
        cut: Number of truncated rows. None: the number is unknown. Rows whose length equals the limit are then treated as
            truncated.
        numbers: Number of each row's example in the dataset. None: rows have the numbers of the sampled examples, or their
            numbers are unknown.
        reasons: Reasons why rows were dropped.
    """

    rows: list[Row]
    findings: Sequence[Finding] = ()
    cut: int | None = None
    numbers: list[int] | None = None
    reasons: str = ""


class Subject:
    """Training command with its parsed arguments. Model weights are not loaded.

    Args:
        name: Name of the training command.
        tokens: Command-line arguments. Options of ``accelerate launch`` have no effect.

    Attributes:
        parsed: Result of the command's parser, i.e. the instances of the data, config, model and mixture arguments.
        kind: Trainer class.
        method: Method of the trainer, with the config.

    Raises:
        ConfigError: The command does not exist, or its arguments are invalid.
    """

    def __init__(self, name: str, tokens: Sequence[str]) -> None:
        check_choice("command", name, sorted(TRAINING))
        self.name = name
        self.parsed, self.launch = train.parse(name, tokens)
        self.script_args, self.config, self.model_args, self.mixture = self.parsed
        init = self.model_args.model_init_kwargs(self.config.trust_remote_code)
        if self.model_args.load_in_4bit or self.model_args.load_in_8bit:
            # Use a dict, because the config object can only be created if bitsandbytes is installed.
            init["quantization_config"] = {
                "load_in_4bit": self.model_args.load_in_4bit,
                "load_in_8bit": self.model_args.load_in_8bit,
                "bnb_4bit_use_double_quant": self.model_args.use_bnb_nested_quant,
            }
        self.config.model_init_kwargs = init | dict(self.config.model_init_kwargs or {})
        self.kind = TRAINING[name].trainer

    @cached_property
    def method(self) -> Any:
        """Method object of the trainer, created with the config."""
        return self.kind.METHOD(self.config)

    @cached_property
    def source(self) -> str:
        """Path or Hub id of the model.

        Raises:
            ConfigError: No model is set.
            ModelError: The model does not exist, or the trainer does not support its class.
        """
        from posttrain.models.load import check_model_source

        source = train.model_source(self.model_args, self.config)
        check_model_source(source, generative=self.method.traits.generative)
        return source

    @cached_property
    def model_config(self) -> Any:
        """Config of the model, as loaded by transformers."""
        return model_config(self.source, self.config.trust_remote_code, self.model_args.model_revision)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer, prepared in the same way as in the trainer."""
        from posttrain.models.load import changes_vocabulary, load_tokenizer, prepare_tokenizer, resolve_pad_token

        config, trust = self.config, self.config.trust_remote_code
        tokenizer = load_tokenizer(self.source, trust_remote_code=trust, revision=self.model_args.model_revision)
        if changes_vocabulary(config):
            # Copy the chat template, added tokens and eos token of the other tokenizer. The model's embedding is not
            # resized, because it does not affect rows.
            other, vocab = load_tokenizer(config.chat_template_path, trust_remote_code=trust), tokenizer.get_vocab()
            tokenizer.chat_template = other.chat_template
            tokenizer.add_tokens([t for t in other.added_tokens_decoder.values() if t.content not in vocab])
            tokenizer.eos_token = other.eos_token
        prepare_tokenizer(tokenizer, config)
        resolve_pad_token(tokenizer)
        return tokenizer

    @property
    def split(self) -> str:
        """Name of the split on which the command trains."""
        return train._train_split(self.script_args, self.mixture)

    @cached_property
    def splits(self) -> Any:
        """All splits of the data, by name."""
        with no_progress_bars():
            return train._datasets(self.script_args, self.mixture, self.config)

    @cached_property
    def data(self) -> Any:
        """Training set, or None if the environment produces prompts during training."""
        return self.splits.get(self.split)

    def drawn(self, dataset: AnyDataset, count: int) -> tuple[Any, int | None, list[int]]:
        """Sample up to ``count`` examples of a dataset. Return the sampled examples in dataset order, the size of the dataset
        (None for a stream), and the indices of the sampled examples.

        Raises:
            DataError: The dataset is None or empty.
        """
        import datasets

        from posttrain.data.formats import ROW, undecoded

        if dataset is None:
            raise DataError("there is no dataset to inspect, because the environment produces prompts during training.")
        dataset, total = undecoded(dataset), None
        if isinstance(dataset, datasets.IterableDataset):
            examples = list(itertools.islice(dataset, count))
            places = list(range(len(examples)))
        else:
            total = len(dataset)
            places = sorted(random.Random(self.config.seed).sample(range(total), min(count, total)))
            examples = list(dataset.select(places))
        if not examples:
            raise DataError("the dataset is empty, so there is nothing to inspect.")
        # Create an in-memory dataset, so that preparing rows writes no cache file.
        drawn: Any = datasets.Dataset.from_list(examples, features=dataset.features)
        return drawn.add_column(ROW, places), total, places

    def rows_of(self, examples: Any) -> tuple[Prepared, Any]:
        """Return the rows that the trainer would create from examples, and the image reader. The image reader is None if rows
        contain only text.
        """
        from posttrain.loop.media import media_of

        takes = self.method.traits.reads_images
        with no_progress_bars():
            vision = media_of(self.config, None, self.source if takes else "", (examples,), takes=takes)
            prepared = (
                self._prompts(examples, vision) if self.method.traits.samples else self._answers(examples, vision)
            )
        return prepared, vision if vision.images else None

    def _prompts(self, examples: Any, vision: Any) -> Prepared:
        """Convert examples to the prompts that the generation engine would receive."""
        from posttrain.data.samplers import check_prompts
        from posttrain.loop.data_report import prompt_rows

        if vision.images:
            return Prepared(vision.prompt_rows(list(vision.checked_prompts(examples, "train_dataset"))))
        id_columns = self.method.traits.id_columns
        if not ("input_ids" in id_columns and "input_ids" in examples.column_names):
            check_prompts(examples, "train_dataset", self.tokenizer)
        return Prepared(prompt_rows(list(examples), self.tokenizer, self.config, id_columns))

    def _answers(self, examples: Any, vision: Any) -> Prepared:
        """Convert examples to rows like the trainer, but without a model. Packed rows are split into documents."""
        from posttrain.checks.pairs import check_pairs
        from posttrain.checks.rows import diverged_prompts
        from posttrain.data.chat import terminal_token_ids
        from posttrain.data.formats import ROW, PreparationReport, listed
        from posttrain.methods.preference import AnswerMethod

        config = copy.copy(self.config)
        packs = config.packing
        # The strategy "bfd" does not split documents. Disable packing, so that each document is a separate row.
        if packs and config.packing_strategy == "bfd":
            packs = False
        elif packs and ROW in examples.column_names:
            examples = examples.remove_columns(ROW)
        vars(config).update(packing=packs, eval_packing=None, shuffle_dataset=False)
        trainer = self.kind.__new__(self.kind)
        attributes = {"args": config, "method": self.kind.METHOD(config), "vision": vision}
        attributes |= {"processing_class": self.tokenizer, "reports": {}}
        vars(trainer).update(attributes, user_collator=None, formatting_func=None, embedding=None)
        prepared = trainer.prepare(examples, "train")
        rows, report = trainer._rows_of(list(prepared)), trainer.reports.get("train", PreparationReport("train"))
        findings = [diverged_prompts(report.diverged, report.rows_in)] if self.name == "sft" else []
        if isinstance(self.method, AnswerMethod) and self.method.branches == ("chosen", "rejected"):
            findings += check_pairs(rows, limit=config.max_length, stops=terminal_token_ids(self.tokenizer))
        numbers = list(prepared[ROW]) if ROW in prepared.column_names else None
        # Packing strategies that split long rows do not truncate rows. Without a report, the number of truncated rows is
        # unknown.
        cut = None if packs or not trainer.reports else report.truncated
        return Prepared(
            rows, [finding for finding in findings if finding is not None], cut, numbers, listed(report.dropped)
        )


def model_config(source: str, trust_remote_code: bool, revision: str = "main") -> Any:
    """Load a model's config without its weights.

    Raises:
        ModelError: The config does not exist or cannot be read.
    """
    import transformers

    from posttrain.integrations.hub import explained
    from posttrain.models.load import check_model_source

    check_model_source(source, generative=False)
    with explained("model", source):
        return transformers.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable progress bars of ``datasets`` inside the context, because they would clutter the output of fast commands."""
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
