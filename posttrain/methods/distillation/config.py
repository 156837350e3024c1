"""`DistillationConfig` and `Axes`: options of distillation. Contradictory options are rejected."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from posttrain.errors import ConfigError, check_rules
from posttrain.fields import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
    config,
    option,
    read_mapping,
)
from posttrain.methods.config import PictureConfig
from posttrain.methods.online_config import OnlineConfig, reshaped_sampling
from posttrain.models.heads import causal_lm

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

# If beta is closer to 0 or 1 than this number, but not equal to 0 or 1, a warning is logged. The divergence then has almost
# no gradient.
FLAT = 0.05
Support = Literal["none", "full", "teacher_topk", "student_topk", "union_topk", "sampled", "top1_pair", "aligned"]


def preset(unread: dict[str, tuple[Any, str]] | None = None, **defaults: Any) -> Callable[[Any], Any]:
    """Return a class decorator that sets the default values of one distillation method. It must be applied before the
    decorator ``config``.

    Args:
        unread: Fields of TRL that this method does not use. The key is the field's name. The value is the field's default,
            and a text that describes the alternative. Setting the field to another value raises an error that contains this
            text.
        defaults: New default values of inherited fields. A pair is a new default value and a new help text.
    """

    def decorate(cls: Any) -> Any:
        bases = [base for base in cls.__mro__[:0:-1] if dataclasses.is_dataclass(base)]
        fields: dict[str, Any] = {f.name: f for base in bases for f in dataclasses.fields(base)}
        kinds: dict[str, Any] = {}
        for base in (OnlineConfig, *cls.__bases__[::-1]):  # The type hints of a class include inherited fields.
            kinds |= get_type_hints(base, include_extras=True)
        explained = {name: (value[0], f"Not used. {value[1]}") for name, value in (unread or {}).items()}
        # Merge the unused fields of all base classes. An attribute lookup would find only those of the first base class.
        inherited = [vars(base).get("_refused", {}) for base in cls.__mro__[:0:-1]]
        cls._refused = dict(pair for of_base in (*inherited, unread or {}) for pair in of_base.items())
        for name, value in (defaults | explained).items():
            default, text = value if isinstance(value, tuple) else (value, fields[name].metadata["help"])
            kind = "str | None" if default is None else type(default).__name__
            cls.__annotations__[name] = kinds.get(name, kind)
            setattr(cls, name, option(default, text))
        return cls

    return decorate


def logit_width(model: nn.Module) -> int:
    """Return the number of logits per position. The model may have wrappers, for example an adapter."""
    inner: Any = causal_lm(model)
    return inner.config.get_text_config().vocab_size


@dataclass(frozen=True)
class Axes:
    """Properties that define a distillation loss.

    Attributes:
        support: Token ids over which the divergence is computed at each position. ``full``: the whole vocabulary.
            ``teacher_topk``, ``student_topk``: the k most likely ids of the teacher or of the student. ``union_topk``: the k
            most likely ids of each of the two models. ``sampled``: only the sampled token. ``top1_pair``: the sampled token
            and the teacher's most likely id. ``aligned``: groups of tokens that have the same bytes in both tokenizers.
            ``none``: there is no teacher.
        beta: Number from 0 (forward KL) to 1 (reverse KL) that selects the divergence; see
            `posttrain.losses.distillation.divergence`.
        top_k: Number k of token ids in the support.
        tail: Whether all ids outside the support form one additional category with their total probability. False: both
            distributions are renormalized over the support.
        student_temperature, teacher_temperature: Temperatures that divide the logits before the divergence is computed.
        estimator: How the divergence is minimized. ``exact``: by differentiating the divergence. ``score``: by a policy
            gradient, in which the reward of a sampled token is the log-ratio of teacher and student.
        prefix: Parameters gamma and epsilon of the token weights of IW-OPD. None: all tokens have the same weight.
        reduction: How the loss is averaged. ``token``: the average over all tokens. ``sequence_token``: the average over the
            tokens of each sequence, then over sequences. ``active``: the same as ``sequence_token``, but only over sequences
            that have a teacher.
        is_clip: Maximum importance weight of a token. Importance weights correct for samples of older weights. With
            None, all importance weights are 1.
        weight, cross_entropy: Weights of two loss terms: the divergence, and the cross-entropy ``-log q`` of the tokens.
        policy: Weight of an additional GRPO loss. None: there is no GRPO loss.
    """

    support: Support = "full"
    beta: float = 1.0
    top_k: int = 0
    tail: bool = True
    student_temperature: float = 1.0
    teacher_temperature: float = 1.0
    estimator: Literal["exact", "score"] = "exact"
    prefix: tuple[float, float] | None = None
    reduction: Literal["token", "sequence_token", "active"] = "token"
    is_clip: float | None = None
    weight: float = 1.0
    cross_entropy: float = 0.0
    policy: float | None = None

    def check(self) -> Axes:
        """Raise an error for values that are out of range or give a loss without a gradient. Return ``self``.

        Raises:
            ConfigError: A value is out of range, or the support has a single token id and no tail. The renormalized
                probability of a single id is always 1.
        """
        if not 0 <= self.beta <= 1:
            raise ConfigError(
                f"beta={self.beta} (distillation_alpha of SDFT and SDPO) must be from 0 to 1. 0 is the forward "
                "KL(teacher || student), and 1 is the reverse KL(student || teacher)."
            )
        coldest = min(self.student_temperature, self.teacher_temperature)
        if coldest <= 0:
            raise ConfigError(f"temperature={coldest} must be above 0, because logits are divided by it.")
        exact = self.estimator == "exact"
        single = self.support == "sampled" or (self.support.endswith("topk") and self.top_k == 1)
        if single and not self.tail and exact:
            raise ConfigError(
                f"top_k={self.top_k or 1} without a tail gives a loss of 0, because a single token id has probability 1 after "
                "renormalization, in both distributions. Fix: add a category for all other ids (loss_add_tail=True or "
                "distillation_add_tail=True), or increase top_k."
            )
        if exact and (0 < self.beta < FLAT or 1 - FLAT < self.beta < 1):
            text = (
                "beta=%s: for values close to but not equal to 0 or 1, the divergence and its gradient are proportional to "
                "beta (1 - beta), so they are much smaller than with beta=%d."
            )
            logger.warning(text, self.beta, round(self.beta))
        return self


def check_weights(weights: Mapping[str, float] | None) -> None:
    """Check that the weights of teachers are numbers from 0 to 1 and that their sum is 1.

    Raises:
        ConfigError: A weight is out of range, or the sum is not 1.
    """
    for name, weight in (weights or {}).items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
            raise ConfigError(
                f"teacher_weights: the weight of {name!r} is {weight!r}, but it must be a number from 0 to 1."
            )
    if weights is not None and not math.isclose(total := sum(weights.values()), 1, abs_tol=1e-6):
        shares = {name: round(weight / total, 6) for name, weight in weights.items()} if total else "shares of one"
        raise ConfigError(
            f"teacher_weights={dict(weights)} have the sum {total:g}, but the sum must be 1. Fix: use {shares}."
        )


@dataclass
class DistillationFields:
    """Options of all distillation configs: teacher, data and divergence."""

    learning_rate: float = option(
        1e-6, "Peak learning rate. The default is for full fine-tuning. Use about ten times this value for LoRA."
    )
    num_generations: PositiveInt = option(
        1,
        "Number of completions sampled per prompt, at least 1. The default is 1, because the loss does not compare the "
        "completions of a prompt.",
    )
    temperature: PositiveFloat = option(
        1.0,
        "Temperature, above 0. Logits are divided by it during sampling. In the loss, the logits of student and teacher are "
        "also divided by it. Higher values make completions more diverse and the compared distributions more uniform.",
    )
    lmbda: Share = option(
        1.0,
        "Fraction of prompts for which the student samples the completion, from 0 to 1. For all other prompts, the completion "
        "of the dataset is used, or, with seq_kd, a completion sampled by the teacher. 1: training uses only samples of the "
        "student (on-policy). 0: the student samples no completions, which is fastest.",
    )
    seq_kd: bool = option(
        False,
        "For prompts whose completion the student does not sample, let the teacher sample a completion. False: use the "
        "completion of the dataset. True needs lmbda below 1 and a teacher model in this process.",
    )
    max_length: int | None = option(
        None,
        "Maximum number of tokens of a dataset row, at least 2. The beginning of a longer row is removed. None: no limit.",
    )
    max_prompt_length: PositiveInt | None = option(
        None, "Maximum number of tokens of a prompt. The beginning of a longer prompt is removed. None: no limit."
    )
    eval_mode: Literal["auto", "dataset", "student"] = option(
        "auto",
        "Completions on which evaluation computes the loss. 'dataset': completions of the evaluation set. 'student': samples "
        "of the student. 'auto': 'dataset' if the evaluation set has completions, else 'student'.",
    )
    teacher_model_name_or_path: dict[str, str] | str | None = option(
        None,
        "Folder or Hub id of the teacher. It is used if no teacher_model is passed to the trainer. For several teachers, pass "
        "a mapping from the teachers' names to folders or Hub ids. On the command line, write the mapping as JSON.",
    )
    teacher_model_revision: str | None = option(
        None, "Branch, tag or commit of the teacher on the Hub. None: the default branch."
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Keyword arguments of from_pretrained for the teacher, as a mapping or JSON. If dtype is not set, the teacher is "
        "loaded in the precision of its checkpoint.",
    )
    teacher_model_kind: Literal["model", "live", "base", "ema"] = option(
        "model",
        "Which model is the teacher. 'model': another model. 'live': the student with its current weights. 'base': the "
        "student with its initial weights (with LoRA, the student without its adapter). 'ema': the student with an "
        "exponential moving average of its weights (with LoRA, of the adapter's weights).",
    )
    teacher_update_rate: PositiveShare = option(
        0.05,
        "With teacher_model_kind='ema': mixing weight `a` in `teacher = (1 - a) * teacher + a * student`. It must be above 0 "
        "and at most 1.",
    )
    teacher_sync_steps: PositiveInt = option(
        1, "With teacher_model_kind='ema': number of optimizer steps between two updates of the teacher, at least 1."
    )
    teacher_scores: str | None = option(
        None,
        "File with the teacher's log-probs for the training set, written by posttrain teacher-scores. With this file, no "
        "teacher model is loaded, which saves memory and time. It needs lmbda=0, because the file contains only scores of the "
        "dataset's completions. None: a teacher model computes log-probs during training.",
    )
    eval_teacher_scores: str | None = option(
        None,
        "File with the teacher's log-probs for the evaluation set, written by posttrain teacher-scores. It can be set "
        "only together with teacher_scores. None: no file.",
    )
    teacher_model_server_url: dict[str, str] | str | None = option(
        None,
        "Address of a server with the teacher, for example 'http://localhost:8000'. The server computes the teacher's "
        "log-probs, so no teacher is loaded in this process. For several teachers, pass a mapping from the teachers' names to "
        "addresses. None: no server.",
    )
    teacher_weights: dict[str, float] | str | None = option(
        None,
        "With several teachers: weight of the divergence from each teacher, as a mapping or JSON from names to weights. The "
        "weights must sum to 1. None: each row has one teacher, whose name is in the column teacher_id.",
    )
    loss_top_k: NonNegativeInt = option(
        0,
        "Number k of token ids per position over which the divergence is computed. With beta=0, they are the k most likely "
        "ids of the teacher. With beta=1, they are the k most likely ids of the student. With beta between 0 and 1, both "
        "groups are used. With loss_top_k=1, the sampled token replaces the student's most likely id. 0: the whole vocabulary, "
        "which is exact. A smaller k needs less memory and network traffic.",
    )
    loss_add_tail: bool = option(
        True,
        "With loss_top_k above 0: add one category with the total probability of all token ids that are not among the "
        "selected ones. False: both distributions are renormalized over the selected ids, so the probability of all other ids "
        "is ignored.",
    )
    tokenizer_check: Literal["error", "warn", "off"] = option(
        "error",
        "What to do if the tokenizers of student and teacher differ. 'error': raise an error, because the same token id would "
        "stand for different tokens. 'warn': log a warning. 'off': do not compare the tokenizers.",
    )

    # Attributes that are defined by the config classes with these fields.
    if TYPE_CHECKING:
        beta: float
        use_liger_kernel: bool

    # Names of the config fields that contain beta and the loss temperature. A number instead of a name is the value itself.
    _beta: ClassVar[str | float] = "beta"
    _loss_temperature: ClassVar[str | float] = "temperature"
    _least_generations: ClassVar[int] = 1
    _corrects_sampler: ClassVar[bool] = False
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *OnlineConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs", "teacher_weights",
    ]  # fmt: skip
    # Fields that the method does not use: the argument ``unread`` of `preset`, merged with the fields of base classes.
    _refused: ClassVar[dict[str, tuple[Any, str]]] = {}

    def __post_init__(self) -> None:
        for name in ("teacher_model_name_or_path", "teacher_model_server_url"):
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):
                setattr(self, name, read_mapping(name, value))
        super().__post_init__()  # type: ignore[misc]
        # `SyncRefModelCallback` reads these two attributes.
        self.ref_model_mixup_alpha, self.ref_model_sync_steps = self.teacher_update_rate, self.teacher_sync_steps
        check_rules(self, self._rules())
        self._check_sources()
        axes = self.axes().check()
        if axes.estimator == "score" and (cut := reshaped_sampling(self, "top_p", "top_k", "min_p")):
            logger.warning(
                "%s changes the distribution from which tokens are sampled, but the loss on sampled tokens assumes the "
                "unchanged distribution.",
                cut,
            )

    def _rules(self) -> list[tuple[str, bool, str]]:
        refused, names = self._refused.items(), ("teacher_update_rate", "teacher_sync_steps")
        ema = [(f.name, getattr(self, f.name) == f.default) for f in dataclasses.fields(self) if f.name in names]
        return [
            *(
                (name, getattr(self, name) == old, f"has no effect with this method. Fix: {new}")
                for name, (old, new) in refused
            ),
            *(
                (name, self.teacher_model_kind == "ema" or is_default, "is only used with teacher_model_kind='ema'")
                for name, is_default in ema
            ),
            (
                "max_length",
                (self.max_length or 2) >= 2,
                "must be at least 2: one token of the prompt and one of the answer",
            ),
            ("use_liger_kernel", not self.use_liger_kernel, "is not needed: the loss is always computed in chunks"),
            ("eval_teacher_scores", self.teacher_scores or not self.eval_teacher_scores, "needs teacher_scores"),
        ]

    def _check_sources(self) -> None:
        """Raise an error if several teachers are set, or if the teacher cannot score the selected completions."""
        named = {
            "teacher_scores": self.teacher_scores,
            "teacher_model_server_url": self.teacher_model_server_url,
            "teacher_model_name_or_path": self.teacher_model_name_or_path,
            "teacher_model_kind": self.teacher_model_kind,
        }
        sources = {name: value for name, value in named.items() if value not in (None, "model")}
        # With a server, teacher_model_name_or_path may also be set. It is then the name of the model that the server must
        # have.
        if len(sources) > 1 and set(sources) != {"teacher_model_server_url", "teacher_model_name_or_path"}:
            raise ConfigError(
                f"{sources} are all set, but only one of them can define the teacher. Fix: set only one of them."
            )
        check_weights(self.teacher_weights)  # type: ignore[arg-type]
        if self.teacher_scores and self.lmbda > 0:
            raise ConfigError(
                f"teacher_scores={self.teacher_scores!r} cannot be used with lmbda={self.lmbda}, because the file contains "
                "scores of the dataset's completions, but no scores of sampled completions. Fix: set lmbda=0, or use a teacher "
                "model."
            )
        if self.seq_kd and (self.teacher_scores or self.teacher_model_server_url or self.lmbda == 1):
            raise ConfigError(
                f"seq_kd=True needs lmbda below 1 and a teacher model in this process, but lmbda={self.lmbda}. The teacher "
                "samples completions only for prompts whose completions the student does not sample. Fix: set lmbda below 1 "
                "and teacher_model, or set seq_kd=False."
            )
        if self.num_generations > 1 and self.lmbda < 1 and not self.seq_kd:
            text = (
                "num_generations=%d with lmbda=%s repeats each completion of the dataset %d times in a batch, because "
                "completions are not sampled for all prompts."
            )
            logger.warning(text, self.num_generations, self.lmbda, self.num_generations)

    def axes(self) -> Axes:
        """Return the properties of the loss that these options define."""
        sources, k = (self._beta, self._loss_temperature), self.loss_top_k
        beta, t = (float(getattr(self, source) if isinstance(source, str) else source) for source in sources)
        support: Support = "student_topk" if beta == 1 else "union_topk"
        if self.teacher_scores:
            support = "teacher_topk"
        elif k == 0 and not self.teacher_model_server_url:
            support = "full"
        elif beta == 0:
            support = "teacher_topk"
        elif k <= 1:
            support = "sampled" if beta == 1 else "top1_pair"
        return Axes(support, beta, k, self.loss_add_tail, student_temperature=t, teacher_temperature=t)


# Options for rewards and importance ratios. Distillation losses use neither.
OF_REWARDS: dict[str, tuple[Any, str]] = {
    name: (default, "Remove it, because the loss is the divergence from a teacher, without rewards and without a clipped ratio.")
    for name, default in {
        "reward_weights": None, "reward_timeout": None, "reward_transform": None, "check_rewards": True,
        "check_reward_determinism": False, "stop_without_signal": None, "dynamic_sampling": 0,
        "epsilon": 0.2, "epsilon_high": None,
    }.items()
}  # fmt: skip


@config
@preset(
    unread=OF_REWARDS | {
        "max_tool_calling_iterations": (
            None, "To train with tools, use GRPOTrainer. Distillation supports only single-turn completions."
        ),
        "sync_ref_model": (False, "Set teacher_model_kind='ema' for a teacher that follows the student."),
    }
)  # fmt: skip
class DistillationConfig(DistillationFields, PictureConfig, OnlineConfig):
    """Arguments of `DistillationTrainer`, which trains a student on the next-token distributions of a teacher.

    Reference: GKD, arXiv:2306.13649.
    """

    beta: float = option(
        1.0,
        "Parameter of the generalized Jensen-Shannon divergence, from 0 to 1. 0: forward KL(teacher || student), with which "
        "the student covers all modes of the teacher. 1: reverse KL(student || teacher), with which the student concentrates "
        "on the teacher's most likely modes. 0.5: Jensen-Shannon divergence. For values close to 0 or 1, but not equal to "
        "them, the gradient is small.",
    )
