"""Outcome reward models: a scalar head that scores the chosen answer of a pair higher."""

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
    """Arguments of `RewardTrainer`."""

    learning_rate: float = option(1e-4, "Peak learning rate; about ten times more for LoRA.")
    disable_dropout: bool = option(True, "Set every dropout to 0.")
    chat_template_path: str | None = option(
        None, "A .jinja file with the template's text, or a tokenizer to clone with its tokens."
    )
    eos_token: str | None = option(None, "Token that ends a sequence; None: the tokenizer's.")
    pad_token: str | None = option(None, "Deprecated: set pad_token on the tokenizer.")
    max_length: PositiveInt | None = option(1024, "Pairs with a longer side are left out; None keeps all.")
    dataset_num_proc: PositiveInt | None = option(None, "Processes that prepare the dataset.")
    center_rewards_coefficient: NonNegativeFloat | None = option(
        None, "Weight of (r+ + r-)^2, which keeps scores near 0; 0.01 is usual. None: off."
    )
    pad_to_multiple_of: int | str | None = option(None, "Rounds row widths up; auto or None: what the layout wants.")


def reward_objective(out: ModelOutputs, batch: Batch, *, center: float | None) -> LossTerms:
    """``-log sigmoid(r+ - r- - margin) + c (r+ + r-)^2``, averaged over the pairs of the whole optimiser step."""
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
    """A scalar head that scores the chosen answer of a pair higher."""

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
