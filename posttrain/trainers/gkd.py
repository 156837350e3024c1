"""`GKDTrainer`, with TRL's signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.methods.distillation.gkd import GKD, GKDConfig
from posttrain.rollouts.base import RolloutEngine
from posttrain.trainers.arguments import (
    Adapter,
    Callbacks,
    EvalSets,
    Metrics,
    Model,
    OptimizerClass,
    Optimizers,
    Quantization,
    Rewards,
    Tokenizer,
    TrainSet,
)
from posttrain.trainers.distillation import DistillationTrainer


class GKDTrainer(DistillationTrainer):
    """Trainer of generalized knowledge distillation (GKD). It trains on the dataset's answers, mixed with samples of the
    student or the teacher.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        teacher_model: Teacher as a path, Hub id or model object, or a mapping from names to teachers. With several teachers,
            the column ``teacher_id`` selects one for each row, or ``args.teacher_weights`` mixes them. If None, ``args``
            selects the teacher.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Not supported. It must be None, because batches are built after completions are sampled.
        train_dataset: Dataset with ``prompt`` and optionally ``completion``, or with ``messages``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        formatting_func: Not supported. It must be None. Use ``dataset.map`` to create the columns ``prompt`` and ``completion``
            instead.
        teacher_processing_class: Tokenizer or processor of the teacher. If None, the tokenizer is loaded from the teacher's
            path or Hub id. If the teacher was built in memory, the student's tokenizer is used.
        teacher_server: Client of a server that scores completions (see `ServerTeacher`), or several clients by name.
        reward_funcs: Not supported. It must be None. Among the distillation methods, only MiniLLM and SDPO use rewards.
        reward_processing_classes: Not used. Among the distillation methods, only MiniLLM and SDPO use rewards.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        tools: Not supported. It must be None. To train with tools, use `GRPOTrainer`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        rollout_func: Not supported. It must be None. Use `GRPOTrainer` instead.
        environment_factory: Not supported. It must be None. To train in environments, use `GRPOTrainer`.

    Reference: GKD, arXiv:2306.13649.
    """

    METHOD = GKD
    args: GKDConfig

    def __init__(
        self,
        model: Model,
        teacher_model: Model | None = None,
        args: GKDConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Adapter | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        *,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        reward_funcs: Rewards | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        quantization_config: Quantization | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_engine: RolloutEngine | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        super().__init__(
            model,
            teacher_model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            peft_config=peft_config,
            formatting_func=formatting_func,
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            quantization_config=quantization_config,
            tools=tools,
            rollout_engine=rollout_engine,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
