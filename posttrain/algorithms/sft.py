"""Supervised fine-tuning: maximise the likelihood of the trained tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from posttrain.algorithms.base import PostTrainer
from posttrain.algorithms.config import PostTrainingConfig
from posttrain.data.tokenize import prepare_sft_dataset
from posttrain.errors import ConfigError, DataError, check_choice
from posttrain.losses.likelihood import dft, nll
from posttrain.metrics import mean
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

__all__ = ["SFTConfig", "SFTTrainer", "sft_objective"]

LOSSES: dict[str, Callable] = {"nll": nll, "chunked_nll": nll, "dft": dft}
IGNORED = -100


@dataclass
class SFTConfig(PostTrainingConfig):
    """Arguments of `SFTTrainer`."""

    _VALID_DICT_FIELDS = [*PostTrainingConfig._VALID_DICT_FIELDS, "dataset_kwargs"]  # noqa: RUF012

    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate; about ten times more for LoRA."})
    dataset_text_field: str = field(default="text", metadata={"help": "Column of plain language modelling."})
    dataset_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Only key: skip_prepare_dataset, for rows that already hold input_ids and labels."},
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the dataset."})
    eos_token: str | None = field(default=None, metadata={"help": "Token that ends a sequence; None: the tokenizer's."})
    chat_template_path: str | None = field(
        default=None, metadata={"help": "A .jinja file, or a tokenizer to clone from."}
    )
    max_length: int | None = field(default=1024, metadata={"help": "Tokens a row may have; None never cuts."})
    truncation_mode: Literal["keep_start", "keep_end"] = field(
        default="keep_start", metadata={"help": "Which end of a long row is kept."}
    )
    completion_only_loss: bool | None = field(
        default=None, metadata={"help": "Train the completion alone. None: yes where rows have prompt and completion."}
    )
    assistant_only_loss: bool = field(default=False, metadata={"help": "Train only what the assistant says."})
    loss_type: Literal["nll", "chunked_nll", "dft"] | None = field(
        default=None,
        metadata={"help": "nll; dft weighs it by the token's probability; None: chunked_nll, nll in little memory."},
    )
    shuffle_dataset: bool = field(default=False, metadata={"help": "Shuffle once before training."})
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "Rounds row widths up."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss_type = self.loss_type or "chunked_nll"
        check_choice("loss_type", self.loss_type, LOSSES)
        check_choice("truncation_mode", self.truncation_mode, ("keep_start", "keep_end"))
        unknown = sorted(set(self.dataset_kwargs or {}) - {"skip_prepare_dataset"})
        if unknown:
            raise ConfigError(f"dataset_kwargs has unknown keys {unknown}; the only key is 'skip_prepare_dataset'.")


def sft_objective(out: ModelOutputs, batch: Batch, *, loss_type: str) -> LossTerms:
    """Negative log-likelihood of the trained tokens, averaged over the tokens of the whole optimiser step."""
    metrics = {
        "entropy": mean(out.entropy, batch.loss_mask),
        "mean_token_accuracy": mean(out.correct.float(), batch.loss_mask),
    }
    return LossTerms(LOSSES[loss_type](out.logp), batch.loss_mask, "token", metrics=metrics)


class SFTTrainer(PostTrainer):
    """Supervised fine-tuning on text, conversations, prompt-completion pairs or tokenised rows.

    >>> trainer = SFTTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", train_dataset=dataset)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[SFTConfig]] = SFTConfig
    needs: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "correct"})
    _tag_names: ClassVar[list[str]] = ["posttrain", "sft"]
    _name: ClassVar[str] = "SFT"
    _suffix: ClassVar[str] = "SFT"
    args: SFTConfig

    def __init__(
        self,
        model: str | nn.Module,
        args: SFTConfig | None = None,
        *,
        formatting_func: Callable[[dict], str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.formatting_func = formatting_func
        super().__init__(model, args, **kwargs)

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Tokenise both sets, once."""
        if isinstance(evaluation, dict):
            return self._prepare(train, "train"), {k: self._prepare(v, k) for k, v in evaluation.items()}
        return self._prepare(train, "train"), None if evaluation is None else self._prepare(evaluation, "eval")

    def _prepare(self, dataset: Any, name: str) -> Any:
        args = self.args
        if (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
            return dataset
        prepared, _ = prepare_sft_dataset(
            dataset,
            self.processing_class,
            name=name,
            dataset_text_field=args.dataset_text_field,
            completion_only_loss=args.completion_only_loss,
            assistant_only_loss=args.assistant_only_loss,
            formatting_func=self.formatting_func,
            max_length=args.max_length,
            truncation_mode=args.truncation_mode,
            num_proc=args.dataset_num_proc,
        )
        return prepared.shuffle(seed=args.seed) if args.shuffle_dataset else prepared

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Tokenised examples as rows without a shared prompt; packed examples come apart into their documents."""
        rows = []
        for index, example in enumerate(examples):
            ids, labels = example["input_ids"], example.get("labels", example["input_ids"])
            if any(label not in (IGNORED, token) for token, label in zip(ids, labels, strict=True)):
                raise DataError(
                    f"row {index} of a batch: a label is neither its token nor {IGNORED}; labels are not shifted."
                )
            start = 0
            for length in example.get("seq_lengths") or [len(ids)]:
                document, targets = ids[start : start + length], labels[start : start + length]
                rows.append(Row([], [document], [[int(label != IGNORED) for label in targets]]))
                start += length
        return rows

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `sft_objective`."""
        return sft_objective(outputs, batch, loss_type=self.args.loss_type or "nll")
