"""`SFTTrainer`, with TRL's signature: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from posttrain.data.forest import unbatched
from posttrain.data.formats import ROW, PreparationReport
from posttrain.data.sft import check_prepared, prepare_sft_dataset, with_training_template
from posttrain.errors import ConfigError
from posttrain.loop.build import as_config
from posttrain.loop.trainer import PostTrainer
from posttrain.methods.sft import SFT, SFTConfig
from posttrain.models.forward import learns_prompts
from posttrain.trainers.arguments import (
    Adapter,
    Callbacks,
    EvalSets,
    Metrics,
    Model,
    OptimizerClass,
    Optimizers,
    Quantization,
    Tokenizer,
    TrainSet,
)
from posttrain.types import Row

if TYPE_CHECKING:
    from posttrain.types import AnyDataset


class SFTTrainer(PostTrainer):
    """Trainer of supervised fine-tuning on text, conversations, prompt-completion pairs or tokenized rows.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Function that builds batches from prepared rows. If None, the trainer builds batches itself.
        train_dataset: Dataset with ``messages``, ``text``, ``prompt`` and ``completion``, or token ids.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        compute_loss_func: Function that replaces the loss. It receives the model's outputs, the labels and the number of
            label tokens.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        formatting_func: Function that converts a row to a text. The text is used instead of the row's columns.
        model_init: Function that returns a new model for each trial of a hyperparameter search.

    >>> trainer = SFTTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", train_dataset=dataset)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    METHOD = SFT
    args: SFTConfig

    def __init__(
        self,
        model: Model,
        args: SFTConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        *,
        model_init: Callable | None = None,
    ) -> None:
        self.formatting_func = formatting_func
        self.reports: dict[str, PreparationReport] = {}
        args = as_config(self.config_class, args)
        # Without a config, read the defaults from the class, whose attributes have the default values.
        config = args or SFTConfig
        if config.loss_type == "dft" and compute_loss_func is not None:
            raise ConfigError("loss_type='dft' and compute_loss_func both define the loss. Fix: remove one of them.")
        joins = {"padding_free": config.padding_free, "packing": config.packing, "eval_packing": config.eval_packing}
        joined = [name for name, on in joins.items() if on]
        if data_collator is not None and joined:
            raise ConfigError(
                f"{joined[0]}=True joins several documents into a row, which is not possible with a data_collator. Fix: remove "
                f"{joined[0]} or data_collator."
            )
        super().__init__(
            model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
            model_init=model_init,
        )
        if self.args.packing and learns_prompts(self.model):
            raise ConfigError(
                "packing=True is not supported with prompt learning, because every document needs its own virtual tokens. "
                "Fix: set packing=False."
            )

    @property
    def prompts_are_given(self) -> bool:
        """Whether rows have separate columns for prompt and completion."""
        return {"prompt", "completion"} <= set(self._raw.column_names or ())

    def prepare(self, dataset: AnyDataset, name: str, *, training: bool = False) -> Any:
        """Tokenize a dataset with `prepare_sft_dataset`. Rows with images are prepared by the images extension."""
        args = self.args
        if self.vision.reader is not None:
            own = {
                "formatting_func": self.formatting_func,
                "data_collator": self.user_collator,
                "dataset_kwargs": (args.dataset_kwargs or {}).get("skip_prepare_dataset"),
            }
            packs = args.packing if training or args.eval_packing is None else args.eval_packing
            prepared, self.reports[name] = self.vision.prepare_rows(
                dataset,
                name=name,
                num_proc=args.dataset_num_proc,
                keep=(ROW,),
                packs=packs,
                unsupported=own,
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

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert examples to rows with `SFT.rows`. A user's data collator is called first."""
        return self.method.rows(examples if self.user_collator is None else unbatched(self.user_collator(examples)))
