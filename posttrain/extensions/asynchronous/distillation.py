"""`AsyncDistillationTrainer`: distillation on rollouts that other processes sample during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch

from posttrain.errors import ConfigError
from posttrain.extensions.asynchronous.distillation_method import AsyncDistillation, AsyncDistillationConfig
from posttrain.extensions.asynchronous.rollouts import AsyncRollouts
from posttrain.extensions.asynchronous.samples import RolloutSample, Trajectory
from posttrain.extensions.asynchronous.trainer import AsyncTrainer
from posttrain.methods.distillation.teacher import teacher_servers
from posttrain.metrics import Metric, mean
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch
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
from posttrain.types import Advantages

ASKED_AT_ONCE = 16  # Maximum number of rollouts that the teachers score concurrently.


class TeacherRequests:
    """Sends each rollout to the teacher servers as soon as the rollout arrives. Most scores are then available when the
    training step begins.

    Args:
        ask: Function that requests the teachers' scores of one sample and returns these scores.
    """

    def __init__(self, ask: Callable[[RolloutSample], dict[str, Any]]) -> None:
        self.ask = ask
        self.pool = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="teachers")

    def begin(self, trajectory: Trajectory) -> None:
        """Start a thread-pool task that requests the scores of a rollout, and return immediately."""
        for sample in trajectory.samples:
            sample.scores = self.pool.submit(self.ask, sample)

    def finish(self, samples: Sequence[RolloutSample]) -> dict[str, Metric]:
        """Wait until the scores of all rollouts of the step are available. Rollouts from a user's own worker did not pass
        through `begin`, so this method requests their scores.
        """
        began = time.perf_counter()
        futures = [s.scores if isinstance(s.scores, Future) else self.pool.submit(self.ask, s) for s in samples]
        for sample, future in zip(samples, futures, strict=True):
            sample.scores = future.result()
        return {"perf/teacher_wait_s": mean(time.perf_counter() - began)}


class AsyncDistillationTrainer(AsyncTrainer, DistillationTrainer):
    """On-policy distillation on rollouts that other processes sample (experimental).

    Workers sample completions with the newest student weights that they have received. Teacher servers score a
    rollout as soon as it arrives. A teacher model in the trainer's process scores rollouts during the training step.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with the column ``prompt``. With several teachers, it also needs ``teacher_id``, unless
            ``teacher_weights`` mixes the teachers.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        rollout_worker: Worker that samples rollouts instead of the trainer's worker processes. See
            `RolloutWorkerProtocol`.
        weight_transfer: Object that sends weights to ``rollout_worker``. See `WeightTransferProtocol`.
        teacher_model: Teacher model or models, as in `DistillationTrainer`. Not used if ``args`` sets a teacher server.
        teacher_processing_class: Tokenizer or processor of the teacher. If None, the tokenizer is loaded from the teacher's
            path or Hub id. For a teacher that was built in memory, the tokenizer is assumed to equal the student's.
        teacher_server: Client of a server that scores completions, see `ServerTeacher`; or a mapping from names to
            clients.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        engine_factory: Picklable function that creates the engine of a worker. If None, ``args.worker_engine`` selects
            the engine.
        rollout_engine: Engine object for evaluation in the trainer's process. If None, ``args.rollout_engine`` selects
            the engine.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.

    Reference: GKD, arXiv:2306.13649; one teacher per dataset row: MOPD, arXiv:2606.30406.

    >>> args = AsyncDistillationConfig("runs/async", teacher_server_urls={"math": url, "code": other})  # doctest: +SKIP
    >>> AsyncDistillationTrainer(student, args, train_dataset=prompts).train()  # doctest: +SKIP
    """

    METHOD = AsyncDistillation
    _name: ClassVar[str] = "Async Distillation"
    args: AsyncDistillationConfig

    def __init__(
        self,
        model: Model,
        args: AsyncDistillationConfig | None = None,
        train_dataset: TrainSet | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        *,
        teacher_model: Model | Mapping[str, Model] | None = None,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        eval_dataset: EvalSets | None = None,
        engine_factory: Callable | None = None,
        rollout_engine: RolloutEngine | None = None,
        quantization_config: Quantization | None = None,
        data_collator: Callable | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> None:
        if train_dataset is None:
            raise ConfigError("AsyncDistillationTrainer needs train_dataset, which contains the prompts.")
        sent = {"unscored": True, "engine_factory": engine_factory}
        self.sends(sent, rollout_worker, weight_transfer, processing_class)
        super().__init__(
            model,
            teacher_model,
            args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            eval_dataset=eval_dataset,
            rollout_engine=rollout_engine,
            quantization_config=quantization_config,
            data_collator=data_collator,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.begins()

    @property
    def scores_rewards(self) -> bool:
        """Whether rollouts have rewards. Always False, because distillation has no reward functions."""
        return False

    def make_source(self) -> AsyncRollouts:
        """Create the queue of rollouts. If there are teacher servers, they score each rollout as soon as it arrives."""
        source = super().make_source()
        if self.servers:
            source.service.scoring = TeacherRequests(self._reported_by)
        return source

    def _reported_by(self, sample: RolloutSample) -> dict[str, Any]:
        """Return the teacher servers' scores of one rollout. If the dataset selects one teacher per row, send the request
        only to the selected teacher.
        """
        numbers = [self.teacher_number(sample.teacher_id)] if self.chosen_by_row else None
        (scores,) = teacher_servers(self.servers, [sample.rollout()], numbers)
        return scores

    def taken(self, batch: RolloutBatch) -> RolloutBatch:
        """Add to the batch the index of each completion's teacher and the scores from teacher servers."""
        values = torch.tensor(batch.columns["advantages"])
        return batch.worth(self.keep(batch, Advantages(values, values, token_columns=batch.token_columns)))

    def facts(self, rollouts: RolloutBatch, found: Advantages) -> tuple[list[Any], Advantages]:
        """Return the teacher servers' scores of each completion. These scores arrived together with the rollouts. If the
        teachers are models in this process, call the parent's method.
        """
        return (rollouts.extra["scores"], found) if "scores" in rollouts.extra else super().facts(rollouts, found)
