"""GMPO: the geometric mean of a completion's clipped token ratios, instead of the arithmetic mean of clipped terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.algorithms.grpo.config import GRPOConfig
from posttrain.algorithms.grpo.trainer import GRPOTrainer
from posttrain.errors import ConfigError
from posttrain.losses.kl import k3
from posttrain.losses.policy import clip_metrics
from posttrain.losses.ratio import engine_gap, entropy_mask, importance_log_ratio, rollout_correction
from posttrain.losses.reduce import sequence_lengths, sequence_mean, sequence_sum, spread
from posttrain.metrics import Metric, maximum, mean
from posttrain.types import Batch, LossTerms, ModelOutputs

__all__ = ["GMPOConfig", "GMPOTrainer", "geometric_ratio", "gmpo_objective"]

WITHOUT = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "delta": None,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": False,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}


@dataclass
class GMPOConfig(GRPOConfig):
    """Arguments of `GMPOTrainer`; the clip bounds are in log space: ratios in (e^-0.4, e^0.4) = (0.670, 1.492) stay."""

    epsilon: float = field(default=0.4, metadata={"help": "Lower clip of the log-ratio: -epsilon."})
    epsilon_high: float | None = field(default=None, metadata={"help": "Upper clip of the log-ratio; None: epsilon."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in WITHOUT.items():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} has no meaning in GMPO, whose loss is one ratio a completion. Leave it at "
                    f"{default!r}, or use GRPO."
                )


def geometric_ratio(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    epsilon: float,
    epsilon_high: float,
) -> Tensor:
    """``c_i = exp(mean_t d'_t)`` with ``d' = min(d, eps_high)`` where A > 0 and ``max(d, -eps)`` elsewhere, ``(S,)``.

    Args:
        log_ratio: ``(B, T)`` token log-ratios d.
        advantages: ``(S,)``.
        mask: ``(B, T)`` bool, the tokens that count.
        sequence: ``(B, T)`` sequence index.
        num_sequences: S.
        epsilon: Lower clip, in log space.
        epsilon_high: Upper clip, in log space.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """
    better = spread(advantages, sequence) > 0
    clipped = torch.where(better, log_ratio.clamp_max(epsilon_high), log_ratio.clamp_min(-epsilon))
    return sequence_mean(clipped, mask, sequence, num_sequences).exp()


def gmpo_objective(
    out: ModelOutputs, batch: Batch, cfg: GMPOConfig, *, gather: Callable[[Tensor], Tensor] | None = None
) -> LossTerms:
    """``mean_i(-c_i A_i + beta * mean_t KL)`` with the clipped geometric ratio ``c_i``; see `geometric_ratio`.

    Args:
        out: With ``logp`` and ``entropy``.
        batch: With ``advantages (S,)``, and ``old_logp`` where the policy has moved since it sampled.
        cfg: Clip bounds, ``beta``, ``top_entropy_quantile``.
        gather: Concatenates a 1-D tensor over ranks, for one entropy threshold on all of them.
    """
    mask, sequence, count = batch.loss_mask, batch.sequence, batch.num_sequences
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    log_ratio = importance_log_ratio(out.logp, batch.old_logp, mask, sequence, count, level="token")
    kept = mask
    if cfg.top_entropy_quantile < 1.0:
        kept = entropy_mask(out.entropy.detach(), mask, quantile=cfg.top_entropy_quantile, gather=gather)
    bounds = {"epsilon": cfg.epsilon, "epsilon_high": high}
    ratio = geometric_ratio(log_ratio, batch.advantages, kept, sequence, count, **bounds)
    weight, gap = _engine_weight(out.logp, batch, cfg)
    terms = -ratio * batch.advantages * weight
    metrics = clip_metrics(  # The same bounds, as those of a ratio.
        log_ratio,
        spread(batch.advantages, sequence),
        mask,
        sequence,
        count,
        epsilon=1 - math.exp(-cfg.epsilon),
        epsilon_high=math.expm1(high),
    )
    metrics |= gap
    if cfg.beta:
        kl = k3(out.logp, batch.ref_logp)
        terms = terms + cfg.beta * sequence_mean(kl, mask, sequence, count)
        metrics["kl"] = mean(kl, mask)
    metrics["entropy"] = mean(out.entropy, mask)
    metrics["ratio/max"] = maximum(log_ratio.detach()[mask].exp())
    some = sequence_sum(mask.float(), mask, sequence, count) > 0
    return LossTerms(terms, some, "sequence", metrics=metrics)


def _engine_weight(logp: Tensor, batch: Batch, cfg: GMPOConfig) -> tuple[Tensor | float, dict[str, Metric]]:
    """One weight a completion, ``(S,)``, where another engine sampled it, and how far that one is from the trainer."""
    if batch.rollout_logp is None:
        return 1.0, {}
    trained = logp.detach() if batch.old_logp is None else batch.old_logp
    gap = engine_gap(trained, batch.rollout_logp, batch.loss_mask)
    if not cfg.vllm_importance_sampling_correction:
        return 1.0, gap
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    weight = rollout_correction(
        trained,
        batch.rollout_logp,
        *forest,
        mode=cfg.vllm_importance_sampling_mode.replace("token_", "sequence_"),
        clip_max=cfg.vllm_importance_sampling_clip_max,
        clip_min=cfg.vllm_importance_sampling_clip_min,
    )
    return sequence_sum(weight, *forest) / sequence_lengths(*forest), gap  # Equal on all tokens of a completion.


class GMPOTrainer(GRPOTrainer):
    """Geometric-mean policy optimisation: GRPO whose ratio is the geometric mean of a completion's clipped token ratios.

    A single token far off cannot decide the loss of its completion: its log-ratio is clipped and averaged. An
    experimental method.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """

    config_class: ClassVar[type[GMPOConfig]] = GMPOConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "gmpo"]
    _name: ClassVar[str] = "GMPO"
    _suffix: ClassVar[str] = "GMPO"
    args: GMPOConfig

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `gmpo_objective`."""
        gather = self._gather_entropies if self.accelerator.num_processes > 1 else None
        return gmpo_objective(outputs, batch, self.args, gather=gather)
