"""TRL's distillation methods as rows of one table: a config with its defaults, and what the common trainer has not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from posttrain.algorithms.distillation.config import Axes, DistillationConfig, DistillationFields, Support
from posttrain.algorithms.distillation.data import joined_text
from posttrain.algorithms.distillation.objective import distillation_objective
from posttrain.algorithms.distillation.trainer import DistillationTrainer
from posttrain.algorithms.grpo.config import GRPOConfig
from posttrain.errors import ConfigError, DataError, check_choice
from posttrain.losses.distillation import discounted_returns
from posttrain.metrics import mean
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch
from posttrain.training.online import OnlineTrainer
from posttrain.types import Batch, LossTerms, ModelOutputs, Rollout

__all__ = [
    "GKDConfig",
    "GKDTrainer",
    "IWOPDConfig",
    "IWOPDTrainer",
    "MiniLLMConfig",
    "MiniLLMTrainer",
    "SDFTConfig",
    "SDFTTrainer",
    "SDPOConfig",
    "SDPOTrainer",
    "SSDConfig",
    "SSDTrainer",
]

THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
SHORT = 10  # A single line of fewer characters is no answer (SSD).


# GKD --------------------------------------------------------------------------------------------------------------------


@dataclass
class GKDConfig(DistillationConfig):
    """Arguments of `GKDTrainer`."""

    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    temperature: float = field(default=0.9, metadata={"help": "Sampling only: the loss is at temperature 1; > 0."})
    lmbda: float = field(default=0.5, metadata={"help": "Share of prompts that the student completes, in [0, 1]."})
    beta: float = field(
        default=0.5, metadata={"help": "0 is KL(teacher || student), 1 KL(student || teacher), between Jensen-Shannon."}
    )
    max_length: int | None = field(
        default=1024, metadata={"help": "Tokens of a dataset row; the end is kept. None: no limit."}
    )
    max_completion_length: int = field(
        default=128, metadata={"help": "Most tokens of a sampled completion, EOS included."}
    )
    max_new_tokens: int | None = field(default=None, metadata={"help": "TRL's name of max_completion_length."})
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout of the student to 0."})

    def __post_init__(self) -> None:
        self.max_completion_length = self.max_new_tokens or self.max_completion_length
        self.max_new_tokens = self.max_completion_length
        super().__post_init__()

    @property
    def loss_temperature(self) -> float:
        """The loss is at temperature 1."""
        return 1.0


class GKDTrainer(DistillationTrainer):
    """Generalised knowledge distillation: the dataset's answers mixed with the student's own (or the teacher's).

    Reference: GKD, arXiv:2306.13649.
    """

    config_class: ClassVar[type[Any]] = GKDConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "gkd"]
    _name: ClassVar[str] = "GKD"
    _suffix: ClassVar[str] = "GKD"


# IW-OPD -----------------------------------------------------------------------------------------------------------------


@dataclass
class IWOPDConfig(DistillationConfig):
    """Arguments of `IWOPDTrainer`."""

    distillation_objective: Literal["iw_opd", "jsd"] = field(
        default="iw_opd", metadata={"help": "iw_opd: policy gradient with prefix weights; jsd: the divergence of beta."}
    )
    iw_opd_gamma: float = field(default=0.5, metadata={"help": "How much more the first token weighs, at least 0."})
    iw_opd_epsilon: float = field(
        default=1e-8, metadata={"help": "Least sum of advantages that is divided by, above 0."}
    )
    loss_top_k: int = field(default=1, metadata={"help": "jsd: ids per position, see DistillationConfig; 0: all."})
    reverse_kl_top_1_mode: str = field(default="sampled", metadata={"help": "Only sampled."})
    use_teacher_server: bool = field(default=False, metadata={"help": "Stated by teacher_model_server_url."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus mass in (0, 1]; below 1 the estimate is biased."})
    max_length: int | None = field(default=1024, metadata={"help": "Tokens of a dataset row; the end is kept."})
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout of the student to 0."})
    vllm_sync_frequency: int = field(default=1, metadata={"help": "Only 1: weights are pushed when they moved."})
    log_completions_steps: int = field(default=100, metadata={"help": "Not read; see log_completions, logging_steps."})

    _refused: ClassVar[dict[str, tuple[Any, str]]] = {
        "reverse_kl_top_1_mode": (
            "sampled",
            "leave it at 'sampled'; loss_top_k above 1 sees the student's likeliest ids",
        ),
        "vllm_sync_frequency": (1, "leave it at 1; steps_per_generation lets several steps train one generation"),
        "log_completions_steps": (100, "logging_steps"),
        "use_teacher_server": (False, "teacher_model_server_url names the server"),
    }

    def __post_init__(self) -> None:
        check_choice("distillation_objective", self.distillation_objective, ("iw_opd", "jsd"))
        super().__post_init__()
        if self.iw_opd_gamma < 0 or self.iw_opd_epsilon <= 0:
            raise ConfigError(
                f"iw_opd_gamma={self.iw_opd_gamma} must be at least 0, and iw_opd_epsilon={self.iw_opd_epsilon} above 0."
            )
        if self.distillation_objective == "iw_opd" and self.lmbda != 1:
            raise ConfigError(
                f"lmbda={self.lmbda} with distillation_objective='iw_opd': its gradient is right for the "
                "student's own tokens alone. "
                "Fix: lmbda=1.0, or distillation_objective='jsd'."
            )

    def axes(self) -> Axes:
        """The sampled token's policy gradient, or the divergence."""
        row = super().axes()
        if self.distillation_objective == "jsd":
            return row
        return replace(row, support="sampled", beta=1.0, estimator="score", credit="prefix")


class IWOPDTrainer(DistillationTrainer):
    """On-policy distillation whose early tokens weigh more.

    Reference: IW-OPD, arXiv:2606.22600.
    """

    config_class: ClassVar[type[Any]] = IWOPDConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "iw-opd"]
    _name: ClassVar[str] = "IW-OPD"
    _suffix: ClassVar[str] = "IWOPD"

    def needs_old_logp(self, mode: str) -> bool:
        """Advantages are against the log-probs that the tokens were sampled with."""
        return (
            OnlineTrainer.needs_old_logp(self, mode) if self.axes.credit == "prefix" else super().needs_old_logp(mode)
        )

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `posttrain.losses.distillation.prefix_weights`."""
        prefix = (self.args.iw_opd_gamma, self.args.iw_opd_epsilon) if self.axes.credit == "prefix" else None
        return distillation_objective(outputs, batch, self.axes, prefix=prefix)


# MiniLLM: with a GRPO term ------------------------------------------------------------------------------------------------


@dataclass
class MiniLLMConfig(DistillationFields, GRPOConfig):
    """Arguments of `MiniLLMTrainer`: those of GRPO, whose ``beta`` is a KL penalty, and of the teacher."""

    num_generations: int = field(default=8, metadata={"help": "Completions per prompt; 1 sets scale_rewards='none'."})
    rkl_advantage: bool = field(default=True, metadata={"help": "Add log p - log q of each token to its advantage."})
    single_step_decomposition: bool = field(
        default=True, metadata={"help": "Add KL(student || teacher) of each position."}
    )
    kd_temperature: float = field(default=1.0, metadata={"help": "Loss only: divides both models' logits; > 0."})
    gamma: float = field(
        default=0.0, metadata={"help": "Discount of later tokens' rewards, in [0, 1]; 0: the token's own."}
    )
    length_normalization: bool = field(default=True, metadata={"help": "Divide by the sum of the discounts."})
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout of the student to 0."})

    def __post_init__(self) -> None:
        if self.num_generations == 1:
            self.scale_rewards = "none"
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma={self.gamma} must be in [0, 1].")
        if not (self.rkl_advantage or self.single_step_decomposition):
            raise ConfigError(
                "rkl_advantage=False and single_step_decomposition=False: the teacher would not be read. "
                "Fix: set one of them, or use "
                "GRPO."
            )

    @property
    def divergence_beta(self) -> float:
        """The reverse KL."""
        return 1.0

    @property
    def loss_temperature(self) -> float:
        """Of both models in the divergence."""
        return self.kd_temperature

    def axes(self) -> Axes:
        """The reverse KL, over the vocabulary and as a reward."""
        return replace(super().axes(), policy=1.0)


class MiniLLMTrainer(DistillationTrainer):
    """The reverse KL to the teacher as a reward of each token, beside rewards of whole completions if there are any.

    Reference: MiniLLM, arXiv:2306.08543.
    """

    config_class: ClassVar[type[Any]] = MiniLLMConfig
    takes_rewards: ClassVar[bool] = True
    _tag_names: ClassVar[list[str]] = ["posttrain", "minillm"]
    _name: ClassVar[str] = "MiniLLM"
    _suffix: ClassVar[str] = "MiniLLM"

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """``GRPO(A + sum gamma^i (log p - log q)) + KL(q || p)``."""
        args, returns = self.args, None
        if args.rkl_advantage:
            gap = torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)
            gap = gap.masked_scatter(batch.loss_mask, outputs.compared["gap"])  # (B, T)
            credit = {"gamma": args.gamma, "length_normalization": args.length_normalization}
            returns = discounted_returns(-gap, batch.loss_mask, batch.sequence, **credit)
        single = distillation_objective(outputs, batch, self.axes)
        policy = self.policy_terms(outputs, batch, returns)
        if args.single_step_decomposition:
            policy.extra.append(single)
        policy.metrics = single.metrics | policy.metrics
        return policy


# The student as its own teacher -------------------------------------------------------------------------------------------


@dataclass
class SelfDistillationFields(DistillationFields):
    """Fields of methods whose teacher is the student with more in its prompt."""

    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate."})
    max_prompt_length: int | None = field(default=512, metadata={"help": "Tokens of a prompt; the end is kept."})
    max_completion_length: int = field(default=256, metadata={"help": "Most tokens of a completion, EOS included."})
    num_generations: int = field(default=8, metadata={"help": "Completions per prompt."})
    distillation_alpha: float = field(
        default=0.5, metadata={"help": "beta of the divergence: 0 forward KL, 1 reverse KL."}
    )
    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = field(
        default="topk_logits",
        metadata={"help": "What the divergence sees: the token, all ids, the student's likeliest."},
    )
    distillation_topk: int | None = field(default=100, metadata={"help": "Ids of topk_logits."})
    distillation_add_tail: bool = field(
        default=False, metadata={"help": "One category more for the mass outside them."}
    )
    distillation_is_clip: float | None = field(
        default=2.0,
        metadata={"help": "Most of the importance weight of tokens that older weights sampled; None: no weight."},
    )
    teacher_model_kind: Literal["model", "live", "base", "ema"] = field(
        default="base", metadata={"help": "base, live or ema."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout to 0."})
    use_teacher_server: bool = field(default=False, metadata={"help": "Refused: the teacher is in this process."})

    _refused: ClassVar[dict[str, tuple[Any, str]]] = {
        "use_teacher_server": (False, "teacher_model_kind='live', which needs no second model")
    }

    def __post_init__(self) -> None:
        check_choice("distillation_mode", self.distillation_mode, ("sampled_token", "full_logits", "topk_logits"))
        super().__post_init__()
        if self.distillation_mode == "sampled_token" and self.distillation_alpha != 1:
            raise ConfigError(
                f"distillation_mode='sampled_token' with distillation_alpha={self.distillation_alpha}: "
                "sampled tokens estimate the "
                "reverse KL alone. Fix: distillation_alpha=1.0."
            )

    @property
    def divergence_beta(self) -> float:
        """``distillation_alpha``."""
        return self.distillation_alpha

    def axes(self) -> Axes:
        """By ``distillation_mode``; every sequence weighs the same."""
        modes: dict[str, Support] = {"sampled_token": "sampled", "full_logits": "full", "topk_logits": "student_topk"}
        mode = modes[self.distillation_mode]
        if mode == "student_topk" and (self.distillation_topk or 0) < 1:
            raise ConfigError(f"distillation_topk={self.distillation_topk} must be at least 1 with topk_logits.")
        shared: dict[str, Any] = {"student_temperature": self.temperature, "teacher_temperature": self.temperature}
        return Axes(
            mode,
            beta=self.distillation_alpha,
            top_k=self.distillation_topk or 0,
            tail=self.distillation_add_tail,
            estimator="score" if mode == "sampled" else "exact",
            reduction="sequence_token",
            is_clip=self.distillation_is_clip,
            **shared,
        )


@dataclass
class SDFTConfig(SelfDistillationFields, DistillationConfig):
    """Arguments of `SDFTTrainer`."""

    teacher_prompt_template: str = field(
        default="{prompt}\n\n{privileged_context}",
        metadata={"help": "The teacher's last user turn; both names are needed."},
    )
    generate_from_teacher: bool = field(default=False, metadata={"help": "Sample from the teacher's prompt."})
    num_loss_tokens_to_skip: int = field(
        default=0, metadata={"help": "First tokens of a completion that are not trained."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name in ("{prompt}", "{privileged_context}") if name not in self.teacher_prompt_template]
        if missing:
            raise ConfigError(f"teacher_prompt_template={self.teacher_prompt_template!r} lacks {missing}.")


class SDFTTrainer(DistillationTrainer):
    """The student learns what it would say if it saw the ``privileged_context`` of the row.

    Reference: Self-Distillation Fine-Tuning, arXiv:2601.19897.
    """

    config_class: ClassVar[type[Any]] = SDFTConfig
    privileged: ClassVar[bool] = True
    _tag_names: ClassVar[list[str]] = ["posttrain", "sdft"]
    _name: ClassVar[str] = "SDFT"
    _suffix: ClassVar[str] = "SDFT"

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Refuse a dataset without ``privileged_context``."""
        names = getattr(train, "column_names", None)
        if names is not None and "privileged_context" not in names:
            raise DataError(f"train_dataset has no column 'privileged_context'; its columns are {sorted(names)}.")
        return super().prepare_datasets(train, evaluation)

    def _hinted(self, example: dict[str, Any]) -> list[int]:
        extra = joined_text(example.get("privileged_context"))
        return self.teacher_prompt(
            example["prompt"], extra, self.args.teacher_prompt_template, self.args.max_prompt_length
        )

    def student_rollouts(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """As the parent's, from the teacher's prompts where that is asked for; the first tokens may carry no loss."""
        rollouts, completions = super().student_rollouts(examples, mode)
        if self.args.generate_from_teacher:
            rollouts = self.sample([self._hinted(example) for example in examples], self.sampling(mode))
            texts = self.processing_class.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
            for rollout, text, ids in zip(rollouts, texts, self.tokenize(examples), strict=True):
                rollout.prompt_ids, rollout.logp, rollout.text = ids, [], text
        skip = self.args.num_loss_tokens_to_skip
        for rollout in rollouts if skip else ():
            rollout.tool_mask = [int(i >= skip) for i in range(len(rollout.token_ids))]
        return rollouts, completions

    def facts(self, generation: RolloutBatch, table: RewardTable, mode: str) -> list[Any]:
        """The teacher's prompt of each completion."""
        return [self._hinted(example) for example in generation.examples]


@dataclass
class SDPOConfig(SelfDistillationFields, GRPOConfig):
    """Arguments of `SDPOTrainer`: those of GRPO, whose ``beta`` is a KL penalty, and of the teacher."""

    distillation_alpha: float = field(
        default=1.0, metadata={"help": "beta of the divergence: 0 forward KL, 1 reverse KL."}
    )
    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = field(
        default="sampled_token",
        metadata={"help": "What the divergence sees: the token, all ids, the student's likeliest."},
    )
    distillation_topk: int | None = field(default=None, metadata={"help": "Ids of topk_logits."})
    distillation_weight: float = field(
        default=1.0, metadata={"help": "w in (1 - w) policy + w distillation, in [0, 1]."}
    )
    teacher_model_kind: Literal["model", "live", "base", "ema"] = field(
        default="ema", metadata={"help": "base, live or ema."}
    )
    max_reprompt_len: int = field(default=10240, metadata={"help": "Tokens of the teacher's prompt; the hint is cut."})
    use_successful_as_teacher: bool = field(
        default=True, metadata={"help": "Show the teacher a successful completion."}
    )
    success_reward_threshold: float = field(
        default=1.0, metadata={"help": "Reward from which a completion is a success."}
    )
    dont_reprompt_on_self_success: bool = field(default=True, metadata={"help": "Never show a completion itself."})
    reprompt_template: str = field(
        default="{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        metadata={"help": "The teacher's last user turn, of {prompt}, {solution} and {feedback}."},
    )
    solution_template: str = field(
        default="\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        metadata={"help": "Of the successful completion."},
    )
    feedback_template: str = field(
        default="\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        metadata={"help": "Of the column privileged_context."},
    )
    include_environment_feedback: bool = field(default=False, metadata={"help": "Show the column privileged_context."})
    environment_feedback_only_without_solution: bool = field(
        default=False, metadata={"help": "Only where none succeeded."}
    )
    remove_thinking_from_demonstration: bool = field(default=False, metadata={"help": "Cut <think> blocks out."})
    diagnostics_warning_interval: int = field(default=10, metadata={"help": "Not read; the checks of the log warn."})
    diagnostics_flat_tolerance: float = field(default=1e-8, metadata={"help": "Not read; see min_group_std."})

    _refused: ClassVar[dict[str, tuple[Any, str]]] = SelfDistillationFields._refused | {
        "diagnostics_warning_interval": (10, "the checks of the log warn of flat rewards by themselves"),
        "diagnostics_flat_tolerance": (1e-8, "min_group_std"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.distillation_weight <= 1:
            raise ConfigError(f"distillation_weight={self.distillation_weight} must be in [0, 1].")

    def axes(self) -> Axes:
        """The mean over sequences whose teacher sees more."""
        w = self.distillation_weight
        return replace(super().axes(), reduction="active", weight=w, policy=1 - w)


class SDPOTrainer(DistillationTrainer):
    """The student learns from itself after it saw a successful completion of the same prompt.

    Reference: Self-Distillation Policy Optimization, arXiv:2601.20802.
    """

    config_class: ClassVar[type[Any]] = SDPOConfig
    privileged: ClassVar[bool] = True
    takes_rewards: ClassVar[bool] = True
    _tag_names: ClassVar[list[str]] = ["posttrain", "sdpo"]
    _name: ClassVar[str] = "SDPO"
    _suffix: ClassVar[str] = "SDPO"

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if reward_funcs is None:
            raise ConfigError("SDPO needs reward_funcs: they say which completions succeeded.")
        super().__init__(model, None, args, *rest, reward_funcs=reward_funcs, **kwargs)

    def facts(self, generation: RolloutBatch, table: RewardTable, mode: str) -> list[Any]:
        """The teacher's prompt of each completion, and which have one of their own (column ``active``)."""
        count, size = len(generation.rollouts), self.group_size(mode)
        mine = self.rewarded[table.start : table.start + count].tolist() if count else []
        draw = torch.Generator().manual_seed(self.args.seed + self._generation_number(mode))
        prompts, active = [], []
        for i, (example, rollout) in enumerate(zip(generation.examples, generation.rollouts, strict=True)):
            group = range(i // size * size, min(i // size * size + size, count))
            hint = self._hint(example, [generation.rollouts[j] for j in self._successes(mine, i, group)], draw)
            active.append(float(bool(hint)))
            prompts.append(rollout.prompt_ids if not hint else self._shown(example["prompt"], hint))
        generation.columns["active"] = active
        self.log_metrics_now({"self_distillation/reprompt_sample_fraction": mean(torch.tensor(active))}, mode)
        return prompts

    def _successes(self, rewards: list[float], own: int, group: range) -> list[int]:
        args = self.args
        if not args.use_successful_as_teacher:
            return []
        found = [j for j in group if rewards[j] >= args.success_reward_threshold]
        return [j for j in found if j != own or not args.dont_reprompt_on_self_success]

    def _hint(self, example: dict[str, Any], successes: list[Rollout], draw: torch.Generator) -> str:
        """What the teacher sees beside the prompt; empty where there is nothing."""
        args, hint = self.args, ""
        if successes:
            chosen = successes[int(torch.randint(len(successes), (), generator=draw))].text or ""
            chosen = THINKING.sub("", chosen) if args.remove_thinking_from_demonstration else chosen
            hint = args.solution_template.replace("{successful_previous_attempt}", chosen)
        feedback = example.get("privileged_context")
        wanted = args.include_environment_feedback and not (hint and args.environment_feedback_only_without_solution)
        if wanted and isinstance(feedback, str) and feedback.strip():
            hint += args.feedback_template.replace("{feedback_raw}", feedback)
        return hint

    def _shown(self, prompt: Any, hint: str) -> list[int]:
        template = self.args.reprompt_template.replace("{solution}", "{privileged_context}").replace("{feedback}", "")
        return self.teacher_prompt(prompt, hint, template, self.args.max_reprompt_len)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """``(1 - w) GRPO + w divergence``, the divergence over completions whose teacher saw more."""
        loss = distillation_objective(outputs, batch, self.axes)
        if self.axes.policy:
            policy = self.policy_terms(outputs, batch)
            policy.terms = self.axes.policy * policy.terms
            loss.extra.append(policy)
            loss.metrics = policy.metrics | loss.metrics
        return loss


# SSD --------------------------------------------------------------------------------------------------------------------


@dataclass
class SSDConfig(DistillationConfig):
    """Arguments of `SSDTrainer`."""

    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate."})
    temperature: float = field(
        default=1.0, metadata={"help": "Sampling only: the cross-entropy is at temperature 1; > 0."}
    )
    max_prompt_length: int | None = field(default=512, metadata={"help": "Tokens of a prompt; the end is kept."})
    max_completion_length: int = field(default=256, metadata={"help": "Most tokens of a completion, EOS included."})
    filter_empty: bool = field(
        default=True, metadata={"help": "Leave out blank completions, and single lines under 10 letters."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout to 0."})

    def axes(self) -> Axes:
        """Cross-entropy alone."""
        return Axes("none", weight=0.0, cross_entropy=1.0)


class SSDTrainer(DistillationTrainer):
    """Simple self-distillation: supervised fine-tuning on the model's own samples, at another temperature.

    Reference: arXiv:2604.01193.
    """

    config_class: ClassVar[type[Any]] = SSDConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "ssd"]
    _name: ClassVar[str] = "SSD"
    _suffix: ClassVar[str] = "SSD"

    def keep(self, generation: RolloutBatch, table: RewardTable, mode: str) -> None:
        """Leave out completions that say nothing."""
        texts = [(rollout.text or "").strip() for rollout in generation.rollouts]
        if self.args.filter_empty:
            generation.left_out = {
                i for i, text in enumerate(texts) if not text or ("\n" not in text and len(text) < SHORT)
            }
        kept = [float(i not in generation.left_out) for i in range(len(texts))]
        self.log_metrics_now({"ssd/active_sample_ratio": mean(torch.tensor(kept))}, mode)
