"""The clipped policy gradient against the log-probs of whoever sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.losses.kl import k3
from posttrain.losses.policy import clip_metrics, clipped
from posttrain.losses.ratio import importance_log_ratio, rollout_correction
from posttrain.losses.reduce import spread
from posttrain.metrics import Metric, maximum, mean
from posttrain.types import Batch, LossTerms, ModelOutputs

if TYPE_CHECKING:
    from posttrain.algorithms.async_grpo.config import AsyncGRPOConfig

__all__ = ["NEEDS", "async_grpo_objective"]

NEEDS = frozenset({"logp", "entropy"})


def async_grpo_objective(out: ModelOutputs, batch: Batch, cfg: AsyncGRPOConfig) -> LossTerms:
    """``-min(rho A, clip(rho, 1 - eps, 1 + eps_high) A)``, per token, divided by the tokens of the whole step.

    ``is_correction=None``: ``rho = pi / mu`` with the log-probs ``log mu`` of the weights that sampled each token. Otherwise
    ``rho = pi / pi_start`` (1, with its gradient, since all passes of a step see the same weights), and the term is weighted
    by ``pi_start / mu``, bounded: decoupled PPO, whose proximal policy costs no pass of its own here.

    Args:
        out: Log-probs and entropies of the policy.
        batch: With ``rollout_logp`` and ``advantages``.
        cfg: `AsyncGRPOConfig`.

    Reference: PPO, arXiv:1707.06347, equation 7; AReaL, arXiv:2505.24298, equation 5.
    """
    assert out.logp is not None and batch.rollout_logp is not None and batch.advantages is not None
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    advantages = spread(batch.advantages, batch.sequence)
    old = batch.rollout_logp if cfg.is_correction is None else None
    log_ratio = importance_log_ratio(out.logp, old, *forest, level="token")
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    terms = clipped(log_ratio, advantages, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta)
    ratio = (out.logp - batch.rollout_logp).detach().exp()
    metrics: dict[str, Metric] = {
        "entropy": mean(out.entropy, batch.loss_mask),  # type: ignore[arg-type]
        "ratio": mean(ratio, batch.loss_mask),
        "ratio/max": maximum(ratio[batch.loss_mask]),
        "kl": mean(k3(batch.rollout_logp, out.logp.detach()), batch.loss_mask),
    }
    metrics |= clip_metrics(log_ratio, advantages, *forest, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta)
    if cfg.is_correction is not None:
        bounds = {"clip_max": cfg.is_clip_max, "clip_min": cfg.is_clip_min}
        weight = rollout_correction(out.logp.detach(), batch.rollout_logp, *forest, mode=cfg.is_correction, **bounds)
        terms = terms * weight
        values = weight[batch.loss_mask]
        metrics |= {
            "sampling/importance_sampling_ratio/mean": mean(values),
            "sampling/importance_sampling_ratio/max": maximum(values),
            "sampling/frac_masked": mean((values == 0).float()),
        }
    return LossTerms(
        terms,
        batch.loss_mask,
        "token",
        sequence=batch.sequence,
        num_sequences=batch.num_sequences,
        metrics=metrics,
    )
