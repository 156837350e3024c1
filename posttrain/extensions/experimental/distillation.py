"""Trainers for TRL's distillation methods IW-OPD, MiniLLM, SDFT, SDPO and SSD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import torch

from posttrain.errors import ConfigError
from posttrain.extensions.experimental.distillation_methods import (
    IWOPD,
    SDFT,
    SDPO,
    SHORT,
    SSD,
    THINKING,
    IWOPDConfig,
    MiniLLM,
    MiniLLMConfig,
    SDFTConfig,
    SDPOConfig,
    SSDConfig,
    _require_context,
)
from posttrain.loop.rollout import batch_number
from posttrain.loop.samplers import SingleTurn
from posttrain.losses.distillation import discounted_returns
from posttrain.methods.distillation.data import joined_text, text_of
from posttrain.metrics import mean
from posttrain.models import parallel
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
    Rewards,
    Tokenizer,
    TrainSet,
)
from posttrain.trainers.distillation import DistillationTrainer
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, SampleSettings

if TYPE_CHECKING:
    from posttrain.types import AnyDataset


class IWOPDTrainer(DistillationTrainer):
    """On-policy distillation with a policy gradient. Early tokens of a completion have larger weights. An importance ratio
    corrects for the difference between the current weights and the weights that sampled the completion.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        teacher_model: Teacher as a path, Hub id or model object, or a mapping from names to teachers. With several
            teachers, the column ``teacher_id`` selects the teacher of each row, or ``args.teacher_weights`` mixes them.
            If None, ``args`` sets the teacher.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        train_dataset: Dataset with ``prompt`` (and ``completion``), or with ``messages``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        teacher_processing_class: Tokenizer or processor of the teacher. If None, the tokenizer is loaded from the teacher's
            path or Hub id. For a teacher that was built in memory, the tokenizer is assumed to equal the student's.
        teacher_server: Client of a server that scores completions, see `ServerTeacher`; or a mapping from names to
            clients.
        reward_funcs: Not supported, must be None. Only MiniLLM and SDPO use rewards.
        reward_processing_classes: Not used. Only MiniLLM and SDPO use rewards.
        formatting_func: Not supported, must be None. Map the dataset to ``prompt`` and ``completion`` instead.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        tools: Not supported, must be None. Use `GRPOTrainer`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        rollout_func: Not supported, must be None. Use `GRPOTrainer`.
        environment_factory: Not supported, must be None. Use `GRPOTrainer`.

    Reference: IW-OPD, arXiv:2606.22600.
    """

    METHOD = IWOPD
    _name: ClassVar[str] = "IW-OPD"
    args: IWOPDConfig

    def __init__(
        self,
        model: Model,
        teacher_model: Model | None = None,
        args: IWOPDConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Adapter | None = None,
        *,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        reward_funcs: Rewards | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        formatting_func: Callable[[dict], str] | None = None,
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
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            formatting_func=formatting_func,
            quantization_config=quantization_config,
            tools=tools,
            rollout_engine=rollout_engine,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )


class MiniLLMTrainer(DistillationTrainer):
    """Distillation that uses the negative reverse KL to the teacher as a reward for each token. Rewards of whole
    completions can be added to these token rewards.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        teacher_model: Teacher as a path, Hub id or model object, or a mapping from names to teachers. With several
            teachers, the column ``teacher_id`` selects the teacher of each row, or ``args.teacher_weights`` mixes them.
            If None, ``args`` sets the teacher.
        reward_funcs: Reward function ``f(prompts, completions, **columns) -> list[float | None]``, reward model, path
            or Hub id of a reward model, or a list of these.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with ``prompt`` (and ``completion``), or with ``messages``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        reward_processing_classes: Tokenizer, or list of tokenizers, of the reward models. If None, they are loaded
            together with the reward models.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        rollout_func: Not supported, must be None. Use `GRPOTrainer`.
        teacher_processing_class: Tokenizer or processor of the teacher. If None, the tokenizer is loaded from the teacher's
            path or Hub id. For a teacher that was built in memory, the tokenizer is assumed to equal the student's.
        teacher_server: Client of a server that scores completions, see `ServerTeacher`; or a mapping from names to
            clients.
        formatting_func: Not supported, must be None. Map the dataset to ``prompt`` and ``completion`` instead.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        tools: Not supported, must be None. Use `GRPOTrainer`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        environment_factory: Not supported, must be None. Use `GRPOTrainer`.

    Reference: MiniLLM, arXiv:2306.08543.
    """

    METHOD = MiniLLM
    args: MiniLLMConfig

    def __init__(
        self,
        model: Model,
        teacher_model: Model | None = None,
        reward_funcs: Rewards | None = None,
        args: MiniLLMConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        rollout_func: Callable | None = None,
        *,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        formatting_func: Callable[[dict], str] | None = None,
        quantization_config: Quantization | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_engine: RolloutEngine | None = None,
        data_collator: Callable | None = None,
        compute_metrics: Metrics | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        super().__init__(
            model,
            teacher_model,
            args,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            rollout_func=rollout_func,
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            formatting_func=formatting_func,
            quantization_config=quantization_config,
            tools=tools,
            rollout_engine=rollout_engine,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            environment_factory=environment_factory,
        )

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """Compute ``GRPO(A + sum gamma^i (log p - log q)) + KL(q || p)``, where p is the teacher and q the student."""
        args, returns = self.args, None
        if args.rkl_advantage:
            gap = torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)
            gap = gap.masked_scatter(batch.loss_mask, outputs.compared["gap"])  # (B, T)
            credit = {"gamma": args.gamma, "length_normalization": args.length_normalization}
            returns = discounted_returns(-gap, batch.loss_mask, batch.sequence, **credit)
        single = super().objective(outputs, batch)
        policy = self.policy_terms(outputs, batch, returns)
        extra = [*policy.extra, single] if args.single_step_decomposition else policy.extra
        return replace(policy, extra=extra, metrics=single.metrics | policy.metrics)


class SDFTTrainer(DistillationTrainer):
    """Self-distillation. The teacher is the student itself, but the teacher's prompt also contains the row's
    ``privileged_context``.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with ``prompt`` and ``privileged_context``, which only the teacher reads.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        teacher_model: Separate teacher. If None, the student is its own teacher, with the weights that
            ``args.teacher_model_kind`` selects.
        teacher_processing_class: Tokenizer or processor of the teacher. If None, the tokenizer is loaded from the teacher's
            path or Hub id. For a teacher that was built in memory, the tokenizer is assumed to equal the student's.
        teacher_server: Client of a server that scores completions, see `ServerTeacher`; or a mapping from names to
            clients.
        reward_funcs: Not supported, must be None. Only MiniLLM and SDPO use rewards.
        reward_processing_classes: Not used. Only MiniLLM and SDPO use rewards.
        formatting_func: Not supported, must be None. Map the dataset to ``prompt`` and ``completion`` instead.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        tools: Not supported, must be None. Use `GRPOTrainer`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        rollout_func: Not supported, must be None. Use `GRPOTrainer`.
        environment_factory: Not supported, must be None. Use `GRPOTrainer`.

    Reference: Self-Distillation Fine-Tuning, arXiv:2601.19897.
    """

    METHOD = SDFT
    args: SDFTConfig

    def __init__(
        self,
        model: Model,
        args: SDFTConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        *,
        teacher_model: Model | None = None,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        reward_funcs: Rewards | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        quantization_config: Quantization | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_engine: RolloutEngine | None = None,
        data_collator: Callable | None = None,
        compute_metrics: Metrics | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        super().__init__(
            model,
            teacher_model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            formatting_func=formatting_func,
            quantization_config=quantization_config,
            tools=tools,
            rollout_engine=rollout_engine,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )

    def prepare(self, dataset: AnyDataset, name: str, *, training: bool = False) -> Any:
        """Tokenize a dataset. Raise an error if the column ``privileged_context`` is missing, or empty in any row."""
        _require_context(dataset, name)
        for row, value in enumerate(dataset["privileged_context"] if isinstance(dataset, datasets.Dataset) else ()):
            joined_text(value, f"{name} row {row}: ")
        return super().prepare(dataset, name, training=training)

    def _hinted(self, example: dict[str, Any]) -> list[int]:
        shown, args = {"privileged_context": joined_text(example.get("privileged_context"))}, self.args
        return self.teacher_prompt(example, args.teacher_prompt_template, shown, args.max_prompt_length)

    def student_samples(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """Sample completions of the student. With ``generate_from_teacher``, the student completes the teacher's prompts,
        which contain ``privileged_context``, instead of the student's prompts.
        """
        if not self.args.generate_from_teacher:
            return super().student_samples(examples, settings)
        single = SingleTurn(self.weight_sync, self.prompt_source, self.processing_class)
        rollouts = single.complete([self._hinted(example) for example in examples], settings.sampling)
        prompts = self.prompt_source.token_ids(examples)
        rollouts = [replace(r, prompt_ids=ids, logp=[]) for r, ids in zip(rollouts, prompts, strict=True)]
        return single.batch_of(examples, rollouts)

    def facts(self, rollouts: RolloutBatch, found: Advantages) -> tuple[list[Any], Advantages]:
        """Return the teacher's prompt for each completion. Exclude the first ``num_loss_tokens_to_skip`` tokens from
        the loss.
        """
        if skip := self.args.num_loss_tokens_to_skip:
            keep = [[int(i >= skip) for i in range(len(rollout.token_ids))] for rollout in rollouts.rollouts]
            found = replace(found, keep=keep)
        return [self._hinted(example) for example in rollouts.examples], found


class SDPOTrainer(DistillationTrainer):
    """Self-distillation. The teacher is the student itself, but the teacher's prompt also contains a successful completion
    of the student's prompt.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        reward_funcs: Reward function ``f(prompts, completions, **columns) -> list[float | None]``, reward model, path
            or Hub id of a reward model, or a list of these.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with the column ``prompt``, and the columns that reward functions read.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        reward_processing_classes: Tokenizer, or list of tokenizers, of the reward models. If None, they are loaded
            together with the reward models.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        teacher_model: Separate teacher. If None, the student is its own teacher, with the weights that
            ``args.teacher_model_kind`` selects.
        teacher_processing_class: Tokenizer or processor of the teacher. If None, the tokenizer is loaded from the teacher's
            path or Hub id. For a teacher that was built in memory, the tokenizer is assumed to equal the student's.
        teacher_server: Client of a server that scores completions, see `ServerTeacher`; or a mapping from names to
            clients.
        formatting_func: Not supported, must be None. Map the dataset to ``prompt`` and ``completion`` instead.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        tools: Not supported, must be None. Use `GRPOTrainer`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        rollout_func: Not supported, must be None. Use `GRPOTrainer`.
        environment_factory: Not supported, must be None. Use `GRPOTrainer`.

    Reference: Self-Distillation Policy Optimization, arXiv:2601.20802.
    """

    METHOD = SDPO
    args: SDPOConfig

    def __init__(
        self,
        model: Model,
        reward_funcs: Rewards | None = None,
        args: SDPOConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        *,
        teacher_model: Model | None = None,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        formatting_func: Callable[[dict], str] | None = None,
        quantization_config: Quantization | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_engine: RolloutEngine | None = None,
        data_collator: Callable | None = None,
        compute_metrics: Metrics | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        if reward_funcs is None:
            raise ConfigError("SDPO needs reward_funcs, which determine the successful completions.")
        super().__init__(
            model,
            teacher_model,
            args,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            formatting_func=formatting_func,
            quantization_config=quantization_config,
            tools=tools,
            rollout_engine=rollout_engine,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )

    def prepare(self, dataset: AnyDataset, name: str, *, training: bool = False) -> Any:
        """Tokenize a dataset. With ``include_environment_feedback``, raise an error if the dataset has no column
        ``privileged_context``.
        """
        if self.args.include_environment_feedback:
            _require_context(dataset, name)
        return super().prepare(dataset, name, training=training)

    def facts(self, rollouts: RolloutBatch, found: Advantages) -> tuple[list[Any], Advantages]:
        """Return the teacher's prompt for each completion, and add the column ``active`` to the advantages. ``active`` is 1
        if the teacher's prompt contains a hint, else 0.
        """
        size, rewards = rollouts.group_size, found.totals.tolist()
        # Gather the texts of all ranks, because completions of the same prompt may be on several ranks.
        texts = parallel.all_gather_objects([rollout.text or "" for rollout in rollouts.rollouts], self.accelerator)
        draw = torch.Generator().manual_seed(self.args.seed + batch_number(self.run, rollouts.mode))
        prompts, active = [], []
        for own, (example, rollout) in enumerate(
            zip(rollouts.examples, rollouts.rollouts, strict=True), start=found.start
        ):
            group = range(own // size * size, min(own // size * size + size, len(rewards)))
            hint = self._hint(example, [texts[j] for j in self._successes(rewards, own, group)], draw)
            active.append(float(any(hint.values())))
            prompts.append(self._shown(example, hint) if active[-1] else rollout.prompt_ids)
        share = mean(torch.tensor(active))
        self.run.log({"self_distillation/reprompt_sample_fraction": share}, rollouts.mode)
        return prompts, replace(found, columns={**found.columns, "active": active})

    def _successes(self, rewards: list[float], own: int, group: range) -> list[int]:
        args = self.args
        if not args.use_successful_as_teacher:
            return []
        successes = [j for j in group if rewards[j] >= args.success_reward_threshold]
        return [j for j in successes if j != own or not args.dont_reprompt_on_self_success]

    def _hint(self, example: dict[str, Any], successes: list[str], draw: torch.Generator) -> dict[str, str]:
        """Return the texts ``solution`` and ``feedback`` for the teacher's prompt. A text is empty if it is not available."""
        args, hint = self.args, {"solution": "", "feedback": ""}
        if successes:
            chosen = successes[int(torch.randint(len(successes), (), generator=draw))]
            chosen = THINKING.sub(r"\1", chosen) if args.remove_thinking_from_demonstration else chosen
            hint["solution"] = args.solution_template.format(successful_previous_attempt=chosen)
        context = text_of(example.get("privileged_context"))
        only = hint["solution"] and args.environment_feedback_only_without_solution
        if args.include_environment_feedback and context.strip() and not only:
            hint["feedback"] = args.feedback_template.format(feedback_raw=context)
        return hint

    def _shown(self, example: dict[str, Any], hint: dict[str, str]) -> list[int]:
        return self.teacher_prompt(example, self.args.reprompt_template, hint, self.args.max_reprompt_len)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """Compute ``(1 - w) GRPO + w divergence``. The divergence of a completion is computed only if the teacher's prompt
        contains a hint.
        """
        loss = super().objective(outputs, batch)
        if self.axes.policy:
            policy = self.policy_terms(outputs, batch)
            weighted = replace(policy, terms=self.axes.policy * policy.terms)
            loss = replace(loss, extra=[*loss.extra, weighted], metrics=policy.metrics | loss.metrics)
        return loss


class SSDTrainer(DistillationTrainer):
    """Simple self-distillation: supervised fine-tuning on completions that the model samples at a different
    temperature.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with the column ``prompt``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        teacher_model: Not supported, must be None. There is no teacher.
        teacher_processing_class: Not used. There is no teacher.
        teacher_server: Not supported, must be None. There is no teacher.
        reward_funcs: Not supported, must be None. Only MiniLLM and SDPO use rewards.
        reward_processing_classes: Not used. Only MiniLLM and SDPO use rewards.
        formatting_func: Not supported, must be None. Map the dataset to ``prompt`` and ``completion`` instead.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        tools: Not supported, must be None. Use `GRPOTrainer`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        rollout_func: Not supported, must be None. Use `GRPOTrainer`.
        environment_factory: Not supported, must be None. Use `GRPOTrainer`.

    Reference: arXiv:2604.01193.
    """

    METHOD = SSD
    args: SSDConfig

    def __init__(
        self,
        model: Model,
        args: SSDConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        *,
        teacher_model: Model | None = None,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        reward_funcs: Rewards | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        quantization_config: Quantization | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_engine: RolloutEngine | None = None,
        data_collator: Callable | None = None,
        compute_metrics: Metrics | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        super().__init__(
            model,
            teacher_model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            formatting_func=formatting_func,
            quantization_config=quantization_config,
            tools=tools,
            rollout_engine=rollout_engine,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )

    def keep(self, rollouts: RolloutBatch, found: Advantages) -> Advantages:
        """Store the data that the parent class stores for each completion. Exclude blank and very short completions from
        the loss.
        """
        texts, left_out = [(rollout.text or "").strip() for rollout in rollouts.rollouts], rollouts.left_out
        if self.args.filter_empty:
            left_out = {i for i, text in enumerate(texts) if not text or ("\n" not in text and len(text) < SHORT)}
        active = [float(i not in left_out) for i in range(len(texts))]
        self.run.log({"ssd/active_sample_ratio": mean(torch.tensor(active))}, rollouts.mode)
        return replace(super().keep(rollouts, found), left_out=frozenset(left_out))
