"""GKD: distillation on the dataset's answers, the student's own samples, or a mixture of both."""

from __future__ import annotations

from typing import Any, ClassVar

from posttrain.fields import PositiveInt, config, option
from posttrain.methods.distillation.config import DistillationConfig, preset
from posttrain.methods.distillation.objective import Distillation

# Fields that TRL's GKDConfig inherits from SFTConfig, although TRL's trainer does not use them.
OF_SFT: dict[str, tuple[Any, str]] = {
    "assistant_only_loss": (
        False,
        "Remove it. The loss is always computed only on the completion, which is the last message of a conversation.",
    ),
    "completion_only_loss": (None, "Remove it. The loss is always computed only on the completion."),
    "dataset_kwargs": (None, "Prepare the dataset with dataset.map."),
    "dataset_num_proc": (None, "Prepare the dataset with dataset.map(num_proc=...)."),
    "dataset_text_field": ("text", "Name the columns prompt and completion, or messages."),
    "eval_packing": (None, "Remove it. Rows share forward passes without padding if the model supports it."),
    "loss_type": ("nll", "Set beta, which selects the divergence."),
    "packing": (False, "Remove it. Rows share forward passes without padding if the model supports it."),
    "packing_strategy": ("bfd", "Remove it. Rows share forward passes without padding if the model supports it."),
    "padding_free": (False, "Remove it. Rows share forward passes without padding if the model supports it."),
    "truncation_mode": (
        "keep_start",
        "Remove it. Rows longer than max_length always lose their beginning, as in TRL's collator.",
    ),
}


@config
@preset(
    unread=OF_SFT, learning_rate=2e-5, lmbda=0.5, beta=0.5, max_length=1024, max_completion_length=128, disable_dropout=True,
    temperature=(0.9, "Sampling temperature, above 0. The loss compares student and teacher at temperature 1."),
)  # fmt: skip
class GKDConfig(DistillationConfig):
    """Arguments of `GKDTrainer`, which distills on the dataset's answers, the student's samples, or a mixture."""

    _loss_temperature: ClassVar[str | float] = 1.0
    max_new_tokens: PositiveInt | None = option(
        None,
        "Maximum number of tokens of a sampled completion. This is TRL's name of max_completion_length. If both are set, "
        "max_new_tokens is used. None: the value of max_completion_length.",
    )
    chat_template_path: str | None = option(
        None,
        "Chat template to use instead of the tokenizer's own template: the path of a .jinja or .j2 file, or the folder or Hub "
        "id of another tokenizer. The special tokens of a file must already be in the vocabulary. The added tokens of another "
        "tokenizer are copied too, and the model's embedding is extended for them. None: the tokenizer's own template.",
    )
    eos_token: str | None = option(
        None,
        "End-of-sequence token to use instead of the tokenizer's default. It must be in the tokenizer's vocabulary. None: the "
        "tokenizer's default.",
    )

    def __post_init__(self) -> None:
        self.check_fields()
        self.max_new_tokens = self.max_completion_length = self.max_new_tokens or self.max_completion_length
        super().__post_init__()


class GKD(Distillation):
    """Generalized knowledge distillation (GKD) on answers of the dataset, samples of the student, or samples of the teacher.

    Reference: GKD, arXiv:2306.13649.
    """

    config_class = GKDConfig
