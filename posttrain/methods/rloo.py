"""RLOO: plain policy gradients on whole completions, each measured against the others of its prompt."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError
from posttrain.loop.config import attributes, takes
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.online_config import OnlineConfig, reject_truncated_sampling
from posttrain.loop.pictures import PictureConfig
from posttrain.loop.scoring import FIXED, FIXED_PATHS, SETTABLE, SETTABLE_PATHS, last_logged
from posttrain.losses.advantages import group_advantages, leave_one_out_advantages, standardized
from posttrain.losses.policy import clip_metrics, clipped, engine_gap, k1, rollout_correction
from posttrain.losses.reduce import sequence_mean, sequence_sum
from posttrain.metrics import maximum, mean
from posttrain.models import parallel
from posttrain.report.sync_reference import SyncRefModelCallback
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Batch, LossTerms, ModelOutputs, NonNegativeFloat, PositiveInt, option

logger = logging.getLogger(__name__)

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: beyond it one sequence would decide the whole loss.
CLIPPED_MOST, CLIPPED_STEPS = 0.5, 10  # Share of clipped sequences, and steps in a row, after which little is learned.


@dataclass
class RLOOConfig(PictureConfig, OnlineConfig):
    """Arguments of `RLOOTrainer`; those of GRPO's loss family do not exist here.

    Reference: Back to basics, arXiv:2402.14740.
    """

    num_generations: PositiveInt = option(2, "Completions per prompt, at least 2.")
    beta: NonNegativeFloat = option(0.05, "Weight of the KL that is charged to the reward; 0: none.")
    reward_clip_range: list[float] | None = option(
        None, "Lowest and highest reward, before the KL is charged; None: as they are."
    )
    normalize_advantages: bool = option(False, "Standardise advantages over the whole generation.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_clip_range()
        if self.use_liger_kernel:
            raise ConfigError("use_liger_kernel=True: RLOO has no such option. Leave it at False, or use GRPO.")
        if self.vllm_importance_sampling_mode.startswith("token"):
            raise ConfigError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} weighs tokens, and RLOO's ratio is one of "
                "whole sequences. Use 'sequence_mask', 'sequence_truncate' or 'geometric'."
            )

    def check_foreign_logprobs(self) -> None:
        """See `reject_truncated_sampling`."""
        reject_truncated_sampling(self)

    def _check_clip_range(self) -> None:
        given = self.reward_clip_range
        if given is None:
            return
        numbers = [x for x in given if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(given) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
            raise ConfigError(
                f"reward_clip_range={given!r} must be two numbers, the lowest reward and a higher one: (-5.0, 5.0)."
            )
        self.reward_clip_range = [float(numbers[0]), float(numbers[1])]


def rloo_objective(out: ModelOutputs, batch: Batch, cfg: RLOOConfig) -> LossTerms:
    """``-min(rho A, clip(rho, 1 - eps, 1 + eps_high) A)`` with ``rho = exp(sum_t (logp - old_logp))``, one term a sequence.

    The ratio is that of the whole completion, not a mean over its tokens; its logarithm stops at 20. A completion without
    loss tokens has ratio 1 and a constant term.

    Args:
        out: ``logp`` and ``entropy``, ``(B, T)``.
        batch: With ``advantages (S,)`` and ``old_logp (B, T)``, and ``rollout_logp`` where another engine sampled.
        cfg: `RLOOConfig`.

    Reference: Back to basics, arXiv:2402.14740, equation 8, with PPO's clip, arXiv:1707.06347.
    """
    assert out.logp is not None and out.entropy is not None and batch.advantages is not None
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    old = out.logp.detach() if batch.old_logp is None else batch.old_logp
    log_ratio = sequence_sum(out.logp - old, *forest).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # (S,)
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    bounds = {"epsilon": cfg.epsilon, "epsilon_high": high}
    terms = clipped(log_ratio, batch.advantages, **bounds)
    whole = torch.ones_like(terms, dtype=torch.bool)
    one_each = torch.arange(batch.num_sequences, device=terms.device)
    metrics = clip_metrics(log_ratio, batch.advantages, whole, one_each, batch.num_sequences, **bounds)
    metrics["ratio/max"] = maximum(log_ratio.exp())
    metrics["entropy"] = mean(out.entropy, batch.loss_mask)
    if batch.rollout_logp is not None:
        metrics |= engine_gap(old, batch.rollout_logp, batch.loss_mask)
    if batch.rollout_logp is not None and cfg.vllm_importance_sampling_correction:
        weight = rollout_correction(
            old,
            batch.rollout_logp,
            *forest,
            mode=cfg.vllm_importance_sampling_mode,
            clip_max=cfg.vllm_importance_sampling_clip_max,
            clip_min=cfg.vllm_importance_sampling_clip_min,
        )
        per_sequence = sequence_mean(weight, *forest)  # All tokens of a sequence have its weight.
        terms = terms * per_sequence
        metrics["sampling/importance_sampling_ratio/mean"] = mean(per_sequence)
        metrics["sampling/importance_sampling_ratio/max"] = maximum(per_sequence)
    return LossTerms(terms, whole, "sequence", num_sequences=batch.num_sequences, metrics=metrics)


@attributes(*SETTABLE, "normalize_advantages", "reward_clip_range", **SETTABLE_PATHS)
@attributes(*FIXED, **FIXED_PATHS, fixed=True)
class RLOOTrainer(OnlineTrainer, config=RLOOConfig):
    """REINFORCE with the mean of a prompt's other completions as the baseline; the KL is part of the reward.

    Args:
        model: Hub id, folder, model or peft model.
        reward_funcs: A callable ``f(prompts, completions, **columns) -> list[float | None]``, a reward model, or several.
        args: `RLOOConfig`.
        train_dataset: Prompts, with the columns that rewards read.
        eval_dataset: Prompts to evaluate on, or several sets by name.
        processing_class: The tokenizer; None loads the model's.
        reward_processing_classes: Tokenizers of reward models.
        callbacks: `transformers.TrainerCallback` objects.
        kwargs: Those of `OnlineTrainer`: ``peft_config``, ``rollout_engine`` and so on.

    Reference: Back to basics, arXiv:2402.14740.

    >>> def short(completions, **kwargs):
    ...     return [-len(text) / 100 for text in completions]
    >>> trainer = RLOOTrainer(model, short, train_dataset=prompts)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    splits_tokens = True
    takes_images: bool = True
    needs: frozenset[str] = frozenset({"logp", "entropy"})
    _paper: ClassVar[dict[str, str]] = {
        "title": "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "id": "2402.14740",
    }
    args: RLOOConfig
    _told = False
    _logs = property(last_logged)

    @takes(
        "model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, "
        "callbacks, optimizers, quantization_config, peft_config"
    )
    def __init__(
        self, model: str | nn.Module, reward_funcs: Any = None, args: RLOOConfig | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model, reward_funcs, args, **kwargs)
        self._clipped_steps, self._last_logged = 0, 0
        if self.args.sync_ref_model and self.reference is not None:
            self.add_callback(SyncRefModelCallback(self.reference, self.accelerator))

    def needs_old_logp(self, mode: str) -> bool:
        """Always: the KL of the reward is measured with them."""
        return True

    def advantages(self, generation: RolloutBatch, table: RewardTable, mode: str) -> Tensor:
        """``(clip(R) - beta KL)`` against the mean of the others; what is logged as reward is R itself."""
        args, size = self.args, self.group_size(mode)
        stats = group_advantages(table.values, table.weights, size, scale_rewards="none")
        totals = stats.totals if args.reward_clip_range is None else stats.totals.clamp(*args.reward_clip_range)
        if self.reference is not None:
            totals = totals - args.beta * self._charged_kl(generation, mode)
        advantages = leave_one_out_advantages(totals, size)
        if args.normalize_advantages:
            advantages = self.reward_watch.bounded(standardized(advantages, ~totals.isnan()), mode)
        self.reward_watch.log(generation, table, stats.totals, advantages, mode, stats.zero_std_share)
        return advantages

    def _charged_kl(self, generation: RolloutBatch, mode: str) -> Tensor:
        """``(n,)`` summed k1 over the loss tokens of all ranks' completions: ``sum_t m (old_logp - ref_logp)``."""
        kept = [generation.loss_mask(i, self.args.mask_truncated_completions) for i in range(len(generation.rollouts))]
        old, ref = generation.token_columns["old_logp"], generation.token_columns["ref_logp"]
        tokens = [
            k1(torch.tensor(o), torch.tensor(r))[torch.tensor(m, dtype=torch.bool)]
            for o, r, m in zip(old, ref, kept, strict=True)
        ]
        self.log_metrics_now({"kl": mean(torch.cat([torch.empty(0), *tokens]))}, mode)
        return torch.tensor(parallel.all_gather_objects([float(t.sum()) for t in tokens], self.accelerator))

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `rloo_objective`."""
        if batch.rollout_logp is not None and self.args.vllm_importance_sampling_correction and not self._told:
            self._told = True
            logger.warning(
                "completions come from another engine than the trainer's: their weight is the ratio of both probabilities "
                "(vllm_importance_sampling_mode=%r). vllm_importance_sampling_correction=False turns that off.",
                self.args.vllm_importance_sampling_mode,
            )
        # While the policy has not moved the ratio is 1. Stored log-probs would add half precision's rounding of every token
        # of a completion: ratios up to 2.9 were seen for 8 tokens in bfloat16, and the clip would act on them.
        if not super().needs_old_logp("train"):
            batch = replace(batch, old_logp=None)
        return rloo_objective(outputs, batch, self.args)

    def reduced_metrics(self, mode: str) -> dict[str, float]:
        metrics = super().reduced_metrics(mode)
        if mode == "train":
            self._watch_clipping(metrics.get("clip_ratio/region_mean", 0.0))
        return metrics

    def _watch_clipping(self, share: float) -> None:
        """A ratio of whole sequences leaves the clip's band after tiny updates: then most of a generation trains nothing."""
        if not super().needs_old_logp("train"):
            return
        steps, self._last_logged = self.state.global_step - self._last_logged, self.state.global_step
        before = self._clipped_steps
        self._clipped_steps = before + steps if share > CLIPPED_MOST else 0
        if before < CLIPPED_STEPS <= self._clipped_steps:
            logger.warning(
                "%.0f%% of the sequences were clipped over the last %d steps, so they train nothing. RLOO's ratio is that of "
                "whole completions and grows with their length. Let steps_per_generation * num_iterations divide "
                "gradient_accumulation_steps, lower learning_rate, or use GRPO with importance_sampling_level='sequence'.",
                100 * share, self._clipped_steps,
            )  # fmt: skip
