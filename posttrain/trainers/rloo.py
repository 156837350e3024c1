"""`RLOOTrainer`, with TRL's signature."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from posttrain.loop.online import OnlineTrainer
from posttrain.loop.scoring import by_column
from posttrain.loop.sync_reference import SyncRefModelCallback
from posttrain.methods.rloo import CLIPPED_MOST, CLIPPED_STEPS, RLOO, RLOOConfig
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


class RLOOTrainer(OnlineTrainer):
    """Trainer of RLOO: REINFORCE with a leave-one-out baseline. The baseline of a completion is the mean reward of all other
    completions of the same prompt.

    The KL penalty is subtracted from the reward. It is not a term of the loss.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        reward_funcs: Reward function ``f(prompts, completions, **columns) -> list[float | None]``, reward model, or path or
            Hub id of a reward model. A list combines several of these.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with the column ``prompt``, and the columns that reward functions read.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        reward_processing_classes: Tokenizer of the reward model, or a list of tokenizers if there are several reward models.
            If None, the tokenizers are loaded together with the reward models.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported. It must be None, because batches are built after completions are sampled.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        tools: Not supported. It must be None. To train with tools, use `GRPOTrainer`.
        rollout_func: Not supported. It must be None. Use `GRPOTrainer` instead.
        environment_factory: Not supported. It must be None. To train in environments, use `GRPOTrainer`.

    Reference: Back to basics, arXiv:2402.14740.

    >>> def short(completions, **kwargs):
    ...     return [-len(text) / 100 for text in completions]
    >>> trainer = RLOOTrainer(model, short, train_dataset=prompts)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    METHOD = RLOO
    method: RLOO
    _paper: ClassVar[dict[str, str]] = {
        "title": "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "id": "2402.14740",
    }
    args: RLOOConfig

    @property
    def _logs(self) -> dict[str, list]:
        return by_column(self.run.progress.shown, self.rewards.names)

    def __init__(
        self,
        model: Model,
        reward_funcs: Rewards | None = None,
        args: RLOOConfig | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        *,
        rollout_engine: RolloutEngine | None = None,
        data_collator: Callable | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
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
            rollout_engine=rollout_engine,
            data_collator=data_collator,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self._clipped_steps, self._last_logged = 0, 0
        if self.args.vllm_importance_sampling_correction and not self.run.online.samples_policy:
            logger.warning(
                "the engine does not compute exactly the policy's probabilities, so completions are weighted by the ratio of "
                "both probabilities (vllm_importance_sampling_mode=%r). Set "
                "vllm_importance_sampling_correction=False to disable the weight.",
                self.args.vllm_importance_sampling_mode,
            )
        if self.args.sync_ref_model and self.reference is not None:
            self.add_callback(SyncRefModelCallback(self.reference, self.accelerator))

    def reduced_metrics(self, mode: str) -> dict[str, float]:
        metrics = super().reduced_metrics(mode)
        if mode == "train":
            self._watch_clipping(metrics.get("clip_ratio/region_mean", 0.0))
        return metrics

    def _watch_clipping(self, share: float) -> None:
        """Log a warning if most sequences are clipped in several consecutive steps.

        RLOO has one importance ratio per sequence. Even small updates can move it outside the clip range, and clipped
        sequences have no gradient.
        """
        if not self.args.outlives_weights:
            return
        steps, self._last_logged = self.state.global_step - self._last_logged, self.state.global_step
        before = self._clipped_steps
        self._clipped_steps = before + steps if share > CLIPPED_MOST else 0
        if before < CLIPPED_STEPS <= self._clipped_steps:
            logger.warning(
                "%.0f%% of the sequences were clipped over the last %d steps, so they had no gradient. RLOO has one ratio per "
                "completion, which grows with the completion's length. Set gradient_accumulation_steps to a multiple of "
                "steps_per_generation * num_iterations, decrease learning_rate, or use GRPO with "
                "importance_sampling_level='sequence'.",
                100 * share, self._clipped_steps,
            )  # fmt: skip
