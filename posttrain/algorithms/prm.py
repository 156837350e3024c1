"""Process reward models: a classifier that judges every step of an answer at the step's last token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers.trainer_utils import EvalPrediction

from posttrain.algorithms.base import PostTrainer
from posttrain.algorithms.config import PostTrainingConfig, refuse_cut_sequences
from posttrain.data.forest import collate
from posttrain.data.steps import prepare_step_dataset, step_rows, tokenize_steps
from posttrain.errors import ConfigError, ModelError
from posttrain.losses.ranking import step_nll
from posttrain.metrics import mean
from posttrain.models.forward import forward
from posttrain.models.load import load_classifier
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

__all__ = ["PRMConfig", "PRMTrainer", "compute_accuracy", "prm_objective"]

logger = logging.getLogger(__name__)

IGNORED = -100


@dataclass
class PRMConfig(PostTrainingConfig):
    """Arguments of `PRMTrainer`."""

    learning_rate: float = field(default=1e-5, metadata={"help": "Peak learning rate; about ten times more for LoRA."})
    disable_dropout: bool = field(default=True, metadata={"help": "Set every dropout to 0."})
    max_length: int | None = field(default=1024, metadata={"help": "Tokens of prompt and steps; None never cuts."})
    max_completion_length: int | None = field(default=None, metadata={"help": "Tokens of the steps; None never cuts."})
    step_separator: str = field(default="\n", metadata={"help": "Follows every step; its last token is judged."})
    train_on_last_step_only: bool = field(default=False, metadata={"help": "Train on the last step's label alone."})
    soft_labels: bool = field(
        default=False, metadata={"help": "Labels are shares in [0, 1] instead of True and False."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the dataset."})
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "Rounds row widths up."})

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_cut_sequences(self, "judged steps")
        if not self.step_separator:
            raise ConfigError("step_separator is empty, so a step would have no token to be judged at. Use '\\n'.")
        for name in ("max_length", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1, or None for no limit.")


def prm_objective(out: ModelOutputs, batch: Batch) -> LossTerms:
    """``-(y log p_1 + (1 - y) log p_0)`` at each judged token, averaged over those of the whole optimiser step."""
    assert out.logits is not None
    good = batch.columns["good"][batch.loss_mask]
    terms = step_nll(out.logits, good)
    hits = (out.logits.argmax(-1) == (good >= 0.5)).float()
    metrics = {"accuracy": mean(hits)}
    return LossTerms(terms, torch.ones_like(terms, dtype=torch.bool), "token", metrics=metrics)


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of labels that are predicted, over tokens whose label is not -100.

    Two-dimensional predictions are two scores a row, labelled by the index of the better; ties are left out and told.

    >>> compute_accuracy(EvalPrediction(np.array([[0.9, 0.1], [0.6, 0.4], [0.5, 0.5]]), np.array([0, 1, 1])))
    {'accuracy': 0.5}
    """
    predictions, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    if predictions.ndim == 3:
        kept = labels != IGNORED
        return {"accuracy": float((predictions.argmax(-1) == labels)[kept].mean())}
    ties = predictions[:, 0] == predictions[:, 1]
    if ties.any():
        logger.warning("%d of %d rows have equal scores and are left out of the accuracy.", ties.sum(), len(ties))
    return {"accuracy": float((predictions.argmax(-1) == labels)[~ties].mean())}


class PRMTrainer(PostTrainer):
    """Trains a token classifier with two labels (0 bad, 1 good) on answers whose steps were judged.

    Reference: Solving math word problems with process- and outcome-based feedback, arXiv:2211.14275.
    """

    config_class: ClassVar[type[PRMConfig]] = PRMConfig
    needs: ClassVar[frozenset[str]] = frozenset({"token_scores"})
    generative: ClassVar[bool] = False
    # Steps are judged at their separators: nothing is generated, so nothing has to end.
    beside_the_point: ClassVar[frozenset[str]] = frozenset({"PT-D004", "PT-D006"})
    _tag_names: ClassVar[list[str]] = ["posttrain", "prm"]
    _name: ClassVar[str] = "PRM"
    _suffix: ClassVar[str] = "PRM"
    args: PRMConfig

    def __init__(self, model: str | nn.Module, args: PRMConfig | None = None, **kwargs: Any) -> None:
        labels = getattr(getattr(model, "config", None), "num_labels", 2)
        if labels != 2:
            raise ModelError(f"a process reward model needs num_labels=2, and {type(model).__name__} has {labels}.")
        super().__init__(model, args, **kwargs)

    def load_model(self, model_id: str, **kwargs: Any) -> Any:
        """A token classifier with two outputs; its head is new unless the checkpoint has one."""
        return load_classifier(model_id, "token", num_labels=2, **kwargs)

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """Tokenise one set of judged steps, as `prepare_step_dataset` does; evaluation keeps all labels."""
        args = self.args
        return prepare_step_dataset(
            dataset,
            self.processing_class,
            step_separator=args.step_separator,
            max_length=args.max_length,
            max_completion_length=args.max_completion_length,
            last_step_only=training and args.train_on_last_step_only,
            soft_labels=args.soft_labels,
            name=name,
            num_proc=args.dataset_num_proc,
        )

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """See `step_rows`."""
        return step_rows(examples)

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `prm_objective`."""
        return prm_objective(outputs, batch)

    def predictions(self, model: nn.Module, batches: list[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        """``(steps, 2)`` logits and labels at the judged tokens of each row, in the order of the dataset."""
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for batch in batches:
            logits = forward(model, batch, self.needs).logits
            owner = batch.sequence[batch.loss_mask]
            labels = (batch.columns["good"][batch.loss_mask] >= 0.5).long()
            for sequence, origin in enumerate(batch.origin):
                mine = owner == sequence
                found[origin] = (logits[mine].float().cpu().numpy(), labels[mine].cpu().numpy())  # type: ignore[index]
        return [found[origin] for origin in sorted(found)]

    def score_steps(self, prompt: str, steps: Sequence[str]) -> list[float]:
        """The probability that each step is good, tokenised as in training."""
        prompt_ids, completion, ends = tokenize_steps(
            prompt, steps, self.processing_class, step_separator=self.args.step_separator
        )
        mask = [int(i in set(ends)) for i in range(len(completion))]
        (batch,) = collate([Row(prompt_ids, [completion], [mask])], pad_token_id=self.pad_token_id, layout=self.layout)
        with self.inference() as model:
            logits = forward(model, batch.to(self.args.device), self.needs).logits
        return logits.float().softmax(-1)[:, 1].tolist()  # type: ignore[union-attr]
