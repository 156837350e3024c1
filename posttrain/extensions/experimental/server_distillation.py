"""`ServerDistillationTrainer`: distillation from teachers on servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from posttrain.errors import ConfigError
from posttrain.extensions.experimental.distillation_methods import ServerDistillation, ServerDistillationConfig
from posttrain.loop.build import as_config
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
    Tokenizer,
    TrainSet,
)
from posttrain.trainers.distillation import DistillationTrainer


class ServerDistillationTrainer(DistillationTrainer):
    """On-policy distillation from one or several teachers on servers.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        args: Training arguments. ``teacher_model_server_url`` contains the addresses of the teachers.
        train_dataset: Dataset with the column ``prompt``. With several teachers, it also needs ``teacher_id``, unless
            ``teacher_weights`` mixes the teachers.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        teacher_processing_class: Tokenizer of the teachers. None: loaded from the model id that the server reports, if
            possible.
        teacher_server: Client of a server that scores completions, see `ServerTeacher`; or a mapping from names to
            clients.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.

    Reference: GKD, arXiv:2306.13649; one teacher per dataset row: MOPD, arXiv:2606.30406.

    >>> args = ServerDistillationConfig("runs/server", teacher_model_server_url="http://127.0.0.1:8000")  # doctest: +SKIP
    >>> ServerDistillationTrainer(student, args, train_dataset=prompts).train()  # doctest: +SKIP
    """

    METHOD = ServerDistillation
    _name: ClassVar[str] = "Server Distillation"
    args: ServerDistillationConfig

    def __init__(
        self,
        model: Model,
        args: ServerDistillationConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        *,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        rollout_engine: RolloutEngine | None = None,
        data_collator: Callable | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> None:
        args = as_config(self.config_class, args)
        if teacher_server is None and (args is None or not args.teacher_model_server_url):
            raise ConfigError(
                f"{type(self).__name__} needs a teacher server. Fix: set teacher_model_server_url (an address, or "
                "several by name), or use DistillationTrainer for a teacher in this process."
            )
        super().__init__(
            model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            rollout_engine=rollout_engine,
            data_collator=data_collator,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
