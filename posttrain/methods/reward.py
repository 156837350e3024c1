"""Outcome reward models: train a scalar head that scores the chosen answer of a pair higher than the rejected answer."""

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
    """Arguments of `RewardTrainer`, which trains a scalar head to score chosen answers higher than rejected answers."""

    learning_rate: float = option(1e-4, "Peak learning rate. For LoRA, use a value about ten times larger.")
    disable_dropout: bool = option(
        True,
        "Set every dropout probability of the model to 0, so that equal answers get equal scores. An adapter's lora_dropout "
        "is not changed.",
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
    max_length: PositiveInt | None = option(
        1024,
        "Maximum number of tokens of a prompt and its answer together, at least 1. If one answer of a pair is longer, the "
        "pair is removed. Answers are not truncated, because the score is read at the end of the answer. None: no limit.",
    )
    dataset_num_proc: PositiveInt | None = option(
        None,
        "Number of processes that prepare the dataset, at least 1. None: the main process only. Raise it for large datasets.",
    )
    center_rewards_coefficient: NonNegativeFloat | None = option(
        None,
        "Weight of the term (r_chosen + r_rejected)^2, which keeps scores close to 0 (arXiv:2312.09244). 0.01 is recommended. "
        "Without this term, adding a constant to all scores does not change the loss, so scores have an arbitrary offset. "
        "None or 0 disables the term.",
    )
    pad_to_multiple_of: int | str | None = option(
        None,
        "Round the length of batch rows up to a multiple of this number of tokens. None or 'auto': lengths are not rounded, "
        "except with FlexAttention, which needs multiples of 128.",
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
    """Reward model with a scalar head. It is trained on pairs of answers with the Bradley-Terry loss."""

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
        """Convert examples to pairs of token sequences; see `pair_rows`."""
        return pair_rows(examples)

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the Bradley-Terry loss; see `reward_objective`."""
        return reward_objective(outputs, batch, center=self.cfg.center_rewards_coefficient)
