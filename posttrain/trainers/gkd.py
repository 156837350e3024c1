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
    """Generalized knowledge distillation on the dataset's answers, mixed with samples of the student (or of the
    teacher).

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
