"""`AsyncGRPOTrainer`: GRPO on rollouts that other processes sample during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from posttrain.errors import ConfigError
from posttrain.extensions.asynchronous.grpo_config import AsyncGRPOConfig
from posttrain.extensions.asynchronous.grpo_method import AsyncGRPO
from posttrain.extensions.asynchronous.rollouts import warn_of_reward_models
from posttrain.extensions.asynchronous.trainer import AsyncTrainer
from posttrain.loop.rollout import Online, logps_of_sampler
from posttrain.methods.online_config import reject_reshaped_sampling
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.episodes.driver import take_harness
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


class AsyncGRPOTrainer(AsyncTrainer):
    """Group-relative policy optimization on rollouts that other processes sample (experimental).

    Workers sample completions with the newest weights that they have received, and score these completions. The trainer takes
    rollouts from a queue and drops rollouts whose weights are too old. The loss corrects for the difference
    between the current weights and the weights that sampled a rollout.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        reward_funcs: Reward functions, as in `GRPOTrainer`. They run in the workers, so they must be defined at the top
            level of a module.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with the column ``prompt``, and the columns that reward functions read. If None, the
            prompts come from ``environment_factory``.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        tools: Python functions that the model may call. Each function needs type hints and a docstring.
        environment_factory: Function that creates an environment for each completion, or a mapping from names to such
            functions. With a mapping, the dataset column ``environment`` selects the function.
        rollout_worker: Worker that samples rollouts instead of the trainer's worker processes: an object with the methods of
            `RolloutWorkerProtocol`, or a `HarnessRolloutWorker`, which runs an agent.
        weight_transfer: Object that sends weights to ``rollout_worker``. See `WeightTransferProtocol`.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        reward_processing_classes: Tokenizer, or list of tokenizers, of the reward models. If None, they are loaded
            together with the reward models.
        engine_factory: Picklable function that creates the engine of a worker. If None, ``args.worker_engine`` selects
            the engine.
        rollout_func: Not supported, must be None. Pass ``rollout_worker`` instead.
        harness: Agent code of the user, which calls an OpenAI-compatible endpoint of the model. See `Harness`.
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

    Reference: AReaL, arXiv:2505.24298; DeepSeekMath, arXiv:2402.03300, equation 3.

    >>> trainer = AsyncGRPOTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", short, train_dataset=data)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    METHOD = AsyncGRPO
    method: AsyncGRPO
    _tag_names: ClassVar[list[str]] = ["posttrain", "async-grpo"]
    args: AsyncGRPOConfig

    def __init__(
        self,
        model: Model,
        reward_funcs: Rewards | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: TrainSet | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: Adapter | None = None,
        tools: Sequence[Callable] | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        *,
        eval_dataset: EvalSets | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        engine_factory: Callable | None = None,
        rollout_func: Callable | None = None,
        harness: Any = None,
        rollout_engine: RolloutEngine | None = None,
        quantization_config: Quantization | None = None,
        data_collator: Callable | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> None:
        rollout_worker, harness, reward_funcs = take_harness(rollout_worker, harness, reward_funcs)
        sent: dict[str, Any] = {
            "tools": tools,
            "environment_factory": environment_factory,
            "harness": harness,
            "reward_processing_classes": reward_processing_classes,
        }
        sent |= {"reward_funcs": reward_funcs, "engine_factory": engine_factory}
        if rollout_worker is None:
            warn_of_reward_models(reward_funcs)
        if rollout_func is not None:
            raise ConfigError(
                "rollout_func runs in the trainer, but asynchronous GRPO samples in workers. Pass rollout_worker."
            )
        # Tools and environments may return images after the prompt, but samples support images only in the prompt.
        self._prompt_images = not (tools or environment_factory)
        self.sends(sent, rollout_worker, weight_transfer, processing_class)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            environment_factory=environment_factory,
            eval_dataset=eval_dataset,
            reward_processing_classes=reward_processing_classes,
            harness=harness,
            rollout_engine=rollout_engine,
            quantization_config=quantization_config,
            data_collator=data_collator,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        # If the sampling options forbid token ids, the workers' log-probs include the effect of every option that
        # changes the distribution, for example of a penalty. Reject options that the trainer's log-probs cannot reproduce.
        if self.run.progress.truncation.never:
            reject_reshaped_sampling(self.args)
        self.begins()

    def make_online(self) -> Online:
        """Create the components that generate completions for evaluation. The sampler's log-probs are taken from the
        engine, because the evaluation engine always has the policy's current weights.
        """
        logps = lambda run, batch: {"rollout_logp": logps_of_sampler(run, batch)}  # noqa: E731
        # Both the workers and the evaluation engine return log-probs of the distribution they sampled from.
        return replace(super().make_online(), logps=logps, follows_truncation=True)
