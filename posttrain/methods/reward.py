"""Outcome reward models: a scalar head that scores the chosen answer of a pair above the rejected one."""

from __future__ import annotations

import logging
from typing import Any

import torch

from posttrain.data.preference import pair_rows
from posttrain.fields import NonNegativeFloat, PositiveInt, config, option
from posttrain.losses.preference import bradley_terry, centering
from posttrain.losses.reduce import row_terms
from posttrain.methods.base import Method, Traits
from posttrain.methods.config import PostTrainingConfig
from posttrain.metrics import maximum, mean, minimum
from posttrain.types import Batch, LossTerms, ModelOutputs, Row, State

logger = logging.getLogger(__name__)


@config
class RewardConfig(PostTrainingConfig):
    """Arguments of `RewardTrainer`, which trains a scalar head to score chosen answers above rejected ones."""

    learning_rate: float = option(1e-4, "Peak learning rate. For LoRA, use a value about ten times larger.")
    disable_dropout: bool = option(
        True,
        "Set every dropout probability of the model to 0, so that equal answers get equal scores. An adapter's lora_dropout "
        "is not changed.",
    )
    chat_template_path: str | None = option(
        None,
        "Chat template to use. Either the path of a .jinja or .j2 file, whose special tokens must already be in the "
        "vocabulary, or the folder or Hub id of a tokenizer. The template and the added tokens of that tokenizer are copied, "
        "and the model's embedding is extended. None: the tokenizer's own template.",
    )
    eos_token: str | None = option(
        None, "Token that ends a sequence. It must be in the tokenizer's vocabulary. None: the tokenizer's own token."
    )
    pad_token: str | None = option(None, "Deprecated. Set pad_token on the tokenizer instead.")
    max_length: PositiveInt | None = option(
        1024,
        "Maximum number of tokens of prompt and answer, at least 1. Pairs with a longer answer are dropped and not truncated, "
        "because the score is read at the end of the answer. None keeps all pairs.",
    )
    dataset_num_proc: PositiveInt | None = option(
        None,
        "Number of processes that prepare the dataset, at least 1. None: the main process only. Raise it for large datasets.",
    )
    center_rewards_coefficient: NonNegativeFloat | None = option(
        None,
        "Weight of the term (r_chosen + r_rejected)^2, which keeps scores close to 0 (arXiv:2312.09244). 0.01 is recommended. "
        "None or 0 disables the term, so that scores have an arbitrary offset.",
    )
    pad_to_multiple_of: int | str | None = option(
        None,
        "Round the width of batches up to a multiple of this number. None or 'auto': no rounding, except for FlexAttention, "
        "which needs multiples of 128.",
    )


def reward_objective(out: ModelOutputs, batch: Batch, *, center: float | None) -> LossTerms:
    """Compute ``-log sigmoid(r+ - r- - margin) + c (r+ + r-)^2``, averaged over the pairs of the optimizer step."""
    assert out.scores is not None
    chosen, rejected = batch.grouped(out.scores, 2).unbind(1)
    margin = batch.columns.get("margin")
    loss = bradley_terry(chosen, rejected, None if margin is None else batch.grouped(margin, 2)[:, 0])
    if center:
        loss = loss + center * centering(chosen, rejected)
    scores = torch.cat([chosen, rejected])
    metrics = {
        "accuracy": mean((chosen > rejected).float()),
        "tie_rate": mean((chosen == rejected).float()),
        "margin": mean(chosen - rejected),
        "min_reward": minimum(scores),
        "mean_reward": mean(scores),
        "max_reward": maximum(scores),
    }
    return row_terms(batch, loss, branches=2, metrics=metrics)


class RewardModel(Method[RewardConfig]):
    """Bradley-Terry loss for a scalar head on pairs of answers."""

    config_class = RewardConfig
    traits = Traits(
        needs=frozenset({"scores"}),
        answers=2,
        whole_rows=True,
        generative=False,
        takes_collator=True,
        splits_tokens=True,
    )

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """See `pair_rows`."""
        return pair_rows(examples)

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """See `reward_objective`."""
        return reward_objective(outputs, batch, center=self.cfg.center_rewards_coefficient)
