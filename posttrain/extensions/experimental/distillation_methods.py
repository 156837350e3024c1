"""TRL's distillation methods as rows of one table: a config with its defaults, and what the common trainer has not."""

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
SHORT = 10  # A single line of fewer characters is no answer (SSD).
# Of GRPO's trainer, and not of its loss.
OF_GRPO: dict[str, tuple[Any, str]] = {
    "cast_lm_head_to_fp32": (False, "Both models' logits are in float32 anyway."),
    "entropy_coef": (0.0, "Use GRPO for a bonus of entropy."),
    "mask_zero_variance_groups": (False, "Groups without a reward to learn from still have a teacher."),
    "sync_ref_model": (False, "teacher_model_kind='ema' is a teacher that follows the student."),
    "top_entropy_quantile": (1.0, "The teacher is asked about every token."),
    "use_adaptive_entropy": (False, "See entropy_coef."),
}
OF_BUFFER: dict[str, tuple[Any, str]] = {
    "vllm_sync_frequency": (
        1,
        "Weights are pushed when they moved; steps_per_generation trains one generation longer.",
    ),
    "log_completions_steps": (100, "Use logging_steps."),
}
# Of a teacher and its divergence, which SSD has not.
OF_TEACHER: dict[str, tuple[Any, str]] = {
    name: (default, "SSD trains on its own samples, without a teacher.")
    for name, default in {
        "beta": 1.0, "loss_top_k": 0, "loss_add_tail": True, "seq_kd": False, "teacher_model_kind": "model",
        "teacher_model_name_or_path": None, "teacher_model_server_url": None, "teacher_scores": None, "teacher_weights": None,
    }.items()
}  # fmt: skip


def _template_rule(
    config: Any, field: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()
) -> tuple[str, bool, str]:
    """A rule of a config: the template has these names in braces, and no others."""
    fields = template_fields(getattr(config, field))
    shown, known = (
        " and ".join(f"{{{name}}}" for name in names) for names in (needed, dict.fromkeys((*needed, *optional)))
    )
    other = "" if len(needed) == len(known.split(" and ")) else f", of {known}"
    rule = f"must have {shown} in it{other}; other braces are written twice"
    return field, set(needed) <= fields <= {*needed, *optional}, rule


def _require_context(dataset: AnyDataset, name: str) -> None:
    names = known_columns(dataset)
    if names and "privileged_context" not in names:
        raise DataError(f"{name} has no column 'privileged_context'; its columns are {sorted(names)}.")


# IW-OPD -----------------------------------------------------------------------------------------------------------------


@config
@preset(
    unread=OF_BUFFER | {
        "reverse_kl_top_1_mode": ("sampled", "loss_top_k above 1 sees the student's likeliest ids."),
        "use_teacher_server": (False, "teacher_model_server_url names the server."),
    },
    loss_top_k=(1, "jsd: ids per position, see DistillationConfig; 0: all."), max_length=1024, disable_dropout=True,
    vllm_server_port=8001,
)  # fmt: skip
class IWOPDConfig(DistillationConfig):
    """Arguments of `IWOPDTrainer`; ``top_p`` is 1.0, as below 1 the estimate is biased."""

    distillation_objective: Literal["iw_opd", "jsd"] = option(
        "iw_opd", "iw_opd: policy gradient with prefix weights; jsd: the divergence of beta."
    )
    iw_opd_gamma: NonNegativeFloat = option(0.5, "How much more the first token weighs, at least 0.")
    iw_opd_epsilon: PositiveFloat = option(1e-8, "Least sum of advantages that is divided by, above 0.")

    def _rules(self) -> list[tuple[str, bool, str]]:
        jsd = self.distillation_objective == "jsd"
        return [
            *super()._rules(),
            *((name, jsd or kept, "is not read with iw_opd. Fix: distillation_objective='jsd'")
              for name, kept in (("beta", self.beta == 1), ("loss_top_k", self.loss_top_k in (0, 1)))),
            ("lmbda", jsd or self.lmbda == 1, "with iw_opd: its gradient is right for the student's own tokens alone. Fix: "
             "lmbda=1.0, or distillation_objective='jsd'"),
        ]  # fmt: skip

    def axes(self) -> Axes:
        """The sampled token's policy gradient, or the divergence."""
        if self.distillation_objective == "jsd":
            return super().axes()
        prefix = (self.iw_opd_gamma, self.iw_opd_epsilon)
        return replace(super().axes(), support="sampled", beta=1.0, estimator="score", prefix=prefix)


class IWOPD(Distillation):
    """On-policy distillation whose early tokens weigh more, against the log-probs that they were sampled with.

    Reference: IW-OPD, arXiv:2606.22600.
    """

    config_class = IWOPDConfig


# Teachers behind servers -------------------------------------------------------------------------------------------------


@config
@preset(
    loss_top_k=(1, "Ids per position that the servers are asked for: any number at beta=0, else 1."), vllm_server_port=8001,
    unread={"reverse_kl_top_1_mode": ("sampled", "A server scores the tokens that it is given, and no others.")},
)  # fmt: skip
class ServerDistillationConfig(DistillationConfig):
    """Arguments of `ServerDistillationTrainer`; ``vllm_server_port``, the student's, leaves 8000 to the teacher."""

    def _rules(self) -> list[tuple[str, bool, str]]:
        fits = self.loss_top_k >= 1 if self.beta == 0 else self.loss_top_k == 1
        rule = f"with beta={self.beta}: a server gives its own likeliest ids and the sampled token. Fix: 1, or beta=0"
        return [*super()._rules(), ("loss_top_k", fits, rule)]


class ServerDistillation(Distillation):
    """On-policy distillation from teachers that servers hold: of each position they tell their likeliest ids.

    Reference: GKD, arXiv:2306.13649.
    """

    config_class = ServerDistillationConfig
    traits = replace(Distillation.traits, reads_images=False)


# MiniLLM: with a GRPO term ------------------------------------------------------------------------------------------------


@config
@preset(
    unread=OF_GRPO, disable_dropout=True, num_generations=(8, "Completions per prompt; 1 sets scale_rewards='none'.")
)
class MiniLLMConfig(DistillationFields, GRPOConfig):
    """Arguments of `MiniLLMTrainer`: those of GRPO, whose ``beta`` is a KL penalty, and of the teacher."""

    _beta: ClassVar[str | float] = 1.0
    _loss_temperature: ClassVar[str | float] = "kd_temperature"
    rkl_advantage: bool = option(True, "Add log p - log q of each token to its advantage.")
    single_step_decomposition: bool = option(True, "Add KL(student || teacher) of each position.")
    kd_temperature: PositiveFloat = option(1.0, "Loss only: divides both models' logits; > 0.")
    gamma: Share = option(0.0, "Discount of later tokens' rewards, in [0, 1]; 0: the token's own.")
    length_normalization: bool = option(True, "Divide by the sum of the discounts.")

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
                "with single_step_decomposition=False: the teacher would not be read. Fix: set one, or GRPO",
            ),
        ]

    def axes(self) -> Axes:
        """The reverse KL, over the vocabulary and as a reward."""
        return replace(super().axes(), policy=1.0)


class MiniLLM(Distillation):
    """The reverse KL to the teacher as a reward of each token, beside rewards of whole completions if there are any.

    Reference: MiniLLM, arXiv:2306.08543.
    """

    config_class = MiniLLMConfig
    traits = replace(Distillation.traits, reads_images=False)
    takes_rewards = True


# The student as its own teacher -------------------------------------------------------------------------------------------


@config
@preset(
    learning_rate=5e-5, max_prompt_length=512, num_generations=8, teacher_model_kind=("base", "base, live or ema."),
    max_completion_length=(256, "Most tokens of a completion, EOS included."),
    disable_dropout=(True, "Set every dropout to 0."),
    unread={
        "use_teacher_server": (False, "teacher_model_kind='live' needs no second model."),
        "loss_top_k": (0, "Use distillation_topk."),
        "loss_add_tail": (True, "Use distillation_add_tail."),
    },
)  # fmt: skip
class SelfDistillationFields(DistillationFields):
    """Fields of methods whose teacher is the student with more in its prompt."""

    _beta: ClassVar[str | float] = "distillation_alpha"
    distillation_alpha: float = option(0.5, "beta of the divergence: 0 forward KL, 1 reverse KL.")
    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = option(
        "topk_logits", "What the divergence sees: the token, all ids, the student's likeliest."
    )
    distillation_topk: PositiveInt | None = option(100, "Ids of topk_logits.")
    distillation_add_tail: bool = option(False, "One category more for the mass outside them.")
    distillation_is_clip: PositiveFloat | None = option(
        2.0, "Most of the importance weight of tokens that older weights sampled; None: no weight."
    )

    def _rules(self) -> list[tuple[str, bool, str]]:
        mode, alpha, k = self.distillation_mode, self.distillation_alpha, self.distillation_topk or 0
        sampled = mode != "sampled_token" or alpha == 1
        return [
            *super()._rules(),
            ("distillation_alpha", sampled, "with sampled_token, which estimates the reverse KL alone. Fix: 1.0"),
            ("distillation_topk", mode != "topk_logits" or k, "must be set with topk_logits"),
        ]

    def axes(self) -> Axes:
        """By ``distillation_mode``; every sequence weighs the same."""
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
        "{prompt}\n\n{privileged_context}", "The teacher's last user turn; both names are needed."
    )
    generate_from_teacher: bool = option(False, "Sample from the teacher's prompt.")
    num_loss_tokens_to_skip: NonNegativeInt = option(0, "First tokens of a completion that are not trained.")

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [*super()._rules(), _template_rule(self, "teacher_prompt_template", ("prompt", "privileged_context"))]


class SDFT(Distillation):
    """The student learns what it would say if it saw the ``privileged_context`` of the row.

    Reference: Self-Distillation Fine-Tuning, arXiv:2601.19897.
    """

    config_class = SDFTConfig
    traits = replace(Distillation.traits, reads_images=False)
    privileged = True

    def needs_old_logp(self, outlived: bool) -> bool:
        """As the parent's. Samples from the teacher's prompt need none: no ratio says how likely the student drew them."""
        return not self.cfg.generate_from_teacher and super().needs_old_logp(outlived)


@config
@preset(
    distillation_alpha=1.0, distillation_mode="sampled_token", distillation_topk=None, teacher_model_kind="ema",
    epsilon_high=(0.2, "Upper clip: 1 + epsilon_high; None: epsilon."),
    unread=OF_GRPO | {
        "diagnostics_warning_interval": (10, "The checks of the log warn of flat rewards by themselves."),
        "diagnostics_flat_tolerance": (1e-8, "Use min_group_std."),
    },
)  # fmt: skip
class SDPOConfig(SelfDistillationFields, GRPOConfig):
    """Arguments of `SDPOTrainer`: those of GRPO, whose ``beta`` is a KL penalty, and of the teacher."""

    distillation_weight: Share = option(1.0, "w in (1 - w) policy + w distillation, in [0, 1].")
    max_reprompt_len: PositiveInt = option(10240, "Tokens of the teacher's prompt; the hint is cut.")
    use_successful_as_teacher: bool = option(True, "Show the teacher a successful completion.")
    success_reward_threshold: float = option(1.0, "Reward from which a completion is a success.")
    dont_reprompt_on_self_success: bool = option(True, "Never show a completion itself.")
    reprompt_template: str = option(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "The teacher's last user turn, of {prompt}, {solution} and {feedback}.",
    )
    solution_template: str = option(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n", "Of the successful completion."
    )
    feedback_template: str = option(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "Of the column privileged_context.",
    )
    include_environment_feedback: bool = option(False, "Show the column privileged_context.")
    environment_feedback_only_without_solution: bool = option(False, "Only where none succeeded.")
    remove_thinking_from_demonstration: bool = option(False, "Cut <think> blocks out.")

    def _rules(self) -> list[tuple[str, bool, str]]:
        read = {"solution": self.use_successful_as_teacher, "feedback": self.include_environment_feedback}
        needed = ("prompt", *(name for name, wanted in read.items() if wanted))
        return [
            *super()._rules(),
            _template_rule(self, "reprompt_template", needed, tuple(read)),
            _template_rule(self, "solution_template", ("successful_previous_attempt",)),
            _template_rule(self, "feedback_template", ("feedback_raw",)),
            ("use_successful_as_teacher", any(read.values()), "with include_environment_feedback=False: the teacher would "
             "see no more than the student. Fix: set one of them"),
        ]  # fmt: skip

    def axes(self) -> Axes:
        """The mean over sequences whose teacher sees more."""
        w = self.distillation_weight
        return replace(super().axes(), reduction="active", weight=w, policy=1 - w)


class SDPO(Distillation):
    """The student learns from itself after it saw a successful completion of the same prompt.

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
    temperature=(1.0, "Sampling only: the cross-entropy is at temperature 1; > 0."),
)  # fmt: skip
class SSDConfig(DistillationConfig):
    """Arguments of `SSDTrainer`."""

    filter_empty: bool = option(True, "Leave out blank completions, and single lines under 10 letters.")

    def axes(self) -> Axes:
        """Cross-entropy alone."""
        return Axes("none", weight=0.0, cross_entropy=1.0)


class SSD(Distillation):
    """Simple self-distillation: supervised fine-tuning on the model's own samples, at another temperature.

    Reference: arXiv:2604.01193.
    """

    config_class = SSDConfig
    traits = replace(Distillation.traits, reads_images=False)
