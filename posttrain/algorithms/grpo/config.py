"""`GRPOConfig`: the loss family's choices, checked against each other before anything is loaded."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, field
from typing import Literal

from posttrain.algorithms.episode_config import EpisodeFields
from posttrain.algorithms.grpo.combinations import check_combinations, warn_of_odd_choices
from posttrain.algorithms.online_config import OnlineConfig
from posttrain.errors import ConfigError, check_choice
from posttrain.losses.policy import LOSS_TYPES
from posttrain.losses.ratio import CORRECTIONS

__all__ = ["GRPOConfig"]

logger = logging.getLogger(__name__)

LEVELS = ("token", "sequence", "sequence_token")
SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


@dataclass
class GRPOConfig(EpisodeFields, OnlineConfig):
    """Arguments of `GRPOTrainer`: group-relative policy optimisation and the losses of its family.

    Reference: DeepSeekMath (arXiv:2402.03300), equation 3; DAPO (2503.14476); Dr. GRPO (2503.20783); GSPO (2507.18071).
    """

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo"] = field(
        default="dapo", metadata={"help": "A row of the loss table: ratio level, surrogate and reduction."}
    )
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = field(
        default="token", metadata={"help": "One ratio a token (GRPO), or a sequence (GSPO)."}
    )
    delta: float | None = field(default=None, metadata={"help": "Cap of the unclipped ratio; above 1 + epsilon_high."})
    scale_rewards: str = field(  # True and False, as older scripts have it, are group and none.
        default="group", metadata={"help": "Divide advantages by the std of the group, of the batch, or not (none)."}
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = field(
        default="sum_then_normalize", metadata={"help": "Weigh rewards before or after normalising each (GDPO)."}
    )
    min_group_std: float = field(
        default=0.0, metadata={"help": "A group whose rewards spread less than this counts as having no signal."}
    )
    sapo_temperature_neg: float = field(
        default=1.05, metadata={"help": "SAPO: sharpness for negative advantages, > 0."}
    )
    sapo_temperature_pos: float = field(default=1.0, metadata={"help": "SAPO: sharpness for positive advantages, > 0."})
    vespo_k_pos: float = field(default=2.0, metadata={"help": "VESPO exponent, positive advantages."})
    vespo_lambda_pos: float = field(default=3.0, metadata={"help": "VESPO decay, positive advantages."})
    vespo_k_neg: float = field(default=3.0, metadata={"help": "VESPO exponent, negative advantages."})
    vespo_lambda_neg: float = field(default=2.0, metadata={"help": "VESPO decay, negative advantages."})
    mask_zero_variance_groups: bool = field(
        default=False,
        metadata={"help": "Leave groups whose rewards are all equal out of loss and denominators, their KL included."},
    )
    log_ref_kl: bool = field(
        default=False,
        metadata={"help": "With beta=0: measure the KL to the start of training without charging it."},
    )
    use_bias_correction_kl: bool = field(default=False, metadata={"help": "Multiply the KL by the importance ratio."})
    top_entropy_quantile: float = field(
        default=1.0, metadata={"help": "Train this share of the most uncertain tokens."}
    )
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus."})
    off_policy_mask_threshold: float | None = field(
        default=None, metadata={"help": "Drop bad sequences the policy has moved away from by more than this, > 0."}
    )
    cast_lm_head_to_fp32: bool = field(default=False, metadata={"help": "Compute the output layer in float32."})
    router_aux_loss_coef: float = field(default=0.001, metadata={"help": "Expert balance, mixture-of-experts only."})
    use_adaptive_entropy: bool = field(default=False, metadata={"help": "Steer entropy_coef towards entropy_target."})
    entropy_coef_min: float = field(default=0.0, metadata={"help": "Lower bound of the steered coefficient."})
    entropy_coef_max: float = field(default=1.0, metadata={"help": "Upper bound of the steered coefficient."})
    entropy_coef_delta: float = field(default=0.005, metadata={"help": "Step of the steered coefficient."})
    entropy_target: float = field(default=0.2, metadata={"help": "Entropy in nats to hold."})
    log_completions_hub_repo: str | None = field(
        default=None, metadata={"help": "Dataset repository that completions are pushed to every 2 minutes."}
    )

    def __post_init__(self) -> None:
        spelled = {"True": "group", "true": "group", "False": "none", "false": "none"}
        self.scale_rewards = spelled.get(str(self.scale_rewards), self.scale_rewards)
        self._check_choices()
        self._resolve_liger()
        if self.loss_type == "bnpo":
            self.balance_ranks = False  # Its mean is one of each rank's own rows.
        super().__post_init__()
        self._check_ranges()
        self._check_combinations()

    def _check_choices(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_choice("importance_sampling_level", self.importance_sampling_level, LEVELS)
        check_choice("scale_rewards", self.scale_rewards, SCALES)
        check_choice("multi_objective_aggregation", self.multi_objective_aggregation, AGGREGATIONS)
        check_choice("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, CORRECTIONS)

    def _resolve_liger(self) -> None:
        if self.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
            # Its loss is what people turn it on for, and ours never holds the logits either, with every option.
            logger.warning(
                "use_liger_kernel=True: liger_kernel is not installed and its layers are left out. The loss is computed in "
                "chunks without it."
            )
            self.use_liger_kernel = False

    def _check_ranges(self) -> None:
        rules: list[tuple[str, bool, str]] = [
            ("top_entropy_quantile", 0 <= self.top_entropy_quantile <= 1, "must be in [0, 1]"),
            ("off_policy_mask_threshold", _above_zero(self.off_policy_mask_threshold), "must be above 0, or None"),
            ("sapo_temperature_neg", self.sapo_temperature_neg > 0, "must be above 0"),
            ("sapo_temperature_pos", self.sapo_temperature_pos > 0, "must be above 0"),
            ("delta", _above_zero(self.delta), "must be above 0, or None"),
            ("epsilon_high", self.epsilon_high is None or self.epsilon_high >= 0, "must be 0 or positive, or None"),
            ("min_group_std", self.min_group_std >= 0, "must be 0 (off) or positive"),
            ("entropy_coef_delta", self.entropy_coef_delta > 0, "must be above 0"),
            ("entropy_target", self.entropy_target >= 0, "must be 0 or positive (nats)"),
            (
                "entropy_coef_min",
                self.entropy_coef_min <= self.entropy_coef_max,
                f"must not be above entropy_coef_max={self.entropy_coef_max}",
            ),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)!r} {rule}.")
        if self.log_completions_hub_repo and not self.log_completions:
            raise ConfigError(
                f"log_completions_hub_repo={self.log_completions_hub_repo!r} is set but log_completions=False. Turn "
                "log_completions on, or leave the repository out."
            )

    def _check_combinations(self) -> None:
        check_combinations(self)
        warn_of_odd_choices(self)


def _above_zero(value: float | None) -> bool:
    return value is None or value > 0
