"""How likely a prompt is one of a good answer: the density ratio that BCO weighs bad answers with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.errors import DataError
from posttrain.integrations import require

__all__ = ["PromptDensity", "embed_prompts"]


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
