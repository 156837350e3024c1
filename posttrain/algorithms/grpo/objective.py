"""The GRPO family in one function: ratio, surrogate, weights, KL, reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.losses.kl import k3
from posttrain.losses.policy import LOSS_TYPES, cispo, clip_metrics, clipped, sapo, vespo, vespo_weight
from posttrain.losses.ratio import entropy_mask, importance_log_ratio, off_policy_mask, rollout_correction
from posttrain.losses.reduce import spread
from posttrain.metrics import Metric, maximum, mean
from posttrain.types import Batch, LossTerms, ModelOutputs

if TYPE_CHECKING:
    from posttrain.algorithms.grpo.config import GRPOConfig

__all__ = ["grpo_needs", "grpo_objective"]


def grpo_needs(cfg: GRPOConfig) -> frozenset[str]:
    """What the forward pass must produce for this config."""
    return frozenset({"logp", "entropy"} | ({"entropy_grad"} if cfg.entropy_coef else set()))


def grpo_objective(out: ModelOutputs, batch: Batch, cfg: GRPOConfig) -> LossTerms:
    """``-surrogate(ratio, A) * weights + beta * KL``, unreduced.

    Reference: DeepSeekMath, arXiv:2402.03300, equation 3; the loss types are rows of `LOSS_TYPES`.
    """
    kind, forest = LOSS_TYPES[cfg.loss_type], (batch.loss_mask, batch.sequence, batch.num_sequences)
    level = kind.level or cfg.importance_sampling_level
    log_ratio = importance_log_ratio(out.logp, batch.old_logp, *forest, level=level)
    advantages = spread(batch.advantages, batch.sequence)
    weight = _rollout_weight(out.logp, batch, cfg)
    terms, metrics = _surrogate(kind.surrogate, log_ratio, advantages, out.logp, batch, cfg, weight)
    if weight is not None and kind.surrogate != "vespo":
        terms = terms * weight
    terms = terms * _kept(out, batch, cfg)
    if cfg.beta:
        kl = k3(out.logp, batch.ref_logp) * (log_ratio.exp() if cfg.use_bias_correction_kl else 1.0)
        terms = terms + cfg.beta * kl
        metrics["kl"] = mean(kl, batch.loss_mask)
    metrics["entropy"] = mean(out.entropy, batch.loss_mask)
    metrics["ratio/max"] = maximum(log_ratio.detach()[batch.loss_mask].exp())
    loss = LossTerms(
        terms,
        batch.loss_mask,
        kind.reduction,
        sequence=batch.sequence,
        num_sequences=batch.num_sequences,
        constant=1.0 if cfg.loss_type == "luspo" else float(cfg.max_completion_length),
        metrics=metrics,
    )
    if cfg.entropy_coef:
        bonus = LossTerms(-cfg.entropy_coef * out.entropy, batch.loss_mask, "token")
        loss.extra.append(bonus)
    return loss


def _surrogate(
    name: str, log_ratio: Tensor, advantages: Tensor, logp: Tensor, batch: Batch, cfg: GRPOConfig, weight: Tensor | None
) -> tuple[Tensor, dict[str, Metric]]:
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    metrics = clip_metrics(log_ratio, advantages, *forest, epsilon=cfg.epsilon, epsilon_high=high, surrogate=name)
    if name == "clipped":
        return clipped(log_ratio, advantages, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta), metrics
    if name == "cispo":
        return cispo(log_ratio, advantages, logp, epsilon_high=high), metrics
    if name == "sapo":
        pos, neg = cfg.sapo_temperature_pos, cfg.sapo_temperature_neg
        return sapo(log_ratio, advantages, temperature_pos=pos, temperature_neg=neg), metrics
    phi = vespo_weight(
        log_ratio,
        batch.advantages,
        *forest,
        pos=(cfg.vespo_k_pos, cfg.vespo_lambda_pos),
        neg=(cfg.vespo_k_neg, cfg.vespo_lambda_neg),
        rollout_weight=weight,
    )
    metrics["vespo/phi_seq_mean"] = mean(phi)
    return vespo(spread(phi, batch.sequence), advantages, logp), metrics


def _rollout_weight(logp: Tensor, batch: Batch, cfg: GRPOConfig) -> Tensor | None:
    """Correction for an engine that is not the trainer; None where the engine is, or when it is turned off."""
    if batch.rollout_logp is None or not cfg.vllm_importance_sampling_correction:
        return None
    return rollout_correction(
        logp.detach() if batch.old_logp is None else batch.old_logp,
        batch.rollout_logp,
        batch.loss_mask,
        batch.sequence,
        batch.num_sequences,
        mode=cfg.vllm_importance_sampling_mode,
        clip_max=cfg.vllm_importance_sampling_clip_max,
        clip_min=cfg.vllm_importance_sampling_clip_min,
    )


def _kept(out: ModelOutputs, batch: Batch, cfg: GRPOConfig) -> Tensor:
    """1 on tokens whose policy term counts; the KL and the denominators do not change."""
    kept = torch.ones_like(out.logp)
    if cfg.off_policy_mask_threshold is not None:
        old = out.logp.detach() if batch.old_logp is None else batch.old_logp
        sampled = old if batch.rollout_logp is None else batch.rollout_logp
        forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
        keep = off_policy_mask(out.logp, sampled, batch.advantages, *forest, threshold=cfg.off_policy_mask_threshold)
        kept = kept * spread(keep.float(), batch.sequence)
    if cfg.top_entropy_quantile < 1.0:
        kept = kept * entropy_mask(out.entropy.detach(), batch.loss_mask, quantile=cfg.top_entropy_quantile)
    return kept
