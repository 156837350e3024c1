"""What fields of `GRPOConfig` must not be, or had better not be, together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from posttrain.algorithms.vllm_fields import refuse_truncated, truncated_sampling
from posttrain.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.algorithms.grpo.config import GRPOConfig

__all__ = ["check_combinations", "check_correction", "warn_of_odd_choices"]

logger = logging.getLogger(__name__)

OLD_UPDATES = 16  # Updates between sampling and training, after which even a clipped ratio is mostly noise.
BY_LENGTH = ("bnpo", "dr_grpo", "dapo", "cispo")  # Reductions under which a sequence's ratio counts once a token.
LOW_TEMPERATURE = 0.1
# What the loss of one ratio a completion has no place for.
WITHOUT_IN_GMPO = {
    "importance_sampling_level": "token",
    "delta": None,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": False,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}


def check_combinations(cfg: GRPOConfig) -> None:
    """Refuse what could only train something else than what was asked for.

    Raises:
        ConfigError: Names the fields, their values and what to set.
    """
    if cfg.loss_type == "luspo":
        _check_luspo(cfg)
    if cfg.loss_type == "gmpo":
        _check_gmpo(cfg)
    if cfg.loss_type == "cispo" and (cfg.epsilon_high is None or cfg.epsilon_high < 1):
        raise ConfigError(
            f"loss_type='cispo' with epsilon_high={cfg.epsilon_high}: CISPO caps the ratio itself, so a cap below 1 would "
            "scale every token down. Use epsilon_high=5.0."
        )
    low, high = cfg.vllm_importance_sampling_clip_min, cfg.vllm_importance_sampling_clip_max
    if cfg.vllm_importance_sampling_mode.endswith("_truncate") and low is None and high is None:
        raise ConfigError(
            f"vllm_importance_sampling_mode={cfg.vllm_importance_sampling_mode!r} truncates the ratio at "
            "vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max, and both are None. Set one, e.g. "
            "vllm_importance_sampling_clip_max=2.0."
        )
    if cfg.use_vllm:
        check_correction(cfg)


def _check_luspo(cfg: GRPOConfig) -> None:
    token_weights = cfg.vllm_importance_sampling_correction and cfg.vllm_importance_sampling_mode.startswith("token")
    for name, fits in {
        "importance_sampling_level": cfg.importance_sampling_level == "sequence",
        "beta": cfg.beta == 0,
        "top_entropy_quantile": cfg.top_entropy_quantile == 1,
        "vllm_importance_sampling_mode": not token_weights,
    }.items():
        if not fits:
            raise ConfigError(
                f"loss_type='luspo' weighs whole sequences, so {name}={getattr(cfg, name)!r} cannot be used with it. "
                "Set importance_sampling_level='sequence', beta=0.0, top_entropy_quantile=1.0 and a "
                "vllm_importance_sampling_mode that begins with 'sequence'."
            )


def _check_gmpo(cfg: GRPOConfig) -> None:
    for name, default in WITHOUT_IN_GMPO.items():
        if getattr(cfg, name) != default:
            raise ConfigError(
                f"{name}={getattr(cfg, name)!r} has no meaning in GMPO, whose loss is one ratio a completion. Leave it at "
                f"{default!r}, or use another loss_type."
            )


def check_correction(cfg: GRPOConfig) -> None:
    """Refuse settings that do not fit log-probs of an engine which is not the trainer.

    Raises:
        ConfigError: VESPO with one weight a sequence; truncated sampling with the correction.
    """
    if not cfg.vllm_importance_sampling_correction:
        return
    mode = cfg.vllm_importance_sampling_mode
    if cfg.loss_type == "vespo" and not mode.startswith("token"):
        raise ConfigError(
            f"loss_type='vespo' multiplies the engine's correction up over tokens, and vllm_importance_sampling_mode="
            f"{mode!r} has one value a sequence. Set vllm_importance_sampling_mode='token_truncate'."
        )
    refuse_truncated(cfg)


def warn_of_odd_choices(cfg: GRPOConfig) -> None:
    """Say what is accepted and will not do what it may seem to do."""
    _warn_of_levels(cfg)
    _warn_of_clips(cfg)
    _warn_of_schedule(cfg)
    if cfg.multi_objective_aggregation == "normalize_then_sum" and cfg.scale_rewards != "group":
        logger.warning("scale_rewards=%r is ignored with normalize_then_sum.", cfg.scale_rewards)
    if cfg.temperature < LOW_TEMPERATURE:
        logger.warning(
            "temperature=%s is so low that completions of a group will hardly differ; log-probs are divided by it too.",
            cfg.temperature,
        )
    if truncated := truncated_sampling(cfg):
        logger.warning(
            "%s: completions are drawn from a truncated distribution; log-probs, ratios and the KL are of the whole one and "
            "ignore it.", truncated,
        )  # fmt: skip


def _warn_of_levels(cfg: GRPOConfig) -> None:
    level, kind = cfg.importance_sampling_level, cfg.loss_type
    if level != "token" and kind in BY_LENGTH:
        logger.warning(
            "importance_sampling_level=%r with loss_type=%r weighs sequences by length; GSPO is loss_type='grpo'.",
            level, kind,
        )  # fmt: skip
    if level != "token" and kind == "vespo":
        logger.warning("vespo forms its own sequence weight; importance_sampling_level=%r is ignored.", level)


def _warn_of_clips(cfg: GRPOConfig) -> None:
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    set_by_user = {name for name in ("epsilon", "epsilon_high", "delta") if _changed(cfg, name)}
    unused = {"sapo": {"epsilon", "epsilon_high", "delta"}, "cispo": {"epsilon", "delta"}}
    unused["vespo"] = unused["sapo"]
    if ignored := sorted(set_by_user & unused.get(cfg.loss_type, set())):
        logger.warning(
            "%s: ignored, because loss_type=%r does not clip with it.",
            ", ".join(f"{name}={getattr(cfg, name)}" for name in ignored), cfg.loss_type,
        )  # fmt: skip
    elif cfg.delta is not None and cfg.delta < 1 + high:
        logger.warning("delta=%s is below 1 + epsilon_high = %s and cancels the clip.", cfg.delta, 1 + high)


def _changed(cfg: GRPOConfig, name: str) -> bool:
    return getattr(cfg, name) != type(cfg).__dataclass_fields__[name].default


def _warn_of_schedule(cfg: GRPOConfig) -> None:
    window = (cfg.steps_per_generation or 1) * cfg.num_iterations
    accumulation = cfg.gradient_accumulation_steps
    if window / accumulation > OLD_UPDATES:
        logger.warning(
            "steps_per_generation=%d x num_iterations=%d over gradient_accumulation_steps=%d: the last slices are %.0f "
            "updates old when they are trained. Lower steps_per_generation or num_iterations.",
            cfg.steps_per_generation, cfg.num_iterations, accumulation, window / accumulation,
        )  # fmt: skip
    fields = ["epsilon", "epsilon_high", "delta", "importance_sampling_level"]
    chosen = [f"{name}={getattr(cfg, name)!r}" for name in fields if _changed(cfg, name)]
    chosen += [f"loss_type={cfg.loss_type!r}"] * (cfg.loss_type in ("sapo", "cispo", "vespo"))
    if chosen and accumulation % window == 0:
        logger.warning(
            "%s: no effect, because each batch is trained before the weights move (gradient_accumulation_steps=%d is a "
            "multiple of steps_per_generation x num_iterations = %d), so the importance ratio is 1. Raise "
            "steps_per_generation or num_iterations to go off-policy.",
            ", ".join(chosen), accumulation, window,
        )  # fmt: skip
