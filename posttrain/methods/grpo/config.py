"""`GRPOConfig`: options of GRPO and related losses. Contradictory options are rejected."""

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


# If completions are used for training more than this number of optimizer steps after sampling, a warning is logged. Their
# importance ratios are then mostly noise, even after clipping.
OLD_UPDATES = 16
# Losses that average over tokens. With sequence-level ratios, these losses weight each sequence by its length.
BY_LENGTH = ("bnpo", "dr_grpo", "dapo", "cispo")
LOW_TEMPERATURE = 0.1
# Options that GMPO does not support, with the values that they must keep. GMPO's loss has one ratio per completion.
WITHOUT_IN_GMPO = {
    "importance_sampling_level": "token",
    "delta": None,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}


def check_combinations(cfg: GRPOConfig) -> None:
    """Raise an error for options that contradict each other.

    Raises:
        ConfigError: Two options contradict each other. The message contains both options, their values and a fix.
    """
    if cfg.loss_type == "luspo":
        _check_luspo(cfg)
    if cfg.loss_type == "gmpo":
        _check_gmpo(cfg)
    if cfg.loss_type == "cispo" and (cfg.epsilon_high is None or cfg.epsilon_high < 1):
        raise ConfigError(
            f"loss_type='cispo' needs epsilon_high of at least 1, but epsilon_high={cfg.epsilon_high}. CISPO limits the ratio "
            "itself to epsilon_high, so a smaller value would reduce the weight of every token. Fix: set epsilon_high=5.0."
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
                f"loss_type='luspo' weights whole sequences and does not support {name}={getattr(cfg, name)!r}. Fix: set "
                "importance_sampling_level='sequence', beta=0.0, top_entropy_quantile=1.0, and "
                "vllm_importance_sampling_mode='sequence_mask' or 'sequence_truncate'."
            )


def _check_gmpo(cfg: GRPOConfig) -> None:
    for name, default in WITHOUT_IN_GMPO.items():
        if (value := getattr(cfg, name)) != default:
            raise ConfigError(
                f"{name}={value!r} is not supported by loss_type='gmpo', whose loss has one ratio per completion. Fix: set "
                f"{name}={default!r}, or use another loss_type."
            )


def check_correction(cfg: GRPOConfig) -> None:
    """Raise an error for settings that are invalid if engine and trainer compute different log-probs.

    Raises:
        ConfigError: The importance-sampling correction is enabled, and one of two conditions holds. The loss is VESPO and
            the correction has one value per sequence, or a setting changes the engine's sampling distribution.
    """
    if not cfg.vllm_importance_sampling_correction:
        return
    mode = cfg.vllm_importance_sampling_mode
    if cfg.loss_type == "vespo" and not mode.startswith("token"):
        raise ConfigError(
            f"loss_type='vespo' needs one importance-sampling correction per token, but vllm_importance_sampling_mode={mode!r} "
            "gives one correction per sequence. Fix: set vllm_importance_sampling_mode='token_truncate'."
        )
    reject_reshaped_sampling(cfg)


def warn_ineffective_options(cfg: GRPOConfig) -> None:
    """Log warnings about options that have no effect or an unexpected effect."""
    _warn_of_levels(cfg)
    _warn_of_clips(cfg)
    _warn_of_schedule(cfg)
    if cfg.multi_objective_aggregation == "normalize_then_sum" and cfg.scale_rewards != "group":
        logger.warning(
            "scale_rewards=%r is ignored with multi_objective_aggregation='normalize_then_sum'.", cfg.scale_rewards
        )
    if cfg.temperature < LOW_TEMPERATURE:
        logger.warning(
            "temperature=%s is so low that the completions of a prompt will be nearly identical. The log-probs in the loss "
            "are also computed at this temperature.",
            cfg.temperature,
        )
    if reshaped := reshaped_sampling(cfg):
        logger.warning(
            "%s changes the distribution from which completions are sampled. The loss computes log-probs, importance ratios "
            "and the KL divergence for the unchanged distribution.", reshaped,
        )  # fmt: skip


def _warn_of_levels(cfg: GRPOConfig) -> None:
    level, kind = cfg.importance_sampling_level, cfg.loss_type
    if level != "token" and kind in BY_LENGTH:
        logger.warning(
            "importance_sampling_level=%r with loss_type=%r weights each sequence by its length. For GSPO, set "
            "loss_type='grpo'.",
            level, kind,
        )  # fmt: skip
    if level != "token" and kind == "vespo":
        logger.warning(
            "loss_type='vespo' ignores importance_sampling_level=%r, because it defines its own sequence weight.", level
        )


def _warn_of_clips(cfg: GRPOConfig) -> None:
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    set_by_user = {name for name in ("epsilon", "epsilon_high", "delta") if _changed(cfg, name)}
    unused = {"sapo": {"epsilon", "epsilon_high", "delta"}, "cispo": {"epsilon", "delta"}}
    unused["vespo"] = unused["sapo"]
    if ignored := sorted(set_by_user & unused.get(cfg.loss_type, set())):
        logger.warning(
            "%s has no effect, because loss_type=%r does not use it for clipping.",
            ", ".join(f"{name}={getattr(cfg, name)}" for name in ignored), cfg.loss_type,
        )  # fmt: skip
    elif cfg.delta is not None and cfg.delta < 1 + high:
        logger.warning(
            "delta=%s is below 1 + epsilon_high = %s, so the ratio is limited by delta before the upper clip can have an "
            "effect.",
            cfg.delta,
            1 + high,
        )


def _changed(cfg: GRPOConfig, name: str) -> bool:
    return getattr(cfg, name) != type(cfg).__dataclass_fields__[name].default


def _warn_of_schedule(cfg: GRPOConfig) -> None:
    window = (cfg.steps_per_generation or 1) * cfg.num_iterations
    accumulation = cfg.gradient_accumulation_steps
    if window / accumulation > OLD_UPDATES:
        logger.warning(
            "steps_per_generation=%d x num_iterations=%d with gradient_accumulation_steps=%d: the last completions of a "
            "generation are used for training %.0f optimizer steps after they were sampled. Decrease steps_per_generation or "
            "num_iterations.",
            cfg.steps_per_generation, cfg.num_iterations, accumulation, window / accumulation,
        )  # fmt: skip
    fields = ["epsilon", "epsilon_high", "delta", "importance_sampling_level"]
    # A delta below 1 also limits a ratio of 1.
    changed = [name for name in fields if _changed(cfg, name) and (name != "delta" or vars(cfg)[name] >= 1)]
    chosen = [f"{name}={getattr(cfg, name)!r}" for name in changed]
    chosen += [f"loss_type={cfg.loss_type!r}"] * (cfg.loss_type in ("sapo", "cispo", "vespo"))
    if chosen and accumulation % window == 0:
        logger.warning(
            "%s has no effect, because the importance ratio is always 1: all completions are used for training before the "
            "weights change (gradient_accumulation_steps=%d is a multiple of steps_per_generation x num_iterations = %d). To "
            "train off-policy, increase steps_per_generation or num_iterations.",
            ", ".join(chosen), accumulation, window,
        )  # fmt: skip


LEVELS = ("token", "sequence", "sequence_token")
SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


# Options that are equivalent to a published method, by the method's name.
OTHER_NAMES = {
    "dapo+": "loss_type='dapo', epsilon_high=0.28, dynamic_sampling and mask_truncated_completions=True",
    "gspo": "loss_type='grpo' and importance_sampling_level='sequence'",
    "gspo_token": "loss_type='grpo' and importance_sampling_level='sequence_token'",
    "icepop": "loss_type='grpo' and vllm_importance_sampling_mode='token_mask', with both vllm_importance_sampling_clip_min and "
    "vllm_importance_sampling_clip_max",
}


@config
class GRPOConfig(PictureConfig, EpisodeFields, OnlineConfig):
    """Arguments of `GRPOTrainer`, which trains with group-relative policy optimization (GRPO) or a related loss.

    Reference: DeepSeekMath (arXiv:2402.03300), equation 3; DAPO (2503.14476); Dr. GRPO (2503.20783); GSPO (2507.18071).
    """

    _corrects_sampler: ClassVar[bool] = True
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo"] = option(
        "dapo",
        "Loss. 'dapo' (default): averages the loss over all tokens of the optimizer step, which gives all tokens the same "
        "weight. 'grpo': averages over the tokens of each completion, then over completions. This favors short correct and "
        "long wrong completions (length bias). 'dr_grpo': divides by max_completion_length instead of the completion's "
        "length, which removes the length bias. 'bnpo': averages over the tokens of each forward pass. 'cispo': multiplies "
        "the log-prob of each token by its limited importance ratio, so no token loses its gradient (MiniMax-M1). 'sapo': "
        "replaces the clip with a smooth function of the ratio. 'luspo': uses sequence-level ratios, and weights each "
        "completion by its length. 'vespo': uses one smooth weight per sequence. 'gmpo': uses the geometric mean of the "
        "clipped ratios of a completion. Formulas are in docs/losses.md.",
    )
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = option(
        "token",
        "Level of the importance ratio, i.e. the probability under the current weights divided by the probability under the "
        "weights that sampled the completion. 'token': one ratio per token. 'sequence': all tokens of a completion have the "
        "same ratio, the geometric mean of the token ratios (GSPO, with loss_type='grpo'). 'sequence_token': the ratio has "
        "the same value as with 'sequence', but the gradient flows only through the log-prob of the token itself. "
        "loss_type='luspo' needs 'sequence'. 'vespo' and 'gmpo' define their own ratio and ignore this option.",
    )
    delta: PositiveFloat | None = option(
        None,
        "Upper bound of the importance ratio for completions with a negative advantage (INTELLECT-2). Without it, the loss of "
        "such a completion can grow without limit, because for negative advantages the clip limits only ratios below 1 - "
        "epsilon. The bound should be above 1 + epsilon_high. None: no bound. Set it if training becomes unstable because bad "
        "completions have become much more likely since they were sampled.",
    )
    scale_rewards: Annotated[str, OneOf(SCALES)] = option(
        "group",
        "How advantages are scaled. 'group' or True: divide by the standard deviation of the rewards of the same prompt. "
        "'batch': divide by the standard deviation of all rewards of the generation. 'none' or False: do not scale. Division "
        "by the standard deviation of a group gives prompts with nearly equal rewards a large weight, which 'none' avoids "
        "(Dr. GRPO). Scaled advantages are limited to the range from -10 to 10.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize",
        "How the rewards of several functions are combined. 'sum_then_normalize': add the weighted rewards, then normalize "
        "the sum within the group. 'normalize_then_sum': normalize the rewards of each function within the group, add the "
        "results with their weights, and normalize the sum over the generation (GDPO). Use it if the functions have very "
        "different scales. It ignores scale_rewards.",
    )
    min_group_std: NonNegativeFloat = option(
        0.0,
        "Minimum standard deviation of the rewards of a group. In groups with a smaller standard deviation, all advantages "
        "are set to 0, because division by a tiny standard deviation amplifies noise. 0: no minimum.",
    )
    sapo_temperature_neg: PositiveFloat = option(
        1.05,
        "With loss_type='sapo': temperature of the smooth function that replaces the clip, for advantages of 0 or below. It "
        "must be above 0. A larger value reduces the weight of off-policy tokens more strongly.",
    )
    sapo_temperature_pos: PositiveFloat = option(
        1.0,
        "With loss_type='sapo': temperature of the smooth function that replaces the clip, for positive advantages. It must "
        "be above 0. A larger value reduces the weight of off-policy tokens more strongly.",
    )
    vespo_k_pos: float = option(
        2.0,
        "With loss_type='vespo': exponent k in the weight w^k * exp(lambda * (1 - w)), where w is the importance ratio of the "
        "sequence. It is used for advantages of at least 0. A larger k reduces the weight of sequences with w below 1.",
    )
    vespo_lambda_pos: float = option(
        3.0,
        "With loss_type='vespo': lambda in the weight w^k * exp(lambda * (1 - w)), where w is the importance ratio of the "
        "sequence. It is used for advantages of at least 0. A larger lambda reduces the weight of sequences with w above 1.",
    )
    vespo_k_neg: float = option(
        3.0,
        "With loss_type='vespo': exponent k for negative advantages, see vespo_k_pos.",
    )
    vespo_lambda_neg: float = option(
        2.0,
        "With loss_type='vespo': lambda for negative advantages, see vespo_lambda_pos.",
    )
    mask_zero_variance_groups: bool = option(
        False,
        "Exclude groups whose rewards are all equal from the loss, the KL penalty and the token counts by which the loss is "
        "divided. These groups have no gradient, so computing them would only cost time. False: these groups are computed "
        "with advantages of 0, and their tokens are counted.",
    )
    log_ref_kl: bool = option(
        False,
        "Log the KL divergence from the initial policy even if beta is 0. This costs an additional forward pass of the "
        "reference model.",
    )
    use_bias_correction_kl: bool = option(
        True,
        "Multiply the KL term by the importance ratio (DeepSeek-V3.2). With importance_sampling_level='token', this makes the "
        "gradient of the KL term unbiased. It changes the gradient even if the ratio is 1, because the ratio itself depends "
        "on the weights. loss_type='gmpo' ignores it.",
    )
    top_entropy_quantile: Share = option(
        1.0,
        "Fraction of tokens on which the policy loss is computed, from 0 to 1. The tokens with the highest entropy are "
        "selected. The entropy threshold is computed for each micro-batch over all processes. 1: all tokens. 0: only the "
        "token with the maximum entropy. arXiv:2506.01939 recommends 0.2. The KL penalty is always computed on all tokens.",
    )
    entropy_coef: float = option(
        0.0,
        "Weight with which the mean entropy per token, in nats, is subtracted from the loss (entropy bonus). A positive "
        "weight encourages exploration and delays entropy collapse. 0: no bonus. With use_adaptive_entropy, this is the "
        "initial weight.",
    )
    off_policy_mask_threshold: PositiveFloat | None = option(
        None,
        "Exclude a completion with a negative advantage from the loss if its mean log-prob per token has decreased by more "
        "than this number of nats since it was sampled (DeepSeek-V3.2). It must be above 0, for example 0.5. None: no "
        "completion is excluded. Set it if completions are many optimizer steps old when they are used for training.",
    )
    cast_lm_head_to_fp32: bool = option(
        False,
        "Compute the output layer of policy and reference model in float32 (MiniMax-M1, ScaleRL). This reduces the difference "
        "between the log-probs of engine and trainer, but needs more memory and time. It cannot be combined with an adapter "
        "on the output layer.",
    )
    use_adaptive_entropy: bool = option(
        False,
        "Adjust the weight of the entropy bonus after each optimizer step (Skywork-OR1). If the entropy of the step is at "
        "most entropy_target, the weight increases by entropy_coef_delta. Otherwise, it decreases by entropy_coef_delta. In "
        "the next step, the bonus is applied only if the entropy was at most entropy_target.",
    )
    entropy_coef_min: float = option(0.0, "With use_adaptive_entropy: minimum weight of the entropy bonus.")
    entropy_coef_max: float = option(1.0, "With use_adaptive_entropy: maximum weight of the entropy bonus.")
    entropy_coef_delta: PositiveFloat = option(
        0.005,
        "With use_adaptive_entropy: number by which the weight of the entropy bonus changes after each optimizer step, "
        "above 0.",
    )
    entropy_target: NonNegativeFloat = option(
        0.2,
        "With use_adaptive_entropy: the bonus is applied only while the mean entropy per token, in nats, is at most this "
        "number. Set it close to the entropy that is logged in the first steps. The default is lower than the entropy of most "
        "models, so with the default the bonus starts only shortly before entropy collapse.",
    )
    log_completions_hub_repo: str | None = option(
        None,
        "Dataset repository on the Hub, 'user/name' or 'name', to which completions are uploaded every 2 minutes. This needs "
        "log_completions=True. If the repository does not exist, it is created. A new repository is public unless "
        "hub_private_repo is set. None: no upload.",
    )

    def __post_init__(self) -> None:
        spelled = {"True": "group", "true": "group", "False": "none", "false": "none"}
        self.scale_rewards = spelled.get(str(self.scale_rewards), self.scale_rewards)
        self._resolve_liger()
        if (settings := OTHER_NAMES.get(str(self.loss_type).lower().replace("-", "_"))) is not None:
            raise ConfigError(
                f"loss_type={self.loss_type!r} is not a loss type but a combination of options. Fix: set {settings}."
            )
        if self.loss_type == "bnpo":
            # 'bnpo' averages over the rows of each rank, so ranks must not exchange rows.
            self.balance_ranks = False
        super().__post_init__()
        self._check_ranges()
        self._check_combinations()

    def check_foreign_logprobs(self) -> None:
        """Raise an error for settings that would make the importance-sampling correction wrong; see `check_correction`."""
        check_correction(self)

    def _resolve_liger(self) -> None:
        if self.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
            # Log a warning instead of an error. Most users enable Liger because its loss saves the memory of the logits, and
            # this trainer's loss also saves that memory.
            logger.warning(
                "use_liger_kernel=True is ignored, because liger_kernel is not installed. The loss saves memory without it, "
                "because it computes logits in chunks."
            )
            self.use_liger_kernel = False

    def _check_ranges(self) -> None:
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef_min={self.entropy_coef_min} must be at most entropy_coef_max={self.entropy_coef_max}."
            )
        if self.log_completions_hub_repo and not self.log_completions:
            raise ConfigError(
                f"log_completions_hub_repo={self.log_completions_hub_repo!r} is set but log_completions=False. Fix: set "
                "log_completions=True, or remove log_completions_hub_repo."
            )

    def _check_combinations(self) -> None:
        check_combinations(self)
        warn_ineffective_options(self)
