"""`DPOTrainer`, with TRL's signature."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar

from torch import nn

from posttrain.methods.dpo import DPO, DPOConfig
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
from posttrain.trainers.preference import PreferenceTrainer

logger = logging.getLogger(__name__)


class DPOTrainer(PreferenceTrainer):
    """Trainer of DPO and related losses on preference pairs. Each model computes the prompt of a pair only once.

    Without ``ref_model``, the reference is a frozen copy of the initial model. With ``peft_config``, it is the model with
    its adapter disabled.

    Reference log-probs are cached after the first epoch.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        ref_model: Reference model. If None, the reference is a frozen copy of the initial policy. With ``peft_config``, it
            is the policy with its adapter disabled.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Function that builds batches from prepared rows. If None, the trainer builds batches itself.
        train_dataset: Dataset with ``chosen`` and ``rejected``, and optionally ``prompt``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.

    >>> DPOTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", train_dataset=pairs).train()  # doctest: +SKIP

    Reference: Direct preference optimization, arXiv:2305.18290.
    """

    METHOD = DPO
    _paper: ClassVar[dict[str, str]] = {
        "title": "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "id": "2305.18290",
    }
    args: DPOConfig

    def __init__(
        self,
        model: Model,
        ref_model: nn.Module | None = None,
        args: DPOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        *,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> None:
        super().__init__(
            model,
            ref_model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if self.method.traits.single_pass and self.args.per_device_train_batch_size < 4:
            logger.warning(
                "loss_type=%s sorts the pairs in the batch of a device, but per_device_train_batch_size=%d gives each batch "
                "only few pairs. Use a larger batch size.",
                self.args.loss_type, self.args.per_device_train_batch_size,
            )  # fmt: skip
