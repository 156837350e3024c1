"""The GRPO family in one function: ratio, surrogate, weights, KL, reduction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from posttrain.losses.policy import (
    LOSS_TYPES,
    cispo,
    clip_metrics,
    clipped,
    engine_gap,
    entropy_mask,
    geometric_ratio,
    importance_log_ratio,
    k3,
    off_policy_mask,
    rollout_correction,
    sapo,
    vespo,
    vespo_weight,
)
from posttrain.losses.reduce import spread
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.types import Batch, LossTerms, ModelOutputs

if TYPE_CHECKING:
    from posttrain.algorithms.grpo.config import GRPOConfig

__all__ = ["grpo_needs", "grpo_objective"]


def grpo_needs(cfg: GRPOConfig) -> frozenset[str]:
    """What the forward pass must produce for this config."""
    bonus = cfg.entropy_coef or cfg.use_adaptive_entropy
    return frozenset({"logp", "entropy"} | ({"entropy_grad"} if bonus else set()))


def grpo_objective(
    out: ModelOutputs,
    batch: Batch,
    cfg: GRPOConfig,
    *,
    entropy_coef: float | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> LossTerms:
    """``-surrogate(ratio, A) * weights + beta * KL - entropy_coef * H``, unreduced; the bonus is the first extra term.

    The KL is never clipped, weighted, filtered by entropy or masked as off-policy.

    Args:
        out: Log-probs and entropies of the policy.
        batch: Completions with their advantages; log-probs of older, frozen or sampling weights where there are any.
        cfg: `GRPOConfig`.
        entropy_coef: Instead of ``cfg.entropy_coef``, where it is steered.
        gather: Concatenates over ranks, so that the entropy filter has one threshold; every rank must call it.

    Reference: DeepSeekMath, arXiv:2402.03300, equation 3; the loss types are rows of `LOSS_TYPES`.
    """
    kind, forest = LOSS_TYPES[cfg.loss_type], (batch.loss_mask, batch.sequence, batch.num_sequences)
    level = kind.level or cfg.importance_sampling_level
    log_ratio = importance_log_ratio(out.logp, batch.old_logp, *forest, level=level)
    advantages = spread(batch.advantages, batch.sequence)
    weight, metrics = _rollout_weight(out.logp, batch, cfg)
    uncertain = batch.loss_mask
    if cfg.top_entropy_quantile < 1.0:
        uncertain = entropy_mask(out.entropy, batch.loss_mask, quantile=cfg.top_entropy_quantile, gather=gather)
    if kind.surrogate == "geometric":
        terms, clipping = _geometric(log_ratio, advantages, batch, cfg, uncertain)
    else:
        terms, clipping = _surrogate(kind.surrogate, log_ratio, advantages, out.logp, batch, cfg, weight, level)
        terms = terms * uncertain
    if weight is not None and kind.surrogate != "vespo":
        terms = terms * weight
    terms = terms * _kept(out.logp, batch, cfg)
    if batch.ref_logp is not None:
        kl = k3(out.logp, batch.ref_logp)
        if cfg.use_bias_correction_kl and kind.surrogate != "geometric":
            kl = kl * log_ratio.exp()
        terms = terms + cfg.beta * kl if cfg.beta else terms
        metrics["kl"] = mean(kl, batch.loss_mask)
    metrics |= clipping | {
        "entropy": mean(out.entropy, batch.loss_mask),
        "ratio/max": maximum(log_ratio.detach()[batch.loss_mask].exp()),
    }
    loss = LossTerms(
        terms,
        batch.loss_mask,
        kind.reduction,
        sequence=batch.sequence,
        num_sequences=batch.num_sequences,
        constant=1.0 if cfg.loss_type == "luspo" else float(cfg.max_completion_length),
        metrics=metrics,
    )
    if cfg.entropy_coef or cfg.use_adaptive_entropy:
        coefficient = cfg.entropy_coef if entropy_coef is None else entropy_coef
        # The filter is one of this pass, and so is the mean over what it kept.
        reduction = "token" if uncertain is batch.loss_mask else "local_token"
        loss.extra.append(LossTerms(-coefficient * out.entropy, uncertain, reduction))
    return loss


def _surrogate(
    name: str,
    log_ratio: Tensor,
    advantages: Tensor,
    logp: Tensor,
    batch: Batch,
    cfg: GRPOConfig,
    weight: Tensor | None,
    level: str,
) -> tuple[Tensor, dict[str, Metric]]:
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    clip = {"epsilon": cfg.epsilon, "epsilon_high": high, "delta": cfg.delta}
    metrics = clip_metrics(log_ratio, advantages, *forest, **clip, surrogate=name, level=level)
    if name == "clipped":
        return clipped(log_ratio, advantages, **clip), metrics
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


def _geometric(
    log_ratio: Tensor, advantages: Tensor, batch: Batch, cfg: GRPOConfig, kept: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """GMPO: ``-c_i A_i`` on every token of a completion, the ratio over the ``kept`` ones; bounds are in log space."""
    forest = (batch.sequence, batch.num_sequences)
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    bounds = {"epsilon": cfg.epsilon, "epsilon_high": high}
    ratio = geometric_ratio(log_ratio, batch.advantages, kept, *forest, **bounds)
    same = {"epsilon": 1 - math.exp(-cfg.epsilon), "epsilon_high": math.expm1(high)}
    metrics = clip_metrics(log_ratio, advantages, batch.loss_mask, *forest, **same)
    return -spread(ratio, batch.sequence) * advantages, metrics


def _rollout_weight(logp: Tensor, batch: Batch, cfg: GRPOConfig) -> tuple[Tensor | None, dict[str, Metric]]:
    """Correction for an engine that is not the trainer, and how far the two are apart; None where the engine is."""
    sampled = batch.rollout_logp
    if sampled is None:
        return None, {}
    trained = logp.detach() if batch.old_logp is None else batch.old_logp
    metrics = engine_gap(trained, sampled, batch.loss_mask)
    if not cfg.vllm_importance_sampling_correction:
        return None, metrics
    mode = cfg.vllm_importance_sampling_mode
    weight = rollout_correction(
        trained,
        sampled,
        batch.loss_mask,
        batch.sequence,
        batch.num_sequences,
        mode=mode.replace("token_", "sequence_") if cfg.loss_type == "gmpo" else mode,
        clip_max=cfg.vllm_importance_sampling_clip_max,
        clip_min=cfg.vllm_importance_sampling_clip_min,
    )
    values = weight[batch.loss_mask]
    return weight, metrics | {
        "sampling/importance_sampling_ratio/min": minimum(values),
        "sampling/importance_sampling_ratio/mean": mean(values),
        "sampling/importance_sampling_ratio/max": maximum(values),
        "sampling/frac_masked": mean((values == 0).float()),
    }


def _kept(logp: Tensor, batch: Batch, cfg: GRPOConfig) -> Tensor | float:
    """1 on tokens of sequences the policy has not moved away from, 0 on others; denominators do not change."""
    if cfg.off_policy_mask_threshold is None:
        return 1.0
    old = logp.detach() if batch.old_logp is None else batch.old_logp
    sampled = old if batch.rollout_logp is None else batch.rollout_logp
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    keep = off_policy_mask(logp, sampled, batch.advantages, *forest, threshold=cfg.off_policy_mask_threshold)
    return spread(keep.float(), batch.sequence)
