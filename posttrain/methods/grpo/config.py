"""`GRPOConfig`: the options of GRPO and the losses of its family, with their validation."""

from __future__ import annotations

import importlib.util
import logging
from typing import Annotated, ClassVar, Literal

from posttrain.errors import ConfigError
from posttrain.fields import NonNegativeFloat, OneOf, PositiveFloat, Share, config, option
from posttrain.methods.config import PictureConfig
from posttrain.methods.online_config import (
    EpisodeFields,
    OnlineConfig,
    check_truncation,
    reject_reshaped_sampling,
    reshaped_sampling,
)

logger = logging.getLogger(__name__)


# A warning is logged if sampling and training are separated by more optimizer steps than this, because even a clipped ratio is
# then mostly noise.
OLD_UPDATES = 16
# Losses that average over tokens. With sequence-level ratios, they weight each sequence by its length.
BY_LENGTH = ("bnpo", "dr_grpo", "dapo", "cispo")
LOW_TEMPERATURE = 0.1
# Options that GMPO does not support, because its loss has one ratio per completion. Each has the only allowed value.
WITHOUT_IN_GMPO = {
    "importance_sampling_level": "token",
    "delta": None,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}


def check_combinations(cfg: GRPOConfig) -> None:
    """Reject combinations of options that contradict each other.

    Raises:
        ConfigError: The message contains the fields, their values and the fix.
    """
    if cfg.loss_type == "luspo":
        _check_luspo(cfg)
    if cfg.loss_type == "gmpo":
        _check_gmpo(cfg)
    if cfg.loss_type == "cispo" and (cfg.epsilon_high is None or cfg.epsilon_high < 1):
        raise ConfigError(
            f"loss_type='cispo' with epsilon_high={cfg.epsilon_high}: CISPO caps the ratio itself at epsilon_high, "
            "and a cap below 1 would reduce the weight of every token. Set epsilon_high=5.0."
        )
    check_truncation(cfg)


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
                f"loss_type='luspo' weights whole sequences and does not support {name}={getattr(cfg, name)!r}. Set "
                "importance_sampling_level='sequence', beta=0.0, top_entropy_quantile=1.0 and a "
                "vllm_importance_sampling_mode that begins with 'sequence'."
            )


def _check_gmpo(cfg: GRPOConfig) -> None:
    for name, default in WITHOUT_IN_GMPO.items():
        if (value := getattr(cfg, name)) != default:
            raise ConfigError(
                f"{name}={value!r} is not supported by loss_type='gmpo', whose loss has one ratio per completion. Set "
                f"it to {default!r}, or use another loss_type."
            )


def check_correction(cfg: GRPOConfig) -> None:
    """Reject settings that are invalid if the engine's log-probs are not the trainer's.

    Raises:
        ConfigError: VESPO with a sequence-level correction, or changed sampling with the correction.
    """
    if not cfg.vllm_importance_sampling_correction:
        return
    mode = cfg.vllm_importance_sampling_mode
    if cfg.loss_type == "vespo" and not mode.startswith("token"):
        raise ConfigError(
            "loss_type='vespo' multiplies the correction over the tokens of a sequence, but "
            f"vllm_importance_sampling_mode={mode!r} has one value per sequence. Set "
            "vllm_importance_sampling_mode='token_truncate'."
        )
    reject_reshaped_sampling(cfg)


def warn_ineffective_options(cfg: GRPOConfig) -> None:
    """Warn about options that are accepted but have no effect or an unexpected effect."""
    _warn_of_levels(cfg)
    _warn_of_clips(cfg)
    _warn_of_schedule(cfg)
    if cfg.multi_objective_aggregation == "normalize_then_sum" and cfg.scale_rewards != "group":
        logger.warning(
            "scale_rewards=%r is ignored with multi_objective_aggregation='normalize_then_sum'.", cfg.scale_rewards
        )
    if cfg.temperature < LOW_TEMPERATURE:
        logger.warning(
            "temperature=%s is so low that the completions of a group will be nearly identical. Log-probs are "
            "computed at this temperature too.",
            cfg.temperature,
        )
    if reshaped := reshaped_sampling(cfg):
        logger.warning(
            "%s changes the distribution of completions. Log-probs, ratios and the KL are computed for the unchanged "
            "distribution.", reshaped,
        )  # fmt: skip


def _warn_of_levels(cfg: GRPOConfig) -> None:
    level, kind = cfg.importance_sampling_level, cfg.loss_type
    if level != "token" and kind in BY_LENGTH:
        logger.warning(
            "importance_sampling_level=%r with loss_type=%r weights sequences by their length. For GSPO set "
                "loss_type='grpo'.",
            level, kind,
        )  # fmt: skip
    if level != "token" and kind == "vespo":
        logger.warning("loss_type='vespo' has its own sequence weight; importance_sampling_level=%r is ignored.", level)


def _warn_of_clips(cfg: GRPOConfig) -> None:
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    set_by_user = {name for name in ("epsilon", "epsilon_high", "delta") if _changed(cfg, name)}
    unused = {"sapo": {"epsilon", "epsilon_high", "delta"}, "cispo": {"epsilon", "delta"}}
    unused["vespo"] = unused["sapo"]
    if ignored := sorted(set_by_user & unused.get(cfg.loss_type, set())):
        logger.warning(
            "%s has no effect, because loss_type=%r does not clip with it.",
            ", ".join(f"{name}={getattr(cfg, name)}" for name in ignored), cfg.loss_type,
        )  # fmt: skip
    elif cfg.delta is not None and cfg.delta < 1 + high:
        logger.warning("delta=%s is below 1 + epsilon_high = %s, so the upper clip has no effect.", cfg.delta, 1 + high)


def _changed(cfg: GRPOConfig, name: str) -> bool:
    return getattr(cfg, name) != type(cfg).__dataclass_fields__[name].default


def _warn_of_schedule(cfg: GRPOConfig) -> None:
    window = (cfg.steps_per_generation or 1) * cfg.num_iterations
    accumulation = cfg.gradient_accumulation_steps
    if window / accumulation > OLD_UPDATES:
        logger.warning(
            "steps_per_generation=%d x num_iterations=%d with gradient_accumulation_steps=%d: the last slices of a "
            "generation are used for training %.0f optimizer steps after sampling. Lower steps_per_generation or "
            "num_iterations.",
            cfg.steps_per_generation, cfg.num_iterations, accumulation, window / accumulation,
        )  # fmt: skip
    fields = ["epsilon", "epsilon_high", "delta", "importance_sampling_level"]
    chosen = [f"{name}={getattr(cfg, name)!r}" for name in fields if _changed(cfg, name)]
    chosen += [f"loss_type={cfg.loss_type!r}"] * (cfg.loss_type in ("sapo", "cispo", "vespo"))
    if chosen and accumulation % window == 0:
        logger.warning(
            "%s has no effect, because each batch is used for training before the weights change "
            "(gradient_accumulation_steps=%d is a multiple of steps_per_generation x num_iterations = %d), so the "
            "importance ratio is 1. Raise steps_per_generation or num_iterations to train off-policy.",
            ", ".join(chosen), accumulation, window,
        )  # fmt: skip


LEVELS = ("token", "sequence", "sequence_token")
SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


# Maps names of published methods to the combination of options that is equivalent.
OTHER_NAMES = {
    "dapo+": "loss_type='dapo', epsilon_high=0.28, dynamic_sampling and mask_truncated_completions=True",
    "gspo": "loss_type='grpo' and importance_sampling_level='sequence'",
    "gspo_token": "loss_type='grpo' and importance_sampling_level='sequence_token'",
    "icepop": "loss_type='grpo' and vllm_importance_sampling_mode='token_mask', with both vllm_importance_sampling_clip_min and "
    "vllm_importance_sampling_clip_max",
}


@config
class GRPOConfig(PictureConfig, EpisodeFields, OnlineConfig):
    """Arguments of `GRPOTrainer`: group-relative policy optimization and the losses of its family.

    Reference: DeepSeekMath (arXiv:2402.03300), equation 3; DAPO (2503.14476); Dr. GRPO (2503.20783); GSPO (2507.18071).
    """

    _corrects_sampler: ClassVar[bool] = True
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo"] = option(
        "dapo",
        "Loss. 'dapo' (default): averages over all tokens of the step, which has no length bias. 'grpo': averages over the "
        "tokens of each completion, then over completions; it favors short correct and long wrong completions. 'dr_grpo': "
        "divides by max_completion_length instead of the completion's length, which also removes the length bias. 'bnpo': "
        "averages over the tokens of each forward pass. 'cispo': uses the capped importance ratio as weight of the log-prob "
        "(MiniMax-M1). 'sapo': replaces the clip with a smooth gate. 'luspo': uses sequence-level ratios, and weights each "
        "completion by its length. 'vespo': uses a smooth weight per sequence. 'gmpo': uses the geometric mean of a "
        "completion's clipped ratios. Formulas are in docs/losses.md.",
    )
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = option(
        "token",
        "Level of the importance ratio between the policy and the weights that sampled the completion. 'token': one ratio per "
        "token. 'sequence': the geometric mean of the completion's token ratios, used for all of its tokens (GSPO, with "
        "loss_type='grpo'). 'sequence_token': the same value as 'sequence', but with each token's own gradient. 'luspo' needs "
        "'sequence'. 'vespo' and 'gmpo' define their own ratio.",
    )
    delta: PositiveFloat | None = option(
        None,
        "Upper bound of the importance ratio for completions with a negative advantage, for which the clip has no upper bound "
        "(INTELLECT-2). It should be above 1 + epsilon_high. None: no bound. Set it if training becomes unstable because such "
        "completions have become much more likely.",
    )
    scale_rewards: Annotated[str, OneOf(SCALES)] = option(
        "group",
        "How advantages are scaled. 'group' or True: divide by the standard deviation of the group's rewards. 'batch': divide "
        "by the standard deviation over the whole generation. 'none' or False: do not scale, which removes the bias towards "
        "prompts with nearly equal rewards (Dr. GRPO). Scaled advantages are limited to the range from -10 to 10.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize",
        "How several reward functions are combined. 'sum_then_normalize': add the weighted rewards, then normalize the sum. "
        "'normalize_then_sum': normalize the rewards of each function within the group, add them with their weights, and "
        "normalize the sum over the generation (GDPO). scale_rewards is then ignored. Use 'normalize_then_sum' if the "
        "functions have very different scales.",
    )
    min_group_std: NonNegativeFloat = option(
        0.0,
        "Minimum standard deviation of a group's rewards. Groups with a smaller standard deviation get advantage 0, because "
        "division by a tiny standard deviation amplifies noise. 0: no minimum.",
    )
    sapo_temperature_neg: PositiveFloat = option(
        1.05,
        "With loss_type='sapo': sharpness of the gate for advantages of 0 or below, above 0. A larger value suppresses "
        "off-policy tokens more.",
    )
    sapo_temperature_pos: PositiveFloat = option(
        1.0,
        "With loss_type='sapo': sharpness of the gate for positive advantages, above 0. A larger value suppresses off-policy "
        "tokens more.",
    )
    vespo_k_pos: float = option(
        2.0,
        "With loss_type='vespo': exponent k of the weight w^k * exp(lambda * (1 - w)) for advantages of at least 0, where w "
        "is the sequence ratio. A larger value reduces the weight of ratios below 1.",
    )
    vespo_lambda_pos: float = option(
        3.0,
        "With loss_type='vespo': lambda of the weight w^k * exp(lambda * (1 - w)), for advantages of at least 0. A larger "
        "value reduces the weight of ratios above 1.",
    )
    vespo_k_neg: float = option(
        3.0,
        "With loss_type='vespo': exponent k for negative advantages. A larger value reduces the weight of ratios below 1.",
    )
    vespo_lambda_neg: float = option(
        2.0,
        "With loss_type='vespo': lambda for negative advantages. A larger value reduces the weight of ratios above 1.",
    )
    mask_zero_variance_groups: bool = option(
        False,
        "Exclude groups whose rewards are all equal from the loss, its denominators and the KL penalty. Computing them "
        "would only cost time. False keeps these groups: their advantages are 0, but their tokens count in averages.",
    )
    log_ref_kl: bool = option(
        False,
        "Log the KL divergence from the initial policy even if beta is 0. This needs a forward pass of the reference model.",
    )
    use_bias_correction_kl: bool = option(
        True,
        "Multiply the KL term by the importance ratio, which makes its gradient unbiased for "
        "importance_sampling_level='token' (DeepSeek-V3.2). The gradient changes even if the ratio is 1. loss_type='gmpo' "
        "does not use it.",
    )
    top_entropy_quantile: Share = option(
        1.0,
        "Fraction of tokens in the policy loss, from 0 to 1. The tokens with the highest entropy are selected; the threshold "
        "is computed per micro-batch over all processes. 1: all tokens. 0: only the token with the maximum entropy. "
        "arXiv:2506.01939 recommends 0.2. The KL penalty always includes all tokens.",
    )
    entropy_coef: float = option(
        0.0,
        "Weight of the entropy bonus, the mean entropy per token in nats. A positive value encourages exploration and delays "
        "entropy collapse. 0: no bonus. With use_adaptive_entropy it is the initial weight.",
    )
    off_policy_mask_threshold: PositiveFloat | None = option(
        None,
        "Exclude a completion with a negative advantage if its mean log-prob per token has fallen by more than this number of "
        "nats since it was sampled (DeepSeek-V3.2). Above 0, for example 0.5. None: no completion is excluded. Set it for "
        "very off-policy training.",
    )
    cast_lm_head_to_fp32: bool = option(
        False,
        "Compute the output layer of policy and reference model in float32 (MiniMax-M1, ScaleRL). It reduces the difference "
        "between engine and trainer, but needs memory and time. It cannot be combined with an adapter on the output layer.",
    )
    use_adaptive_entropy: bool = option(
        False,
        "Adjust the weight of the entropy bonus after each optimizer step (Skywork-OR1). If the entropy is at most "
        "entropy_target, entropy_coef_delta is added to the weight, else subtracted from it. The bonus is applied only if the "
        "last measured entropy is at most entropy_target.",
    )
    entropy_coef_min: float = option(0.0, "With use_adaptive_entropy: lower bound of the bonus's weight.")
    entropy_coef_max: float = option(1.0, "With use_adaptive_entropy: upper bound of the bonus's weight.")
    entropy_coef_delta: PositiveFloat = option(
        0.005, "With use_adaptive_entropy: change of the bonus's weight per optimizer step, above 0."
    )
    entropy_target: NonNegativeFloat = option(
        0.2,
        "With use_adaptive_entropy: mean entropy per token, in nats, below which the bonus is applied. Set it close to the "
        "entropy logged in the first steps. The default is lower than the entropy of most models, so with the default the "
        "bonus starts only close to entropy collapse.",
    )
    log_completions_hub_repo: str | None = option(
        None,
        "Dataset repository on the Hub, 'user/name' or 'name', to which completions are pushed every 2 minutes. It is "
        "created if it does not exist, and is private only if hub_private_repo is set. It needs log_completions. None: no "
        "upload.",
    )

    def __post_init__(self) -> None:
        spelled = {"True": "group", "true": "group", "False": "none", "false": "none"}
        self.scale_rewards = spelled.get(str(self.scale_rewards), self.scale_rewards)
        self._resolve_liger()
        if (settings := OTHER_NAMES.get(str(self.loss_type).lower().replace("-", "_"))) is not None:
            raise ConfigError(f"loss_type={self.loss_type!r} is a combination of options. Fix: set {settings}.")
        if self.loss_type == "bnpo":
            # Do not exchange rows between ranks, because 'bnpo' averages over each rank's own rows.
            self.balance_ranks = False
        super().__post_init__()
        self._check_ranges()
        self._check_combinations()

    def check_foreign_logprobs(self) -> None:
        """See `check_correction`."""
        check_correction(self)

    def _resolve_liger(self) -> None:
        if self.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
            # Log a warning only. Most users enable Liger for its loss, and the loss used here does not materialize all logits
            # either.
            logger.warning(
                "use_liger_kernel=True: liger_kernel is not installed, so its layers are not used. The loss is "
                "computed in chunks without it."
            )
            self.use_liger_kernel = False

    def _check_ranges(self) -> None:
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef_min={self.entropy_coef_min} must not be above entropy_coef_max={self.entropy_coef_max}."
            )
        if self.log_completions_hub_repo and not self.log_completions:
            raise ConfigError(
                f"log_completions_hub_repo={self.log_completions_hub_repo!r} is set but log_completions=False. Set "
                "log_completions=True or remove the repository."
            )

    def _check_combinations(self) -> None:
        check_combinations(self)
        warn_ineffective_options(self)
