"""`GRPOTrainer`, with TRL's signature."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from posttrain.errors import ConfigError
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.scoring import by_column
from posttrain.loop.sync_reference import SyncRefModelCallback
from posttrain.methods.grpo.config import GRPOConfig, check_correction
from posttrain.methods.grpo.objective import GRPO
from posttrain.models.architecture import config_of, text_of
from posttrain.report.completions import CompletionsHubCallback
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

logger = logging.getLogger(__name__)


def _active_dropout(model: nn.Module) -> str:
    """Describe the first module that adds random noise to the model during training, such as dropout. Return "" if there is
    no such module.
    """
    for name, module in model.named_modules():
        if hasattr(module, "pvera_lambda_d"):
            return f"the noise of the PVeRA adapter in {name}"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name}={module.p}"
    rate = getattr(text_of(config_of(model)), "attention_dropout", 0.0)
    return f"attention_dropout={rate}" if rate else ""


class GRPOTrainer(OnlineTrainer):
    """Trainer of group-relative policy optimization (GRPO). A completion's baseline is the mean reward of its group.

    GRPO needs no value model.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        reward_funcs: Reward function ``f(prompts, completions, **columns) -> list[float | None]``, reward model, or path or
            Hub id of a reward model. A list combines several of these.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with the column ``prompt``, and the columns that reward functions read. If None, the
            prompts come from ``environment_factory``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        reward_processing_classes: Tokenizer of the reward model, or a list of tokenizers if there are several reward models.
            If None, the tokenizers are loaded together with the reward models.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        tools: Python functions that the model may call. Each function needs type hints and a docstring.
        rollout_func: Function that samples completions instead of an engine. It receives a list of prompts and returns a
            dict of lists.
        environment_factory: Function that creates an environment for each completion, or a mapping from names to such
            functions. With a mapping, the column ``environment`` selects the function of each row.
        harness: Agent code of the user. It calls an OpenAI-compatible endpoint of the model. See `Harness`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported. It must be None, because batches are built after completions are sampled.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.

    Reference: DeepSeekMath, arXiv:2402.03300, equations 3 and 4.

    >>> def short(completions, **kwargs):
    ...     return [-len(text) / 100 for text in completions]
    >>> trainer = GRPOTrainer(model, short, train_dataset=prompts)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    METHOD: ClassVar[type[GRPO[Any]]] = GRPO
    method: GRPO[Any]
    args: GRPOConfig

    def __init__(
        self,
        model: Model,
        reward_funcs: Rewards | None = None,
        args: GRPOConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        *,
        harness: Any = None,
        rollout_engine: RolloutEngine | None = None,
        data_collator: Callable | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> None:
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            harness=harness,
            rollout_engine=rollout_engine,
            data_collator=data_collator,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        args = self.args
        if args.scale_rewards == "group":
            self.reward_watch.min_group_std = args.min_group_std
        if not self.run.online.samples_policy:
            check_correction(args)
        if args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(self.reference, self.accelerator))
        if args.log_completions_hub_repo:
            self.add_callback(CompletionsHubCallback(args.log_completions_hub_repo))
        if dropout := _active_dropout(self.model):
            fix = "Replace PVeRA with another adapter type" if "PVeRA" in dropout else "Set disable_dropout=True"
            logger.warning(
                "%s is active during training, so the policy's log-probs contain random noise, but the old log-probs in the "
                "importance ratio do not. %s.", dropout, fix,
            )  # fmt: skip

    # The entropy bonus -------------------------------------------------------------------------------------------

    @property
    def entropy_coef(self) -> float:
        """Coefficient of the entropy bonus, fixed or adaptive."""
        return self.run.progress.own.coefficient

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save and self.args.use_adaptive_entropy:
            self.run.progress.own.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.args.use_adaptive_entropy:
            self.run.progress.own = self.run.progress.own.loaded(checkpoint)

    # Attributes that callbacks and reward functions read, by TRL's names ---------------------------------------------

    @property
    def _logs(self) -> dict[str, Any]:
        return by_column(self.run.progress.shown, self.rewards.names)

    @property
    def _buffered_inputs(self) -> Any:
        return self.window.slices

    @_buffered_inputs.setter
    def _buffered_inputs(self, value: object) -> None:
        if value is not None:
            raise ConfigError(
                "_buffered_inputs contains batches of packed prefix trees and cannot be replaced. Set it to None to sample "
                "new completions."
            )
        self.window.slices = None
