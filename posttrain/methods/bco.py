"""BCO: a binary classifier of good and bad answers. Its threshold is the running mean of the rewards."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import ConfigError, DataError
from posttrain.fields import NonNegativeFloat, PositiveInt, config, option
from posttrain.integrations import require
from posttrain.losses.reduce import row_terms
from posttrain.losses.unpaired import BCO_LOSSES, Moments, update_moments
from posttrain.methods.preference import JUDGED, AnswerMethod, ComparedConfig, judged_metrics
from posttrain.metrics import Metric, mean
from posttrain.types import Batch, LossTerms, ModelOutputs, Ranks, Row, State

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


def embed_prompts(
    texts: Sequence[str], embedding_func: Callable, tokenizer: Tokenizer, *, batch_size: int = 32
) -> np.ndarray:
    """Compute embeddings ``(n, H)`` of n texts. Batches of texts are padded with the pad token of the embedding model's
    tokenizer.

    Args:
        texts: Prompts.
        embedding_func: Function ``f(input_ids=, attention_mask=)`` that returns embeddings ``(B, H)``.
        tokenizer: Tokenizer of the embedding model.
        batch_size: Number of texts per call.
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
    """Logistic regression on prompt embeddings that separates prompts of good answers from prompts of bad answers.

    Reference: Binary classifier optimization, arXiv:2404.04656, section on underlying distribution matching.
    """

    coefficients: np.ndarray
    intercept: float

    @classmethod
    def fit(cls, embeddings: np.ndarray, good: Sequence[bool], *, sample_size: int, seed: int) -> PromptDensity:
        """Fit the logistic regression on up to ``sample_size`` prompts per label, sampled with replacement.

        Raises:
            DataError: All answers have the same label. MissingDependencyError: scikit-learn is not installed.
        """
        linear_model = require("sklearn.linear_model", "density ratio of prompts (embedding_func)")
        labels = np.asarray(good, dtype=bool)
        if labels.all() or not labels.any():
            raise DataError(
                f"all {len(labels)} answers have the label {bool(labels.all())}, but embedding_func needs good and bad answers "
                "to compare their prompts. Fix: add answers with the other label, or remove embedding_func."
            )
        rng = np.random.default_rng(seed)
        sides = [np.flatnonzero(labels), np.flatnonzero(~labels)]
        chosen = np.concatenate([rng.choice(side, size=min(sample_size, len(side))) for side in sides])
        model = linear_model.LogisticRegression(class_weight="balanced", max_iter=1000, random_state=seed)
        model.fit(embeddings[chosen], labels[chosen])
        return cls(model.coef_[0].astype(np.float64), float(model.intercept_[0]))

    def probability(self, embeddings: np.ndarray) -> np.ndarray:
        """Compute the probability ``(n,)`` that a prompt belongs to a good answer."""
        return 1.0 / (1.0 + np.exp(-(embeddings @ self.coefficients + self.intercept)))

    def save(self, folder: str | Path) -> None:
        """Write the coefficients of the logistic regression to the JSON file ``density.json``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        content = {"coefficients": self.coefficients.tolist(), "intercept": self.intercept}
        Path(folder, "density.json").write_text(json.dumps(content), encoding="utf-8")


@config
class BCOConfig(ComparedConfig):
    """Arguments of `BCOTrainer`, which trains a binary classifier of good and bad answers."""

    learning_rate: float = option(
        5e-7, "Peak learning rate. The default is for full fine-tuning. Use about ten times this value for LoRA."
    )
    prompt_sample_size: PositiveInt = option(
        1024,
        "With embedding_func: maximum number of prompts per label on which a logistic regression is fitted. It separates "
        "prompts of good answers from prompts of bad answers.",
    )
    min_density_ratio: NonNegativeFloat = option(
        0.5,
        "With embedding_func: minimum weight of a bad answer, above 0. A bad answer has a larger weight if its prompt "
        "resembles the prompts of good answers.",
    )
    max_density_ratio: NonNegativeFloat = option(
        10.0, "With embedding_func: maximum weight of a bad answer, at least min_density_ratio."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.min_density_ratio <= self.max_density_ratio:
            raise ConfigError(
                f"min_density_ratio={self.min_density_ratio} and max_density_ratio={self.max_density_ratio} must "
                "satisfy 0 < min_density_ratio <= max_density_ratio."
            )


@dataclass(frozen=True, slots=True)
class Delta:
    """State of `BCO` between steps.

    Attributes:
        moments: Running moments of all rewards of the run. The mean of these moments is delta. The rewards of the current
            step are included only if ``moves_in_pass`` is True.
        moves_in_pass: Whether the optimizer step has only one forward pass. A single pass has all rewards of the step, so it
            updates delta before it computes the loss.
    """

    moments: Moments = field(default_factory=Moments)
    moves_in_pass: bool = False

    def moved(self, sums: Tensor, ranks: Ranks) -> Delta:
        """Return the state after adding the rewards of all ranks. The argument ``sums`` is the result of `reward_sums` on
        this rank.
        """
        total, squares, count = ranks.sum(sums.tolist())
        if not count:
            return Delta(self.moments)
        average = total / count
        return Delta(update_moments(self.moments, average, max(squares / count - average**2, 0.0), count))


def reward_sums(rewards: Tensor) -> Tensor:
    """Return the sum, the sum of squares and the count of ``rewards (n,)``."""
    values = rewards.detach().double().cpu()
    return torch.stack([values.sum(), (values**2).sum(), torch.tensor(len(values), dtype=torch.float64)])


class BCO(AnswerMethod[BCOConfig]):
    """Binary classifier of good and bad answers. The threshold delta is the running mean of all rewards so far.

    `State.own` is a `Delta`.

    Reference: Binary classifier optimization, arXiv:2404.04656.
    """

    config_class = BCOConfig
    # A micro-batch must not be split over ranks, because the objective updates delta with a collective operation.
    traits = replace(JUDGED, splits_tokens=False)
    judged = True
    branches = ("completion",)
    reference_columns = ("ref_logps",)
    keep = ("label",)

    def start(self) -> Delta:
        """Return the initial state, with empty moments."""
        return Delta()

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert examples to rows with one completion, its label and its weight."""
        weights = [float(example.get("density_weight") or 1.0) for example in examples]
        return [row.with_columns(density_weight=[w]) for row, w in zip(super().rows(examples), weights, strict=True)]

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the classifier loss of each answer, averaged over the answers of the optimizer step."""
        assert outputs.logp is not None
        logp = self.sums(outputs.logp, batch)
        ratio, good = logp - self.reference_logp(batch), batch.columns["label"] > 0.5
        threshold, sums = state.own, None
        if threshold.moves_in_pass and torch.is_grad_enabled():
            sums = reward_sums(self.cfg.beta * ratio)
            threshold = threshold.moved(sums, state.ranks)
        delta = torch.tensor(threshold.moments.mean, device=ratio.device, dtype=ratio.dtype)
        values = {"log_ratio": ratio, "desirable": good, "shift": delta, "weight": batch.columns["density_weight"]}
        terms = BCO_LOSSES["bco"](values, beta=self.cfg.beta)
        metrics = judged_metrics(outputs, batch, self.cfg.beta * ratio, logp, good)
        return replace(row_terms(batch, terms, metrics=metrics), sums=sums)

    def end_step(self, state: State, sums: Tensor | None) -> tuple[Delta, dict[str, Metric]]:
        """Update the threshold delta with the rewards of the step."""
        threshold = state.own if sums is None else state.own.moved(sums, state.ranks)
        return threshold, {"delta": mean(threshold.moments.mean)}

    def saved(self, own: Delta) -> dict[str, Any]:
        """Convert the running moments of the rewards to JSON-compatible values."""
        return {"moments": asdict(own.moments)}

    def restored(self, saved: Mapping[str, Any]) -> Delta:
        """Restore the running moments of the rewards from a checkpoint."""
        return Delta(Moments(**saved["moments"]))
