"""Supervised fine-tuning: maximise the likelihood of the trained tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from posttrain.data.sft import (
    SupervisedOptions,
    document_rows,
)
from posttrain.errors import ConfigError
from posttrain.fields import PositiveInt, config, option
from posttrain.losses.likelihood import dft, nll, uniform_nll
from posttrain.methods.base import Method, Traits
from posttrain.methods.config import PictureConfig, PostTrainingConfig, warn_keep_end
from posttrain.metrics import mean
from posttrain.types import Batch, LossTerms, ModelOutputs, Row, State

LOSSES: dict[str, Callable] = {"nll": nll, "chunked_nll": nll, "dft": dft}
OLD_DATASET_KWARGS = {"add_special_tokens", "append_concat_token"}


@config
class SFTConfig(PictureConfig, PostTrainingConfig):
    """Arguments of `SFTTrainer`."""

    _VALID_DICT_FIELDS = [*PostTrainingConfig._VALID_DICT_FIELDS, "dataset_kwargs"]  # noqa: RUF012

    learning_rate: float = option(2e-5, "Peak learning rate; about ten times more for LoRA.")
    dataset_text_field: str = option("text", "Column of plain language modelling.")
    dataset_kwargs: dict[str, Any] | str | None = option(
        None, "Only key: skip_prepare_dataset, for rows that already hold input_ids and labels."
    )
    dataset_num_proc: PositiveInt | None = option(None, "Processes that prepare the dataset.")
    eos_token: str | None = option(None, "Token that ends a sequence; None: the tokenizer's.")
    pad_token: str | None = option(None, "Deprecated: set pad_token on the tokenizer.")
    chat_template_path: str | None = option(
        None, "A .jinja file with the template's text, or a tokenizer to clone with its tokens."
    )
    max_length: PositiveInt | None = option(1024, "Tokens a row may have, and of a packed row; None never cuts.")
    truncation_mode: Literal["keep_start", "keep_end"] = option("keep_start", "Which end of a long row is kept.")
    completion_only_loss: bool | None = option(
        None, "Train the completion alone. None: yes where rows have prompt and completion."
    )
    assistant_only_loss: bool = option(False, "Train only what the assistant says.")
    allow_untrained_stop: bool = option(False, "Go on when assistant_only_loss trains no token that ends a turn.")
    loss_type: Literal["nll", "chunked_nll", "dft"] | None = option(
        "nll", "nll, a chunk of logits at a time, and chunked_nll its other name; dft weighs it by the probability."
    )
    packing: bool = option(
        False, "Put several documents in a dataset row, so that a step holds about max_length tokens a row."
    )
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = option(
        "bfd", "bfd cuts long documents, bfd_split splits them, wrapped cuts anywhere."
    )
    eval_packing: bool | None = option(None, "Packing of evaluation sets; None: as packing.")
    padding_free: bool = option(False, "For compatibility: batches carry no padding either way.")
    shuffle_dataset: bool = option(False, "Shuffle once before training.")
    pad_to_multiple_of: int | str | None = option(None, "Rounds row widths up; auto or None: what the layout wants.")

    def __post_init__(self) -> None:
        self._rename_deprecated()
        super().__post_init__()
        self.loss_type = self.loss_type or "nll"
        warn_keep_end(self.truncation_mode)
        if (self.packing or self.eval_packing) and self.max_length is None:
            raise ConfigError("packing=True fills rows of max_length tokens, and max_length is None. Set it.")
        if self.loss_type == "dft" and self.label_smoothing_factor:
            raise ConfigError(
                f"loss_type='dft' with label_smoothing_factor={self.label_smoothing_factor}: smoothing is defined for nll alone."
            )
        given = set(self.dataset_kwargs or {})
        for name in sorted(given & OLD_DATASET_KWARGS):
            warnings.warn(
                f"dataset_kwargs[{name!r}] of older releases is ignored: special tokens that a text has already are not added "
                "again, and every document ends with the end token.", FutureWarning, stacklevel=5,
            )  # fmt: skip
        unknown = sorted(given - {"skip_prepare_dataset"} - OLD_DATASET_KWARGS)
        if unknown:
            raise ConfigError(f"dataset_kwargs has unknown keys {unknown}; the only key is 'skip_prepare_dataset'.")

    def _rename_deprecated(self) -> None:
        if self.packing_strategy == "bfd-requeue":
            warnings.warn("packing_strategy='bfd-requeue' is now called 'bfd_split'.", FutureWarning, stacklevel=5)
            self.packing_strategy = "bfd_split"

    def supervised_options(self, *, training: bool) -> SupervisedOptions:
        """How a training or evaluation set becomes ids and labels."""
        packing = self.packing if training or self.eval_packing is None else self.eval_packing
        return SupervisedOptions(
            dataset_text_field=self.dataset_text_field,
            completion_only_loss=self.completion_only_loss,
            assistant_only_loss=self.assistant_only_loss,
            max_length=self.max_length,
            truncation_mode=self.truncation_mode,
            packing=self.packing_strategy if packing else None,
            allow_untrained_stop=self.allow_untrained_stop,
        )


class SFT(Method[SFTConfig]):
    """The likelihood of the trained tokens of documents, conversations or completions."""

    config_class = SFTConfig
    traits = Traits(
        needs=frozenset({"logp", "entropy", "correct"}),
        documents=True,
        reads_images=True,
        takes_collator=True,
        takes_loss_func=True,
        splits_tokens=True,
    )

    def __init__(self, cfg: SFTConfig) -> None:
        super().__init__(cfg)
        if cfg.label_smoothing_factor:
            self.traits = replace(self.traits, needs=self.traits.needs | {"logits"})

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Tokenised examples as rows without a shared prompt; packed examples come apart into their documents."""
        return document_rows(examples)

    def knows_gradient(self, batch: Batch) -> bool:
        """Every token's term is its log-prob, but for DFT's weights."""
        return self.cfg.loss_type != "dft" and not self.cfg.label_smoothing_factor

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Return the negative log-likelihood of the trained tokens, averaged over the tokens of the whole optimizer step.

        With ``label_smoothing_factor`` e: ``(1 - e) nll + e u``, where u is the mean of ``-log p`` over the vocabulary.
        """
        metrics = {
            "entropy": mean(outputs.entropy, batch.loss_mask),
            "mean_token_accuracy": mean(outputs.correct.float(), batch.loss_mask),
        }
        terms, smoothing = LOSSES[self.cfg.loss_type or "nll"](outputs.logp), self.cfg.label_smoothing_factor
        if smoothing:
            even = torch.zeros_like(terms).masked_scatter(batch.loss_mask, uniform_nll(outputs.logits))
            terms = (1 - smoothing) * terms + smoothing * even
        return LossTerms(terms, batch.loss_mask, "token", metrics=metrics)
