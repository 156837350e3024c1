"""Supervised fine-tuning: maximise the likelihood of the trained tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from posttrain.data.forest import unbatched
from posttrain.data.formats import ROW, PreparationReport
from posttrain.data.sft import (
    SupervisedOptions,
    check_prepared,
    document_rows,
    prepare_sft_dataset,
    with_training_template,
)
from posttrain.errors import ConfigError
from posttrain.loop.config import PostTrainingConfig, attributes, takes, warn_keep_end
from posttrain.loop.evaluation import full_logits
from posttrain.loop.pictures import PictureConfig
from posttrain.loop.trainer import PostTrainer
from posttrain.losses.likelihood import dft, nll, uniform_nll
from posttrain.metrics import Metric, mean
from posttrain.models.forward import learns_prompts
from posttrain.types import Batch, LossTerms, ModelOutputs, PositiveInt, Row, option

LOSSES: dict[str, Callable] = {"nll": nll, "chunked_nll": nll, "dft": dft}


@dataclass
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
        unknown = sorted(set(self.dataset_kwargs or {}) - {"skip_prepare_dataset"})
        if unknown:
            raise ConfigError(f"dataset_kwargs has unknown keys {unknown}; the only key is 'skip_prepare_dataset'.")

    def _rename_deprecated(self) -> None:
        if self.packing_strategy == "bfd-requeue":
            warnings.warn("packing_strategy='bfd-requeue' is now called 'bfd_split'.", FutureWarning, stacklevel=4)
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


def sft_objective(out: ModelOutputs, batch: Batch, *, loss_type: str, smoothing: float = 0.0) -> LossTerms:
    """Negative log-likelihood of the trained tokens, averaged over the tokens of the whole optimiser step.

    With ``smoothing`` e: ``(1 - e) nll + e u``, where u is the mean of ``-log p`` over the vocabulary.
    """
    metrics = {
        "entropy": mean(out.entropy, batch.loss_mask),
        "mean_token_accuracy": mean(out.correct.float(), batch.loss_mask),
    }
    terms = LOSSES[loss_type](out.logp)
    if smoothing:
        even = torch.zeros_like(terms).masked_scatter(batch.loss_mask, uniform_nll(out.logits))
        terms = (1 - smoothing) * terms + smoothing * even
    return LossTerms(terms, batch.loss_mask, "token", metrics=metrics)


@torch.no_grad()
def predicted_metrics(logits: torch.Tensor, labels: torch.Tensor, chunk: int = 256) -> dict[str, Metric]:
    """Entropy (nats) and accuracy of trained tokens: logits ``(B, T, V)``, labels ``(B, T)``, -100 on others."""
    targets = labels[:, 1:]
    kept, targets = logits[:, :-1][targets != -100], targets[targets != -100]
    entropy = torch.cat([torch.special.entr(part.float().softmax(-1)).sum(-1) for part in kept.split(chunk)])
    return {"entropy": mean(entropy), "mean_token_accuracy": mean((kept.argmax(-1) == targets).float())}


@attributes("padding_free")
@attributes(fixed=True, completion_only_loss="args.completion_only_loss or prompts_are_given")
class SFTTrainer(PostTrainer, config=SFTConfig):
    """Supervised fine-tuning on text, conversations, prompt-completion pairs or tokenised rows.

    >>> trainer = SFTTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", train_dataset=dataset)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    needs: frozenset[str] = frozenset({"logp", "entropy", "correct"})
    takes_collator: ClassVar[bool] = True
    takes_images: bool = True
    takes_loss_func: ClassVar[bool] = True
    splits_tokens = True
    args: SFTConfig

    @takes(
        "model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_loss_func, compute_metrics, "
        "callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics, quantization_config, "
        "peft_config, formatting_func"
    )
    def __init__(
        self,
        model: str | nn.Module,
        args: SFTConfig | None = None,
        *,
        formatting_func: Callable[[dict], str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.formatting_func = formatting_func
        self.reports: dict[str, PreparationReport] = {}
        if getattr(args, "loss_type", None) == "dft" and kwargs.get("compute_loss_func") is not None:
            raise ConfigError("loss_type='dft' and compute_loss_func both say what the loss is. Leave one out.")
        joined = [name for name in ("padding_free", "packing", "eval_packing") if getattr(args, name, False)]
        if kwargs.get("data_collator") is not None and joined:
            raise ConfigError(
                f"{joined[0]}=True joins documents in a way that a data_collator cannot know. Leave one out."
            )
        super().__init__(model, args, **kwargs)
        if self.args.label_smoothing_factor:
            self.needs = self.needs | {"logits"}
        if self.args.packing and learns_prompts(self.model):
            raise ConfigError(
                "packing=True with prompt learning: every document needs virtual tokens of its own, so there is nothing to gain. "
                "Set packing=False."
            )

    @property
    def prompts_are_given(self) -> bool:
        """Whether rows have their prompt in a column of its own."""
        return {"prompt", "completion"} <= set(self._raw.column_names or ())

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """Tokenise one set, as `prepare_sft_dataset` does."""
        args = self.args
        if self.vision.reader is not None:
            self._refuse_with_images()
            packs = args.packing if training or args.eval_packing is None else args.eval_packing
            prepared, self.reports[name] = self.vision.prepare_rows(
                dataset,
                name=name,
                num_proc=args.dataset_num_proc,
                keep=(ROW,),
                packs=packs,
            )
            return prepared.shuffle(seed=args.seed) if args.shuffle_dataset else prepared
        if (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
            check_prepared(dataset, name, len(self.processing_class))
            return dataset
        if training and args.packing and args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        options = with_training_template(args.supervised_options(training=training), self.processing_class)
        prepared, report = prepare_sft_dataset(
            dataset,
            self.processing_class,
            options,
            name=name,
            formatting_func=self.formatting_func,
            num_proc=args.dataset_num_proc,
            seed=args.seed,
        )
        self.reports[name] = report
        return prepared.shuffle(seed=args.seed) if args.shuffle_dataset else prepared

    def _refuse_with_images(self) -> None:
        """Options that rows of images do not have."""
        args = self.args
        given = {
            "formatting_func": self.formatting_func,
            "data_collator": self.user_collator,
            "dataset_kwargs": (args.dataset_kwargs or {}).get("skip_prepare_dataset"),
        }
        named = [name for name, value in given.items() if value]
        if named:
            raise ConfigError(
                f"rows with images are trained without {named}: they are read and placed here. Fix: leave it out, and give "
                "'messages', or 'prompt' and 'completion'."
            )
        if (args.packing or args.eval_packing) and args.packing_strategy != "bfd":
            raise ConfigError(
                f"packing_strategy={args.packing_strategy!r} cuts rows anywhere, also inside an image. Fix: 'bfd', which places "
                "whole rows side by side."
            )

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Tokenised examples as rows without a shared prompt; packed examples come apart into their documents."""
        if self.user_collator is not None:
            examples = unbatched(self.user_collator(examples))
        return document_rows(examples)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `sft_objective`."""
        smoothing = self.args.label_smoothing_factor
        return sft_objective(outputs, batch, loss_type=self.args.loss_type or "nll", smoothing=smoothing)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`sft_objective`, or the user's ``compute_loss_func(outputs, labels, num_items_in_batch)`` on full logits."""
        if self.compute_loss_func is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        output, labels = full_logits(model, inputs)
        self.log_metrics_now(predicted_metrics(output.logits, labels), "train" if model.training else "eval")
        tokens = self.denominators.over(num_items_in_batch, allowed=True).tokens
        loss = self.compute_loss_func(output, labels, num_items_in_batch=tokens) * self.denominators.world_size
        return (loss, output) if return_outputs else loss
