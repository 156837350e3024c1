"""`PostTrainer`: the training loop that all methods share. The loop does not depend on the algorithm."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import PushInProgress

from posttrain.checks.registry import Preflight
from posttrain.data.forest import Layout
from posttrain.data.formats import naming, plain_rows
from posttrain.data.samplers import EvalShard
from posttrain.fields import accepting, check_arguments
from posttrain.integrations.hub import MODEL_FILES, upload
from posttrain.loop import attributes, build, checkpoint, step
from posttrain.loop.data_report import DataReport, DataReportCallback, DatasetHead, prompt_rows
from posttrain.loop.dry_step import DryStep, dry_step, fit_memory
from posttrain.loop.evaluation import check_best_metric, count_rounds, evaluate, evaluation_loader, predicted_rows
from posttrain.loop.memory_profile import MemoryProfile
from posttrain.loop.passes import divided, run_again
from posttrain.loop.run import Hooks, Progress, Run, with_attributes
from posttrain.losses.reduce import Denominators
from posttrain.methods.base import Method
from posttrain.methods.config import PostTrainingConfig, sequence_parallel
from posttrain.metrics import mean
from posttrain.models import load, memory, parallel, token_split, tree_attention
from posttrain.models.architecture import get_config_model_id
from posttrain.models.forward import forward
from posttrain.models.neftune import noisy_embeddings
from posttrain.report.card import create_model_card
from posttrain.report.progress import in_notebook, use_rich_progress
from posttrain.report.record import RunRecordCallback
from posttrain.types import Batch, Batches, LossTerms, ModelOutputs, Row, State

if TYPE_CHECKING:
    from peft import PeftConfig

    from posttrain.types import AnyDataset, EvalSets, Tokenizer

logger = logging.getLogger(__name__)


class PostTrainer(attributes.PartsOfRun, transformers.Trainer):
    """Trainer for all methods. It converts rows to batches, batches to loss terms, and loss terms to one gradient.

    ``METHOD`` defines the algorithm. This class implements everything else: loading, adapters, gradient accumulation, ranks,
    metrics and checkpoints. A subclass may override the methods that are documented as hooks, such as `objective`.
    """

    # The loss needs no further division. Its denominators already count all micro-batches and ranks of a step.
    loss_is_scaled_for_ga = True
    METHOD: ClassVar[type[Method[Any]]]
    # Config class of METHOD. If a subclass sets METHOD, this attribute is set automatically.
    config_class: ClassVar[type[PostTrainingConfig]] = PostTrainingConfig
    # Names that the model card uses, as in TRL's trainers. If a class sets METHOD but not these names, they are derived from
    # the class name.
    _name: ClassVar[str] = "post-training"
    _tag_names: ClassVar[list[str]] = ["posttrain"]
    # Default values of class attributes. Trainers that prepare rows or sample completions override these values.
    reports: Any = MappingProxyType({})
    rewards: Any = None
    environments: Any = None
    driver: Any = None
    no_rows: Any = ()  # Item of the loader if this process has no rows of an evaluation batch.
    _in_loop = False
    # Losses that the method computed. The value is a list only while a function of the user computes the loss of a pass.
    _losses: list[step.Loss] | None = None
    _window_start: float | None = None
    _head: DatasetHead | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "METHOD" in vars(cls):
            name = cls.__name__.removesuffix("Trainer")
            cls.config_class = cls.METHOD.config_class
            cls._name = vars(cls).get("_name", name)
            cls._tag_names = vars(cls).get("_tag_names", ["posttrain", cls._name.lower().replace(" ", "-")])
        if build.is_ours(cls) and "__init__" in vars(cls):
            cls.__init__ = accepting(cls.__init__)

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Raise an error for unknown arguments. If a user's subclass overrides methods that expect TRL's padded dicts, add
        the adapters of `posttrain.compat`, which convert the inputs of these methods.
        """
        check_arguments(cls, kwargs)
        return super().__new__(build.adapted(cls))

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        rows = len(self.train_dataset) if isinstance(self.train_dataset, Sized) else "a stream of"
        source = get_config_model_id(self.model.config) or "a model in memory"
        return f"{type(self).__name__}({source}: {size:,} parameters, {rows} rows, {self.args!r})"

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the load-balancing loss of a mixture of experts is part of the loss. The name is from TRL."""
        return bool(self.router_coefficient)

    def __setattr__(self, name: str, value: object) -> None:
        # Attributes that belong to the run, and settings with TRL's names, are set in the object that stores them.
        if name not in attributes.SET or not attributes.write(self, name, value):
            super().__setattr__(name, value)

    # Hide this method from type checkers, so that they still report attributes that do not exist.
    if not TYPE_CHECKING:
        __getattr__ = attributes.read

    def __init__(
        self,
        model: str | nn.Module,
        args: PostTrainingConfig | None = None,
        *,
        train_dataset: AnyDataset | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        peft_config: PeftConfig | None = None,
        quantization_config: Any = None,
        **trainer_kwargs: Any,
    ) -> None:
        model_id = load.model_id_of(model, type(self).__name__)
        args = build.as_config(self.config_class, args or f"{Path(model_id).name or 'model'}-{self._name}")
        self.args, self.method, self.progress = args, self.METHOD(args), Progress()
        self.user_collator = trainer_kwargs.pop("data_collator", None)
        loss_function = trainer_kwargs.get("compute_loss_func")
        build.check_hooks(self, loss_function)
        self.plan = build.plan(
            build.Spec(
                self.method,
                model,
                train_dataset,
                eval_dataset,
                processing_class,
                peft_config,
                quantization_config,
                self.user_collator,
                loss_function,
                name=type(self).__name__,
                images=self.reads_images(),
                rewards=self.rewards,
                environments=self.environments,
                load_model=self.load_model,
                prepare=self._prepare,
            )
        )
        trainer_kwargs |= {"train_dataset": self.plan.train_dataset, "eval_dataset": self.plan.eval_dataset}
        model = build.load_model(self.plan)
        super().__init__(model, args, self.collator(), processing_class=self.processing_class, **trainer_kwargs)
        build.refuse_foreign_optimizer(self.optimizer, self.model)
        self.run = build.build(
            self.plan, self.model, self.accelerator, progress=self.progress, layout=self._choose_layout, sampling=False
        )
        self._begin()

    def _prepare(self, plan: build.Plan) -> tuple[Any, Any]:
        self.vision, self.processing_class, self.checks = plan.vision, plan.tokenizer, plan.checks
        self._raw = plan.raw
        return self.prepare_datasets(plan.train_dataset, plan.eval_dataset)

    def _begin(self) -> None:
        self._passes: list[list[Batch]] = []  # Batches of the current optimizer step, grouped by micro-batch.
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)
        self._set_signature_columns_if_needed()
        self.check_start()
        args, self.run = self.args, replace(self.run, hooks=self._hooks())
        self.record, self.interrupt = RunRecordCallback(args, self.processing_class), checkpoint.GracefulInterrupt()
        size = lambda: checkpoint.checkpoint_bytes(self.model, args)  # noqa: E731
        self.checkpoints = checkpoint.Checkpointer(args, self.accelerator, self.record.lock, size)
        self.checks.record = self.record
        keepers = (memory.KeepLastActivations(), memory.KeepHostMemory())
        reports = (self.record, DataReportCallback(lambda: self.data_report()))
        for callback in (self.interrupt, *reports, *keepers):
            self.add_callback(callback)
        self.record.interrupted = lambda: self.interrupt.requested
        if in_notebook():
            use_rich_progress(self)

    # Hooks of subclasses --------------------------------------------------------------------------------------------

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """Compute the unreduced loss terms and the metrics of one batch."""
        return self.method.objective(outputs, batch, self.run.now())

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert prepared dataset examples to rows."""
        return self.method.rows(examples)

    def reads_images(self) -> tuple[bool, bool]:
        """Return two flags: whether rows may contain images, and whether tools or environments may return images."""
        return self.method.traits.reads_images, False

    def prepare_datasets(self, train: AnyDataset, evaluation: EvalSets | None) -> tuple[Any, Any]:
        """Check and tokenize the training and evaluation sets once, before the model is loaded."""
        prepared = self.prepare(train, "train", training=True)
        return prepared, None if evaluation is None else self.prepare_evaluation(evaluation)

    def prepare_evaluation(self, dataset: AnyDataset) -> Any:
        """Prepare one raw evaluation set, or a dict of several sets by name. Prepared sets are returned unchanged."""
        prepared = {}
        for name, subset in (dataset if isinstance(dataset, dict) else {"eval": dataset}).items():
            with naming(name):
                prepared[name] = self.prepare(subset, name)
        return prepared if isinstance(dataset, dict) else prepared["eval"]

    def prepare(self, dataset: AnyDataset, name: str, *, training: bool = False) -> Any:
        """Convert one raw dataset to the form that the collator needs."""
        return dataset

    # Construction ------------------------------------------------------------------------------------------------

    @property
    def split_size(self) -> int:
        """Sequence-parallel group size (``sp_size``): the number of processes that compute each batch together."""
        split = token_split.active()
        return 1 if split is None else split.size

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as in the parent class. ``sp_size`` is hidden from accelerate, because accelerate would
        require DeepSpeed for it.
        """
        extension = sequence_parallel(self.args)
        with contextlib.nullcontext() if extension is None else extension.without_accelerate(self.args):
            super().create_accelerator_and_postprocess()

    def load_model(self, model_id: str, **kwargs: Any) -> Any:
        """Load the model from a path or Hub id."""
        return load.create_model_from_path(model_id, **kwargs)

    def _choose_layout(self, model: nn.Module) -> Layout:
        # User functions that read logits need the padded layout, which has one sequence per row.
        wanted = (self.compute_loss_func, self.compute_metrics, self.preprocess_logits_for_metrics)
        return build.choose_layout(model, self.args, padded=any(function is not None for function in wanted))

    def read_also_by(self, other: nn.Module | None) -> None:
        """Choose a row layout that is exact for both the policy and ``other``, a model that runs on the same batches."""
        if other is not None:
            self.layout = build.joint_layout(self.layout, other, self.args)

    def collator(self) -> Callable[[list[dict[str, Any]]], Any]:
        """Return the function that converts dataset examples to an item of the loader. An item is a list with the batches of
        one micro-batch.
        """
        if self.vision.reader is None:
            return lambda examples: Batches(self.run.collate(self.rows(examples)))
        return lambda examples: Batches(self.run.collate(self.vision.placed(self.rows(examples), examples)))

    def _get_train_sampler(self, train_dataset: AnyDataset | None = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return super()._get_train_sampler(build.measured(dataset, self.args))

    def _get_eval_sampler(self, eval_dataset: EvalSets | None) -> Any:
        return super()._get_eval_sampler(build.measured(eval_dataset, self.args))

    def _remove_unused_columns(self, dataset: AnyDataset, description: str | None = None) -> Any:
        return dataset  # Keep all columns. Columns are read by name, so unused columns cost nothing.

    def _get_collator_with_removed_columns(self, data_collator: Callable, description: str | None = None) -> Callable:
        return data_collator

    # Checks and reports ------------------------------------------------------------------------------------------

    def check_start(self) -> None:
        """Check the model, its layout and the training rows. A subclass may add setup steps."""
        if self.args.strict_data and self.train_dataset is not None:
            self.data_report()
        self.checks.start(self.model, self.layout)
        self.check_data()

    def check_data(self) -> None:
        """Run the checks on sampled training rows. A subclass may add further checks."""
        self.checks.data(self.head, self.eval_dataset)

    @property
    def preflight(self) -> Preflight:
        """Checks of this run and their findings."""
        return self.checks.preflight

    @property
    def head(self) -> DatasetHead:
        """Sample of training rows that is checked before training. The sample is read once. If ``train_dataset`` is
        replaced, a new sample is read.
        """
        if self._head is None or self._head.prepared is not self.train_dataset:
            sources = (self._raw, self.train_dataset, self._rows_of, self.processing_class)
            about = {"fills_prompts": self.checks.fills_prompts, "id_columns": self.method.traits.id_columns}
            self._head = DatasetHead(*sources, self.args, **about)
        return self._head

    def data_report(self) -> DataReport:
        """Return a summary of the training set, computed from a sample of evenly spaced rows.

        Raises:
            DataError: ``strict_data`` is set and there are warnings.

        >>> print(trainer.data_report())  # doctest: +SKIP
        """
        return self.head.report(self.reports.get("train"), self.method.traits.ignored_codes)

    def _rows_of(self, examples: list[dict[str, Any]]) -> list[Row]:
        try:
            return self.vision.placed(self.rows(examples), examples)
        # These rows have only prompts, because completions are sampled later.
        except NotImplementedError:
            about = (self.processing_class, self.args, self.method.traits.id_columns)
            return self.vision.prompt_rows(examples) or prompt_rows(examples, *about)

    def dry_step(self, batch_size: int | None = None) -> DryStep:
        """Run forward and backward on the longest rows; see `posttrain.loop.dry_step.dry_step`."""
        return dry_step(self.run, self.head, self.optimizer, batch_size)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train the model.

        After Ctrl-C, SIGTERM or SIGHUP, the current step is finished, a checkpoint is saved, and the method returns. In this
        case, ``trainer.interrupt.requested`` is True.

        Args:
            resume_from_checkpoint: Folder of a checkpoint. True: the last complete checkpoint in ``output_dir``.
                ``"auto"``: the same as True, but without a checkpoint the run starts from the beginning.
            kwargs: Keyword arguments of `transformers.Trainer.train`.
        """
        if not any(isinstance(callback, MemoryProfile) for callback in self.callback_handler.callbacks):
            self.add_callback(MemoryProfile(self.run))
        # The user may have replaced methods of this object after its creation, so store the current methods in the run.
        self.resolve()
        fit_memory(self.run, self.head, self.optimizer)
        self.checks.measure_models()
        self._train_batch_size = self.args.train_batch_size
        configured = self.args.resume_from_checkpoint
        if configured and resume_from_checkpoint is None:
            logger.warning(
                "resume_from_checkpoint=%r of the config has no effect on train(), as in transformers, so the run starts from "
                "the beginning. Fix: call train(resume_from_checkpoint=%r).", configured, configured,
            )  # fmt: skip
        resume = self.checkpoints.resolve(resume_from_checkpoint, self.model)
        if resume_from_checkpoint is not None:
            # Callbacks load their saved state from this path.
            self.args.resume_from_checkpoint = resume
        with parallel.failing_together(self.accelerator):
            if self.accelerator.is_main_process:
                self.checkpoints.take_folder(self.model, self.checks, resumed=resume is not None)
        if (self.args.max_grad_norm or 0) <= 0 and not self.is_deepspeed_enabled:
            # Without a positive limit, transformers would not compute the norm, and NaN gradients would reach the weights.
            self.args.max_grad_norm = math.inf
        self.interrupt.install(self.accelerator)
        # Disable transformers' NEFTune hook. It would use the width of a packed row as the length of each document.
        alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        try:
            plain = contextlib.nullcontext(forward)
            with plain if alpha is None else noisy_embeddings(self.model, alpha) as compute:
                self.run = replace(self.run, forward=compute)
                return super().train(resume, **kwargs)
        finally:
            self.neftune_noise_alpha, self.args.resume_from_checkpoint = alpha, configured
            tree_attention.uninstall(self.model)
            self.checks.finish()
            self.interrupt.restore()
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "stop"):
                    callback.stop()

    def _replaced(self, base: type, name: str, default: Any) -> Any:
        """Return this trainer's method ``name`` if the user or a subclass of ``base`` replaced it. Otherwise, return
        ``default``.
        """
        replaced = name in vars(self) or inspect.getattr_static(type(self), name) is not vars(base)[name]
        return getattr(self, name) if replaced else default

    def resolve(self) -> None:
        """Store the current functions of the loop in the run, including functions that a subclass or the user replaced."""
        self.run = replace(self.run, hooks=self._hooks())

    def _hooks(self) -> Hooks:
        """Return the loop's functions. Functions that a subclass overrides, or that the user assigned to this object,
        replace the defaults.
        """
        run, own = self.run, partial(self._replaced, PostTrainer)
        return replace(
            run.hooks,
            objective=own("objective", None),
            comparison=own("comparison", None),
            loss_of=self._users_loss if self.own_loss else step.loss_of,
            postprocess_metrics=own("postprocess_metrics", run.method.derived_metrics),
            predictions=self.predictions,
            own_loss=self.own_loss,
        )

    # One optimizer step ------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device | str
    ) -> tuple[list[Any], None]:
        """Read all micro-batches of one optimizer step. Their tokens are counted before the first forward pass."""
        began = time.perf_counter()
        drawn = list(itertools.islice(epoch_iterator, num_batches))
        self.checkpoints.place.draw(epoch_iterator, len(drawn), num_batches)
        if self.checkpoints.place.checkpoint is not None:
            # Restore the random state now, before completions are sampled and scored.
            self._load_rng_state(self.checkpoints.place.checkpoint)
        # The stream has ended. It restarts in the next epoch.
        if not drawn:
            return [], None
        self._window_start = began
        hooks = self.run.hooks
        micro_batches = [hooks.batches(self.run, inputs, index) for index, inputs in enumerate(drawn)]
        batches = list(itertools.chain.from_iterable(micro_batches))
        counts, seen, overlong = step.count(self.run, batches, self.checks.has_overlong_sequence(batches))
        if overlong:
            self.checks.report_overlong()
        step.count_tokens(self.run, batches, counts)
        self.run.watch("step", self.run, batches, counts)
        # Online methods have already counted these tokens. Their count includes each prompt once per completion.
        if not self.method.traits.samples:
            self.counters["num_tokens"] += seen
        self._passes, self.denominators, self.progress.sums = [], counts, None
        if hooks.prepare is not None:
            micro_batches = hooks.prepare(self.run, drawn, micro_batches, "train")
        # Add empty micro-batches at the front. The last micro-batch of the step is then never empty, and no gradient remains
        # for the next step.
        return [[]] * (num_batches - len(drawn)) + micro_batches, None

    def training_step(self, model: nn.Module, inputs: list[Batch], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward passes for the batches of one micro-batch. Return the sum of their losses."""
        model.train()
        run, problem = self.run, None
        self._passes.append(inputs)
        passes = inputs if run.progress.max_tokens is None else divided(run, inputs, run.progress.max_tokens)
        if len(passes) > len(inputs) and run.hooks.before_split is not None:
            run.hooks.before_split(run, self._passes)
        try:
            loss = step.forward_backward(run, model, passes, run.progress.denominators, run.now())
        except torch.OutOfMemoryError as error:
            # Remove the traceback. Its frames would keep the activations in memory.
            problem = error.with_traceback(None)
        if problem is not None:
            if run.hooks.before_split is not None:
                run.hooks.before_split(run, self._passes)
            loss = run_again(run, model, self._passes, run.progress.denominators, problem)
        step.commit(run, loss)
        return loss.value

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip the gradient. A gradient that is not finite is discarded. The third such gradient in a row ends the run."""
        norm = super()._clip_grad_norm(model)
        if step.is_finite(self.run, model, norm):
            self.run.watch("gradient", model, self._passes)
        return norm

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a batch: forward pass, objective and reduction. Training and evaluation call this method, and
        a subclass may override it.

        Args:
            model: Model to run, wrapped as in the run.
            inputs: Batch of one forward pass.
            return_outputs: Whether the `ModelOutputs` are also returned.
            num_items_in_batch: Divisor of the loss; see `Denominators.over`.

        Returns:
            The loss of the pass, divided by counts of the whole optimizer step. The losses of all passes add up to the loss
            of the step.
        """
        run = self.run
        allowed = run.loss_function is not None or run.method.traits.takes_loss_func
        counts = run.progress.denominators.over(num_items_in_batch, allowed=allowed)
        loss_of = step.loss_of if run.loss_function is None else step.function_loss
        loss = loss_of(run, model, self.as_batch(inputs), counts, run.now())
        run.progress.reduced_by = "token" if loss.terms is None else loss.terms.count or loss.terms.reduction
        if self._losses is None:
            step.commit(run, loss, "train" if model.training else "eval")
        else:
            self._losses.append(loss)
        return (loss.value, loss.outputs) if return_outputs else loss.value

    def as_batch(self, inputs: Any) -> Batch:
        """Convert the input of ``compute_loss`` to a `Batch`."""
        return inputs

    def _users_loss(self, run: Run, model: nn.Module, batch: Batch, counts: Denominators, state: State) -> step.Loss:
        """Return the loss of a pass from the user's ``compute_loss`` or ``compute_loss_func``. If the user's function calls
        the trainer's own loss, the metrics of the trainer's loss are also logged.
        """
        with with_attributes(self, {"_losses": []}):
            value, losses = self.compute_loss(model, batch), self._losses or ()
        sums = functools.reduce(step.add_sums, (loss.sums for loss in losses), None)
        return step.Loss(value, tuple(metrics for loss in losses for metrics in loss.metrics), sums)

    def comparison(self, batch: Batch) -> Any:
        """Return the function that the output layer calls instead of computing log-probs; see `TokenHead.compare`. Return
        None if the output layer computes log-probs.
        """
        return None

    # Logging and checkpoints -------------------------------------------------------------------------------------

    def postprocess_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add derived metrics to the metrics of a log window, in training and evaluation."""
        return self.method.derived_metrics(metrics)

    def reduced_metrics(self, mode: str) -> dict[str, float]:
        """Return the metrics logged since the last call, reduced over all ranks."""
        return self.run.reduced_metrics(mode)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.state.epoch = self.checkpoints.place.epoch(self.state.epoch)
        run = self.run
        # At the end of an epoch, the step has already ended, so nothing remains to be done.
        if self._passes:
            self._passes = []
            run.progress.own, metrics = self.method.end_step(run.now(), run.progress.sums)
            run.log(metrics)
        if self._window_start is not None:
            self.run.log({"step_time": mean(time.perf_counter() - self._window_start)})
            self._window_start = None
        self._in_loop = True
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except checkpoint.EvaluationStopped:
            self.control.should_evaluate = False
            self.control.should_save = self.control.should_training_stop = True
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self._in_loop = False
        self._complete_checkpoint()

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.interrupt.evaluation():
                metrics = super()._evaluate(*args, **kwargs)
        except checkpoint.EvaluationStopped:
            # Discard the metrics of the stopped evaluation. Otherwise they would be included in a later evaluation.
            self.reduced_metrics("eval")
            if self._in_loop:
                raise
            # With `eval_on_start`, the run ends after its first step.
            return {}
        # metric_for_best_model is missing, and a learning-rate scheduler has read it before the check below.
        except KeyError as error:
            if "metric_for_best_model" in str(error):
                check_best_metric(self.args, self.state.log_history[-1])
            raise
        check_best_metric(self.args, metrics)
        return metrics

    def create_model_card(
        self, model_name: str | None = None, dataset_name: Any = None, tags: Any = None, **_: Any
    ) -> None:
        """Write the model card ``<output_dir>/README.md``. The card describes the model, its training and its usage."""
        create_model_card(self, model_name, dataset_name, tags)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `transformers.Trainer.save_model` does. The first call also checks the padding and stop tokens
        in the saved configs.
        """
        self.checks.saved_tokens(self.model, self.processing_class)
        folder = Path(output_dir or self.args.output_dir)
        with contextlib.ExitStack() as stack:
            if not _internal_call:
                stack.enter_context(checkpoint.without_signals())
                stack.enter_context(checkpoint.named_full_disk(folder, lambda: checkpoint.weight_bytes(self.model)))
            with parallel.saved_whole(self.accelerator, not _internal_call):
                super().save_model(output_dir, _internal_call)
            self.vision.save(str(folder))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        tags: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload as `transformers.Trainer.push_to_hub` does. The run record is only uploaded if ``push_run_record`` is set."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, **({} if private is None else {"private": private}))
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        tags = [tags] if isinstance(tags, str) else list(tags or ())
        self.create_model_card(tags=[*tags, *(getattr(self.model, "model_tags", None) or ())], **kwargs)
        self._finish_current_push()
        revision = self.args.hub_revision if revision is None else revision
        return self._upload(commit_message, token=token, revision=revision, run_as_future=not blocking)

    def _upload(self, message: str | None, folder: str | None = None, **options: Any) -> Any:
        """Upload ``folder``. If it is None, upload ``output_dir`` without its checkpoints."""
        args, ignored = self.args, ["_*", "checkpoint-*"] if folder is None else []
        options = {"token": args.hub_token, "revision": args.hub_revision, "run_as_future": True} | options
        options |= {"repo_id": self.hub_model_id, "commit_message": message, "ignore_patterns": ignored}
        return upload(folder or str(args.output_dir), run_record=args.push_run_record, **options)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        strategy, running = self.args.hub_strategy, self.push_in_progress
        busy = running is not None and not running.is_done()
        if not self.is_world_process_zero() or strategy == "end" or (busy and not self.args.hub_always_push):
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        for path in (path for pattern in MODEL_FILES for path in Path(checkpoint_folder).glob(pattern)):
            shutil.copy(path, self.args.output_dir)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(self.args.output_dir)
        steps = self.args.save_strategy == "steps"
        at = f"step {self.state.global_step}" if steps else f"epoch {int(self.state.epoch or 0)}"
        message = f"Training in progress, {at}"
        jobs = [self._upload(message)]
        if strategy in ("checkpoint", "all_checkpoints"):
            place = "last-checkpoint" if strategy == "checkpoint" else Path(checkpoint_folder).name
            jobs.append(self._upload(f"{message}, checkpoint", checkpoint_folder, path_in_repo=place))
        if busy:
            running.jobs += jobs
        else:
            self.push_in_progress = PushInProgress(jobs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.create_model_card()
        if trial is None and self.hp_search_backend is None:
            self.store_flos()
        self.checkpoints.save(self._write_checkpoint, Path(self._get_output_dir(trial=trial)), self.state)
        if not self._in_loop:
            self._complete_checkpoint()

    def _complete_checkpoint(self) -> None:
        """Mark the last checkpoint as complete. Then push it to the Hub if ``push_to_hub`` is set."""
        final = self.checkpoints.complete(self.state)
        if final is not None and self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _write_checkpoint(self, part: Path) -> None:
        """Write all files of a checkpoint into a temporary folder, which is renamed to its final path later."""
        self.save_model(str(part), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(part))
            self._save_scaler(str(part))
            self._save_rng_state(str(part))
            state = self.state_to_save() | {"stream": self.checkpoints.place.stream}
            checkpoint.save_state(part, state, self.accelerator)
        if self.args.should_save:
            checkpoint.export_callbacks((*self.callback_handler.callbacks, self.control), self.state)
            self.state.save_to_json(str(part / "trainer_state.json"))

    @contextlib.contextmanager
    def _reading_fsdp(self, folder: str | None) -> Iterator[None]:
        with (
            parallel.reading_fsdp(self.accelerator, folder, shards=self.is_fsdp_enabled) as reads,
            with_attributes(self, {"is_fsdp_enabled": reads}),
        ):
            yield

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        with self._reading_fsdp(folder):
            super()._load_optimizer_and_scheduler(folder)
        if state := checkpoint.saved_state(folder, self.accelerator):
            self.load_saved_state(state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        target = model or self.model
        learns = {name: parameter.requires_grad for name, parameter in target.named_parameters()}
        if not load.load_added_adapter(target, resume_from_checkpoint):
            with (
                self._reading_fsdp(resume_from_checkpoint),
                checkpoint.refused_if_shapes_differ(resume_from_checkpoint),
            ):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            load.load_renamed(target, resume_from_checkpoint, self.accelerator)
            load.load_default_adapter(target, resume_from_checkpoint, self.accelerator)
        load.mark_loaded_projections(target)
        # peft makes all parameters of a loaded adapter trainable, even parameters that the user froze. Restore the user's
        # choice.
        for name, parameter in target.named_parameters():
            parameter.requires_grad_(learns.get(name, parameter.requires_grad))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Tied weights are saved under only one name. Their other names are not missing.
        tied = vars(self.model).get("all_tied_weights_keys", {})
        load_result.missing_keys[:] = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        with parallel.reading_zero(self.accelerator, lambda: self.model_wrapped, resume_from_checkpoint):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        start = super()._init_training_state(*args, **kwargs)
        owed = checkpoint.owes_evaluation(self.args, self.state)
        self._unevaluated = self.checkpoints.place.checkpoint if owed else None
        if self.state.global_step >= self.state.max_steps > 0 and self.checkpoints.place.checkpoint:
            logger.warning(
                "the checkpoint is at step %d and max_steps is %d, so the run ends without a step.",
                self.state.global_step, self.state.max_steps,
            )  # fmt: skip
            return self.state.num_train_epochs, 0
        return self.checkpoints.place.begin(start, self.train_dataset, skips=not self.args.ignore_data_skip)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # The random state is restored only once, before the first rollouts are sampled.
        if self.checkpoints.place.restores_random():
            self._evaluate_resumed()  # Evaluate before the random state is restored. Evaluation may use random numbers.
            super()._load_rng_state(checkpoint)

    def _evaluate_resumed(self) -> None:
        """Run the evaluation that the interrupted run did not reach at the checkpoint's step."""
        folder, self._unevaluated = self._unevaluated, None
        metrics = None if folder is None else self._evaluate(None, None)
        if metrics and self._determine_best_metric(metrics, None):
            self.state.best_model_checkpoint = folder

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluate_resumed()  # If no training step followed, the skipped evaluation has not run yet.
        # Do not remove checkpoints here. With save_total_limit=1, transformers would remove all checkpoints except the best
        # one. It would remove checkpoints of other runs and the checkpoint to resume from too.
        with with_attributes(self.args, {"save_total_limit": None}):
            return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if load.load_added_adapter(self.model, str(best)):
            return
        with parallel.reading_zero(self.accelerator, lambda: self.model_wrapped, best):
            folder = load.adapter_folder(self.model, str(best), self.accelerator)
            with with_attributes(self.state, {"best_model_checkpoint": folder}):
                super()._load_best_model()
        load.load_renamed(self.model, str(self.state.best_model_checkpoint), self.accelerator)

    def state_to_save(self) -> dict[str, Any]:
        """Return additional state for a checkpoint, as JSON-compatible data. A resumed run needs this state to give the same
        result as an uninterrupted run.
        """
        rows = self.get_total_train_batch_size(self.args)
        seen = checkpoint.rows_fingerprint(self._raw)
        settings = checkpoint.settings(self.args, self.state.max_steps) | {"method": self.METHOD.__name__}
        saved = {"counters": self.counters, "step_rows": rows, "rows": seen, "settings": settings}
        return saved | self.method.saved(self.run.progress.own)

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_to_save` returned."""
        skips = not self.args.ignore_data_skip
        checkpoint.refuse_other_run(state, self.METHOD.__name__, self.args.optim)
        checkpoint.refuse_other_rows(state, checkpoint.rows_fingerprint(self._raw), skips=skips)
        self.counters = state["counters"]
        self.run.progress.own = self.method.restored(state)
        if self.accelerator.is_main_process:
            checkpoint.warn_of_other_settings(state, checkpoint.settings(self.args, self.state.max_steps))
            checkpoint.warn_of_other_rows(state, self.get_total_train_batch_size(self.args))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the given values, and the metrics collected since the last call, reduced over all ranks."""
        if self.run.progress.eval_rounds:
            count_rounds(logs, self.run.progress.eval_rounds)
        if not any(key.startswith("eval_") for key in logs):
            logs.update(self.reduced_metrics("train"))
            logs["num_tokens"] = self.counters["num_tokens"]
        super().log(logs, start_time)
        self.run.watch("log", self.state.log_history)

    # Evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: EvalSets | None = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `transformers.Trainer.evaluate` does. A raw dataset is prepared first. A string selects one of the
        trainer's evaluation sets by name.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self.prepare_evaluation(plain_rows(eval_dataset))
        return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as `transformers.Trainer.predict` does. A raw dataset is prepared first. Rows are padded, because full
        logits need one sequence per row.
        """
        if (split := token_split.active()) is not None:
            split.refuse_predict()
        with with_attributes(self, {"layout": Layout("padded", row_tokens=self.layout.row_tokens)}):
            output = super().predict(self.prepare_evaluation(plain_rows(test_dataset)), *args, **kwargs)
        count_rounds(output.metrics, self.run.progress.eval_rounds)
        return output

    def _get_dataloader(  # The signature is that of transformers.
        self, dataset: AnyDataset, description: str, batch_size: int, sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False, dataloader_key: str | None = None,
    ) -> DataLoader:  # fmt: skip
        """Create a data loader.

        For training, it is the parent's loader, but its batches stay on the CPU. Counting tokens then does not wait for the
        GPU. For evaluation, it is `evaluation_loader`.
        """
        if is_training:
            loader = super()._get_dataloader(dataset, description, batch_size, sampler_fn, True, dataloader_key)
            loader.device = None
            return loader
        shard = EvalShard(batch_size, self.accelerator.num_processes, self.accelerator.process_index, self.eval_group)
        loader = evaluation_loader(dataset, self.args, shard, partial(self._collated, self.data_collator), sampler_fn)
        # Set this attribute, because the parent class reads it.
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            vars(self).setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    def _collated(self, collator: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
        return collator(rows) if rows else self.no_rows

    @property
    def answers_per_row(self) -> int:
        """Number of sequences per dataset row."""
        return self.method.traits.answers

    @property
    def eval_group(self) -> int:
        """Number of consecutive rows in an evaluation batch that the loss compares with each other."""
        return 1

    def evaluation_loop(  # The signature is that of transformers.
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Compute the loss over the whole evaluation set. It is divided by the counts of the set, so it does not depend on
        the evaluation batch size.
        """
        self.resolve()
        self.callback_handler.eval_dataloader, self.run.progress.eval_rounds = dataloader, 0

        def after_batch() -> None:
            self.run.progress.eval_rounds += 1
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            self.interrupt.leave_evaluation()

        options = {"answers": self.answers_per_row, "predicts": description == "Prediction", "after_batch": after_batch}
        output, self.run.progress.eval_rounds = evaluate(
            self.run, dataloader, metric_key_prefix, self.compute_metrics, **options
        )
        return output

    @property
    def own_loss(self) -> bool:
        """Whether the user defines the loss, with ``compute_loss`` of a subclass or with ``compute_loss_func``."""
        replaced = "compute_loss" in vars(self) or build.user_override(type(self), "compute_loss") is not None
        return replaced or self.compute_loss_func is not None

    def predictions(self, model: nn.Module, batches: list[Batch]) -> list[tuple[Any, np.ndarray]]:
        """Return a pair (logits, labels) for each row, in the order of the dataset. ``preprocess_logits_for_metrics`` can
        reduce the size of the logits.
        """
        return predicted_rows(model, batches, self.preprocess_logits_for_metrics)

    def floating_point_ops(self, inputs: Any) -> int:
        """Estimate the number of floating-point operations of a step as six per parameter and token. This is the cost of
        forward and backward passes in a dense transformer.
        """
        return 6 * sum(p.numel() for p in self.model.parameters()) * sum(batch.num_tokens for batch in inputs)

    def _track_num_input_tokens(self, inputs: list[Batch]) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen = int(self.counters["num_tokens"])
