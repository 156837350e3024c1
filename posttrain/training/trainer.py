"""`PostTrainer`: the one training loop; it does not know which algorithm runs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import set_seed

from posttrain.data.forest import Layout, collate
from posttrain.errors import ArgumentTypeError, ConfigError, DataError
from posttrain.losses.reduce import Denominators, reduce
from posttrain.metrics import Metric, MetricBuffer, mean
from posttrain.models import parallel
from posttrain.models.activations import (
    KeepHostMemory,
    KeepLastActivations,
    check_offloading,
    get_act_offloading_ctx_manager,
    gradients_first,
)
from posttrain.models.attention import padded_layout, probe_head, probe_layout
from posttrain.models.forward import causal_lm, forward, install_token_head, learns_prompts, noisy_embeddings
from posttrain.models.load import (
    changes_vocabulary,
    create_model_from_path,
    get_config_model_id,
    load_tokenizer,
    mirror_eos,
    prepare_tokenizer,
    resolve_pad_token,
    router_coefficient,
    train_new_tokens,
    train_score_head,
    wrap_with_peft,
)
from posttrain.models.parallel import main_process_first
from posttrain.models.reference import disable_dropout_in_model
from posttrain.report.progress import GracefulInterrupt
from posttrain.report.record import RunRecordCallback, check_writable
from posttrain.rollouts.server.replies import remove_orphans
from posttrain.training.checkpoint import CheckpointMixin
from posttrain.training.checks import HealthMixin
from posttrain.training.config import PostTrainingConfig
from posttrain.training.data_report import DataReportCallback
from posttrain.training.dry_step import MemoryHealthMixin
from posttrain.training.evaluation import EvaluationMixin
from posttrain.training.hooks import check_hooks
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

__all__ = ["PostTrainer", "PostTrainingConfig"]

logger = logging.getLogger(__name__)


class PostTrainer(MemoryHealthMixin, HealthMixin, CheckpointMixin, EvaluationMixin, transformers.Trainer):
    """Turns rows into batches, batches into loss terms, terms into one gradient, whatever the algorithm.

    A subclass gives ``objective(outputs, batch) -> LossTerms`` and the rows (`rows`); ``needs`` names what the forward
    pass must produce. Everything else (loading, adapters, accumulation, ranks, metrics, checkpoints) is here once.
    """

    loss_is_scaled_for_ga = True  # Our denominators span the whole optimiser step, over micro-batches and ranks.
    needs: ClassVar[frozenset[str]] = frozenset({"logp"})
    config_class: ClassVar[type[PostTrainingConfig]] = PostTrainingConfig
    _tag_names: ClassVar[list[str]] = ["posttrain"]
    _name: ClassVar[str] = "post-training"
    _paper: ClassVar[dict[str, str]] = {}  # Title, arXiv id and citation, for the model card.
    _suffix: ClassVar[str] = "posttrain"
    generative: ClassVar[bool] = True  # Whether the model must have a language-model head.
    whole_rows: ClassVar[bool] = False  # Whether the objective compares the completions of a row.
    denominators = Denominators(1, 1, 1)  # Of the current optimiser step.
    takes_loss_func: ClassVar[bool] = False  # Whether a user's compute_loss_func says what the loss is.
    takes_collator: ClassVar[bool] = False  # Whether `rows` reads what a user's own data_collator makes.
    _window_start: float | None = None
    together = False  # Whether it compares all rows of a micro-batch, which must then be one forward pass.

    def __init__(
        self,
        model: str | nn.Module,
        args: PostTrainingConfig | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        **trainer_kwargs: Any,
    ) -> None:
        model_id = model if isinstance(model, str) else get_config_model_id(causal_lm(model).config)
        args = self.config_class(f"{Path(model_id).name or 'model'}-{self._suffix}") if args is None else args
        check_hooks(self, trainer_kwargs.get("compute_loss_func"))
        self._check_arguments(model, args, train_dataset, trainer_kwargs.pop("data_collator", None))
        set_seed(args.seed)
        init = dict(args.model_init_kwargs or {}) if isinstance(model, str) else {}
        self.processing_class = processing_class or load_tokenizer(
            model_id, trust_remote_code=args.trust_remote_code, revision=init.get("revision")
        )
        self.args = args
        self.added_tokens: list[int] = []
        if changes_vocabulary(args):
            model = self._clone_vocabulary(self._load(model, args, init, quantization_config))
        prepare_tokenizer(self.processing_class, args)
        train_dataset = self.check_config(model, train_dataset, eval_dataset, peft_config)
        with main_process_first(), self.strict_about_data(args.strict_data):
            train_dataset, eval_dataset = self.prepare_datasets(train_dataset, eval_dataset)
        model = self._prepare_model(self._load(model, args, init, quantization_config), args, peft_config)
        self.buffers = {"train": MetricBuffer(), "eval": MetricBuffer()}
        self.counters: dict[str, float] = {"num_tokens": 0.0}
        self.router_coefficient = router_coefficient(model, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=self.collator(),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.processing_class,
            **trainer_kwargs,
        )
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)
        self.layout = self._choose_layout()
        self.check_start()
        self.record, self.interrupt = RunRecordCallback(args, self.processing_class), GracefulInterrupt()
        own = (self.interrupt, self.record, DataReportCallback(self), KeepLastActivations(), KeepHostMemory())
        for callback in own:
            self.add_callback(callback)

    # What a subclass gives ---------------------------------------------------------------------------------------

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """The algorithm: unreduced loss terms and metrics of one batch."""
        raise NotImplementedError(f"{type(self).__name__} must define objective(outputs, batch).")

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Prepared dataset examples as rows."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(examples).")

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Check and tokenise all datasets, once; runs before the model is loaded."""
        prepared = self.prepare(train, "train", training=True)
        return prepared, None if evaluation is None else self.prepare_evaluation(evaluation)

    @property
    def temperature(self) -> float:
        """What the logits are divided by before any log-prob."""
        return getattr(self.args, "temperature", 1.0)

    # Construction ------------------------------------------------------------------------------------------------

    def _check_arguments(self, model: Any, args: PostTrainingConfig, train_dataset: Any, collator: Any) -> None:
        from posttrain.models.load import check_model_source

        self.user_collator = collator
        if not isinstance(args, transformers.TrainingArguments):
            raise ArgumentTypeError(f"args must be a {self.config_class.__name__}, not {type(args).__name__}.")
        known = (datasets.Dataset, datasets.IterableDataset)
        if self.user_collator is not None and not self.takes_collator:
            raise ConfigError(
                f"{type(self).__name__} makes its own batches of tokenised rows, and data_collator={self.user_collator!r:.80} "
                "has no place there. Leave it out; pad_to_multiple_of and max_row_tokens shape batches."
            )
        if train_dataset is None:
            raise DataError(f"{type(self).__name__} needs train_dataset, and it is None.")
        if not isinstance(train_dataset, known):
            hint = " Pass one split of it: dataset['train']." if isinstance(train_dataset, dict) else ""
            raise ArgumentTypeError(
                f"train_dataset must be a datasets.Dataset, not {type(train_dataset).__name__}.{hint}"
            )
        if isinstance(train_dataset, datasets.IterableDataset):
            if args.max_steps <= 0:
                raise ConfigError("a streaming train_dataset has no length: set max_steps (it is not set).")
            if args.accelerator_config.dispatch_batches:
                logger.warning(
                    "dispatch_batches=True with a streaming train_dataset is set to False: ranks read alone."
                )
            args.accelerator_config.dispatch_batches = False
        check_offloading(args)
        check_writable(args.output_dir)
        check_model_source(model, generative=self.generative)

    def _load(self, model: Any, args: PostTrainingConfig, init: dict[str, Any], quantization_config: Any) -> Any:
        if not isinstance(model, str):
            given = {"model_init_kwargs": args.model_init_kwargs, "quantization_config": quantization_config}
            for name in [name for name, value in given.items() if value and not self.added_tokens]:
                logger.warning("%s is ignored: the model was given as an object, already loaded.", name)
            return model
        if quantization_config is not None and init.get("quantization_config") is not None:
            raise ConfigError(
                "quantization_config is given both as an argument and in model_init_kwargs. Give it once."
            )
        if quantization_config is not None:
            init["quantization_config"] = quantization_config
        init.setdefault("trust_remote_code", args.trust_remote_code)
        return self.load_model(model, **init)

    def load_model(self, model_id: str, **kwargs: Any) -> Any:
        """The model behind a string."""
        return create_model_from_path(model_id, **kwargs)

    def _clone_vocabulary(self, model: Any) -> Any:
        from posttrain.models.clone import clone_chat_template

        source = self.args.chat_template_path  # type: ignore[attr-defined]
        model, self.processing_class, self.added_tokens = clone_chat_template(model, self.processing_class, source)
        return model

    def _prepare_model(self, model: Any, args: PostTrainingConfig, peft_config: Any) -> Any:
        mirror_eos(self.processing_class, model, args)
        self.pad_token_id = resolve_pad_token(self.processing_class, model)
        self.fresh_adapter = peft_config is not None
        if args.disable_dropout:
            disable_dropout_in_model(model)
        peft_config = train_new_tokens(peft_config, model, self.added_tokens)
        if not self.generative:
            peft_config = train_score_head(peft_config, model)
        model = wrap_with_peft(model, peft_config, activation_checkpointing=_checkpointing(args))
        install_token_head(model)
        return model

    def _choose_layout(self) -> Layout:
        probe_head(self.model)
        layout = padded_layout(self.model) if self._needs_padded_rows() else probe_layout(self.model)
        if self.args.max_row_tokens is not None:
            layout = replace(layout, row_tokens=self.args.max_row_tokens)
        multiple = getattr(self.args, "pad_to_multiple_of", None)
        return replace(layout, pad_to_multiple_of=multiple) if multiple else layout

    def _needs_padded_rows(self) -> bool:
        """Virtual tokens and user functions on logits want one sequence a row."""
        wanted = (self.compute_loss_func, self.compute_metrics, self.preprocess_logits_for_metrics)
        return learns_prompts(self.model) or any(function is not None for function in wanted)

    def collator(self) -> Callable[[list[dict[str, Any]]], Any]:
        """Dataset examples to what the loader yields: here, the batches of one micro-batch."""
        return lambda examples: collate(
            self.rows(examples),
            pad_token_id=self.pad_token_id,
            layout=self.layout,
            whole_rows=self.whole_rows,
            together=self.together,
        )

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = self._signature_columns or []

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return super()._get_train_sampler(
            self._measured(self.train_dataset if train_dataset is None else train_dataset)
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return super()._get_eval_sampler(self._measured(eval_dataset))

    def _measured(self, dataset: Any) -> Any:
        """For samplers that want rows of like length: with the lengths, where there is no column ``input_ids`` to tell them."""
        name, wanted = self.args.length_column_name, ("group_by_length", "batch_rebalance")
        known = getattr(dataset, "column_names", None) or ()
        if self.args.train_sampling_strategy not in wanted or {name, "input_ids"} & set(known):
            return dataset
        columns = [dataset[column][:] for column in known if column.endswith("_ids")]
        lengths = [sum(len(ids or ()) for ids in row) for row in zip(*columns, strict=True)]
        return dataset.add_column(name, lengths) if lengths else dataset

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return dataset  # Rows are read by name; what is not read costs nothing.

    def _get_collator_with_removed_columns(self, data_collator: Callable, description: str | None = None) -> Callable:
        return data_collator

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train; Ctrl-C or SIGTERM finishes the step, saves a checkpoint and returns; ``trainer.interrupt.requested`` says so."""
        if isinstance(resume_from_checkpoint, str):
            self.args.resume_from_checkpoint = resume_from_checkpoint  # Callbacks find their own state by it.
        remove_orphans()  # Weights in shared memory, of runs that were killed.
        self.interrupt.install(self.accelerator)
        # transformers' own hook would take the width of a row for the length of each document in it.
        alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        try:
            with noisy_embeddings(self.model, alpha):
                return super().train(resume_from_checkpoint, **kwargs)
        finally:
            self.neftune_noise_alpha = alpha
            self.interrupt.restore()
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "stop"):
                    callback.stop()

    # One optimiser step ------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[list[Batch]], None]:
        """All micro-batches of one optimiser step, so that its denominators are known before the first forward."""
        began = time.perf_counter()
        drawn = list(itertools.islice(epoch_iterator, num_batches))
        if not drawn:  # A stream has come to its end; it begins again with the next epoch.
            return [], None
        self._window_start = began
        micro_batches = [self.micro_batch(inputs, index) for index, inputs in enumerate(drawn)]
        self.denominators = self._count(micro_batches)
        self.before_step(micro_batches)
        # A step of fewer micro-batches ends with the last one all the same, and leaves no gradient to the next step.
        return [[]] * (num_batches - len(drawn)) + micro_batches, None

    def before_step(self, micro_batches: list[list[Batch]]) -> None:
        """What a method computes over the whole optimiser step before its first forward pass."""

    def micro_batch(self, inputs: Any, index: int) -> list[Batch]:
        """What the loader yielded, as batches; online trainers generate here."""
        return inputs

    def _count(self, micro_batches: Sequence[Sequence[Batch]]) -> Denominators:
        """Tokens and sequences of the whole optimiser step, over micro-batches and ranks."""
        batches = [batch for micro in micro_batches for batch in micro]
        tokens = sum(batch.num_loss_tokens for batch in batches)
        sequences = sum(batch.num_sequences for batch in batches)
        seen = sum(batch.num_sequence_tokens for batch in batches)
        named = self.named_counts(batches)
        counts = [tokens, sequences, seen, len(batches), self.alarm(batches), *named.values()]
        tokens, sequences, seen, passes, alarms, *rest = parallel.all_reduce_sum(counts, self.accelerator)
        self.count_tokens_seen(seen)
        self.check_step(batches, tokens, sequences, alarms)
        totals = dict(zip(named, rest, strict=True))
        return Denominators(tokens, sequences, passes, self.accelerator.num_processes, totals)

    def named_counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Other counts of the optimiser step that the objective divides by; the same names on every rank."""
        return {}

    def count_tokens_seen(self, tokens: float) -> None:
        """Add the real tokens of an optimiser step, over all ranks, to the running total."""
        self.counters["num_tokens"] += tokens

    def training_step(self, model: nn.Module, inputs: list[Batch], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward over the batches of one micro-batch; returns their summed loss."""
        model.train()
        total = torch.zeros((), device=self.args.device)
        offloading = get_act_offloading_ctx_manager(model, enabled=self.args.activation_offloading)
        passes = parallel.equal_passes(len(inputs), self.accelerator)
        with gradients_first(model, passes=passes):
            for index in range(passes):
                batch = inputs[min(index, len(inputs) - 1)]
                idle = index >= len(inputs)  # Only to keep collectives equal over ranks.
                with offloading, parallel.no_sync(model, last=index == passes - 1):
                    total = total + self.one_pass(model, batch, 0.0 if idle else 1.0)
        return total

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Batch to scalar: forward, objective, reduce. A subclass may change what comes out; evaluation goes through it too.

        Args:
            model: What to run, wrapped as the run wraps it.
            inputs: One forward pass.
            return_outputs: Also return the `ModelOutputs`.
            num_items_in_batch: Not read: the optimiser step's counts are in ``denominators``.

        Returns:
            The sum of the pass's terms over counts of the whole optimiser step, so that losses of passes add up.
        """
        terms, outputs = self.terms(model, inputs)
        self.buffers["train" if model.training else "eval"].add(terms.metrics)
        self._reduced_by = terms.count or terms.reduction
        loss = reduce(terms, self.denominators)
        return (loss, outputs) if return_outputs else loss

    def terms(self, model: nn.Module, batch: Batch) -> tuple[LossTerms, ModelOutputs]:
        """Forward and objective; a mixture of experts adds its load-balancing term, averaged over passes."""
        needs = self.needs | {"aux"} if self.router_coefficient else self.needs
        outputs = forward(model, batch, needs, temperature=self.temperature, chunk_size=self.args.logits_chunk_size)
        terms = self.objective(outputs, batch)
        if self.router_coefficient and outputs.aux_loss is not None:
            term = self.router_coefficient * outputs.aux_loss[None]
            terms.extra.append(LossTerms(term, torch.ones_like(term, dtype=torch.bool), "local_token"))
            terms.metrics["aux_loss"] = mean(outputs.aux_loss)
        return terms, outputs

    # Logging and checkpoints -------------------------------------------------------------------------------------

    def log_metrics_now(self, metrics: dict[str, Metric], mode: str = "train") -> None:
        """Add metrics to the current window."""
        self.buffers[mode].add(metrics)

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """The window's metrics with those that follow from others; training and evaluation both pass here."""
        return metrics

    def _reduced(self, mode: str) -> dict[str, float]:
        gather = None
        if self.accelerator.num_processes > 1:

            def gather(rows: list) -> list:
                return parallel.all_gather_objects(rows, self.accelerator)

        return self.derived(self.buffers[mode].compute(gather))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._window_start is not None:
            self.log_metrics_now({"step_time": mean(time.perf_counter() - self._window_start)})
            self._window_start = None
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Reduce this window's metrics over ranks, once, and pass everything on."""
        self.count_rounds(logs)
        if not any(key.startswith("eval_") for key in logs):
            logs.update(self._reduced("train"))
            logs["num_tokens"] = self.counters["num_tokens"]
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Six per parameter and token, as the forward and backward of a dense transformer cost."""
        parameters = sum(p.numel() for p in self.model.parameters())
        return 6 * parameters * sum(batch.num_tokens for batch in inputs)

    def _track_num_input_tokens(self, inputs: list[Batch]) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen = int(self.counters["num_tokens"])

    @contextlib.contextmanager
    def inference(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """The model in eval mode, without gradients, under the run's precision; training mode is restored."""
        model = parallel.without_ddp(model if model is not None else self.model_wrapped)
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.accelerator.autocast():
                yield model
        finally:
            model.train(training)


def _checkpointing(args: transformers.TrainingArguments) -> bool:
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)
