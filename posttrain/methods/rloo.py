"""RLOO: policy gradients on whole completions with a leave-one-out baseline."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from posttrain.errors import ConfigError
from posttrain.fields import NonNegativeFloat, PositiveInt, config, option
from posttrain.losses.advantages import bounded, group_advantages, leave_one_out_advantages, standardized
from posttrain.losses.policy import clip_metrics, clipped, engine_gap, k1, rollout_correction, sequence_weight
from posttrain.losses.reduce import sequence_sum
from posttrain.methods.base import SAMPLES, Method, sampler_logp
from posttrain.methods.config import PictureConfig
from posttrain.methods.online_config import OnlineConfig, reject_reshaped_sampling
from posttrain.metrics import maximum, mean
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, State

if TYPE_CHECKING:
    from posttrain.rewards.runner import RewardTable
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import LogProbs

logger = logging.getLogger(__name__)

# Maximum logarithm of the importance ratio, equivalent to a ratio of 5e8. Without a maximum, one sequence could dominate the
# loss.
MAX_LOG_RATIO = 20.0
# If the fraction of clipped sequences is above CLIPPED_MOST in CLIPPED_STEPS consecutive steps, a warning is logged.
CLIPPED_MOST, CLIPPED_STEPS = 0.5, 10


@config
class RLOOConfig(PictureConfig, OnlineConfig):
    """Arguments of `RLOOTrainer`. RLOO has only one loss, so there is no option ``loss_type``.

    Reference: Back to basics, arXiv:2402.14740.
    """

    _corrects_sampler: ClassVar[bool] = True
    num_generations: PositiveInt = option(
        2,
        "Number of completions sampled per prompt, at least 2. The baseline of a completion is the mean reward of the other "
        "completions of its prompt, so more completions make it less noisy. The number must divide generation_batch_size.",
    )
    beta: NonNegativeFloat = option(
        0.05,
        "Weight of the KL divergence from the reference model, which is subtracted from the reward. 0: no KL penalty, and no "
        "reference model is loaded. Increase it if the model loses earlier skills.",
    )
    reward_clip_range: list[float] | None = option(
        None,
        "Minimum and maximum reward, as a list of two numbers. Rewards are clipped to this range before the KL penalty is "
        "subtracted. The logged rewards are not clipped. None: no clipping.",
    )
    normalize_advantages: bool = option(
        False,
        "Standardize advantages over the whole generation to mean 0 and standard deviation 1, and clip them to the range from "
        "-10 to 10. False: advantages are not scaled. Set it to True if rewards are large.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_clip_range()
        if self.use_liger_kernel:
            raise ConfigError(
                "use_liger_kernel=True is not supported by RLOO. Fix: set use_liger_kernel=False, or use GRPO."
            )
        if self.vllm_importance_sampling_mode.startswith("token"):
            raise ConfigError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} weights single tokens, but RLOO has one "
                "importance ratio per sequence. Fix: use 'sequence_mask', 'sequence_truncate' or 'geometric'."
            )

    def check_foreign_logprobs(self) -> None:
        """Raise an error for sampling settings that make the importance-sampling correction wrong; see
        `reject_reshaped_sampling`.
        """
        reject_reshaped_sampling(self)

    def _check_clip_range(self) -> None:
        clip = self.reward_clip_range
        if clip is None:
            return
        bounds = clip if isinstance(clip, list | tuple) else ()
        numbers = [x for x in bounds if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(bounds) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
            raise ConfigError(
                f"reward_clip_range={clip!r} must be two numbers, a minimum and a larger maximum, for example (-5.0, 5.0)."
            )
        self.reward_clip_range = [float(numbers[0]), float(numbers[1])]


def rloo_objective(out: ModelOutputs, batch: Batch, cfg: RLOOConfig) -> LossTerms:
    """Compute the clipped loss ``-min(rho A, clip(rho, 1 - eps, 1 + eps_high) A)`` per sequence.

    The importance ratio ``rho = exp(sum_t (logp - old_logp))`` is the ratio of the whole completion, not a mean over its
    tokens. The logarithm of rho is limited to 20. A completion without loss tokens has the ratio 1 and no gradient.

    Args:
        out: Model outputs. ``logp`` and ``entropy`` are tensors ``(B, T)``.
        batch: Batch with the tensors ``advantages (S,)`` and ``old_logp (B, T)``. If the engine's log-probs differ from the
            policy's log-probs, the batch has ``rollout_logp`` too.
        cfg: `RLOOConfig`.

    Reference: Back to basics, arXiv:2402.14740, equation 8, with PPO's clip, arXiv:1707.06347.
    """
    assert out.logp is not None and out.entropy is not None and batch.advantages is not None
    forest = batch.by_sequence
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
    sampled = sampler_logp(out, batch)
    if sampled is not None:
        metrics |= engine_gap(old, sampled, batch.loss_mask)
    if sampled is not None and cfg.vllm_importance_sampling_correction:
        weight = rollout_correction(
            old,
            sampled,
            *forest,
            mode=cfg.vllm_importance_sampling_mode,
            clip_max=cfg.vllm_importance_sampling_clip_max,
            clip_min=cfg.vllm_importance_sampling_clip_min,
        )
        per_sequence, some = sequence_weight(weight, sampled, *forest)
        terms = terms * per_sequence
        metrics["sampling/importance_sampling_ratio/mean"] = mean(per_sequence, some)
        metrics["sampling/importance_sampling_ratio/max"] = maximum(per_sequence, some)
    return LossTerms(terms, whole, "sequence", num_sequences=batch.num_sequences, metrics=metrics)


def charged_kl(rollouts: RolloutBatch, logps: LogProbs, *, skip_truncated: bool) -> list[Tensor]:
    """Compute ``old_logp - ref_logp`` for the loss tokens of each completion of this rank.

    The sum over a completion is the k1 estimate of its KL divergence from the reference.
    """
    masks = [rollouts.loss_mask(i, skip_truncated) for i in range(len(rollouts.rollouts))]
    return [
        k1(torch.tensor(old), torch.tensor(ref))[torch.tensor(mask, dtype=torch.bool)]
        for old, ref, mask in zip(logps["old_logp"], logps["ref_logp"], masks, strict=True)
    ]


class RLOO(Method[RLOOConfig]):
    """REINFORCE with a leave-one-out baseline. The baseline of a completion is the mean reward of all other completions of
    the same prompt.

    The KL penalty is subtracted from the reward. It is not a term of the loss.

    Reference: Back to basics, arXiv:2402.14740.
    """

    config_class = RLOOConfig
    traits = replace(SAMPLES, follows_truncation=True, splits_tokens=True, beta_is_kl=True, reads_images=True)

    def needs_old_logp(self, outlived: bool) -> bool:
        """Return True, because the KL penalty in the reward is computed from the old log-probs."""
        return True

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Compute the advantage of each completion: its score ``clip(R) - beta KL`` minus the mean score of all other
        completions of the group. The logged reward is R.
        """
        cfg, metrics = self.cfg, {}
        stats = group_advantages(rewards.values, rewards.weights, rollouts.group_size, scale_rewards="none")
        charged = stats.totals if cfg.reward_clip_range is None else stats.totals.clamp(*cfg.reward_clip_range)
        if "ref_logp" in logps:
            kl = charged_kl(rollouts, logps, skip_truncated=cfg.mask_truncated_completions)
            metrics["kl"] = mean(torch.cat([torch.empty(0), *kl]))
            charged = charged - cfg.beta * torch.tensor(ranks.gather([float(terms.sum()) for terms in kl]))
        values, unbounded = leave_one_out_advantages(charged, rollouts.group_size), None
        if cfg.normalize_advantages:
            unbounded = standardized(values, ~charged.isnan())
            values = bounded(unbounded)
        return Advantages(
            values,
            stats.totals,
            rewards.start,
            token_columns=logps,
            unbounded=unbounded,
            zero_std_share=stats.zero_std_share,
            metrics=metrics,
        )

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the clipped policy-gradient loss; see `rloo_objective`."""
        # Until an optimizer step changes the weights, the ratio is exactly 1, so stored log-probs are not used. In half
        # precision, rounding errors of stored log-probs add up over the tokens. For 8 tokens in bfloat16, ratios of up to
        # 2.9 were measured. Such ratios would be clipped.
        if not self.cfg.outlives_weights:
            batch = replace(batch, old_logp=None)
        return rloo_objective(outputs, batch, self.cfg)
