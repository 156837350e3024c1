"""`OnlineDPOTrainer`: DPO on pairs of sampled completions. Its constructor has the signature of TRL's trainer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from posttrain.errors import ConfigError
from posttrain.extensions.experimental.online_dpo_method import TIES_MOST, OnlineDPO, OnlineDPOConfig
from posttrain.loop.build import as_config
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.rollout import Online, logps
from posttrain.models import parallel
from posttrain.models.reference import Reference, check_reference, log_own_checkpoint
from posttrain.rewards.call import one_each
from posttrain.rewards.judges import JudgeReward, PairRewards
from posttrain.rewards.model import WholeTextReward
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch, sampler_gap
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
from posttrain.types import SampleSettings

if TYPE_CHECKING:
    from posttrain.loop.run import Run
    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)


class OnlineDPOTrainer(OnlineTrainer):
    """Sample two completions per prompt, and train with the DPO loss to prefer the better completion.

    The better completion has the higher reward, or is preferred by the judge. Ties do not contribute to the loss.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        ref_model: Reference model. If None, the reference is the policy with its initial weights: a frozen copy, or, with
            ``peft_config``, the policy with its adapter disabled.
        reward_funcs: Reward model, path or Hub id of a reward model, reward function, or a list of these. Functions receive the
            first completions of all prompts, followed by the second completions. Exactly one of ``reward_funcs`` and
            ``judge`` must be set.
        args: Training arguments. They must be passed.
        data_collator: Not supported. It must be None, because batches are built after completions are sampled.
        train_dataset: Dataset with the column ``prompt``. It must be passed.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer. Required if ``model`` is an object.
        reward_processing_classes: Tokenizer of the reward model, or a list of tokenizers if there are several reward models.
            If None, they are loaded together with the reward models.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        judge: Judge that compares two completions. It replaces ``reward_funcs``. The judge is a `BasePairwiseJudge`,
            `BaseRankJudge` or `BaseBinaryJudge`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        quantization_config: Quantization with which ``model`` is loaded, if it is a path or Hub id.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        tools: Not supported. It must be None. To train with tools, use `GRPOTrainer`.
        rollout_func: Not supported. It must be None. Use `GRPOTrainer` instead.
        environment_factory: Not supported. It must be None. To train in environments, use `GRPOTrainer`.

    Reference: Direct language model alignment from online AI feedback, arXiv:2402.04792.

    >>> trainer = OnlineDPOTrainer(
    ...     model, reward_funcs=reward, args=OnlineDPOConfig("runs/online_dpo"), train_dataset=prompts, processing_class=tok
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    METHOD = OnlineDPO
    method: OnlineDPO
    runner_class = PairRewards
    _name: ClassVar[str] = "Online DPO"
    _paper: ClassVar[dict[str, str]] = {
        "title": "Direct Language Model Alignment from Online AI Feedback",
        "id": "2402.04792",
    }
    args: OnlineDPOConfig

    def __init__(
        self,
        model: Model,
        ref_model: nn.Module | None = None,
        reward_funcs: Rewards | None = None,
        args: OnlineDPOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        peft_config: Adapter | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        *,
        judge: Any = None,
        rollout_engine: RolloutEngine | None = None,
        quantization_config: Quantization | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        self.judge, self._given_reference = judge, ref_model
        if args is None:
            raise ConfigError(f"args is missing. Fix: pass a {self.config_class.__name__} as args.")
        args = as_config(self.config_class, args)
        self._check_given(model, reward_funcs, args, data_collator, processing_class)
        functions: list[Any] = [JudgeReward(judge, halves=True)] if judge is not None else []
        if judge is None:
            functions = self._reward_functions(reward_funcs, reward_processing_classes, args, processing_class)
        super().__init__(
            model,
            functions,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            rollout_engine=rollout_engine,
            quantization_config=quantization_config,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self._ties_logged = False

    def _check_given(
        self, model: nn.Module, reward_funcs: Any, args: PostTrainingConfig, data_collator: Any, tokenizer: Tokenizer
    ) -> None:
        if (reward_funcs is None) == (self.judge is None):
            which = "neither is" if self.judge is None else "both are"
            raise ConfigError(f"exactly one of reward_funcs and judge must be set, but {which} set.")
        if tokenizer is None and not isinstance(model, str):
            raise ConfigError("processing_class is missing. Fix: pass the model's tokenizer as processing_class.")
        if data_collator is not None:
            raise ConfigError("data_collator must be None, because batches are built after completions are sampled.")
        if self._given_reference is not None:
            check_reference(self._given_reference, model)
        of_rewards = {
            "missing_eos_penalty": args.missing_eos_penalty, "reward_weights": args.reward_weights,
            "reward_transform": args.reward_transform,
        }  # fmt: skip
        for name, value in of_rewards.items():
            if self.judge is not None and value is not None:
                raise ConfigError(
                    f"{name} changes rewards, but a judge returns preferences and no rewards. Fix: remove {name} or judge."
                )

    def _reward_functions(
        self, reward_funcs: object, tokenizers: Any, args: PostTrainingConfig, tokenizer: Tokenizer
    ) -> list[Any]:
        """Return reward functions that read text. Reward models are wrapped, and other functions are returned unchanged."""
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        own = tokenizers if isinstance(tokenizers, list | tuple) else [tokenizers] * len(functions)
        own = one_each("reward_processing_classes", own, len(functions))
        init = {"trust_remote_code": args.trust_remote_code, "model_init_kwargs": args.model_init_kwargs}
        wrap = functools.partial(WholeTextReward, policy_tokenizer=tokenizer, **init)
        pairs = zip(functions, own, strict=True)
        return [wrap(reward, theirs) if isinstance(reward, str | nn.Module) else reward for reward, theirs in pairs]

    def make_reference(self) -> Reference:
        """Create the reference model. The loss always uses its log-probs."""
        if self._given_reference is None:
            log_own_checkpoint(self.model)
        elif self.vision.images:
            self.vision.show(self._given_reference)
        self.read_also_by(self._given_reference)
        return Reference(self.model, fresh_adapter=self.fresh_adapter, given=self._given_reference)

    @property
    def beta(self) -> float:
        """Value of ``args.beta`` in the current epoch."""
        return self.args.beta_at(self.state.epoch)

    # Sampling ----------------------------------------------------------------------------------------------------

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """Sample completions. With ``keep_eos_for_rewards``, append the end token to the texts for reward functions."""
        batch = super().sample(examples, settings)
        if not self.args.keep_eos_for_rewards:
            return batch
        decode = self.processing_class.decode
        ends = [decode(r.token_ids[-1:]) if r.finish_reason == "stop" else "" for r in batch.rollouts]
        seen = [c + end if isinstance(c, str) else c for c, end in zip(batch.completions, ends, strict=True)]
        return replace(batch, completions=seen)

    @property
    def prompt_limit(self) -> int:
        """Maximum number of tokens of a prompt. Sampling and loss use the same truncated prompts."""
        return self.args.max_length - self.args.max_new_tokens

    # Scores and preferences --------------------------------------------------------------------------------------

    def score(self, rollouts: RolloutBatch, mode: str) -> RewardTable:
        """Score completions with the reward functions or the judge. In evaluation, the judge is not called, because there
        is one completion per prompt and a judge compares two.
        """
        self.rewards.pairs = mode == "train"  # type: ignore[attr-defined]
        if mode == "train" or self.judge is None:
            return super().score(rollouts, mode)
        counts = parallel.all_gather_objects([len(rollouts.rollouts)], self.accelerator)
        start = sum(counts[: self.accelerator.process_index])
        return RewardTable(torch.empty(sum(counts), 0), [], torch.empty(0), start=start)

    def make_online(self) -> Online:
        """Create the components that sample completions and compute the reference's log-probs of them."""
        return replace(super().make_online(), logps=self._measured_logps)

    def _measured_logps(self, run: Run, rollouts: RolloutBatch) -> dict[str, list[list[float]]]:
        """Compute the reference's log-probs of every completion, and log the gap between policy and sampler."""
        every = rollouts.every_row()
        assert self.reference is not None
        with self.run.inference() as policy, self.reference.active(policy) as reference:
            columns = {"ref_logp": logps(self.run, reference, every)}
        if not self.engine.capabilities.has_logprobs:
            return columns
        # The policy's log-probs at the sampling temperature are needed to log this gap, but the loss uses temperature 1.
        # Compute them for one completion of the batch in an extra forward pass.
        with self.run.inference() as policy:
            own = logps(self.run, policy, rollouts.rows(range(1), skip_truncated=False), self.args.temperature)
        self.run.log(sampler_gap(rollouts.rollouts[:1], own), rollouts.mode)
        return columns

    # Logs --------------------------------------------------------------------------------------------------------

    def reduced_metrics(self, mode: str) -> dict[str, float]:
        metrics = super().reduced_metrics(mode)
        if mode == "train" and metrics.get("ties", 0.0) > TIES_MOST and not self._ties_logged:
            self._ties_logged = True
            logger.warning(
                "%.0f%% of the pairs are ties (identical completions or equal rewards) and have no loss. Increase "
                "temperature, or use a reward or judge that distinguishes completions.",
                100 * metrics["ties"],
            )
        return metrics

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate without a loss, because the loss needs two completions per prompt and evaluation samples one."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.pop(f"{metric_key_prefix}_loss", None)
        return output
