"""Pairs that a run meets again, and pairs that a reward model is shown: do they agree with their labels?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from posttrain.checks.core import finding, register
from posttrain.types import Finding

__all__ = ["AGREEMENT_CODES", "SIGHT_CODES", "SecondSight", "check_agreement", "check_second_sight"]

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
ENOUGH = 50  # Pairs that were met again, below which a share says nothing.
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
        if len(self.margins) < max(ENOUGH, AGAIN * self._looked):
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
    if len(margins) < ENOUGH:
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
