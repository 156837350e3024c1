"""GRPO and related losses: the objective, advantages within groups of completions, and the adaptive entropy bonus."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from posttrain.losses.advantages import flat_groups, group_advantages, within_groups
from posttrain.losses.policy import (
    LOSS_TYPES,
    clip_metrics,
    engine_gap,
    entropy_mask,
    geometric_ratio,
    importance_log_ratio,
    kl_penalty,
    off_policy_mask,
    rollout_correction,
    sequence_weight,
    surrogate,
    token_terms,
    vespo,
    vespo_weight,
)
from posttrain.losses.reduce import Denominators, reduce, spread
from posttrain.methods.base import SAMPLES, Method, sampler_logp
from posttrain.methods.grpo.config import GRPOConfig
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.rewards.runner import RewardTable
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, State, TokenLoss

if TYPE_CHECKING:
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import LogProbs

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=GRPOConfig)


def grpo_needs(cfg: GRPOConfig) -> frozenset[str]:
    """Return the names of the model outputs that the loss of this config needs."""
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
    """Compute the loss of every token, before averaging: ``-surrogate(ratio, A) * weights + beta * KL - entropy_coef * H``.

    The first element of ``LossTerms.extra`` is the entropy bonus. Clipping, importance weights, the entropy filter and the
    off-policy mask do not apply to the KL term.

    Args:
        out: Log-probs and entropies of the policy.
        batch: Completions with advantages. Log-probs of the old policy, log-probs of the reference, and log-probs of the
            sampler are optional.
        cfg: `GRPOConfig`.
        entropy_coef: Current coefficient of the entropy bonus, if it is adaptive. None: ``cfg.entropy_coef``.
        gather: Function that concatenates a tensor over all ranks, so that all ranks use the same entropy threshold. All
            ranks must call it.

    Reference: DeepSeekMath, arXiv:2402.03300, equation 3; see `LOSS_TYPES` for the other losses.
    """
    kind, forest = LOSS_TYPES[cfg.loss_type], batch.by_sequence
    level = kind.level or cfg.importance_sampling_level
    log_ratio = importance_log_ratio(out.logp, batch.old_logp, *forest, level=level)
    advantages = spread(batch.advantages, batch.sequence)
    sampled = sampler_logp(out, batch)
    weight, metrics = _rollout_weight(out.logp, sampled, batch, cfg)
    uncertain = batch.loss_mask
    if cfg.top_entropy_quantile < 1.0:
        uncertain = entropy_mask(out.entropy, batch.loss_mask, quantile=cfg.top_entropy_quantile, gather=gather)
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    clip = {"epsilon": cfg.epsilon, "epsilon_high": high, "delta": cfg.delta}
    if kind.surrogate == "geometric":
        terms, clipping = _geometric(log_ratio, advantages, batch, cfg, uncertain)
    elif kind.surrogate == "vespo":
        terms, clipping = _vespo(log_ratio, advantages, out.logp, batch, cfg, weight)
        terms = terms * uncertain
    else:
        soft = (cfg.sapo_temperature_pos, cfg.sapo_temperature_neg)
        clipping = clip_metrics(log_ratio, advantages, *forest, **clip, surrogate=kind.surrogate, level=level)
        terms = surrogate(kind.surrogate, log_ratio, advantages, out.logp, **clip, sapo_temperatures=soft) * uncertain
    if weight is not None and kind.surrogate != "vespo":
        terms = terms * weight
    terms = terms * _kept(out.logp, sampled, batch, cfg)
    if batch.ref_logp is not None:
        corrected = cfg.use_bias_correction_kl and kind.surrogate != "geometric"
        kl = kl_penalty(out.logp, batch.ref_logp, log_ratio if corrected else None)
        terms = terms + cfg.beta * kl if cfg.beta else terms
        metrics["kl"] = mean(kl, batch.loss_mask)
    metrics |= clipping | {
        "entropy": mean(out.entropy, batch.loss_mask),
        "ratio/max": maximum(log_ratio.detach().exp(), batch.loss_mask),
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
        # The entropy filter is computed per forward pass. If it excludes tokens, the bonus must be averaged per forward pass
        # too.
        reduction = "token" if uncertain is batch.loss_mask else "local_token"
        loss.extra.append(LossTerms(-coefficient * out.entropy, uncertain, reduction))
    return loss


def _vespo(
    log_ratio: Tensor, advantages: Tensor, logp: Tensor, batch: Batch, cfg: GRPOConfig, weight: Tensor | None
) -> tuple[Tensor, dict[str, Metric]]:
    if weight is not None and batch.rollout_logp is not None:
        # The weight of a sequence is a product over its tokens. Give tokens without a log-prob the weight 1, which does not
        # change the product. A masked token has the weight 0, which sets the weight of the whole sequence to 0.
        weight = weight.masked_fill(batch.rollout_logp.isnan(), 1.0)
    phi = vespo_weight(
        log_ratio,
        batch.advantages,
        *batch.by_sequence,
        pos=(cfg.vespo_k_pos, cfg.vespo_lambda_pos),
        neg=(cfg.vespo_k_neg, cfg.vespo_lambda_neg),
        rollout_weight=weight,
    )
    return vespo(spread(phi, batch.sequence), advantages, logp), {"vespo/phi_seq_mean": mean(phi)}


def _geometric(
    log_ratio: Tensor, advantages: Tensor, batch: Batch, cfg: GRPOConfig, kept: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """Compute the GMPO loss ``-c_i A_i`` of each completion, repeated for each of its tokens.

    ``c_i`` is the geometric mean of the clipped ratios of the ``kept`` tokens. The clip bounds apply to the logarithm of the
    ratio.
    """
    forest = (batch.sequence, batch.num_sequences)
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    bounds = {"epsilon": cfg.epsilon, "epsilon_high": high}
    ratio = geometric_ratio(log_ratio, batch.advantages, kept, *forest, **bounds)
    same = {"epsilon": 1 - math.exp(-cfg.epsilon), "epsilon_high": math.expm1(high)}
    metrics = clip_metrics(log_ratio, advantages, batch.loss_mask, *forest, **same)
    return -spread(ratio, batch.sequence) * advantages, metrics


def _rollout_weight(
    logp: Tensor, sampled: Tensor | None, batch: Batch, cfg: GRPOConfig
) -> tuple[Tensor | None, dict[str, Metric]]:
    """Compute the importance-sampling correction for differences between engine and policy, and metrics of these
    differences.

    The correction is None if the batch has no log-probs of the engine, or if the correction is disabled.
    """
    if sampled is None:
        return None, {}
    trained = logp.detach() if batch.old_logp is None else batch.old_logp
    metrics = engine_gap(trained, sampled, batch.loss_mask)
    if not cfg.vllm_importance_sampling_correction:
        return None, metrics
    mode, forest = cfg.vllm_importance_sampling_mode, batch.by_sequence
    mode = mode.replace("token_", "sequence_") if cfg.loss_type == "gmpo" else mode
    bounds = {"clip_max": cfg.vllm_importance_sampling_clip_max, "clip_min": cfg.vllm_importance_sampling_clip_min}
    weight = rollout_correction(trained, sampled, *forest, mode=mode, **bounds)
    ratio, counted = (
        (weight, batch.loss_mask) if mode.startswith("token") else sequence_weight(weight, sampled, *forest)
    )
    return weight, metrics | {
        "sampling/importance_sampling_ratio/min": minimum(ratio, counted),
        "sampling/importance_sampling_ratio/mean": mean(ratio, counted),
        "sampling/importance_sampling_ratio/max": maximum(ratio, counted),
        "sampling/frac_masked": mean((weight == 0).float(), batch.loss_mask),
    }


def _kept(logp: Tensor, sampled: Tensor | None, batch: Batch, cfg: GRPOConfig) -> Tensor | float:
    """Return 0 for tokens in sequences that the off-policy mask excludes, and 1 for other tokens. The denominators of the
    loss still include the excluded tokens.
    """
    if cfg.off_policy_mask_threshold is None:
        return 1.0
    old = logp.detach() if batch.old_logp is None else batch.old_logp
    sampled = old if sampled is None else sampled
    forest = batch.by_sequence
    keep = off_policy_mask(logp, sampled, batch.advantages, *forest, threshold=cfg.off_policy_mask_threshold)
    return spread(keep.float(), batch.sequence)


STATE_FILE = "entropy_ctrl_state.json"
# Number of steps after which a warning is logged if no entropy bonus was applied in any of them.
STEPS_UNTIL_WARNING = 50


@dataclass(frozen=True, slots=True)
class EntropyBonus:
    """Coefficient of the entropy bonus, fixed or adaptive.

    After every optimizer step, an adaptive coefficient changes by a fixed amount. It increases if the entropy of the step is
    at or below the target, and decreases otherwise. The bonus is applied only if the entropy of the previous step was at or
    below the target. It is therefore never applied in the first step.

    Attributes:
        coefficient: Current coefficient. It is stored even while the bonus is not applied.
        last: Entropy of the last optimizer step in nats. It is infinite before the first step.
        ever_applied: Whether the bonus was applied in any step of the run.

    Reference: Skywork-OR1, arXiv:2505.22312.
    """

    coefficient: float
    last: float = math.inf
    ever_applied: bool = False

    def applied(self, args: GRPOConfig) -> float:
        """Return the coefficient for the current step, or 0 if the bonus is not applied."""
        return self.coefficient if not args.use_adaptive_entropy or self.last <= args.entropy_target else 0.0

    def after(self, entropy: float, args: GRPOConfig) -> EntropyBonus:
        """Return the state after an optimizer step with the mean entropy ``entropy``."""
        step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        coefficient = min(max(self.coefficient + step, args.entropy_coef_min), args.entropy_coef_max)
        following = EntropyBonus(coefficient, entropy, self.ever_applied)
        return replace(following, ever_applied=self.ever_applied or following.applied(args) > 0)

    def save(self, folder: str) -> None:
        """Write the state to a checkpoint folder. An infinite entropy is written as null, because JSON has no infinity."""
        last = self.last if math.isfinite(self.last) else None
        state = {"entropy_coef": self.coefficient, "last_world_entropy": last}
        Path(folder, STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def loaded(self, folder: str | None) -> EntropyBonus:
        """Return the state that a checkpoint folder contains. If the folder contains no state, return this object."""
        path = Path(folder or ".", STATE_FILE)
        if folder is None or not path.is_file():
            return self
        state = json.loads(path.read_text(encoding="utf-8"))
        last = state["last_world_entropy"]
        return replace(self, coefficient=state["entropy_coef"], last=math.inf if last is None else last)


@torch.no_grad()
def bonus_sums(terms: LossTerms, outputs: ModelOutputs, denominators: Denominators) -> Tensor:
    """Return three sums of one forward pass: the entropy of tokens with a bonus, the number of these tokens, and the policy
    loss.
    """
    assert outputs.entropy is not None
    mask = terms.extra[0].mask
    policy = reduce(replace(terms, extra=[]), denominators) / denominators.world_size
    return torch.stack([outputs.entropy[mask].sum(), mask.sum(), policy]).cpu().double()


def group_options(args: GRPOConfig) -> dict[str, Any]:
    """Return the keyword arguments of `group_advantages` for this config."""
    return {
        "scale_rewards": str(args.scale_rewards),
        "aggregation": args.multi_objective_aggregation,
        "min_group_std": args.min_group_std,
    }


class GRPO(Method[Config]):
    """Group-relative policy optimization: the baseline of a completion is the mean reward of its group.

    It needs no value model. `State.own` of this method is an `EntropyBonus`.

    Reference: DeepSeekMath, arXiv:2402.03300, equations 3 and 4.
    """

    config_class = GRPOConfig
    traits = replace(
        SAMPLES, follows_truncation=True, splits_tokens=True, beta_is_kl=True, reads_images=True, takes_episodes=True
    )

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        # The entropy threshold and the average of 'bnpo' are computed over a micro-batch, so the whole micro-batch must be
        # in one forward pass.
        single = cfg.top_entropy_quantile < 1.0 or cfg.loss_type == "bnpo"
        head = cfg.cast_lm_head_to_fp32
        self.traits = replace(self.traits, needs=grpo_needs(cfg), single_pass=single, float32_head=head)
        self.has_bonus = bool(cfg.entropy_coef or cfg.use_adaptive_entropy)

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Compute the reward of each completion minus the mean reward of its group, optionally divided by a standard
        deviation.

        With ``mask_zero_variance_groups``, groups whose rewards are all equal are excluded.
        """
        cfg, size, metrics, left_out = self.cfg, rollouts.group_size, {}, frozenset()
        stats = group_advantages(rewards.values, rewards.weights, size, **group_options(cfg))
        if cfg.mask_zero_variance_groups and size > 1:
            # This also excludes groups in which no completion has a reward.
            flat = self.without_signal(rewards, size)
            mine = flat.repeat_interleave(size)[rewards.start : rewards.start + len(rollouts.rollouts)]
            left_out, metrics = frozenset(mine.nonzero().flatten().tolist()), {"groups/masked": mean(flat.float())}
        return within_groups(
            stats,
            rewards.start,
            bound=cfg.scale_rewards != "none" or cfg.multi_objective_aggregation != "sum_then_normalize",
            zero_std_share=stats.zero_std_share,
            token_columns=logps,
            left_out=left_out,
            metrics=metrics,
        )

    def without_signal(self, rewards: RewardTable, group_size: int) -> Tensor:
        """Return a bool tensor ``(n / G,)``. It is True for groups whose rewards are all equal or missing."""
        each = self.cfg.multi_objective_aggregation == "normalize_then_sum"
        least = self.cfg.min_group_std
        return flat_groups(rewards.values, rewards.weights, group_size, least=least, each_function=each)

    def knows_gradient(self, batch: Batch) -> bool | TokenLoss:
        """Return True for on-policy samples without KL penalty, entropy bonus and entropy filter. Otherwise, return a
        `TokenLoss` if the loss of a token depends only on its own log-prob, or False.

        For on-policy samples, all importance ratios are 1. The gradient of a token's loss with respect to its log-prob is
        then its negative advantage.
        """
        others = self.cfg.beta or self.has_bonus or self.cfg.top_entropy_quantile < 1.0
        return (batch.old_logp is None and batch.rollout_logp is None and not others) or self._token_loss(batch)

    def _token_loss(self, batch: Batch) -> bool | TokenLoss:
        """Return the loss of single tokens. Return False if the loss of a token depends on other tokens or on the entropy."""
        cfg, kind = self.cfg, LOSS_TYPES[self.cfg.loss_type]
        wide = self.has_bonus or cfg.top_entropy_quantile < 1.0 or cfg.off_policy_mask_threshold is not None
        level = kind.level or cfg.importance_sampling_level
        if wide or level != "token" or not kind.by_token or batch.rollout_logp is not None:
            return False
        columns = {"advantages": spread(batch.advantages, batch.sequence), "old_logp": batch.old_logp}
        columns |= {"ref_logp": batch.ref_logp} if cfg.beta else {}
        high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
        options = {"epsilon": cfg.epsilon, "epsilon_high": high, "delta": cfg.delta, "beta": cfg.beta}
        soft = (cfg.sapo_temperature_pos, cfg.sapo_temperature_neg)
        options |= {"corrected": cfg.use_bias_correction_kl, "sapo_temperatures": soft}
        terms = partial(token_terms, kind.surrogate, **options)
        return TokenLoss(terms, {name: column for name, column in columns.items() if column is not None})

    def step_sums(self, terms: LossTerms, outputs: ModelOutputs, counts: Denominators) -> Tensor | None:
        """Return the sums of a forward pass that the entropy bonus needs; see `bonus_sums`."""
        return bonus_sums(terms, outputs, counts) if self.has_bonus else None

    def start(self) -> EntropyBonus:
        """Return the initial entropy bonus, with the config's coefficient."""
        return EntropyBonus(float(self.cfg.entropy_coef))

    def end_step(self, state: State, sums: Tensor | None) -> tuple[EntropyBonus, dict[str, Metric]]:
        """Update the coefficient of the entropy bonus. The mean entropy is taken over all forward passes and ranks of the
        step.
        """
        bonus, steered = state.own, self.cfg.use_adaptive_entropy
        if not self.has_bonus:
            return bonus, {}
        entropy, tokens, policy = state.ranks.sum([0.0] * 3 if sums is None else sums.tolist())
        if steered:
            bonus = bonus.after(entropy / max(tokens, 1.0), self.cfg)
        if steered and state.step == STEPS_UNTIL_WARNING and not bonus.ever_applied:
            logger.warning(
                "in the first %d steps, the entropy (now %.2f nats) was never at or below entropy_target=%s, so no entropy "
                "bonus was applied. Set entropy_target close to the entropy of the first steps.",
                STEPS_UNTIL_WARNING, bonus.last, self.cfg.entropy_target,
            )  # fmt: skip
        return bonus, {"policy_loss": mean(policy), "entropy_coef": mean(bonus.coefficient)}

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the loss of a micro-batch; see `grpo_objective`."""
        # Do not gather entropies in evaluation. Ranks run different numbers of forward passes, so a collective operation
        # would wait forever.
        gather = state.ranks.join if state.ranks.size > 1 and torch.is_grad_enabled() else None
        return grpo_objective(outputs, batch, self.cfg, entropy_coef=state.own.applied(self.cfg), gather=gather)
