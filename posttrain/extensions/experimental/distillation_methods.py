"""Configs and methods of TRL's distillation variants."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from posttrain.data.formats import known_columns
from posttrain.errors import DataError
from posttrain.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share, config, option
from posttrain.methods.distillation.config import (
    Axes,
    DistillationConfig,
    DistillationFields,
    Support,
    preset,
)
from posttrain.methods.distillation.data import template_fields
from posttrain.methods.distillation.objective import Distillation
from posttrain.methods.grpo.config import GRPOConfig

if TYPE_CHECKING:
    from posttrain.types import AnyDataset

THINKING = re.compile(r"<think>.*?</think>\s*|(<think>.*)", re.DOTALL)
# SSD excludes completions that are a single line with fewer than SHORT characters.
SHORT = 10
# Options of the GRPO trainer that MiniLLM and SDPO do not support.
OF_GRPO: dict[str, tuple[Any, str]] = {
    "cast_lm_head_to_fp32": (False, "Remove it: the loss computes the logits of both models in float32."),
    "entropy_coef": (0.0, "Use GRPOTrainer for an entropy bonus."),
    "mask_zero_variance_groups": (False, "Remove it: groups with equal rewards still learn from the teacher."),
    "sync_ref_model": (False, "Set teacher_model_kind='ema' for a teacher that follows the student."),
    "top_entropy_quantile": (1.0, "Remove it: the teacher scores every token."),
    "use_adaptive_entropy": (False, "Use GRPOTrainer for an entropy bonus."),
}
OF_BUFFER: dict[str, tuple[Any, str]] = {
    "vllm_sync_frequency": (
        1,
        "Remove it: weights are pushed after every update. Raise steps_per_generation to push less often.",
    ),
    "log_completions_steps": (100, "Use logging_steps."),
}
# Options for a teacher and its divergence. SSD has no teacher.
OF_TEACHER: dict[str, tuple[Any, str]] = {
    name: (default, "Remove it: SSD trains on its own samples without a teacher.")
    for name, default in {
        "beta": 1.0, "loss_top_k": 0, "loss_add_tail": True, "seq_kd": False, "teacher_model_kind": "model",
        "teacher_model_name_or_path": None, "teacher_model_server_url": None, "teacher_scores": None, "teacher_weights": None,
    }.items()
}  # fmt: skip


def _template_rule(
    config: Any, field: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()
) -> tuple[str, bool, str]:
    """Return a config rule for a template field. The template must contain all placeholders in ``needed`` and may contain
    the placeholders in ``optional``. Any other placeholder violates the rule.
    """
    fields = template_fields(getattr(config, field))
    shown, allowed = (
        " and ".join(f"{{{name}}}" for name in names) for names in (needed, dict.fromkeys((*needed, *optional)))
    )
    other = "" if len(needed) == len(allowed.split(" and ")) else f" (allowed: {allowed})"
    rule = f"must contain {shown}{other}; write other braces twice"
    return field, set(needed) <= fields <= {*needed, *optional}, rule


def _require_context(dataset: AnyDataset, name: str) -> None:
    names = known_columns(dataset)
    if names and "privileged_context" not in names:
        raise DataError(f"{name} has no column 'privileged_context'; its columns are {sorted(names)}.")


# IW-OPD -----------------------------------------------------------------------------------------------------------------


@config
@preset(
    unread=OF_BUFFER | {
        "reverse_kl_top_1_mode": ("sampled", "Set loss_top_k above 1 to use the student's most likely ids."),
        "use_teacher_server": (False, "Set teacher_model_server_url to the address of the server."),
    },
    loss_top_k=(1, "With 'jsd': number of token ids per position in the divergence, see DistillationConfig. 0: all ids."),
    max_length=1024, disable_dropout=True,
    vllm_server_port=8001,
)  # fmt: skip
class IWOPDConfig(DistillationConfig):
    """Arguments of `IWOPDTrainer`. ``top_p`` defaults to 1.0, because smaller values would bias the loss."""

    distillation_objective: Literal["iw_opd", "jsd"] = option(
        "iw_opd",
        "Objective. 'iw_opd': policy gradient on the sampled tokens, with larger weights for early tokens. 'jsd': the "
        "divergence selected by beta.",
    )
    iw_opd_gamma: NonNegativeFloat = option(
        0.5,
        "With 'iw_opd': weights fall from 1 + iw_opd_gamma at the first token of a completion to 1 at its last token. At "
        "least 0. 0: all tokens have equal weights.",
    )
    iw_opd_epsilon: PositiveFloat = option(
        1e-8,
        "Used with 'iw_opd'. Weights are divided by a sum of advantages. This option is the minimum of that sum, above 0.",
    )

    def _rules(self) -> list[tuple[str, bool, str]]:
        jsd = self.distillation_objective == "jsd"
        return [
            *super()._rules(),
            *((name, jsd or valid, "is not used with iw_opd. Fix: set distillation_objective='jsd'")
              for name, valid in (("beta", self.beta == 1), ("loss_top_k", self.loss_top_k in (0, 1)))),
            ("lmbda", jsd or self.lmbda == 1, "with iw_opd: its gradient is only correct for the student's own "
                                              "samples. Fix: set lmbda=1.0, or distillation_objective='jsd'"),
        ]  # fmt: skip

    def axes(self) -> Axes:
        """Return the settings of the loss: either the policy gradient of the sampled token or the divergence."""
        if self.distillation_objective == "jsd":
            return super().axes()
        prefix = (self.iw_opd_gamma, self.iw_opd_epsilon)
        return replace(super().axes(), support="sampled", beta=1.0, estimator="score", prefix=prefix)


class IWOPD(Distillation):
    """On-policy distillation with a policy gradient. Early tokens of a completion have larger weights. An importance ratio
    corrects for the difference between the current weights and the weights that sampled the completion.

    Reference: IW-OPD, arXiv:2606.22600.
    """

    config_class = IWOPDConfig


# Teachers on servers -------------------------------------------------------------------------------------------------


@config
@preset(
    loss_top_k=(1, "Number of token ids per position that servers return. It must be 1, except with beta=0."),
    vllm_server_port=8001,
    unread={"reverse_kl_top_1_mode": ("sampled", "A server scores only the tokens of the completion.")},
)  # fmt: skip
class ServerDistillationConfig(DistillationConfig):
    """Arguments of `ServerDistillationTrainer`. ``vllm_server_port`` (the student's server) does not default to port 8000,
    because teacher servers usually listen on port 8000.
    """

    def _rules(self) -> list[tuple[str, bool, str]]:
        fits = self.loss_top_k >= 1 if self.beta == 0 else self.loss_top_k == 1
        rule = (
            f"with beta={self.beta}: a server returns its most likely ids and the sampled token. Fix: set "
            "loss_top_k=1, or beta=0"
        )
        return [*super()._rules(), ("loss_top_k", fits, rule)]


class ServerDistillation(Distillation):
    """On-policy distillation from teachers on servers. A server returns its most likely token ids and the sampled token
    at each position.

    Reference: GKD, arXiv:2306.13649.
    """

    config_class = ServerDistillationConfig
    traits = replace(Distillation.traits, reads_images=False)


# MiniLLM: with a GRPO term ------------------------------------------------------------------------------------------------


@config
@preset(
    unread=OF_GRPO,
    disable_dropout=True,
    num_generations=(8, "Number of completions sampled per prompt. 1 sets scale_rewards='none'."),
)
class MiniLLMConfig(DistillationFields, GRPOConfig):
    """Arguments of `MiniLLMTrainer`: options of GRPO and of the teacher. ``beta`` is the weight of the KL penalty."""

    _beta: ClassVar[str | float] = 1.0
    _loss_temperature: ClassVar[str | float] = "kd_temperature"
    rkl_advantage: bool = option(
        True,
        "Add log p - log q of each sampled token to its advantage, where p is the teacher's and q the student's probability. "
        "At least one of rkl_advantage and single_step_decomposition must be True.",
    )
    single_step_decomposition: bool = option(
        True,
        "Add KL(student || teacher) over the whole vocabulary at each position to the loss. It has less variance than an "
        "estimate from the sampled token.",
    )
    kd_temperature: PositiveFloat = option(
        1.0, "Temperature of both models' logits in the loss, above 0. Sampling uses the field temperature instead."
    )
    gamma: Share = option(
        0.0,
        "Discount factor of the rewards of later tokens, from 0 to 1. 0: use only the token's own reward. 1: use the sum of "
        "its own and all later rewards.",
    )
    length_normalization: bool = option(
        True,
        "Divide the discounted sum of rewards by the sum of the discounts, so that the result does not grow with the length.",
    )

    def __post_init__(self) -> None:
        if self.num_generations == 1:
            self.scale_rewards = "none"
        super().__post_init__()

    def _rules(self) -> list[tuple[str, bool, str]]:
        read = self.rkl_advantage or self.single_step_decomposition
        return [
            *super()._rules(),
            (
                "rkl_advantage",
                read,
                "with single_step_decomposition=False: the teacher would not be used. Fix: set one of them, or "
                "use GRPO",
            ),
        ]

    def axes(self) -> Axes:
        """Return the settings of the loss. The loss has two parts: the reverse KL over the whole vocabulary, and a policy
        gradient with the reverse KL as a reward for each token.
        """
        return replace(super().axes(), policy=1.0)


class MiniLLM(Distillation):
    """Distillation that uses the negative reverse KL to the teacher as a reward for each token. Rewards of whole
    completions can be added to these token rewards.

    Reference: MiniLLM, arXiv:2306.08543.
    """

    config_class = MiniLLMConfig
    traits = replace(Distillation.traits, reads_images=False)
    takes_rewards = True


# The student as its own teacher -------------------------------------------------------------------------------------------


@config
@preset(
    learning_rate=5e-5, max_prompt_length=512, num_generations=8,
    teacher_model_kind=("base", "Teacher: the student with current ('live'), initial ('base') or averaged ('ema') weights."),
    max_completion_length=(256, "Maximum number of tokens of a completion, including the end token."),
    disable_dropout=(True, "Set every dropout probability of the model to 0, so that equal inputs give equal log-probs."),
    unread={
        "use_teacher_server": (False, "Set teacher_model_kind='live' for a teacher without a second model."),
        "loss_top_k": (0, "Use distillation_topk."),
        "loss_add_tail": (True, "Use distillation_add_tail."),
    },
)  # fmt: skip
class SelfDistillationFields(DistillationFields):
    """Options of self-distillation. The teacher is the student itself, but the teacher's prompt contains more information."""

    _beta: ClassVar[str | float] = "distillation_alpha"
    distillation_alpha: float = option(
        0.5,
        "Parameter of the generalized Jensen-Shannon divergence, from 0 to 1. 0: forward KL(teacher || student). 1: reverse "
        "KL(student || teacher). distillation_mode='sampled_token' needs 1.",
    )
    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = option(
        "topk_logits",
        "Token ids over which the divergence is computed. 'sampled_token': only the sampled token. 'full_logits': the whole "
        "vocabulary. 'topk_logits': the student's distillation_topk most likely ids.",
    )
    distillation_topk: PositiveInt | None = option(
        100, "With distillation_mode='topk_logits': number of token ids per position. It must not be None in this mode."
    )
    distillation_add_tail: bool = option(
        False,
        "Add one category with the total probability of all token ids that are not selected. False renormalizes both "
        "distributions over the selected ids.",
    )
    distillation_is_clip: PositiveFloat | None = option(
        2.0,
        "Upper bound, above 0, of the importance ratio of tokens that an older policy sampled. None: no importance ratios.",
    )

    def _rules(self) -> list[tuple[str, bool, str]]:
        mode, alpha, k = self.distillation_mode, self.distillation_alpha, self.distillation_topk or 0
        sampled = mode != "sampled_token" or alpha == 1
        return [
            *super()._rules(),
            ("distillation_alpha", sampled, "with sampled_token, which only estimates the reverse KL. Fix: 1.0"),
            ("distillation_topk", mode != "topk_logits" or k, "must be set with topk_logits"),
        ]

    def axes(self) -> Axes:
        """Return the settings of the loss for ``distillation_mode``. Every sequence has the same weight."""
        modes: dict[str, Support] = {"sampled_token": "sampled", "full_logits": "full", "topk_logits": "student_topk"}
        support, tail = modes[self.distillation_mode], self.distillation_add_tail
        row = replace(super().axes(), support=support, top_k=self.distillation_topk or 0, tail=tail)
        estimator: Any = "score" if support == "sampled" else "exact"
        return replace(row, estimator=estimator, is_clip=self.distillation_is_clip, reduction="sequence_token")


@config
@preset(unread={"beta": (1.0, "Use distillation_alpha.")})
class SDFTConfig(SelfDistillationFields, DistillationConfig):
    """Arguments of `SDFTTrainer`."""

    teacher_prompt_template: str = option(
        "{prompt}\n\n{privileged_context}",
        "Template of the teacher's last user turn. It must contain the placeholders {prompt} and {privileged_context}.",
    )
    generate_from_teacher: bool = option(
        False, "Sample completions from the teacher's prompt. False: from the student's prompt."
    )
    num_loss_tokens_to_skip: NonNegativeInt = option(
        0, "Number of tokens at the start of each completion that are excluded from the loss. 0 excludes no tokens."
    )

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [*super()._rules(), _template_rule(self, "teacher_prompt_template", ("prompt", "privileged_context"))]


class SDFT(Distillation):
    """Self-distillation. The teacher is the student itself, but the teacher's prompt also contains the row's
    ``privileged_context``.

    Reference: Self-Distillation Fine-Tuning, arXiv:2601.19897.
    """

    config_class = SDFTConfig
    traits = replace(Distillation.traits, reads_images=False)
    privileged = True

    def needs_old_logp(self, outlived: bool) -> bool:
        """Return False if completions are sampled from the teacher's prompt, because the loss then has no importance ratio.
        Otherwise, return the result of the parent class.
        """
        return not self.cfg.generate_from_teacher and super().needs_old_logp(outlived)


@config
@preset(
    distillation_alpha=1.0, distillation_mode="sampled_token", distillation_topk=None, teacher_model_kind="ema",
    epsilon_high=(0.2, "Upper clip of the importance ratio: 1 + epsilon_high. None: epsilon."),
    unread=OF_GRPO | {
        "diagnostics_warning_interval": (10, "Remove it: checks during training warn about groups with equal rewards."),
        "diagnostics_flat_tolerance": (1e-8, "Use min_group_std."),
    },
)  # fmt: skip
class SDPOConfig(SelfDistillationFields, GRPOConfig):
    """Arguments of `SDPOTrainer`: options of GRPO and of the teacher. ``beta`` is the weight of the KL penalty."""

    distillation_weight: Share = option(
        1.0,
        "Weight `w` of the distillation loss, from 0 to 1. The loss is `(1 - w) * policy loss + w * distillation loss`. 1: no "
        "policy loss. 0: GRPO.",
    )
    max_reprompt_len: PositiveInt = option(
        10240,
        "Maximum number of tokens of the teacher's prompt. In a longer prompt, the solution and the feedback are truncated.",
    )
    use_successful_as_teacher: bool = option(True, "Add a successful completion of the group to the teacher's prompt.")
    success_reward_threshold: float = option(1.0, "Minimum reward of a successful completion.")
    dont_reprompt_on_self_success: bool = option(
        True, "Do not show a completion to the teacher when the teacher scores this same completion."
    )
    reprompt_template: str = option(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "Template of the teacher's last user turn, with the placeholders {prompt}, {solution} and {feedback}.",
    )
    solution_template: str = option(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        "Text that replaces {solution}. In this text, {successful_previous_attempt} stands for the successful completion.",
    )
    feedback_template: str = option(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "Text that replaces {feedback}. In this text, {feedback_raw} stands for the column privileged_context.",
    )
    include_environment_feedback: bool = option(
        False, "Put the column privileged_context into the teacher's prompt as {feedback}."
    )
    environment_feedback_only_without_solution: bool = option(
        False, "Put the feedback into the teacher's prompt only if no completion of the group succeeded."
    )
    remove_thinking_from_demonstration: bool = option(
        False, "Remove <think> blocks from the successful completion before the teacher receives it."
    )

    def _rules(self) -> list[tuple[str, bool, str]]:
        read = {"solution": self.use_successful_as_teacher, "feedback": self.include_environment_feedback}
        needed = ("prompt", *(name for name, wanted in read.items() if wanted))
        return [
            *super()._rules(),
            _template_rule(self, "reprompt_template", needed, tuple(read)),
            _template_rule(self, "solution_template", ("successful_previous_attempt",)),
            _template_rule(self, "feedback_template", ("feedback_raw",)),
            ("use_successful_as_teacher", any(read.values()), "with include_environment_feedback=False: the teacher "
                                                            "would have no more information than the student. Fix: "
                                                            "set one of them"),
        ]  # fmt: skip

    def axes(self) -> Axes:
        """Return the settings of the loss. The divergence is averaged over the sequences for which the teacher's prompt
        contains a hint.
        """
        w = self.distillation_weight
        return replace(super().axes(), reduction="active", weight=w, policy=1 - w)


class SDPO(Distillation):
    """Self-distillation. The teacher is the student itself, but the teacher's prompt also contains a successful completion
    of the student's prompt.

    Reference: Self-Distillation Policy Optimization, arXiv:2601.20802.
    """

    config_class = SDPOConfig
    traits = replace(Distillation.traits, reads_images=False)
    privileged = True
    takes_rewards = True


# SSD --------------------------------------------------------------------------------------------------------------------


@config
@preset(
    unread=OF_TEACHER, learning_rate=5e-5, max_prompt_length=512, max_completion_length=256, disable_dropout=True,
    temperature=(1.0, "Divisor of the logits in sampling, above 0. The loss uses temperature 1."),
)  # fmt: skip
class SSDConfig(DistillationConfig):
    """Arguments of `SSDTrainer`, which fine-tunes the model on completions that the model itself samples."""

    filter_empty: bool = option(True, "Exclude blank completions and single lines of fewer than 10 characters.")

    def axes(self) -> Axes:
        """Return the settings of the loss. The loss is the cross-entropy and has no divergence term."""
        return Axes("none", weight=0.0, cross_entropy=1.0)


class SSD(Distillation):
    """Simple self-distillation: supervised fine-tuning on completions that the model samples at a different
    temperature.

    Reference: arXiv:2604.01193.
    """

    config_class = SSDConfig
    traits = replace(Distillation.traits, reads_images=False)
