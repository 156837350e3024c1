"""`OnlinePreferenceConfig`: fields of the methods that sample two completions a prompt and prefer one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from posttrain.algorithms.online_config import OnlineConfig
from posttrain.errors import ConfigError, check_choice

__all__ = ["PAIR_LOSS_TYPES", "OnlinePreferenceConfig"]

PAIR_LOSS_TYPES = ("sigmoid", "ipo")
UNREAD = (
    "epsilon", "epsilon_high", "mask_truncated_completions", "sync_ref_model", "use_liger_kernel",
)  # fmt: skip


@dataclass
class OnlinePreferenceConfig(OnlineConfig):
    """Fields of every method that samples two completions a prompt and prefers one.

    Batch sizes count prompts. A list instead of a number has one value per epoch; the last one stays.
    """

    _VALID_DICT_FIELDS = [*OnlineConfig._VALID_DICT_FIELDS]  # noqa: RUF012
    per_epoch: ClassVar[tuple[str, ...]] = ("beta",)
    in_process_because: ClassVar[str | None] = None  # Why another engine cannot sample; None: it can.

    learning_rate: float = field(default=5e-7, metadata={"help": "Peak learning rate."})
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout to 0."})
    reward_model_path: str | None = field(default=None, metadata={"help": "For scripts; the trainer does not read it."})
    max_new_tokens: int = field(default=64, metadata={"help": "Most tokens of a completion, EOS included."})
    max_completion_length: int | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Another name of max_new_tokens."}
    )
    max_length: int = field(
        default=512, metadata={"help": "Most tokens of prompt and completion; a longer prompt loses its beginning."}
    )
    temperature: float = field(
        default=0.9, metadata={"help": "Of sampling alone: log-probs of the loss are those at temperature 1."}
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Taken from the reward of a completion that did not end, > 0."}
    )
    beta: list[float] = field(  # type: ignore[assignment]
        default_factory=lambda: [0.1], metadata={"help": "Strength of the tie to the reference; several: by epoch."}
    )
    loss_type: Literal["sigmoid", "ipo"] = field(default="sigmoid", metadata={"help": "Loss of a pair."})
    num_generations: int = field(default=2, metadata={"help": "Always 2: a pair is compared."})
    num_generations_eval: int | None = field(default=1, metadata={"help": "Always 1: evaluation compares nothing."})
    keep_eos_for_rewards: bool = field(
        default=False, metadata={"help": "Reward functions see the end-of-sequence token of plain text that has ended."}
    )
    vllm_gpu_memory_utilization: float = field(default=0.55, metadata={"help": "Share of GPU memory, colocate."})

    def __post_init__(self) -> None:
        if self.max_completion_length not in (None, self.max_new_tokens):
            raise ConfigError(
                f"max_completion_length={self.max_completion_length} and max_new_tokens={self.max_new_tokens} are two names of "
                "one limit and contradict each other. Set max_new_tokens."
            )
        self.max_completion_length = self.max_new_tokens
        for name in self.per_epoch:
            value = getattr(self, name)
            setattr(self, name, value[0] if isinstance(value, Sequence) and len(value) == 1 else value)
        if self.use_vllm and self.in_process_because:
            raise ConfigError(f"use_vllm=True cannot be used here: {self.in_process_because}. Leave it out.")
        super().__post_init__()
        self._check_pairs()

    def _check_pairs(self) -> None:
        check_choice("loss_type", self.loss_type, PAIR_LOSS_TYPES)
        if self.max_new_tokens >= self.max_length:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} leaves no prompt token within max_length={self.max_length}. Lower it, or "
                "raise max_length."
            )
        if self.missing_eos_penalty is not None and not self.missing_eos_penalty > 0:
            raise ConfigError(
                f"missing_eos_penalty={self.missing_eos_penalty} must be above 0 (it is subtracted), or None."
            )
        if self.num_generations != 2 or (self.num_generations_eval or 1) != 1:
            raise ConfigError(
                f"num_generations={self.num_generations} and num_generations_eval={self.num_generations_eval}: two completions "
                "are compared in training and one is scored in evaluation. Leave both out."
            )
        defaults = type(self).__dataclass_fields__
        for name in UNREAD:
            if getattr(self, name) != defaults[name].default:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not read by {type(self).__name__}. Leave it out.")

    def _check_sampling(self) -> None:
        for name in self.per_epoch:
            for value in self.scheduled_values(name):
                if not isinstance(value, int | float) or not self.in_range(name, value):
                    raise ConfigError(f"{name}={getattr(self, name)!r}: {value!r} is out of range, or no number.")
        given, self.beta = self.beta, self.scheduled_values("beta")[0]  # type: ignore[assignment]
        super()._check_sampling()
        self.beta = given

    def in_range(self, name: str, value: float) -> bool:
        """Whether a value of a scheduled field can be used."""
        return 0 < value < math.inf

    def scheduled_values(self, name: str) -> list[float]:
        """A scheduled field as a list, one value per epoch."""
        value = getattr(self, name)
        if isinstance(value, Sequence) and not value:
            raise ConfigError(f"{name}=[] is empty. Give one value, or one per epoch.")
        return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]

    def at_epoch(self, name: str, epoch: float | None) -> float:
        """The value of a scheduled field in an epoch, whole or not; the last value stays."""
        values = self.scheduled_values(name)
        return float(values[min(int(epoch or 0), len(values) - 1)])

    @property
    def train_batch_size(self) -> int:
        """Completions of a micro-batch: two a prompt."""
        return 2 * super().train_batch_size

    def _resolve_batches(self) -> None:
        """Batch sizes count prompts; a generation counts completions, as in every online method."""
        prompts, self.per_device_train_batch_size = (
            self.per_device_train_batch_size,
            2 * self.per_device_train_batch_size,
        )
        try:
            super()._resolve_batches()
        finally:
            self.per_device_train_batch_size = prompts
