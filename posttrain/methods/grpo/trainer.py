"""GRPO: the objective of the whole family, its trainer, and GMPO, which differs in its defaults."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from posttrain.checks.rewards import RunningReward
from posttrain.errors import ConfigError, check_choice
from posttrain.loop.config import attributes, takes
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.scoring import FIXED, FIXED_PATHS, SETTABLE, SETTABLE_PATHS, groups_without_signal, last_logged
from posttrain.losses.advantages import AdvantageStats, group_advantages
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
from posttrain.losses.reduce import Denominators, reduce, spread
from posttrain.methods.grpo.config import GRPOConfig, check_correction
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.models import parallel
from posttrain.models.heads import cast_head_to_fp32, causal_lm
from posttrain.report.completions import CompletionsHubCallback
from posttrain.report.sync_reference import SyncRefModelCallback
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Batch, LossTerms, ModelOutputs, NonNegativeFloat, option

logger = logging.getLogger(__name__)


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
    return weight, metrics | {
        "sampling/importance_sampling_ratio/min": minimum(weight, batch.loss_mask),
        "sampling/importance_sampling_ratio/mean": mean(weight, batch.loss_mask),
        "sampling/importance_sampling_ratio/max": maximum(weight, batch.loss_mask),
        "sampling/frac_masked": mean((weight == 0).float(), batch.loss_mask),
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


STATE_FILE = "entropy_ctrl_state.json"
# Optimiser steps without a single bonus, after which the target counts as out of reach.
PATIENCE = 50


def _active_dropout(model: nn.Module) -> str:
    """The first dropout that acts in training, as ``name=rate`` (an adapter's own included); empty where there is none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name}={module.p}"
    config: Any = getattr(model, "config", None)
    rate = getattr(config.get_text_config() if config is not None else None, "attention_dropout", 0.0)
    return f"attention_dropout={rate}" if rate else ""


class EntropyBonus:
    """The coefficient of the entropy term: fixed, or steered so that the entropy stays near its target.

    Steered, it rises by a step after every optimiser step whose entropy was at or below the target and falls otherwise;
    it is applied only while the last entropy was at or below the target, so not in the first step.

    Attributes:
        coefficient: Before the gate.
        last: Entropy of the last optimiser step in nats; infinite before the first.

    Args:
        args: Of the trainer.
        accelerator: Of the run.

    Reference: Skywork-OR1, arXiv:2505.22312.
    """

    def __init__(self, args: GRPOConfig, accelerator: Any = None) -> None:
        self.args, self.accelerator = args, accelerator
        self.active, self.steered = bool(args.entropy_coef or args.use_adaptive_entropy), args.use_adaptive_entropy
        self.coefficient, self.last = float(args.entropy_coef), math.inf
        # Entropy of the tokens it acts on, their count, policy loss: (3,) sums over an optimiser step.
        self._window = torch.zeros(3, dtype=torch.float64)
        self._ended_at, self._ever_applied = 0, False

    @property
    def applied(self) -> float:
        """What multiplies the entropy now."""
        return self.coefficient if not self.steered or self.last <= self.args.entropy_target else 0.0

    def update(self, entropy: float) -> None:
        """Take in the entropy of a whole optimiser step."""
        args, self.last = self.args, entropy
        step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        self.coefficient = min(max(self.coefficient + step, args.entropy_coef_min), args.entropy_coef_max)
        self._ever_applied = self._ever_applied or self.applied > 0

    @torch.no_grad()
    def add(self, terms: LossTerms, outputs: ModelOutputs, denominators: Denominators) -> None:
        """Take in one forward pass of training."""
        if not self.active:
            return
        assert outputs.entropy is not None
        mask = terms.extra[0].mask
        policy = reduce(dataclasses.replace(terms, extra=[]), denominators) / denominators.world_size
        self._window += torch.stack([outputs.entropy[mask].sum(), mask.sum(), policy]).to(self._window)

    def end_step(self, step: int) -> dict[str, Metric]:
        """Steer, from the entropy over all micro-batches and ranks of an optimiser step, and say what to log.

        Args:
            step: Optimiser steps that were made; a second call with the same number does nothing.
        """
        if not self.active or step == self._ended_at:
            return {}
        self._ended_at = step
        entropy, tokens, policy = parallel.all_reduce_sum(self._window.tolist(), self.accelerator)
        self._window.zero_()
        if self.steered:
            self.update(entropy / max(tokens, 1.0))
        if self.steered and step == PATIENCE and not self._ever_applied:
            logger.warning(
                "after %d steps the entropy (%.2f nats) never was at or below entropy_target=%s, so there was no bonus yet. Set "
                "the target near the entropy of the first steps.", PATIENCE, self.last, self.args.entropy_target,
            )  # fmt: skip
        return {"policy_loss": mean(policy), "entropy_coef": mean(self.coefficient)}

    def save(self, folder: str) -> None:
        """Write what is steered into a checkpoint; JSON has no infinity."""
        if self.steered:
            last = self.last if math.isfinite(self.last) else None
            state = {"entropy_coef": self.coefficient, "last_world_entropy": last}
            Path(folder, STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: str | None, step: int) -> None:
        """Undo `save`, in a run that goes on after ``step`` optimiser steps."""
        self._ended_at = step
        path = Path(folder or ".", STATE_FILE)
        if self.steered and folder is not None and path.is_file():
            state = json.loads(path.read_text(encoding="utf-8"))
            last = state["last_world_entropy"]
            self.coefficient, self.last = state["entropy_coef"], math.inf if last is None else last


# Groups this narrow against all rewards are noise; more than this share of them is reported.
TINY, MANY = 1e-3, 0.2
# Groups before anything is said of their share, and the latest that it is a share of.
ENOUGH, LOOKED_AT = 5, 64
# No entropy is negative.
PADDING = -1e9


def scored_groups(table: RewardTable, size: int, args: GRPOConfig) -> AdvantageStats:
    """Advantages of completions within their groups of ``size``."""
    return group_advantages(
        table.values,
        table.weights,
        size,
        scale_rewards=str(args.scale_rewards),
        aggregation=args.multi_objective_aggregation,
        min_group_std=args.min_group_std,
    )


@attributes(*SETTABLE, "scale_rewards", "multi_objective_aggregation", **SETTABLE_PATHS)
@attributes("loss_type", "importance_sampling_level", "top_entropy_quantile", *FIXED, **FIXED_PATHS, fixed=True)
class GRPOTrainer(OnlineTrainer, config=GRPOConfig):
    """Group-relative policy optimisation: no value model; a completion's baseline is its group's mean.

    Args:
        model: Hub id, folder, model or peft model.
        reward_funcs: A callable ``f(prompts, completions, **columns) -> list[float | None]``, a reward model, or several.
        args: `GRPOConfig`.
        rollout_engine: An engine object; None makes the one that ``args.rollout_engine`` names.
        tools, rollout_func, environment_factory: See `EpisodeSetup` and the pages on tools and environments.

    Reference: DeepSeekMath, arXiv:2402.03300, equations 3 and 4.

    >>> def short(completions, **kwargs):
    ...     return [-len(text) / 100 for text in completions]
    >>> trainer = GRPOTrainer(model, short, train_dataset=prompts)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    splits_tokens = True
    takes_images: bool = True
    takes_episodes: ClassVar[bool] = True
    args: GRPOConfig

    @takes(
        "model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, "
        "callbacks, optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory"
    )
    def __init__(
        self, model: str | nn.Module, reward_funcs: Any = None, args: GRPOConfig | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model, reward_funcs, args, **kwargs)
        args = self.args
        self.needs = grpo_needs(args)
        # A threshold over the micro-batch, and a mean that is one of the micro-batch, want it in one pass.
        self.single_forward_per_microbatch = args.top_entropy_quantile < 1.0 or args.loss_type == "bnpo"
        self._warned_of_noise, self._totals = False, RunningReward()
        self._stds_seen: deque[float] = deque(maxlen=LOOKED_AT)
        self.entropy_bonus = EntropyBonus(args, self.accelerator)
        if not self.engine_is_policy:
            check_correction(args)
        if args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(self.reference, self.accelerator))
        if args.log_completions_hub_repo:
            self.add_callback(CompletionsHubCallback(args.log_completions_hub_repo))
        if dropout := _active_dropout(self.model):
            logger.warning(
                "%s is active: log-probs of the policy carry its noise, and those it is compared with do not. Set "
                "disable_dropout=True.", dropout,
            )  # fmt: skip

    def _prepare_model(self, model: Any, args: Any, peft_config: Any) -> Any:
        model = super()._prepare_model(model, args, peft_config)
        if args.cast_lm_head_to_fp32:
            cast_head_to_fp32(causal_lm(model))
        return model

    def advantages(self, generation: RolloutBatch, table: RewardTable, mode: str) -> Tensor:
        """A completion's reward against its group's mean, divided by a spread."""
        args, size = self.args, self.group_size(mode)
        stats = scored_groups(table, size, args)
        divided = args.scale_rewards != "none" or args.multi_objective_aggregation != "sum_then_normalize"
        advantages = self.reward_watch.bounded(stats.advantages, mode) if divided else stats.advantages
        self.reward_watch.log(generation, table, stats.totals, advantages, mode, stats.zero_std_share)
        if mode == "train":
            self._warn_of_noise(stats)
        if args.mask_zero_variance_groups and size > 1:
            flat = groups_without_signal(args, table, size)  # Also where nothing was scored.
            mine = flat.repeat_interleave(size)[table.start : table.start + len(generation.rollouts)]
            generation.left_out |= set(mine.nonzero().flatten().tolist())
            self.log_metrics_now({"groups/masked": mean(flat.float())}, mode)
        return advantages

    def _warn_of_noise(self, stats: AdvantageStats) -> None:
        """Warn of groups that are narrow against all rewards so far: a generation may hold a single group."""
        self._totals.add(stats.totals.tolist())
        self._stds_seen.extend(stats.group_std[~stats.group_std.isnan()].tolist())
        known, whole = len(self._stds_seen), self._totals.std
        narrow = sum(std > 0 and self.args.min_group_std <= std < TINY * whole for std in self._stds_seen)
        if self._warned_of_noise or self.args.scale_rewards != "group" or known < ENOUGH or narrow <= MANY * known:
            return
        self._warned_of_noise = True
        logger.warning(
            "%d of the last %d groups spread less than a thousandth of the rewards' std so far (%.3g), and scale_rewards='group' "
            "blows that up to full-size updates. If it is noise, set min_group_std, or scale_rewards='batch'.",
            narrow, known, whole,
        )  # fmt: skip

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `grpo_objective`."""
        # In evaluation passes are not equally many.
        shared = self.accelerator.num_processes > 1 and self.model.training
        gather = self._gather_entropies if shared else None
        return grpo_objective(outputs, batch, self.args, entropy_coef=self.entropy_bonus.applied, gather=gather)

    def _gather_entropies(self, values: Tensor) -> Tensor:
        """Of all ranks, whose counts differ; one collective in every micro-batch, of which all have equally many."""
        padded = self.accelerator.pad_across_processes(values, dim=0, pad_index=PADDING)  # type: ignore[arg-type]
        gathered = self.accelerator.gather(padded)
        assert isinstance(gathered, torch.Tensor)
        return gathered[gathered != PADDING]

    # The entropy bonus -------------------------------------------------------------------------------------------

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy term, steered or not."""
        return self.entropy_bonus.coefficient

    def compute_loss_terms(self, model: nn.Module, batch: Batch) -> tuple[LossTerms, ModelOutputs]:
        """As the parent's; in training, what steering and the log need is added up over the optimiser step."""
        terms, outputs = super().compute_loss_terms(model, batch)
        if model.training:
            self.entropy_bonus.add(terms, outputs, self.denominators)
        return terms, outputs

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.log_metrics_now(self.entropy_bonus.end_step(self.state.global_step))
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            self.entropy_bonus.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.entropy_bonus.load(checkpoint, self.state.global_step)

    # Attributes that callbacks and reward functions read, by TRL's names ---------------------------------------------

    _logs = property(last_logged)

    @property
    def _buffered_inputs(self) -> Any:
        return self.window.slices

    @_buffered_inputs.setter
    def _buffered_inputs(self, value: Any) -> None:
        if value is not None:
            raise ConfigError("_buffered_inputs holds rows of token forests; set it to None to generate again.")
        self.window.slices = None


@dataclass
class GMPOConfig(GRPOConfig):
    """Arguments of `GMPOTrainer`; the clip bounds are in log space: ratios in (e^-0.4, e^0.4) = (0.670, 1.492) stay."""

    loss_type: Literal["gmpo"] = option("gmpo", "Only gmpo: the row of `LOSS_TYPES`.")
    epsilon: NonNegativeFloat = option(0.4, "Lower clip of the log-ratio: -epsilon.")
    epsilon_high: NonNegativeFloat | None = option(None, "Upper clip of the log-ratio; None: epsilon.")

    def _check_choices(self) -> None:
        check_choice("loss_type", self.loss_type, ("gmpo",))
        super()._check_choices()


class GMPOTrainer(GRPOTrainer, config=GMPOConfig):
    """Geometric-mean policy optimisation: GRPO whose ratio is the geometric mean of a completion's clipped token ratios.

    A single token far off cannot decide the loss of its completion: its log-ratio is clipped and averaged. An
    experimental method.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """

    args: GMPOConfig
