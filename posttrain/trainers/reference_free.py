"""`CPOTrainer`, `ORPOTrainer` and `TPOTrainer`, with TRL's signatures: preference methods without a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from posttrain.methods.cpo import CPO, CPOConfig
from posttrain.methods.orpo import ORPO, ORPOConfig
from posttrain.methods.tpo import TPO, TPOConfig
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


class CPOTrainer(PreferenceTrainer):
    """Trainer of CPO, SimPO and AlphaPO, which train on pairs without a reference model. An answer's reward is its
    log-likelihood under the policy. See `CPO`.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Function that builds batches from prepared rows. If None, the trainer builds batches itself.
        train_dataset: Dataset with ``chosen`` and ``rejected``, and optionally ``prompt``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
    """

    METHOD = CPO
    args: CPOConfig

    def __init__(
        self,
        model: Model,
        args: CPOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        model_init: Callable | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Adapter | None = None,
        compute_metrics: Metrics | None = None,
        *,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        quantization_config: Quantization | None = None,
    ) -> None:
        super().__init__(
            model,
            None,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            peft_config=peft_config,
            compute_metrics=compute_metrics,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
        )


class ORPOTrainer(PreferenceTrainer):
    """Trainer of ORPO: supervised fine-tuning on chosen answers with an odds-ratio penalty on rejected answers. See `ORPO`.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Function that builds batches from prepared rows. If None, the trainer builds batches itself.
        train_dataset: Dataset with ``chosen`` and ``rejected``, and optionally ``prompt``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
    """

    METHOD = ORPO
    _paper: ClassVar[dict[str, str]] = {
        "title": "ORPO: Monolithic Preference Optimization without Reference Model",
        "id": "2403.07691",
    }
    args: ORPOConfig

    def __init__(
        self,
        model: Model,
        args: ORPOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        model_init: Callable | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Adapter | None = None,
        compute_metrics: Metrics | None = None,
        *,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        quantization_config: Quantization | None = None,
    ) -> None:
        super().__init__(
            model,
            None,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            peft_config=peft_config,
            compute_metrics=compute_metrics,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
        )


class TPOTrainer(PreferenceTrainer):
    """Trainer of TPO, which trains on triples. The loss compares the chosen and the rejected answer. It also contains the
    NLL of the gold answer (column ``reference``). See `TPO`.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Function that builds batches from prepared rows. If None, the trainer builds batches itself.
        train_dataset: Dataset with ``prompt``, ``chosen``, ``rejected`` and the gold answer ``reference``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
    """

    METHOD = TPO
    args: TPOConfig

    def __init__(
        self,
        model: Model,
        args: TPOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        *,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Quantization | None = None,
    ) -> None:
        super().__init__(
            model,
            None,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
        )
