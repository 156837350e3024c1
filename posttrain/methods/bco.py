"""BCO: answers judged good or bad, by the loss of a binary classifier whose threshold is the running mean reward."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, DataError
from posttrain.integrations import require
from posttrain.losses.reduce import row_terms
from posttrain.losses.unpaired import BCO_LOSSES, Moments, density_weight, update_moments
from posttrain.methods.preference import ComparedConfig, PreferenceTrainer, judged_metrics, sequence_logp
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.types import Batch, LossTerms, ModelOutputs, NonNegativeFloat, PositiveInt, Row, option

logger = logging.getLogger(__name__)


def embed_prompts(
    texts: Sequence[str], embedding_func: Callable, tokenizer: Any, *, batch_size: int = 32
) -> np.ndarray:
    """``(n, H)`` embeddings of texts, padded with the embedding tokenizer's own pad token.

    Args:
        texts: Prompts.
        embedding_func: ``f(input_ids=, attention_mask=) -> (B, H)``.
        tokenizer: Of the embedding model.
        batch_size: Texts a call.
    """
    found = []
    for start in range(0, len(texts), batch_size):
        inputs = tokenizer(list(texts[start : start + batch_size]), padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            out = embedding_func(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        found.append(out.float().cpu().numpy())
    return np.concatenate(found) if found else np.zeros((0, 0), dtype=np.float32)


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


class BCOTrainer(PreferenceTrainer, config=BCOConfig):
    """``-lsig(r - delta)`` for a good answer and ``-lsig(-(r - delta))`` for a bad one, with ``r = beta`` times the log-ratio.

    delta is the running mean of all rewards so far, those of the current optimiser step included; it is saved with every
    checkpoint, and evaluation reads it without moving it. A step of one forward pass moves delta with that pass's own
    rewards. With several passes (accumulation, or rows that do not fit one) the first loss needs the rewards of the last
    pass, so an extra pass without gradients computes them all: accumulating changes neither delta nor the gradient.

    Reference: Binary classifier optimization, arXiv:2404.04656.
    """

    judged: ClassVar[bool] = True
    splits_tokens = False  # Its running mean is moved by a collective within the objective.
    branches: ClassVar[tuple[str, ...]] = ("completion",)
    reference_columns: ClassVar[tuple[str, ...]] = ("ref_logps",)
    needs: frozenset[str] = frozenset({"logp", "entropy", "mean_logit"})
    keep: ClassVar[tuple[str, ...]] = ("label",)
    args: BCOConfig

    def __init__(
        self,
        model: str | nn.Module,
        ref_model: nn.Module | None = None,
        args: Any = None,
        *,
        embedding_func: Callable | None = None,
        embedding_tokenizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if (embedding_func is None) != (embedding_tokenizer is None):
            raise ConfigError("embedding_func and embedding_tokenizer belong together: give both, or none.")
        self.moments = Moments()
        self._moves_in_pass = False
        self.embedding = None if embedding_func is None else (embedding_func, embedding_tokenizer)
        self.density: PromptDensity | None = None
        super().__init__(model, ref_model, args, **kwargs)

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """Tokenise; with an embedding, each bad answer's weight is computed once, from how likely its prompt is a good one's."""
        prepared = super().prepare(dataset, name, training=training)
        if self.embedding is None:
            return prepared
        if not hasattr(prepared, "select"):
            raise ConfigError(f"embedding_func needs a {name} dataset with a length, and it is a stream.")
        texts = self.processing_class.batch_decode(prepared["prompt_ids"][:], skip_special_tokens=True)
        embeddings = embed_prompts(texts, *self.embedding)
        if training:
            labels, size = list(map(bool, prepared["label"][:])), self.args.prompt_sample_size
            self.density = PromptDensity.fit(embeddings, labels, sample_size=size, seed=self.args.seed)
            self.density.save(self.args.output_dir)
        assert self.density is not None
        weights = density_weight(
            torch.from_numpy(self.density.probability(embeddings)),
            low=self.args.min_density_ratio,
            high=self.args.max_density_ratio,
        )
        return prepared.add_column("density_weight", weights.tolist())

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """One completion a row, with its label and weight."""
        rows = super().rows(examples)
        for row, example in zip(rows, examples, strict=True):
            row.sequence_columns["density_weight"] = [float(example.get("density_weight") or 1.0)]
        return rows

    def before_step(self, micro_batches: list[list[Batch]]) -> None:
        """Rewards of the whole step move delta before its first loss."""
        super().before_step(micro_batches)
        self._moves_in_pass = self.denominators.passes == self.accelerator.num_processes and len(micro_batches) == 1
        if not self._moves_in_pass:
            batches = [batch for micro in micro_batches for batch in micro]
            ran = parallel.in_step(batches, self.accelerator, self.spare_batch)
            found = [(self._rewards(batch), counts) for batch, counts in ran]
            self._move([rewards for rewards, counts in found if counts])

    def _move(self, rewards: list[Tensor]) -> None:
        """Update delta with the rewards of an optimiser step, over all ranks."""
        values = torch.cat(rewards).detach().double().cpu() if rewards else torch.zeros(0, dtype=torch.float64)
        sums = [float(values.sum()), float((values**2).sum()), float(len(values))]
        total, squares, count = parallel.all_reduce_sum(sums, self.accelerator)
        if count:
            average = total / count
            self.moments = update_moments(self.moments, average, max(squares / count - average**2, 0.0), count)
        self.log_metrics_now({"delta": mean(self.moments.mean)})

    def _rewards(self, batch: Batch) -> Tensor:
        batch = batch.to(self.args.device)
        with self.inference() as policy:
            logp = forward(policy, batch, chunk_size=self.args.logits_chunk_size).logp
        assert logp is not None
        return self.args.beta * (sequence_logp(logp, batch)[0] - self.reference_logp(batch))

    def state_to_save(self) -> dict[str, Any]:
        """The running moments too."""
        return super().state_to_save() | {"moments": asdict(self.moments)}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """The running moments too."""
        super().load_saved_state(state)
        self.moments = Moments(**state["moments"])

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """The classifier's loss of each answer, averaged over the answers of the whole optimiser step."""
        assert outputs.logp is not None
        logp, _ = sequence_logp(outputs.logp, batch)
        ratio, good = logp - self.reference_logp(batch), batch.columns["label"] > 0.5
        if self._moves_in_pass and self.model.training:
            self._moves_in_pass = False  # Once a step: checkpointing or a user's code may call again.
            self._move([self.args.beta * ratio])
        delta = torch.tensor(self.moments.mean, device=ratio.device, dtype=ratio.dtype)
        values = {"log_ratio": ratio, "desirable": good, "shift": delta, "weight": batch.columns["density_weight"]}
        terms = BCO_LOSSES["bco"](values, beta=self.args.beta)
        metrics = judged_metrics(outputs, batch, self.args.beta * ratio, logp, good)
        return row_terms(batch, terms, metrics=metrics)
