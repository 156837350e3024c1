"""BCO: answers judged good or bad, by the loss of a binary classifier whose threshold is the running mean reward."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import ConfigError, DataError
from posttrain.fields import NonNegativeFloat, PositiveInt, option
from posttrain.integrations import require
from posttrain.losses.reduce import row_terms
from posttrain.losses.unpaired import BCO_LOSSES, Moments, update_moments
from posttrain.methods.preference import JUDGED, AnswerMethod, ComparedConfig, judged_metrics, sequence_logp
from posttrain.metrics import Metric, mean
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


def embed_prompts(
    texts: Sequence[str], embedding_func: Callable, tokenizer: Tokenizer, *, batch_size: int = 32
) -> np.ndarray:
    """``(n, H)`` embeddings of texts, padded with the embedding tokenizer's own pad token.

    Args:
        texts: Prompts.
        embedding_func: ``f(input_ids=, attention_mask=) -> (B, H)``.
        tokenizer: Of the embedding model.
        batch_size: Texts a call.
    """
    embeddings = []
    for start in range(0, len(texts), batch_size):
        inputs = tokenizer(list(texts[start : start + batch_size]), padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            out = embedding_func(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        embeddings.append(out.float().cpu().numpy())
    return np.concatenate(embeddings) if embeddings else np.zeros((0, 0), dtype=np.float32)


@dataclass
class PromptDensity:
    """A logistic regression on prompt embeddings: good answers' prompts against bad ones'.

    Reference: Binary classifier optimization, arXiv:2404.04656, underlying distribution matching.
    """

    coefficients: np.ndarray
    intercept: float

    @classmethod
    def fit(cls, embeddings: np.ndarray, good: Sequence[bool], *, sample_size: int, seed: int) -> PromptDensity:
        """Fit on up to ``sample_size`` prompts of each label, drawn with replacement.

        Raises:
            DataError: One label is missing. MissingDependencyError: scikit-learn is not installed.
        """
        linear_model = require("sklearn.linear_model", "weighing prompts by density (embedding_func)")
        labels = np.asarray(good, dtype=bool)
        if labels.all() or not labels.any():
            raise DataError(
                f"all {len(labels)} answers have the label {bool(labels.all())}: prompts cannot be told apart."
            )
        rng = np.random.default_rng(seed)
        sides = [np.flatnonzero(labels), np.flatnonzero(~labels)]
        chosen = np.concatenate([rng.choice(side, size=min(sample_size, len(side))) for side in sides])
        model = linear_model.LogisticRegression(class_weight="balanced", max_iter=1000, random_state=seed)
        model.fit(embeddings[chosen], labels[chosen])
        return cls(model.coef_[0].astype(np.float64), float(model.intercept_[0]))

    def probability(self, embeddings: np.ndarray) -> np.ndarray:
        """``(n,)`` probability that a prompt is one of a good answer."""
        return 1.0 / (1.0 + np.exp(-(embeddings @ self.coefficients + self.intercept)))

    def save(self, folder: str | Path) -> None:
        """Write ``density.json``: coefficients only, nothing that runs when it is read."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        content = {"coefficients": self.coefficients.tolist(), "intercept": self.intercept}
        Path(folder, "density.json").write_text(json.dumps(content), encoding="utf-8")


@dataclass
class BCOConfig(ComparedConfig):
    """Arguments of `BCOTrainer`."""

    learning_rate: float = option(5e-7, "Peak learning rate; about ten times more for LoRA.")
    prompt_sample_size: PositiveInt = option(1024, "Prompts of each label that the density is fitted on.")
    min_density_ratio: NonNegativeFloat = option(0.5, "Least weight of a bad answer.")
    max_density_ratio: NonNegativeFloat = option(10.0, "Most weight of a bad answer.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.min_density_ratio <= self.max_density_ratio:
            raise ConfigError(
                f"min_density_ratio={self.min_density_ratio} and max_density_ratio={self.max_density_ratio}: 0 < min <= max."
            )


class BCO(AnswerMethod[BCOConfig]):
    """Answers judged good or bad, by a classifier whose threshold delta is the running mean of all rewards so far.

    Attributes:
        moments: Of all rewards so far.
        moves_in_pass: Whether the next training pass holds all rewards of its step, and moves delta itself.

    Reference: Binary classifier optimization, arXiv:2404.04656.
    """

    config_class = BCOConfig
    # Its running mean is moved by a collective within the objective.
    traits = replace(JUDGED, splits_tokens=False)
    judged = True
    branches = ("completion",)
    reference_columns = ("ref_logps",)
    keep = ("label",)

    def __init__(self, cfg: BCOConfig) -> None:
        super().__init__(cfg)
        self.moments, self.moves_in_pass = Moments(), False

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """One completion a row, with its label and weight."""
        weights = [float(example.get("density_weight") or 1.0) for example in examples]
        return [row.with_columns(density_weight=[w]) for row, w in zip(super().rows(examples), weights, strict=True)]

    def move(self, rewards: list[Tensor]) -> dict[str, Metric]:
        """Update delta with the rewards of an optimiser step, over all ranks; what to log."""
        values = torch.cat(rewards).detach().double().cpu() if rewards else torch.zeros(0, dtype=torch.float64)
        total, squares, count = self.ranks.sum([float(values.sum()), float((values**2).sum()), float(len(values))])
        if count:
            average = total / count
            self.moments = update_moments(self.moments, average, max(squares / count - average**2, 0.0), count)
        return {"delta": mean(self.moments.mean)}

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """The classifier's loss of each answer, averaged over the answers of the whole optimiser step."""
        assert outputs.logp is not None
        logp, _ = sequence_logp(outputs.logp, batch)
        ratio, good = logp - self.reference_logp(batch), batch.columns["label"] > 0.5
        moved: dict[str, Metric] = {}
        if self.moves_in_pass and torch.is_grad_enabled():
            self.moves_in_pass = False  # Once a step: checkpointing or a user's code may call again.
            moved = self.move([self.cfg.beta * ratio])
        delta = torch.tensor(self.moments.mean, device=ratio.device, dtype=ratio.dtype)
        values = {"log_ratio": ratio, "desirable": good, "shift": delta, "weight": batch.columns["density_weight"]}
        terms = BCO_LOSSES["bco"](values, beta=self.cfg.beta)
        metrics = judged_metrics(outputs, batch, self.cfg.beta * ratio, logp, good)
        return row_terms(batch, terms, metrics=metrics | moved)

    def state(self) -> dict[str, Any]:
        """The running moments."""
        return {"moments": asdict(self.moments)}

    def load_state(self, state: dict[str, Any]) -> None:
        """The running moments."""
        self.moments = Moments(**state["moments"])
