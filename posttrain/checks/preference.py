"""Preference optimisation while it runs: what the logged numbers say about a run that looks healthy and is not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from posttrain.types import Finding

__all__ = ["PreferenceHealth", "reference_mismatch", "reference_prefers_rejected"]

SINKING = 5  # Logs in a row in which both rewards fall.
ENOUGH, FLIPPED = 20, 0.9  # Pairs below which a share says nothing, and the share above which labels look flipped.
# Measured on a 135M model before its first update: in the same batches policy and reference agree to the last bit, in float32,
# under autocast to bfloat16 and with bfloat16 weights. Log-probs that were computed beforehand, in other batches, differ by
# rounding, which tokens share unevenly: by 0.063, 0.017, 0.009 and 0.003 nats a token in answers of 4, 8, 15 and 60 words at
# most, 0.15 to 0.44 in the sum of an answer, and the first loss by 0.0085 at most. Twice and four times that; a reference of
# other weights is further away a token, one of another precision in the loss (0.055 was seen).
TOLERANCE = {"float32": 1e-3, "half": 0.15}  # Nats a token between policy and reference.
LOSS_OFF = {"float32": 0.02, "half": 0.04}  # Difference of the first sigmoid loss from ln 2.
EVALUATIONS, BACKWARDS = 3, 0.45  # Evaluations in a row, and the accuracy below which labels look inverted.


def reference_mismatch(gap: float, *, half: bool, loss: float | None = None, given: bool = False) -> Finding | None:
    """Before the first update the policy is its own reference: its log-ratio must be 0, and a sigmoid loss ln 2.

    Args:
        gap: Largest absolute log-ratio of a sequence, a token, in nats.
        half: Whether the run computes in half precision.
        loss: The first loss, when it is the plain sigmoid's. Long answers can move it although ``gap`` is small.
        given: Whether the user chose the reference, so that it may differ.
    """
    precision = "half" if half else "float32"
    tolerance = TOLERANCE[precision]
    off = loss is not None and abs(loss - math.log(2)) > LOSS_OFF[precision]
    if gap <= tolerance and not off:
        return None
    seen = "" if loss is None else f"; the first loss is {loss:.4f} instead of ln 2 = {math.log(2):.4f}"
    if given:
        return Finding(
            "PT-P001",
            "info",
            f"policy and ref_model differ by {gap:.2g} nats a token before the first update{seen}",
            "the first training batch",
            "ref_model has other weights than the model, or another dtype or active dropout",
            "nothing where that is meant; to start from the model's own weights, leave ref_model out",
        )
    return Finding(
        "PT-P001",
        "warning",
        f"policy and reference differ by {gap:.2g} nats a token before the first update{seen}",
        "the first training batch",
        "the reference has other weights, another dtype or active dropout, or its precomputed log-probs are stale",
        "set disable_dropout=True, recompute the precomputed columns, or pass the model you mean as ref_model",
    )


def reference_prefers_rejected(chosen: Sequence[float], rejected: Sequence[float]) -> Finding | None:
    """Summed log-probs of the reference: where it finds the rejected answer likelier nearly always, labels may be flipped."""
    if len(chosen) < ENOUGH:
        return None
    share = sum(r > c for c, r in zip(chosen, rejected, strict=True)) / len(chosen)
    if share <= FLIPPED:
        return None
    return Finding(
        "PT-P002",
        "warning",
        f"the reference finds the rejected answer likelier in {share:.0%} of the pairs",
        f"{len(chosen)} pairs",
        "the columns may be swapped, or the chosen answers are much longer",
        "look at some pairs with posttrain inspect; rename the columns if they are swapped",
    )


def inverted(accuracies: Sequence[float]) -> Finding | None:
    """Evaluations in a row in which the policy prefers the rejected answer of held-out pairs.

    Args:
        accuracies: Shares of pairs whose margin is positive, the latest last.
    """
    latest = accuracies[-EVALUATIONS:]
    if len(latest) < EVALUATIONS or max(latest) >= BACKWARDS:
        return None
    return Finding(
        "PT-P007",
        "warning",
        f"eval_rewards/accuracies was {', '.join(f'{value:.2f}' for value in latest)} in the last {EVALUATIONS} evaluations",
        "evaluation",
        "labels may be inverted: on pairs it never saw, the policy prefers the answer that was rejected",
        "look at chosen and rejected of some rows with posttrain inspect; swap the columns if they are swapped",
    )


class PreferenceHealth:
    """Reads each log entry and tells what it means; every code is told once until it clears.

    >>> health = PreferenceHealth()
    >>> entries = [{"rewards/chosen": -0.1 * i, "rewards/rejected": -0.3 * i, "rewards/accuracies": 1.0} for i in range(8)]
    >>> [finding.code for entry in entries for finding in health.read(entry)]
    ['PT-P003']
    """

    def __init__(self) -> None:
        self.history: list[Mapping[str, float]] = []
        self.told: set[str] = set()
        self.evaluated: list[float] = []

    def read(self, entry: Mapping[str, float]) -> list[Finding]:
        """Findings that became true with this log entry."""
        if "eval_rewards/accuracies" in entry:
            self.evaluated = [*self.evaluated, float(entry["eval_rewards/accuracies"])][-EVALUATIONS:]
            found = inverted(self.evaluated)
            return [found] if found is not None else []
        if "rewards/chosen" not in entry or "rewards/rejected" not in entry:
            return []
        self.history = [*self.history, entry][-20:]
        found = [f for check in (self._sinking, self._saturated, self._backwards, self._still) if (f := check())]
        new = [finding for finding in found if finding.code not in self.told]
        self.told = {finding.code for finding in found}
        return new

    def _last(self, name: str, count: int) -> list[float]:
        values = [float(entry[name]) for entry in self.history if name in entry]
        return values[-count:]

    def _sinking(self) -> Finding | None:
        chosen, rejected = self._last("rewards/chosen", SINKING + 1), self._last("rewards/rejected", SINKING + 1)
        falls = all(a > b for values in (chosen, rejected) for a, b in itertools.pairwise(values))
        accuracy = self._last("rewards/accuracies", 1)
        if len(chosen) <= SINKING or not falls or chosen[-1] >= 0 or not accuracy or accuracy[0] <= 0.5:
            return None
        return Finding(
            "PT-P003",
            "warning",
            f"rewards/chosen ({chosen[-1]:.3g}) and rewards/rejected ({rejected[-1]:.3g}) have both fallen for {SINKING} logs",
            "training metrics",
            "the margin grows while the chosen answers become less likely too: the model unlearns both, and its samples get "
            "worse at a rising accuracy",
            "raise the weight of a likelihood term ('sft' in DPO's loss_type, cpo_alpha, tpo_alpha), try apo_zero, a larger "
            "beta or a lower learning rate",
        )

    def _saturated(self) -> Finding | None:
        margins = self._last("rewards/margins", 3)
        if len(margins) < 3 or min(margins) < 10:
            return None
        return Finding(
            "PT-P004",
            "warning",
            f"rewards/margins is {margins[-1]:.3g}, where a sigmoid has no gradient left",
            "training metrics",
            "every further step only moves pairs that are already apart, or noise",
            "stop here, or lower the learning rate or the number of epochs; a larger beta makes the margin reach this sooner",
        )

    def _backwards(self) -> Finding | None:
        accuracy = self._last("rewards/accuracies", 10)
        if len(accuracy) < 10 or sum(accuracy) / 10 >= 0.45:
            return None
        return Finding(
            "PT-P005",
            "warning",
            f"rewards/accuracies has a mean of {sum(accuracy) / 10:.2f} over the last 10 logs",
            "training metrics",
            "the policy moves towards the rejected answers: labels are flipped, or the batches contradict each other",
            "look at chosen and rejected of some rows with posttrain inspect; lower the learning rate",
        )

    def _still(self) -> Finding | None:
        margins = [entry for entry in self.history if "rewards/margins" in entry]
        last = margins[-3:]
        moved = any(entry["rewards/chosen"] != 0 or entry["rewards/rejected"] != 0 for entry in last)
        steps = [entry for entry in last if float(entry.get("learning_rate", 1.0)) > 0]
        if len(steps) < 3 or moved:
            return None
        return Finding(
            "PT-P006",
            "warning",
            "rewards/chosen and rewards/rejected are exactly 0 after 3 logs",
            "training metrics",
            "policy and reference share their weights, or nothing that is trained changes the output",
            "check that ref_model is another object, that some parameter requires a gradient, and beta > 0",
        )
