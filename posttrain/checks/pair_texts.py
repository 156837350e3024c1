"""Preference pairs as text, all of them: is the chosen answer really the better one?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.checks.core import finding, register
from posttrain.checks.row_context import count_of
from posttrain.checks.samples import answers_of
from posttrain.types import Finding

__all__ = ["PAIR_TEXT_CODES", "SCORES", "PairScan", "edit_distance", "nearly_equal", "scan_pairs", "score_columns"]

register("PT-D033", "pair-near-identical", moment="data", title="chosen and rejected hardly differ", page="f")
register("PT-D034", "pair-against-scores", moment="data", title="pairs that contradict their own scores", page="f")
register("PT-D035", "pair-swapped", moment="data", title="pairs that appear with both sides swapped", page="f")

PAIR_TEXT_CODES = ("PT-D033", "PT-D034", "PT-D035")
SCORES = ("score", "rating", "reward", "score_overall")  # chosen_score, score_chosen, ...
NEAR = 0.02  # Edits over the longer text.
COMPARED = 4000  # Characters of a text up to which edits are counted.
SOME = 0.001  # Share of near-equal pairs that every real set has.
SHOWN = 5
ENOUGH = 20  # Pairs that were judged twice, below which their share says nothing.


@dataclass
class PairScan:
    """What all pairs of a set say together.

    Attributes:
        total: Pairs.
        suspects: Reason by number of the row; the first that was found.
        swapped: Rows of pairs that also appear the other way round.
        contradicted: Rows whose scores say that rejected is better.
        near: Rows whose answers hardly differ.
        repeated: Pairs that appear more than once, either way round.
        scored: Pairs with scores.
    """

    total: int = 0
    suspects: dict[int, str] = field(default_factory=dict)
    swapped: list[int] = field(default_factory=list)
    contradicted: list[int] = field(default_factory=list)
    near: list[int] = field(default_factory=list)
    repeated: int = 0
    scored: int = 0

    def flip_rate(self) -> tuple[float, float] | None:
        """Least and largest estimate of the share of flipped labels; None where nothing speaks of it.

        Two judgements of one pair, each flipped with probability p, disagree with probability 2 p (1 - p).
        """
        estimates = []
        if self.scored and self.contradicted:
            estimates.append(len(self.contradicted) / self.scored)
        if self.repeated >= ENOUGH and self.swapped:
            against = min(0.5, len(self.swapped) / 2 / self.repeated)
            estimates.append(0.5 - (0.25 - against / 2) ** 0.5)
        return (min(estimates), max(estimates)) if estimates else None

    def findings(self) -> list[Finding]:
        """What to tell."""
        found = []
        if self.swapped:
            found.append(self._finding("PT-D035", self.swapped, "appear with chosen and rejected swapped"))
        if self.contradicted:
            found.append(self._finding("PT-D034", self.contradicted, "contradict their own scores"))
        if len(self.near) > SOME * self.total:
            found.append(self._finding("PT-D033", self.near, f"differ by {NEAR:.0%} of their text at most"))
        return found

    def _finding(self, code: str, rows: Sequence[int], what: str) -> Finding:
        rate = self.flip_rate()
        shown = ", ".join(map(str, rows[:SHOWN])) + (", ..." if len(rows) > SHOWN else "")
        estimate = f" Estimated flip rate {_span(*rate)}." if rate and code != "PT-D033" else ""
        advice = f"label_smoothing={rate[1]:.2f}" if rate else "label_smoothing near the share of flips"
        return finding(
            code,
            "warning",
            f"{count_of(len(rows), self.total)} {what}.{estimate}",
            f"rows {shown}",
            "what such pairs prefer is noise: they pull against the others, and a margin measured on them means nothing.",
            "look at them in suspect_pairs.jsonl; remove them"
            + (
                "."
                if code == "PT-D033"
                else f", or use a loss that expects flips: loss_type='robust' (or 'sigmoid') with {advice}. "
                "bad_rows='drop' leaves out pairs that appear both ways round."
            ),
        )


def _span(low: float, high: float) -> str:
    return f"{100 * low:.2g} %" if round(100 * low) == round(100 * high) else f"{100 * low:.2g}-{100 * high:.2g} %"


def score_columns(columns: Iterable[str]) -> tuple[str, str] | None:
    """The columns that score chosen and rejected, under the usual names; None where there are none.

    >>> score_columns(["chosen", "rejected", "score_chosen", "score_rejected"])
    ('score_chosen', 'score_rejected')
    """
    names = set(columns)
    for score in SCORES:
        for form in ("{side}_{score}", "{score}_{side}"):
            pair = tuple(form.format(side=side, score=score) for side in ("chosen", "rejected"))
            if names.issuperset(pair):
                return pair[0], pair[1]
    return None


def scan_pairs(rows: Iterable[Mapping[str, Any]], scores: tuple[str, str] | None = None) -> PairScan:
    """Look at every pair: the same pair both ways round, scores that say the opposite, answers that hardly differ.

    Args:
        rows: With ``chosen`` and ``rejected``, and ``prompt`` where there is one.
        scores: Columns of numbers, of chosen and rejected.

    >>> scan_pairs([{"chosen": "a", "rejected": "b"}, {"chosen": "b", "rejected": "a"}]).swapped
    [0, 1]
    """
    scan = PairScan()
    seen: dict[tuple[int, int, int], list[tuple[int, bool]]] = {}
    for index, row in enumerate(rows):
        scan.total += 1
        chosen, rejected = answers_of(row.get("chosen")), answers_of(row.get("rejected"))
        if scores is not None:
            _compare_scores(scan, index, row.get(scores[0]), row.get(scores[1]))
        if chosen == rejected:
            continue
        key = (hash(answers_of(row.get("prompt"))), *sorted((hash(chosen), hash(rejected))))
        seen.setdefault(key, []).append((index, chosen < rejected))
        if nearly_equal(chosen, rejected):
            scan.near.append(index)
    for places in seen.values():
        scan.repeated += len(places) - 1
        if len({way for _, way in places}) > 1:
            scan.swapped += [index for index, _ in places]
    scan.swapped.sort()
    for reason, indices in (
        ("the pair appears both ways round", scan.swapped),
        ("its scores say the opposite", scan.contradicted),
        ("its answers hardly differ", scan.near),
    ):
        for index in indices:
            scan.suspects.setdefault(index, reason)
    return scan


def _compare_scores(scan: PairScan, index: int, chosen: Any, rejected: Any) -> None:
    try:
        good, bad = float(chosen), float(rejected)
    except (TypeError, ValueError):
        return
    scan.scored += 1
    if bad > good:
        scan.contradicted.append(index)


def nearly_equal(first: str, second: str, share: float = NEAR) -> bool:
    """Whether two texts, white space and case aside, differ by at most this share of the longer one.

    >>> nearly_equal("The answer to the question about the number of planets in our system is 8", "the  answer" +
    ...     " to the question about the number of planets in our system is 9")
    True
    """
    a, b = (" ".join(text.casefold().split()) for text in (first, second))
    most = int(share * max(len(a), len(b)))
    if abs(len(a) - len(b)) > most:
        return False
    if a == b:
        return True
    if most == 0 or max(len(a), len(b)) > COMPARED:
        return False
    a, b = _middle(a, b)
    if max(len(a), len(b)) <= most:
        return True
    odd = (Counter(a) - Counter(b)).total(), (Counter(b) - Counter(a)).total()
    return max(odd) <= most and edit_distance(a, b, most) <= most


def _middle(a: str, b: str) -> tuple[str, str]:
    """Two texts without what they begin and end with alike."""
    shortest = min(len(a), len(b))
    start = next((i for i in range(shortest) if a[i] != b[i]), shortest)
    a, b = a[start:], b[start:]
    shortest = min(len(a), len(b))
    end = next((i for i in range(shortest) if a[-1 - i] != b[-1 - i]), shortest)
    return a[: len(a) - end], b[: len(b) - end]


def edit_distance(a: str, b: str, most: int) -> int:
    """Insertions, deletions and substitutions between two texts, counted up to ``most`` and one more.

    >>> edit_distance("kitten", "sitting", 5), edit_distance("kitten", "sitting", 1)
    (3, 2)
    """
    beyond = most + 1
    row = [min(j, beyond) for j in range(len(b) + 1)]
    for i, char in enumerate(a, 1):
        low, high = max(1, i - most), min(len(b), i + most)
        new = [beyond] * (len(b) + 1)
        new[0] = min(i, beyond)
        for j in range(low, high + 1):
            new[j] = min(row[j] + 1, new[j - 1] + 1, row[j - 1] + (char != b[j - 1]), beyond)
        row = new
    return row[-1]
