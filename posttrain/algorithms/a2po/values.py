"""The value of a prompt under the optimal policy, estimated from rewards of the reference's completions, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["ValueCache", "fingerprint", "model_hash", "optimal_value", "row_key"]

logger = logging.getLogger(__name__)

SAMPLED = 1024  # Weights of each parameter that its part of the hash reads.


def optimal_value(rewards: Sequence[float], beta1: float) -> float:
    """``V* = beta1 log mean_i exp(r_i / beta1)`` over the rewards that are known; NaN where none is.

    Args:
        rewards: Of the reference's completions; NaN where no function applied.
        beta1: Above 0.

    Reference: A*-PO, arXiv:2505.20686, equation 5.

    >>> [round(optimal_value([1.0] * k + [0.0] * (8 - k), 0.5), 5) for k in (0, 1, 4, 8)]
    [0.0, 0.29351, 0.71689, 1.0]
    """
    known = [reward for reward in rewards if not math.isnan(reward)]
    if not known:
        return math.nan
    highest = max(known)
    total = math.fsum(math.exp((reward - highest) / beta1) for reward in known)
    return highest + beta1 * math.log(total / len(known))


def row_key(example: Mapping[str, Any]) -> str:
    """A dataset row by its content: the prompt, and the columns that rewards read."""
    text = json.dumps(dict(example), sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@torch.no_grad()
def model_hash(model: nn.Module) -> str:
    """A frozen reference by its parameters: names, shapes and evenly spaced weights of each that is not trained."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            continue  # An adapter, which the reference runs without.
        flat = parameter.detach().reshape(-1)
        part = flat[:: max(1, flat.numel() // SAMPLED)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()[:32]


def fingerprint(**settings: Any) -> str:
    """One short name for all that rewards of a prompt depend on besides the prompt."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]


class ValueCache:
    """Rewards of the reference's completions by prompt, in memory and as lines of a file.

    Args:
        path: JSON lines, appended to as they are found, so that an interrupted estimate goes on where it stopped.
        run: What `fingerprint` gave; lines of other runs are left alone.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.rewards: dict[str, list[float]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                logger.warning("%s has a line that was cut off; its prompt is sampled again.", path)
                continue
            if entry["run"] == run:
                self.rewards[entry["prompt"]] = entry["rewards"]

    def add(self, found: Mapping[str, list[float]], *, write: bool) -> None:
        """Take over new rewards; ``write`` on one process only."""
        new = {key: rewards for key, rewards in found.items() if key not in self.rewards}
        self.rewards.update(new)
        if write and new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                for key, rewards in new.items():
                    file.write(json.dumps({"run": self.run, "prompt": key, "rewards": rewards}) + "\n")

    def value(self, example: Mapping[str, Any], beta1: float) -> float:
        """The value of a row's prompt; NaN where it has none."""
        return optimal_value(self.rewards[row_key(example)], beta1)
