"""Outcome reward models: a scalar head that scores the chosen answer of a pair higher."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from posttrain.data.forest import unbatched_answers
from posttrain.data.preference import pair_rows, prepare_reward_dataset
from posttrain.errors import ModelError
from posttrain.loop.config import PostTrainingConfig, takes
from posttrain.loop.trainer import PostTrainer
from posttrain.losses.preference import bradley_terry, centering
from posttrain.losses.reduce import row_terms
from posttrain.metrics import maximum, mean, minimum
from posttrain.models.forward import forward
from posttrain.models.load import load_classifier
from posttrain.types import Batch, LossTerms, ModelOutputs, NonNegativeFloat, PositiveInt, Row, option

logger = logging.getLogger(__name__)


@dataclass
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


class RewardTrainer(PostTrainer, config=RewardConfig):
    """Trains a sequence classifier with one output on preference pairs; a pair's prompt is computed once.

    The score is read at the true last token of each answer, found by position: a pad token that equals eos changes nothing.

    >>> trainer = RewardTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", train_dataset=pairs)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    Reference: Training a helpful and harmless assistant, arXiv:2204.05862.
    """

    needs: frozenset[str] = frozenset({"scores"})
    generative: ClassVar[bool] = False
    splits_tokens = True
    keep_groups_together: ClassVar[bool] = True
    takes_collator: ClassVar[bool] = True
    answers_per_row = 2
    _tag_names: ClassVar[list[str]] = ["posttrain", "reward-trainer"]
    args: RewardConfig

    @takes(
        "model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, "
        "optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics, quantization_config, peft_config"
    )
    def __init__(self, model: str | nn.Module, args: RewardConfig | None = None, **kwargs: Any) -> None:
        labels = getattr(getattr(model, "config", None), "num_labels", 1)
        if labels != 1:
            raise ModelError(f"a reward model needs num_labels=1, and {type(model).__name__} has num_labels={labels}.")
        super().__init__(model, args, **kwargs)
        tokenizer = self.processing_class
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            logger.warning(
                "the pad token equals the eos token %r. Training reads scores by position and is not affected, but "
                "transformers' own forward looks for the last token that is not pad and would miss the eos: score with "
                "posttrain's reward functions, or set tokenizer.pad_token to another token.",
                tokenizer.eos_token,
            )

    def load_model(self, model_id: str, **kwargs: Any) -> Any:
        """A sequence classifier with one output; its head is new unless the checkpoint has one."""
        return load_classifier(model_id, num_labels=1, **kwargs)

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """Tokenise one set of pairs, as `prepare_reward_dataset` does."""
        args = self.args
        return prepare_reward_dataset(
            dataset, self.processing_class, max_length=args.max_length, name=name, num_proc=args.dataset_num_proc
        )

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """See `pair_rows`."""
        if self.user_collator is not None:
            examples = unbatched_answers(self.user_collator(examples), examples, ("chosen", "rejected"))
        return pair_rows(examples)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `reward_objective`."""
        return reward_objective(outputs, batch, center=self.args.center_rewards_coefficient)

    def predictions(self, model: nn.Module, batches: list[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        """``[chosen, rejected]`` scores of each pair in the order of the dataset, with label 0."""
        found: dict[int, np.ndarray] = {}
        for batch in batches:
            scores = forward(model, batch, self.needs).scores
            assert scores is not None
            pairs = batch.grouped(scores, 2).float().cpu().numpy()
            for first, pair in zip(sorted(batch.origin)[::2], pairs, strict=True):
                found[first] = pair
        return [(found[first], np.array(0)) for first in sorted(found)]
