"""Preference optimisation while it runs: what the logged numbers say about a run that looks healthy and is not."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posttrain.checks.registry import Context, finding, probe, register
from posttrain.types import Finding

__all__ = [
    "AGREEMENT_CODES",
    "SIGHT_CODES",
    "PreferenceHealth",
    "SecondSight",
    "check_agreement",
    "check_references",
    "check_second_sight",
    "reference_column",
    "reference_mismatch",
    "reference_prefers_rejected",
]


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


register("PT-P008", "margins-stay-negative", moment="log_step", title="pairs that stay against their labels", page="f")
register(
    "PT-D036",
    "reward-model-agreement",
    moment="data",
    title="how often a reward model agrees with the labels",
    page="f",
)

SIGHT_CODES, AGREEMENT_CODES = ("PT-P008",), ("PT-D036",)
BEGUN = 0.1  # Of the run, before which margins are mostly noise.
BELOW = 0.5  # Standard deviations under zero.
ENOUGH_MARGINS = 50  # Pairs that were met again, below which a share says nothing.
# A share, its ratio to the one that is expected, and its distance from it in standard errors. Drawn from mixtures of two
# hills 2 / 0.3 of their spreads apart, 5 to 40 % of the pairs in the lower one, the ratio was 1.56 to 3.3; from single
# hills of other shapes (uniform, exponential, Student's t with 3 degrees), 0.3 to 1.33.
LEAST, TIMES, CLEAR = 0.02, 1.5, 3.0
AGAIN = 1.1  # Looked at anew when a tenth more pairs were met.
# Two careful people agree on which answer is better in 63 % (arXiv:2204.05862, section 2.2) to 73 % of the pairs
# (arXiv:2203.02155, section 3.4); a judge that agrees less often with labels than this does not see in them what people do.
AGREES, INVERTED = 0.55, 0.45


class SecondSight:
    """The margin of every pair when the run met it again, and which pairs still stand against their labels.

    A margin is the log-ratio of the chosen answer to the reference minus that of the rejected one: 0 before training.
    """

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.margins: dict[int, float] = {}
        self._looked = 0

    def see(self, step: int, rows: Sequence[int], margins: Sequence[float], *, progress: float) -> None:
        """Note the margins of a micro-batch.

        Args:
            step: Optimiser steps done; a pair is met again at a later one only.
            rows: Numbers of the pairs.
            margins: One each, in nats.
            progress: Share of the run that is done.
        """
        for row, margin in zip(rows, margins, strict=True):
            if self.first.setdefault(row, step) < step and progress >= BEGUN:
                self.margins[row] = margin

    def due(self) -> bool:
        """Whether there is more to look at than the last time."""
        if len(self.margins) < max(ENOUGH_MARGINS, AGAIN * self._looked):
            return False
        self._looked = len(self.margins)
        return True

    def suspects(self) -> list[int]:
        """Rows whose margin stays below minus half a standard deviation, the lowest first."""
        bound = -BELOW * _spread(list(self.margins.values()))
        return sorted((row for row, margin in self.margins.items() if margin < bound), key=self.margins.__getitem__)


def _spread(values: Sequence[float]) -> float:
    centre = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / len(values))


def check_second_sight(margins: Sequence[float]) -> Finding | None:
    """More pairs whose margin stays below -0.5 standard deviations than a single bell curve would have there.

    Margins of sound pairs scatter around one mean m with one spread s, and ``Phi(-0.5 - m / s)`` of them lie below; pairs
    with flipped labels move the other way and make a second hill.

    Args:
        margins: Of pairs that were trained on before.
    """
    if len(margins) < ENOUGH_MARGINS:
        return None
    spread = _spread(margins)
    if spread == 0:
        return None
    centre, count = math.fsum(margins) / len(margins), len(margins)
    share = sum(margin < -BELOW * spread for margin in margins) / count
    expected = 0.5 * math.erfc((BELOW + centre / spread) / math.sqrt(2))
    error = math.sqrt(max(expected * (1 - expected), 1 / count) / count)
    if share < LEAST or share < TIMES * expected or share - expected < CLEAR * error:
        return None
    rate = min(share, 0.5)
    return finding(
        "PT-P008",
        "warning",
        f"{round(share * count)} of {count} pairs ({100 * share:.0f} %) that were trained on before keep a margin below "
        f"-{BELOW:g} standard deviations; {100 * expected:.0f} % would be expected. About {100 * rate:.0f} % of the labels may "
        "be flipped.",
        "margins on second sight",
        "the other pairs pull these the other way although their own labels were trained: they teach the opposite.",
        "look at them in suspect_pairs.jsonl; remove them, or use loss_type='robust' with "
        f"label_smoothing={min(rate, 0.49):.2f}.",
    )


def check_agreement(scores: Mapping[int, tuple[float, float]], model: str) -> Finding | None:
    """How often a reward model prefers the chosen answer; a tie is half an agreement.

    Args:
        scores: Of the chosen and the rejected answer, by number of the pair.
        model: Name of the reward model.

    >>> found = check_agreement({0: (1.0, 0.0), 1: (2.0, 0.5)}, "judge")
    >>> found.severity, found.what
    ('info', 'judge prefers the chosen answer in 2 of 2 pairs (100 %).')
    """
    if not scores:
        return None
    agree = sum((good > bad) + (good == bad) / 2 for good, bad in scores.values())
    share = agree / len(scores)
    noise = 2 * math.sqrt(0.25 / len(scores))  # Of a judge that tosses a coin.
    what = f"{model} prefers the chosen answer in {agree:g} of {len(scores)} pairs ({100 * share:.0f} %)."
    fix = f"look at the pairs where it disagrees, in suspect_pairs.jsonl, and swap the columns if {model} is right."
    if share < INVERTED and share < 0.5 - noise:
        return finding(
            "PT-D036", "warning", what, "the pairs", "labels may be inverted: it prefers the rejected answers.", fix
        )
    if share < AGREES:
        return finding(
            "PT-D036", "warning", what, "the pairs",
            "people who judge such pairs agree with each other more often: the labels are noisy, or this reward model judges "
            "something else.", "look at the pairs where it disagrees, in suspect_pairs.jsonl.",
        )  # fmt: skip
    return finding(
        "PT-D036", "info", what, "the pairs", "it agrees with the labels.", "nothing, or look at the others."
    )


register("PT-R030", "references-unread", moment="data", title="reference answers that say nothing", page="d")

MANY = 0.05  # Share of the rows.
ROWS = 100_000  # That are read.


def reference_column(function: Callable) -> tuple[str, str] | None:
    """Column and mode (see `answers_match`) of a reward of this package that compares with a reference; None of any other.

    >>> from posttrain.rewards import string_match_reward
    >>> reference_column(string_match_reward("gold", mode="number"))
    ('gold', 'number')
    """
    from posttrain.rewards import accuracy_reward, reasoning_accuracy_reward
    from posttrain.rewards.format import CosineScaledReward
    from posttrain.rewards.math import StringMatchReward

    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, StringMatchReward):
        return function.column, function.mode
    reads = function in (accuracy_reward, reasoning_accuracy_reward) or isinstance(function, CosineScaledReward)
    return ("solution", "auto") if reads else None


def check_references(name: str, column: str, golds: Sequence[Any], *, mode: str = "auto") -> Finding | None:
    """Rows whose reference scores no answer: over 5 % is a warning, all of them an error.

    Args:
        name: Of the reward function.
        column: Where references stand.
        golds: Their values.
        mode: How the function compares, see `answers_match`.
    """
    from posttrain.rewards.math import answers_match

    unread = [row for row, gold in enumerate(golds) if answers_match(None, gold, mode) is None]  # type: ignore[arg-type]
    if len(unread) <= MANY * len(golds):
        return None
    shown = ", ".join(f"row {row}: {golds[row]!r:.60}" for row in unread[:3])
    return finding(
        "PT-R030",
        "error" if len(unread) == len(golds) else "warning",
        f"{len(unread)} of {len(golds)} references in `{column}` cannot be read by {name} ({shown}).",
        f"column {column!r}",
        "such a row gets None from it: no completion of it is right or wrong, and it teaches nothing.",
        f"drop these rows, mend the column, or give {name} the column that holds the answers.",
    )


@probe("data", "PT-R030", part="rewards")
def references_of_rewards(context: Context) -> Iterable[Finding | None]:
    """The reference column of each reward function that says which one it reads."""
    rewards: Any = context.parts.get("rewards")
    dataset: Any = context.train_dataset
    names = getattr(dataset, "column_names", None) or ()
    if rewards is None or not hasattr(dataset, "select"):  # A stream is read as it comes.
        return
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        column, mode = reference_column(function) or (None, "")
        if column in names:
            head = dataset.select(range(min(ROWS, len(dataset)))).select_columns([column]).with_format(None)
            yield check_references(name, str(column), head[column][:], mode=mode)
