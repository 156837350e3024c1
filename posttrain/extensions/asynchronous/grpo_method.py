"""The method of asynchronous GRPO: decoupled PPO with group advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.extensions.asynchronous.grpo_config import AsyncGRPOConfig
from posttrain.losses.advantages import group_advantages, within_groups
from posttrain.losses.policy import (
    clip_metrics,
    clipped,
    importance_log_ratio,
    k3,
    rollout_correction,
    sequence_weight,
)
from posttrain.losses.reduce import spread
from posttrain.methods.base import SAMPLES, Method, mismatch_sums, sampler_logp
from posttrain.metrics import Metric, maximum, mean
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, State

if TYPE_CHECKING:
    from posttrain.rewards.runner import RewardTable
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import LogProbs


def async_grpo_objective(out: ModelOutputs, batch: Batch, cfg: AsyncGRPOConfig) -> LossTerms:
    """Compute ``-min(rho A, clip(rho, 1 - eps, 1 + eps_high) A)`` per token, averaged over the tokens of the step.

    With ``vllm_importance_sampling_mode=None``, ``rho = pi / mu``. ``pi`` is the current policy, and ``mu`` is the policy
    with the weights that sampled the token. In all other modes, ``rho = pi / pi_start``. ``pi_start`` is the policy at the
    beginning of the step. All forward passes of a step use the same weights, so this ``rho`` has the value 1, but its
    gradient is not 0. In these modes, each token is weighted by the bounded ratio ``pi_start / mu``. This is decoupled PPO
    without an extra forward pass for the proximal policy.

    Args:
        out: Log-probs and entropies of the policy.
        batch: Batch with ``rollout_logp`` and ``advantages``.
        cfg: `AsyncGRPOConfig`.

    Reference: PPO, arXiv:1707.06347, equation 7; AReaL, arXiv:2505.24298, equation 5.
    """
    sampled = sampler_logp(out, batch)
    assert out.logp is not None and sampled is not None and batch.advantages is not None
    forest = batch.by_sequence
    advantages = spread(batch.advantages, batch.sequence)
    mode = cfg.vllm_importance_sampling_mode
    old = sampled if mode is None else None
    log_ratio = importance_log_ratio(out.logp, old, *forest, level="token")
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    terms = clipped(log_ratio, advantages, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta)
    ratio = (out.logp - sampled).detach().exp()
    metrics: dict[str, Metric] = {
        "entropy": mean(out.entropy, batch.loss_mask),  # type: ignore[arg-type]
        "ratio": mean(ratio, batch.loss_mask),
        "ratio/max": maximum(ratio, batch.loss_mask),
        "kl": mean(k3(sampled, out.logp.detach()), batch.loss_mask),
    }
    metrics |= clip_metrics(log_ratio, advantages, *forest, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta)
    if mode is not None:
        bounds = {
            "clip_max": cfg.vllm_importance_sampling_clip_max,
            "clip_min": cfg.vllm_importance_sampling_clip_min,
        }
        weight = rollout_correction(out.logp.detach(), sampled, *forest, mode=mode, **bounds)
        terms = terms * weight
        by_token = mode.startswith("token")
        ratio, counted = (weight, batch.loss_mask) if by_token else sequence_weight(weight, sampled, *forest)
        metrics |= {
            "sampling/importance_sampling_ratio/mean": mean(ratio, counted),
            "sampling/importance_sampling_ratio/max": maximum(ratio, counted),
            "sampling/frac_masked": mean((weight == 0).float(), batch.loss_mask),
        }
    return LossTerms(
        terms,
        batch.loss_mask,
        "token",
        sequence=batch.sequence,
        num_sequences=batch.num_sequences,
        metrics=metrics,
    )


class AsyncGRPO(Method[AsyncGRPOConfig]):
    """Group-relative policy optimization on rollouts that were sampled with older weights.

    Reference: AReaL, arXiv:2505.24298; DeepSeekMath, arXiv:2402.03300, equation 3.
    """

    config_class = AsyncGRPOConfig
    traits = replace(
        SAMPLES, own_rollouts=True, workers_sample=True, follows_truncation=True, reads_images=True, takes_episodes=True
    )

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Compute the reward of each completion minus the mean reward of its group. Divide the difference by the standard
        deviation that ``scale_rewards`` selects.
        """
        how = self.cfg.scale_rewards
        stats = group_advantages(rewards.values, rewards.weights, rollouts.group_size, scale_rewards=how)
        return within_groups(stats, rewards.start, bound=how != "none", token_columns=logps)

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the loss with `async_grpo_objective`."""
        terms = async_grpo_objective(outputs, batch, self.cfg)
        return replace(terms, sums=mismatch_sums(terms))
