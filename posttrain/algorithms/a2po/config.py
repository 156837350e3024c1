"""`A2POConfig`: how values are estimated, and how strongly they pull."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.errors import ConfigError
from posttrain.rewards.transform import transform_names
from posttrain.training.online_config import OnlineConfig

__all__ = ["A2POConfig"]

OF_OTHERS = ("rank", "zscore", "running")  # Transforms that read other rewards than their own: not those of the values.


@dataclass
class A2POConfig(OnlineConfig):
    """Arguments of `A2POTrainer`: one completion a prompt, measured against the value of its prompt.

    Reference: Accelerating RL for LLM reasoning with optimal advantage regression, arXiv:2505.20686.
    """

    _least_generations: ClassVar[int] = 1

    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate."})
    num_generations: int = field(default=1, metadata={"help": "Completions per prompt in training: always 1."})
    max_prompt_length: int | None = field(
        default=512, metadata={"help": "Most prompt tokens; longer prompts lose their beginning. None: no limit."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Most tokens of a completion, EOS included."})
    top_k: int | None = field(default=None, metadata={"help": "Keep the k most likely tokens; None or 0 is off."})  # type: ignore[assignment]
    num_value_samples: int = field(
        default=8,
        metadata={"help": "Completions of the reference that a prompt's value is estimated from, at least 1."},
    )
    beta1: float = field(
        default=0.5,
        metadata={"help": "Temperature of the value: near 0 the best sample's reward, large their mean; > 0."},
    )
    filter_all_incorrect: bool = field(
        default=True, metadata={"help": "Leave out training prompts that no sample of the reference solved."}
    )
    beta2: float = field(
        default=1e-3, metadata={"help": "Weight of the log-ratio to the reference that advantages are fitted by; > 0."}
    )

    def __post_init__(self) -> None:
        self.top_k = self.top_k or 0
        super().__post_init__()
        rules = {
            "num_generations": (
                self.num_generations == 1,
                "must be 1: the baseline is the prompt's value, not a group",
            ),
            "num_value_samples": (self.num_value_samples >= 1, "must be at least 1"),
            "beta1": (self.beta1 > 0, "must be above 0: rewards are divided by it"),
            "beta2": (self.beta2 > 0, "must be above 0: nothing would be learned"),
            "max_prompt_length": (
                self.max_prompt_length is None or self.max_prompt_length >= 1,
                "must be at least 1, or None",
            ),
            "beta": (self.beta == 0, "must be 0.0: the pull of the reference is beta2"),
            "epsilon": (self.epsilon == 0.2 and self.epsilon_high is None, "is not read: nothing is clipped here"),
            "num_iterations": (self.num_iterations == 1, "must be 1: the regression has no importance ratio"),
            "dynamic_sampling": (self.dynamic_sampling == 0, "must be 0: one completion a prompt has no variance"),
            "reward_transform": (
                not transform_names(self.reward_transform) & set(OF_OTHERS),
                f"holds one of {', '.join(OF_OTHERS)}, which depends on other rewards; values and rewards need one scale. Take "
                "clip, log1p or tanh",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)!r} {rule}.")
