"""`DistillationTrainer`: train a student on a teacher's next-token distributions."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import torch
from torch import Tensor, nn

from posttrain import plugins
from posttrain.checks.tokenizers import TokenizerMatch, compare_tokenizers, require_same_tokens
from posttrain.data.chat import inner_tokenizer, is_processor, terminal_token_ids
from posttrain.data.forest import Layout
from posttrain.data.formats import get_dataset_column_names
from posttrain.errors import ConfigError, DataError
from posttrain.loop.build import choose_layout, user_override, warn_of_unused
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.prompts import PromptSource
from posttrain.loop.rollout import Online
from posttrain.loop.run import Run
from posttrain.loop.sync_reference import SyncRefModelCallback
from posttrain.losses.reduce import Denominators, spread
from posttrain.methods.distillation.config import Axes, DistillationConfig, logit_width
from posttrain.methods.distillation.data import (
    as_rollout,
    privileged_prompt,
    tokenized_answers,
    with_prompt_column,
    with_template_arguments,
)
from posttrain.methods.distillation.objective import Comparison, Distillation, TokenScores
from posttrain.methods.distillation.teacher import (
    AdapterAverage,
    ModelTeacher,
    ScoreFile,
    ServerTeacher,
    by_name,
    frozen,
    load_teacher,
    own_tokenizer,
    scores_of_batch,
    shares_of_batch,
    teacher_id,
    teacher_servers,
)
from posttrain.methods.grpo.objective import grpo_objective
from posttrain.models import parallel
from posttrain.models.architecture import config_of, generation_config_of, get_config_model_id
from posttrain.models.heads import adapters_of, causal_lm, install_token_head
from posttrain.models.reference import Reference
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch, decoded
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
from posttrain.types import (
    Advantages,
    Batch,
    Finding,
    LossTerms,
    ModelOutputs,
    Prompt,
    Request,
    Rollout,
    Row,
    SampleSettings,
)

if TYPE_CHECKING:
    from posttrain.loop.media import Media
    from posttrain.types import AnyDataset, LogProbs

logger = logging.getLogger(__name__)

# Number of tokens with the largest divergence per forward pass that are stored in the column worst_tokens of the completions
# table.
WORST = 5


def _unrewarded(completions: list[Any], **_: Any) -> list[None]:
    """Raise an error. Runs without rewards pass this placeholder as their reward function."""
    raise AssertionError("the reward placeholder of distillation was called")


def no_rewards(generation: RolloutBatch) -> RewardTable:
    """Return a reward table that has no reward functions."""
    return RewardTable(torch.empty(len(generation.rollouts), 0), [], torch.empty(0))


class DistillationTrainer(OnlineTrainer):
    """Trainer of distillation: a student is trained on the next-token distributions of a teacher. The config selects the
    completions, the divergence and the teacher.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        teacher_model: Teacher as a path, Hub id or model object, or a mapping from names to teachers. With several teachers,
            the column ``teacher_id`` selects one for each row, or ``args.teacher_weights`` mixes them. If None, ``args``
            selects the teacher.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with ``prompt`` and optionally ``completion``, or with ``messages``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        tools: Not supported. It must be None. To train with tools, use `GRPOTrainer`.
        teacher_processing_class: Tokenizer or processor of the teacher. If None, the tokenizer is loaded from the teacher's
            path or Hub id. If the teacher was built in memory, the student's tokenizer is used.
        teacher_server: Client of a server that scores completions (see `ServerTeacher`), or several clients by name.
        reward_funcs: Not supported. It must be None. Among the distillation methods, only MiniLLM and SDPO use rewards.
        formatting_func: Not supported. It must be None. Use ``dataset.map`` to create the columns ``prompt`` and ``completion``
            instead.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported. It must be None, because batches are built after completions are sampled.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        reward_processing_classes: Not used. Among the distillation methods, only MiniLLM and SDPO use rewards.
        rollout_func: Not supported. It must be None. Use `GRPOTrainer` instead.
        environment_factory: Not supported. It must be None. To train in environments, use `GRPOTrainer`.

    Reference: GKD, arXiv:2306.13649.

    >>> trainer = DistillationTrainer(student, teacher, train_dataset=prompts)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    METHOD: ClassVar[type[Distillation]] = Distillation
    method: Distillation
    args: Any

    def __init__(
        self,
        model: Model,
        teacher_model: Model | Mapping[str, Model] | None = None,
        args: DistillationConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        tools: Sequence[Callable] | None = None,
        *,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        reward_funcs: Rewards | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        rollout_engine: RolloutEngine | None = None,
        data_collator: Callable | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        if reward_funcs is not None and not self.METHOD.takes_rewards:
            raise ConfigError(
                f"{type(self).__name__} does not use rewards. Fix: remove reward_funcs, or use MiniLLM or SDPO."
            )
        if formatting_func is not None:
            raise ConfigError(
                "formatting_func is not supported. Fix: use dataset.map to create the columns prompt and completion."
            )
        # Additional data that the teacher needs for each completion, as JSON values. The keys are the mode and the number of
        # the completion.
        self.kept: dict[str, dict[int, Any]] = {"train": {}, "eval": {}}
        self.score_files: dict[str, ScoreFile] = {}
        self.columns: int | None = None
        # Tokens with the largest divergence, as pairs of the completion's number and a text.
        self._worst: list[tuple[float, str]] = []
        self._row_of: dict[float, dict[str, Any]] = {}
        # Processor of the teacher's images. None: the teacher reads the student's token ids.
        self.teacher_vision: Any = None

        rewards = reward_funcs or _unrewarded
        super().__init__(
            model,
            rewards,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_engine=rollout_engine,
            data_collator=data_collator,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            reward_processing_classes=reward_processing_classes,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self.record.listeners.append(self._listed)
        self.progress.watchers["step"].append(self._watch_tokens)
        # Teachers by name. A single teacher has the name "".
        self.teachers: dict[str, ModelTeacher] = {}
        self.servers: dict[str, ServerTeacher] = {}
        self.teacher_model: nn.Module | None = None
        self._make_teachers(teacher_model, teacher_processing_class, teacher_server)
        self._check_teacher_names()
        self._check_own_divergence()
        if self.keeps_completions:
            # Do not exchange completions between ranks, because their additional data is stored on only one rank.
            self.args.balance_ranks = False

    @property
    def axes(self) -> Axes:
        """Properties of the distillation loss."""
        return self.method.axes

    @property
    def may_read_images(self) -> bool:
        """Whether prompts may contain images. True if the student supports images."""
        return self.vision.images

    # Teachers ----------------------------------------------------------------------------------------------------

    @property
    def teacher(self) -> ModelTeacher:
        """The single teacher in this process. Reading this property raises an error if there is no teacher or if there are
        several teachers.
        """
        (teacher,) = self.teachers.values()
        return teacher

    @property
    def teacher_names(self) -> list[str]:
        """Names of the teachers, in the order of their numbers. A single teacher has the name ""."""
        return list(self.servers or self.teachers)

    @property
    def chosen_by_row(self) -> bool:
        """Whether the column ``teacher_id`` selects the teacher of each row."""
        return len(self.teacher_names) > 1 and self.args.teacher_weights is None

    def _make_teachers(self, teachers: object, tokenizer: Tokenizer, server: Any) -> None:
        args = self.args
        if self.vision.images and (self.score_files or server or args.teacher_model_server_url):
            raise ConfigError(
                "the rows have images, but files of scores and teacher servers support text only. Fix: use a "
                "teacher model in this process."
            )
        named = args.teacher_model_name_or_path
        if isinstance(teachers, str | Mapping) and named not in (None, teachers):
            raise ConfigError(
                f"teacher_model={teachers!r} and teacher_model_name_or_path={named!r} are both set, but both define the "
                "teacher. Fix: set only one of them."
            )
        if self.axes.support == "none" and (teachers is not None or server is not None):
            raise ConfigError(f"{self._name} does not use a teacher, but one was passed. Fix: remove it.")
        if self.axes.support == "none" or self.score_files:
            return
        if args.teacher_model_server_url or server is not None:
            self._score_on_servers(by_name(args.teacher_model_server_url if server is None else server), tokenizer)
        elif args.teacher_model_kind == "model":
            columns = []
            for name, teacher in by_name(named if teachers is None else teachers).items():
                self._other_teacher(teacher, tokenizer, name)
                columns.append(self.columns)
            self.columns = min((count for count in columns if count is not None), default=None)
        elif teachers is None:
            self._own_teacher(args.teacher_model_kind)
        else:
            raise ConfigError(
                f"teacher_model and teacher_model_kind={args.teacher_model_kind!r} define two different teachers. Fix: remove "
                "one of them."
            )

    def _score_on_servers(self, servers: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        """Connect to the teacher servers, send each of them a test request, and compare the server's tokenizer with the
        student's tokenizer.
        """
        args, named = self.args, by_name(self.args.teacher_model_name_or_path)
        probe = next(row.prompt_ids for row in self._rows_of([next(iter(self.train_dataset))]))
        trust = {"trust_remote_code": args.trust_remote_code, "revision": args.teacher_model_revision}
        for name, teacher in servers.items():
            client = teacher
            if isinstance(teacher, str):
                client = plugins.module("extensions.server.client").VLLMClient(teacher, role="teacher")
            expected = named.get(name)
            self.servers[name] = ServerTeacher(client, self.axes, expected=expected, probe=[*probe, *probe][:8])
            own = tokenizer or own_tokenizer(expected or self.servers[name].name, required=False, **trust)
            if own is not None and args.tokenizer_check != "off":
                self._compared(inner_tokenizer(own), None, None)

    def _check_teacher_names(self) -> None:
        """Check the names of several teachers in ``teacher_weights`` or in the column ``teacher_id``."""
        args, names = self.args, self.teacher_names
        weights = args.teacher_weights
        if weights is not None and set(weights) != set(names):
            raise ConfigError(
                f"teacher_weights has the names {sorted(weights)}, but the teachers are "
                f"{sorted(filter(None, names))}. Fix: pass several teachers by name (a dict as teacher_model, or in "
                "the config) and a weight for each."
            )
        if len(names) < 2:
            return
        if self.method.privileged or not self.shares_tokens or args.seq_kd:
            why = "samples from one" if args.seq_kd else "compares with one"
            raise ConfigError(f"{self._name} {why} teacher, but there are several: {names}. Fix: pass one of them.")
        if weights is None:
            eval_sets = (
                self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval_dataset": self.eval_dataset}
            )
            for name, dataset in {"train_dataset": self.train_dataset, **eval_sets}.items():
                if isinstance(dataset, datasets.Dataset):
                    values = dataset["teacher_id"] if "teacher_id" in dataset.column_names else [None]
                    for row, value in enumerate(values):
                        self.teacher_number(value, f"{name} row {row}: ")

    def teacher_number(self, value: object, where: str = "") -> float:
        """Return the number of a row's teacher. The number of a single teacher is 0.

        Raises:
            DataError: The name is unknown. The message starts with ``where``, which describes the row.
        """
        names = self.teacher_names
        if len(names) < 2:
            return 0.0
        if value not in names:
            raise DataError(
                f"{where}teacher_id={value!r} is not one of the teachers {names}. Fix: add a column teacher_id with "
                "one of these names in each row, or set teacher_weights."
            )
        return float(names.index(str(value)))

    def _own_teacher(self, kind: str) -> None:
        """Use the student as its own teacher, with its current, initial or averaged weights."""
        own = None if kind == "live" else Reference(self.model, fresh_adapter=self.fresh_adapter and kind == "base")
        if own is not None and own.copy is not None:
            self.teacher_model = own.copy.to(self.args.device)
            install_token_head(own.copy)
        if kind == "ema" and own is not None:
            whole = own.copy is not None
            self.add_callback(SyncRefModelCallback(own, self.accelerator) if whole else AdapterAverage(own))

        @contextmanager
        def running() -> Iterator[nn.Module]:
            with self.run.inference() as policy:
                if own is None:
                    yield policy
                else:
                    with own.active(policy) as model:
                        yield model

        self.teachers[""] = ModelTeacher(running, self.layout, True, self.pad_token_id)

    def _other_teacher(self, teacher: object, tokenizer: Tokenizer, name: str = "") -> None:
        args, loaded = self.args, isinstance(teacher, nn.Module)
        if loaded:
            names = ("teacher_model_init_kwargs", "teacher_model_revision")
            warn_of_unused({name: vars(args)[name] for name in names})
        # Do not load a tokenizer if there is no teacher. `load_teacher` then raises an error.
        if tokenizer is None and (loaded or teacher_id(teacher, args)):
            trust = {
                "trust_remote_code": args.trust_remote_code,
                "revision": None if loaded else args.teacher_model_revision,
            }
            tokenizer = own_tokenizer(teacher_id(teacher, args), required=not loaded, **trust)
        processor = tokenizer if is_processor(tokenizer) else None
        tokenizer = inner_tokenizer(tokenizer)
        model = load_teacher(teacher, self.args, self.model).to(self.args.device)
        install_token_head(model)
        if self.vision.images:
            self.vision.show_teacher(self.model, model, processor, self.teacher_vision)
        self.teacher_model, self.teacher_tokenizer = model, tokenizer or self.processing_class
        self.check_vocabularies(model, self.teacher_tokenizer)
        self._log_roles(teacher_id(teacher, args))
        self.checks.set_context(parts={f"teacher_model {name}".strip(): model if self.shares_tokens else None})
        layout = choose_layout(model, self.args, padded=False)
        fits = layout.dense_mask <= self.layout.dense_mask and layout.rope_switch is layout.rope_end is None
        shared = layout.kind == self.layout.kind == "tree" and fits
        running = functools.partial(frozen, model, self.accelerator.autocast)
        self.teachers[name] = ModelTeacher(running, layout, shared and self.shares_tokens, self.pad_token_id)

    @property
    def shares_tokens(self) -> bool:
        """Whether student and teacher use the same token ids."""
        return True

    def _log_roles(self, teacher: str) -> None:
        """Report a finding if teacher and student are the same model, because the divergence is then 0."""
        args = self.args
        revisions = {(args.model_init_kwargs or {}).get("revision") or "main", args.teacher_model_revision or "main"}
        trained = adapters_of(self.model) and not self.fresh_adapter
        student = get_config_model_id(config_of(causal_lm(self.model))) or ""
        same = teacher and teacher.rstrip("/") == student.rstrip("/") and len(revisions) == 1
        if not same or trained or self.can_dry_run:
            return
        finding = Finding(
            "PT-K006", "warning", f"the teacher is the same model as the student, {teacher!r}.", "teacher_model_name_or_path",
            "a divergence of a model from itself is 0, so nothing is learned.",
            "use a better model, or add privileged context to the teacher's prompt (SDFT, SDPO).",
        )  # fmt: skip
        with self.checks.preflight.record_check("config", ("PT-K006",)):
            self.checks.report([finding])

    def check_vocabularies(self, teacher: nn.Module, tokenizer: Tokenizer) -> None:
        """Raise an error if the teacher has a different vocabulary. Limit the logits of both models to ids that have a
        token.
        """
        widths = (logit_width(self.model), logit_width(teacher))
        if self.args.tokenizer_check == "off":
            self.columns = min(widths)
            return
        if widths[1] < len(tokenizer) and self.args.tokenizer_check == "error":
            raise ConfigError(
                f"the teacher has {widths[1]} logits, but its tokenizer has {len(tokenizer)} tokens, so the teacher has no "
                "probability for some tokens. Fix: pass teacher_processing_class if this is not the teacher's tokenizer, or "
                "set tokenizer_check='warn'."
            )
        match = self._compared(tokenizer, widths[1], generation_config_of(causal_lm(teacher)))
        self.columns = match.columns if match.verdict != "identical" else None

    def _compared(self, tokenizer: Tokenizer, width: int | None, generation_config: Any) -> TokenizerMatch:
        """Check that each token id has the same meaning for student and teacher. Return the result of the comparison."""
        own = generation_config_of(causal_lm(self.model))
        stops = (terminal_token_ids(self.processing_class, own), terminal_token_ids(tokenizer, generation_config))
        widths = (logit_width(self.model), width)
        match = compare_tokenizers(self.processing_class, tokenizer, widths=widths, stops=stops)
        options = {"mode": self.args.tokenizer_check, "method": type(self).__name__}
        with self.checks.preflight.record_check("config", ("PT-K001", "PT-K002", "PT-K003")):
            self.checks.report(require_same_tokens(match, on_policy=self.args.lmbda > 0, **options))
        return match

    def _choose_layout(self, model: nn.Module) -> Layout:
        """Choose the layout as in the parent class, but with one batch row per forward pass, because the teacher needs
        memory too.
        """
        return replace(super()._choose_layout(model), pass_tokens=0)

    # Data --------------------------------------------------------------------------------------------------------

    def make_prompt_source(self) -> PromptSource:
        """Create the prompt source. The source keeps all columns, because answers and privileged context are needed later."""
        source = super().make_prompt_source()
        source.drops_columns = False
        return source

    def prepare_datasets(self, train: AnyDataset, evaluation: EvalSets | None) -> tuple[Any, Any]:
        """Prepare prompts as in other online trainers. If the config uses the dataset's answers, tokenize them."""
        train = self.prepare(train, "train_dataset", training=True)
        return super().prepare_datasets(train, None if evaluation is None else self.prepare_evaluation(evaluation))

    def prepare(self, dataset: AnyDataset, name: str, *, training: bool = False) -> Any:
        """Tokenize the answers of a dataset if the config uses them. A prepared dataset is returned unchanged."""
        args, dataset = self.args, with_prompt_column(dataset)
        # The column names of a mapped stream are unknown.
        columns = get_dataset_column_names(dataset) if hasattr(dataset, "column_names") else []
        if "prompt_ids" in columns:
            return dataset
        # A dataset that this class has prepared also has prompt_ids, so these completion ids come from another source.
        # Remove them.
        if "completion_ids" in columns:
            dataset = dataset.remove_columns(["completion_ids"])
        answered = args.eval_mode != "student" and "completion" in columns
        if training:
            answered = args.lmbda < 1 and not args.seq_kd
        if answered and "completion" not in columns:
            raise DataError(
                f"{name} has no completion column, but lmbda={args.lmbda} trains on the dataset's completions. Fix: "
                "add a completion column, or set seq_kd=True (the teacher samples completions) or lmbda=1 (the "
                "student samples them)."
            )
        dataset = with_template_arguments(dataset, args.chat_template_kwargs if answered else None)
        if answered and self.vision.reader is not None:
            dataset, _ = self.vision.prepare_rows(
                dataset, branches=("completion",), begins=True, name=name, keep=columns
            )
        elif answered:
            limits = {"max_length": args.max_length, "max_prompt_length": args.max_prompt_length}
            dataset = tokenized_answers(dataset, self.processing_class, name=name, **limits)
        if args.teacher_scores:
            self._open_scores(dataset, name, training=training, answered=answered)
        return dataset

    def _open_scores(self, dataset: AnyDataset, name: str, *, training: bool, answered: bool) -> None:
        path = self.args.teacher_scores if training else self.args.eval_teacher_scores
        if path is None or not answered:
            raise ConfigError(
                f"teacher_scores is set, but there are no scores for the dataset {name!r}. Fix: score this dataset (posttrain "
                "teacher-scores) and set eval_teacher_scores, or remove eval_dataset."
            )
        file = self.score_files["train" if training else "eval"] = ScoreFile(path)
        file.check(dataset, self.processing_class, self.args.axes())
        # The teacher's scores contain only ids of the student's tokenizer.
        self.columns = len(self.processing_class)

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert dataset answers to rows. Without answers, raise NotImplementedError, because completions are sampled
        later.
        """
        if not examples or "completion_ids" not in examples[0]:
            raise NotImplementedError
        ids = [(list(example["prompt_ids"]), list(example["completion_ids"])) for example in examples]
        rows = [Row(prompt, [answer], [[1] * len(answer)]) for prompt, answer in ids]
        return self.vision.placed(rows, examples)

    @property
    def samples_completions(self) -> bool:
        """Whether completions are sampled. False: the student is trained only on the dataset's answers."""
        return self.args.lmbda > 0 or self.args.seq_kd

    @property
    def prompt_limit(self) -> int | None:
        """Maximum number of tokens of a prompt. The maximum for sampled completions equals the maximum for dataset rows."""
        args = self.args
        room = None if args.max_length is None else max(args.max_length - args.max_completion_length, 1)
        return min((most for most in (args.max_prompt_length, room) if most is not None), default=None)

    @property
    def can_dry_run(self) -> bool:
        """Whether there are reward functions that can be tested before training."""
        return self.method.takes_rewards and self.rewards.functions[0] is not _unrewarded

    # Sources of completions
    # ------------------------------------------------------------------------------------------------

    def samples(self, examples: Sequence[dict[str, Any]], settings: SampleSettings) -> list[bool]:
        """Return whether the student samples the completion of each example. The decision is random per prompt, and equal on
        all ranks.
        """
        if settings.mode == "eval":
            return ["completion_ids" not in example for example in examples]
        size = settings.group_size
        seed = self.args.seed * 1_000_003 + settings.number
        drawn = torch.rand(-(-len(examples) // size), generator=torch.Generator().manual_seed(seed)) < self.args.lmbda
        return drawn.repeat_interleave(size)[: len(examples)].tolist()

    def make_online(self) -> Online:
        """Create the components for sampling as in other online trainers.

        If the dataset has answers, a rank without examples needs no spare prompt in evaluation.
        """

        def spare(mode: str) -> list[dict[str, Any]]:
            row = self.spare_example
            return [] if mode == "eval" and "completion_ids" in row else [dict(row)]

        return replace(super().make_online(), spare=spare)

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """Return one completion per example. `samples` selects the examples that the student completes. Other completions
        are from the dataset or the teacher.
        """
        self._sampled = sampled = self.samples(examples, settings)
        if all(sampled):
            return self.student_samples(examples, settings)
        own = [example for example, mine in zip(examples, sampled, strict=True) if mine]
        others = [example for example, mine in zip(examples, sampled, strict=True) if not mine]
        mine = iter(self.student_samples(own, settings).rollouts if own else ())
        if self.args.seq_kd and settings.mode == "train":
            not_sampled = iter(self._teacher_rollouts(others, settings))
        else:
            not_sampled = iter([as_rollout(row, self.processing_class) for row in self.rows(others)])
        rollouts = [next(mine) if by_student else next(not_sampled) for by_student in sampled]
        chat = not isinstance(examples[0]["prompt"], str)
        return RolloutBatch(examples, *decoded(self.processing_class, rollouts, conversational=chat))

    def student_samples(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """Sample one completion per example from the student."""
        return super().sample(examples, settings)

    @functools.cached_property
    def _teacher_engine(self) -> Any:
        if self.teacher_model is None:
            raise ConfigError(
                "seq_kd=True needs a teacher model in this process to sample from. Fix: pass teacher_model."
            )
        return self.engine_on(self.teacher_model)

    def _teacher_rollouts(self, examples: list[dict[str, Any]], settings: SampleSettings) -> list[Rollout]:
        prompts = self.prompt_source.token_ids(examples)
        requests = [Request(prompt, pictures=Prompt.pictures_of(prompt)) for prompt in prompts]
        rollouts = self._teacher_engine.generate(requests, settings.sampling)
        # Remove the log-probs, because they are log-probs of the teacher and not of the student.
        return [replace(r, logp=[], pictures=request.pictures) for r, request in zip(rollouts, requests, strict=True)]

    # One generation ----------------------------------------------------------------------------------------------

    def score(self, rollouts: RolloutBatch, mode: str) -> RewardTable:
        """Compute the rewards of completions. If the method uses no rewards, return an empty reward table."""
        return super().score(rollouts, mode) if self.can_dry_run else no_rewards(rollouts)

    @property
    def scores_rewards(self) -> bool:
        """Whether completions have rewards."""
        return self.can_dry_run

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs) -> Advantages:
        """Compute advantages as in other online trainers, and store the additional data that the teacher needs."""
        advantages = super().advantages(rollouts, rewards, logps)
        if len(self._sampled) == len(rollouts.rollouts):
            advantages = replace(advantages, columns={"on_policy": [float(by_student) for by_student in self._sampled]})
        return self.keep(rollouts, advantages)

    @property
    def keeps_completions(self) -> bool:
        """Whether the teacher needs additional data for each completion."""
        return self.method.privileged or bool(self.servers or self.score_files)

    def keep(self, rollouts: RolloutBatch, found: Advantages) -> Advantages:
        """Assign a unique number to each completion, and store the additional data from `facts` under this number.

        Numbers are positive in training and negative in evaluation, and differ between ranks. If rows select their teacher,
        ``found`` also gets a column with the teacher's number.

        Returns:
            ``found`` with the new columns.
        """
        if self.chosen_by_row:
            chosen = [self.teacher_number(example.get("teacher_id")) for example in rollouts.examples]
            found = replace(found, columns={**found.columns, "teacher": chosen})
        sign, count = 1 if rollouts.mode == "train" else -1, len(rollouts.rollouts)
        keys = [sign * (self.accelerator.process_index * count + i + 1) for i in range(count)]
        if self.keeps_completions:
            facts, found = self.facts(rollouts, found)
            self.kept[rollouts.mode] = dict(zip(keys, facts, strict=True))
        return replace(found, columns={**found.columns, "key": [float(key) for key in keys]})

    def _listed(self, rows: list[dict[str, Any]], evaluation: bool) -> None:
        """Add the column ``worst_tokens`` to the completions table. This method runs in the main process before the table is
        written.
        """
        numbered = {row.pop("key"): row for row in rows if "key" in row}  # Rows from workers have no number.
        for row in rows:
            row["worst_tokens"] = ""
            if "teacher" in row:
                row["teacher"] = self.teacher_names[int(row["teacher"])]
            if not self.can_dry_run:
                del row["advantage"]
        if not evaluation:
            self._row_of = numbered

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        for key, text in parallel.all_gather_objects(self._worst, self.accelerator):
            if key in self._row_of:
                self._row_of[key]["worst_tokens"] += text
        self._worst = []
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def facts(self, rollouts: RolloutBatch, found: Advantages) -> tuple[list[Any], Advantages]:
        """Return the additional data that the teacher needs for each completion, as JSON values. The data is a row number in
        a score file, the scores from a server, or a prompt for the teacher.

        Returns:
            One value per completion, and ``found`` with columns that the loss needs.
        """
        if not self.servers:
            return [int(example["score_row"]) for example in rollouts.examples], found
        return teacher_servers(self.servers, rollouts.rollouts, found.columns.get("teacher")), found

    def _fact(self, key: int) -> Any:
        mode = "train" if key > 0 else "eval"
        fact = self.kept[mode][key]
        return self.score_files[mode].read(fact, self.axes.top_k) if self.score_files else fact

    def teacher_prompt(
        self, example: dict[str, Any], template: str, shown: Mapping[str, str], most: int | None
    ) -> list[int]:
        """Fill ``template`` with the prompt and the privileged texts, and tokenize the result. The length is limited, so
        that a completion fits after the result.
        """
        room = None if self.context is None else self.context - self.args.max_completion_length
        most = min((limit for limit in (most, room) if limit is not None), default=None)
        kwargs = self.args.chat_template_kwargs or {}
        return privileged_prompt(example, template, shown, self.processing_class, most=most, kwargs=kwargs)

    def make_reference(self) -> Reference | None:
        """Create a reference only if the loss has a GRPO term. Without a GRPO term, ``beta`` is the parameter of the
        divergence, not the weight of a KL penalty.
        """
        return super().make_reference() if self.method.takes_rewards else None

    # The loss ----------------------------------------------------------------------------------------------------

    @staticmethod
    def generalized_jsd_loss(
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor | None = None,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor:
        """Compute the divergence from logits. Name and arguments are those of TRL.

        If a subclass overrides this method, the override replaces the divergence in the loss. It receives the logits and
        labels of the loss tokens, and must return the mean over these tokens. Without an override, the loss is computed in
        chunks and does not call this method.

        Args:
            student_logits: Logits ``(B, T, V)`` of the student.
            teacher_logits: Logits ``(B, T, V)`` of the teacher.
            labels: Labels ``(B, T)``. Positions with the label -100 are excluded. None: no position is excluded.
            beta: Parameter of the divergence; see `posttrain.losses.distillation.divergence`.
            temperature: Temperature that divides the logits of the two models.
            reduction: ``batchmean`` (mean over positions with labels, or over B without labels), ``sum``, ``mean`` (mean
                over all elements) or ``none``.
            num_items_in_batch: Number that divides the sum. It overrides ``reduction``. None: ``reduction`` is used.

        Returns:
            A scalar. With ``none``, one value per position and token id.
        """
        log_q, log_p = ((logits / temperature).log_softmax(-1) for logits in (student_logits, teacher_logits))
        if labels is not None:
            log_q, log_p = log_q[labels != -100], log_p[labels != -100]
        log_m = log_p if beta == 1 else log_q
        if 0 < beta < 1:
            log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
        kl = functools.partial(torch.nn.functional.kl_div, log_m, reduction="none", log_target=True)
        jsd = kl(log_p) if beta == 0 else kl(log_q) if beta == 1 else beta * kl(log_p) + (1 - beta) * kl(log_q)
        if num_items_in_batch is not None:
            return jsd.sum() / num_items_in_batch
        if reduction == "batchmean":
            return jsd.sum() / max(len(jsd), 1)
        return jsd.sum() if reduction == "sum" else jsd.mean() if reduction == "mean" else jsd

    def _check_own_divergence(self) -> None:
        """Raise an error if `generalized_jsd_loss` is overridden, but the loss does not compare full logits of two models."""
        owner, axes = user_override(type(self), "generalized_jsd_loss"), self.axes
        self._own_divergence = None if owner is None else self.generalized_jsd_loss
        exact = (axes.support, axes.estimator, axes.prefix) == ("full", "exact", None)
        if owner is not None and not (exact and self.shares_tokens):
            raise ConfigError(
                f"{owner.__name__} overrides generalized_jsd_loss, which needs the logits of both models over one "
                f"vocabulary. This loss (support {axes.support!r}, estimator {axes.estimator!r}) does not compute "
                "them. Fix: use a teacher model in this process with loss_top_k=0 and without use_uld_loss, or "
                "override objective(outputs, batch)."
            )

    def comparison(self, batch: Batch) -> Any:
        """Return the function with which the student's output layer compares its logits with the teacher's logits. Return
        None if there is no teacher.
        """
        if self.axes.support == "none":
            return None
        options: dict[str, Any] = {"columns": self.columns, "policy_temperature": self.method.temperature}
        options |= {"without": self.never_written(self.vision, self.columns or logit_width(self.model))}
        options |= {"own": self._own_divergence}
        if self.method.privileged and "key" in batch.columns:
            return Comparison(self.axes, self.teacher.of_prompts(batch, self._fact), **options)
        names = self.teacher_names
        if len(names) < 2:
            return Comparison(self.axes, self.teacher_of(batch, *names), **options)
        say = functools.partial(self.teacher_of, batch)
        return Comparison(self.axes, shares_of_batch(batch, self.args.teacher_weights, names, say), **options)

    def teacher_of(self, batch: Batch, name: str = "", members: Sequence[int] | None = None) -> Any:
        """Return the outputs of one teacher, for all sequences of a batch or for the sequences in ``members``."""
        if self.score_files:
            return scores_of_batch(batch, self._fact, members)
        if self.servers:
            return scores_of_batch(batch, lambda key: TokenScores.of(self._fact(key)[name]), members)
        return self.teachers[name].of_batch(batch, members)

    @staticmethod
    def _watch_tokens(run: Run, batches: list[Batch], counts: Denominators) -> bool:
        """Raise an error if a step has no answer token. Log a warning if all completions of the step are excluded from the
        loss.
        """
        if counts.tokens == counts.sequences == 0:
            raise DataError(
                "an optimizer step has no answer token, so the student cannot learn from it. Fix: use longer completions."
            )
        if counts.tokens == 0:
            logger.warning(
                "all completions of step %d are excluded (truncated, too short, or not longer than the skipped "
                "tokens), so the step does not change the model.",
                run.progress.state.global_step + 1,
            )
        return True

    def never_written(self, vision: Media, width: int) -> Tensor | None:
        """Return the ids of image placeholders and markers below ``width``, which are never sampled. Without images,
        return None.
        """
        return None if vision.reader is None else torch.tensor(vision.reader.never(width), device=self.args.device)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """Compute the loss with `distillation_objective`. In training, also store the tokens with the largest divergence."""
        loss = super().objective(outputs, batch)
        if self.model.training and "gap" in outputs.compared and "key" in batch.columns:
            values = outputs.compared["divergence" if self.axes.estimator == "exact" else "gap"].detach().abs()
            sequence, targets = batch.sequence[batch.loss_mask].tolist(), batch.input_ids[batch.loss_mask].tolist()
            for i in values.topk(min(WORST, len(values))).indices.tolist():
                text = f"{self.processing_class.decode([targets[i]])!r} {float(values[i]):.2f}  "
                self._worst.append((float(batch.columns["key"][sequence[i]]), text))
        return loss

    def policy_terms(self, outputs: ModelOutputs, batch: Batch, extra: Tensor | None = None) -> LossTerms:
        """Compute GRPO's loss. ``extra (B, T)`` is added to the advantages of the tokens."""
        assert outputs.logp is not None and batch.advantages is not None
        shared = spread(batch.advantages, batch.sequence)
        return grpo_objective(
            outputs, replace(batch, advantages=shared if extra is None else shared + extra), self.args
        )

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """Return the state of the parent class, and the additional data of completions that were not used for training yet."""
        return super().state_to_save() | {"kept": {} if self.window.used_up else self.kept["train"]}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_to_save` returned."""
        super().load_saved_state(state)
        self.kept["train"] = {int(key): fact for key, fact in state.get("kept", {}).items()}
