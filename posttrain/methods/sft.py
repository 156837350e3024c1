"""Supervised fine-tuning: maximize the likelihood of the tokens that contribute to the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from posttrain.data.sft import SupervisedOptions, document_rows
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
    """Arguments of `SFTTrainer`, which trains on texts, conversations, or prompts with completions."""

    _VALID_DICT_FIELDS = [*PostTrainingConfig._VALID_DICT_FIELDS, "dataset_kwargs"]  # noqa: RUF012

    learning_rate: float = option(
        2e-5, "Peak learning rate. The default is for full fine-tuning. Use about ten times this value for LoRA."
    )
    dataset_text_field: str = option(
        "text",
        "Name of the column with plain text. It is read only if a row has neither input_ids, nor messages, nor prompt and "
        "completion.",
    )
    dataset_kwargs: dict[str, Any] | str | None = option(
        None,
        "Options for the preparation of the dataset, as a mapping or JSON. The only supported key is skip_prepare_dataset. If "
        "skip_prepare_dataset is True, rows are not tokenized and must have the columns input_ids and labels. This is not "
        "supported for rows with images.",
    )
    dataset_num_proc: PositiveInt | None = option(
        None,
        "Number of processes that prepare the dataset, at least 1. None: the main process only. Raise it for large datasets.",
    )
    eos_token: str | None = option(
        None,
        "End-of-sequence token to use instead of the tokenizer's default. It must be in the tokenizer's vocabulary. None: the "
        "tokenizer's default.",
    )
    chat_template_path: str | None = option(
        None,
        "Chat template to use instead of the tokenizer's own template: the path of a .jinja or .j2 file, or the folder or Hub "
        "id of another tokenizer. The special tokens of a file must already be in the vocabulary. The added tokens of another "
        "tokenizer are copied too, and the model's embedding is extended for them. None: the tokenizer's own template.",
    )
    max_length: PositiveInt | None = option(
        1024,
        "Maximum number of tokens per row, at least 1. Longer rows are truncated. With packing, max_length is the length of a "
        "packed row. None: rows are not truncated, and packing is an error. Increase it if the log reports many truncated "
        "rows.",
    )
    truncation_mode: Literal["keep_start", "keep_end"] = option(
        "keep_start",
        "Which part of a row is kept if the row is longer than max_length. 'keep_start': the beginning. 'keep_end': the end. "
        "'keep_end' is deprecated, because truncated rows then begin in the middle of a text, whereas prompts never do.",
    )
    completion_only_loss: bool | None = option(
        None,
        "For rows with a prompt and a completion: train only on the tokens of the completion. None: same as True. False: "
        "train on the tokens of the prompt too. Rows without a prompt are trained on all tokens.",
    )
    assistant_only_loss: bool = option(
        False,
        "Train only on the assistant's turns of a conversation, including the token that ends each turn. False: train on all "
        "tokens of the conversation. If the chat template does not mark assistant turns, rows are tokenized with a template "
        "that marks them and renders the same text.",
    )
    allow_untrained_stop: bool = option(
        False,
        "Continue although assistant_only_loss trains on no token that ends a turn. By default this is an error, because the "
        "model would not learn to end its turns.",
    )
    loss_type: Literal["nll", "chunked_nll", "dft"] | None = option(
        "nll",
        "Loss. 'nll': negative log-likelihood, averaged over all tokens of the optimizer step that have a label. Logits are "
        "computed in chunks to save memory. 'chunked_nll': another name of 'nll'. 'dft': Dynamic Fine-Tuning "
        "(arXiv:2508.05629), which multiplies the loss of each token by the token's probability. No gradient flows through "
        "this factor. None: 'nll'.",
    )
    packing: bool = option(
        False,
        "Pack several documents into each row of the training set, up to max_length tokens. Documents in a row do not attend "
        "to each other. Batch sizes then count packed rows, so that all optimizer steps have similar numbers of tokens.",
    )
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = option(
        "bfd",
        "How documents are packed into rows. 'bfd': best-fit decreasing, which packs the longest documents first. Documents "
        "longer than max_length are truncated. 'bfd_split': same as 'bfd', but a document longer than max_length is split "
        "into several independent documents. 'wrapped': documents keep their order, and a document is split where a row is "
        "full. Rows with images need 'bfd'.",
    )
    eval_packing: bool | None = option(None, "Pack the rows of evaluation sets. None: the value of packing.")
    padding_free: bool = option(
        False,
        "Accepted for compatibility with TRL. It has no effect, because batches contain no padding between sequences.",
    )
    shuffle_dataset: bool = option(
        False,
        "Shuffle the dataset once before training, with the config's seed. With packing, documents are also shuffled before "
        "they are packed.",
    )
    pad_to_multiple_of: int | str | None = option(
        None,
        "Round the length of batch rows up to a multiple of this number of tokens. None or 'auto': lengths are not rounded, "
        "except with FlexAttention, which needs multiples of 128.",
    )

    def __post_init__(self) -> None:
        self._rename_deprecated()
        super().__post_init__()
        self.loss_type = self.loss_type or "nll"
        warn_keep_end(self.truncation_mode)
        if (self.packing or self.eval_packing) and self.max_length is None:
            raise ConfigError(
                "packing=True needs max_length, the length of a packed row, but max_length is None. Fix: set max_length."
            )
        if self.loss_type == "dft" and self.label_smoothing_factor:
            raise ConfigError(
                f"loss_type='dft' does not support label_smoothing_factor={self.label_smoothing_factor}, because label "
                "smoothing is only defined for loss_type='nll'. Fix: remove label_smoothing_factor, or use loss_type='nll'."
            )
        keys = set(self.dataset_kwargs or {})
        for name in sorted(keys & OLD_DATASET_KWARGS):
            warnings.warn(
                f"dataset_kwargs[{name!r}] is a key of older TRL releases and is ignored. Special tokens that are already in a "
                "text are never added again, and every document gets an end-of-sequence token.", FutureWarning, stacklevel=5,
            )  # fmt: skip
        unknown = sorted(keys - {"skip_prepare_dataset"} - OLD_DATASET_KWARGS)
        if unknown:
            raise ConfigError(
                f"dataset_kwargs has unknown keys {unknown}. The only supported key is 'skip_prepare_dataset'."
            )

    def _rename_deprecated(self) -> None:
        if self.packing_strategy == "bfd-requeue":
            warnings.warn(
                "packing_strategy='bfd-requeue' was renamed. Use packing_strategy='bfd_split'.",
                FutureWarning,
                stacklevel=5,
            )
            self.packing_strategy = "bfd_split"

    def supervised_options(self, *, training: bool) -> SupervisedOptions:
        """Return the options for converting a training or evaluation set to token ids and labels."""
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
    """Supervised fine-tuning: negative log-likelihood of the tokens that have a label."""

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
        # All packing strategies except "bfd" split long documents instead of truncating them.
        if cfg.packing and cfg.packing_strategy != "bfd":
            self.traits = replace(self.traits, ignored_codes=frozenset({"PT-D004", "PT-D006", "PT-D011"}))

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert tokenized examples to rows, one per document. A packed example gives one row for each of its documents."""
        return document_rows(examples)

    def knows_gradient(self, batch: Batch) -> bool:
        """Return True if the loss of a token is its negative log-prob, i.e. if neither DFT nor label smoothing is used."""
        return self.cfg.loss_type != "dft" and not self.cfg.label_smoothing_factor

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the negative log-likelihood of the loss tokens, averaged over the optimizer step.

        With ``label_smoothing_factor`` e, the loss of a token is ``(1 - e) nll + e u``. Here, u is the mean of ``-log p``
        over the vocabulary.
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
