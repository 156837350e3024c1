"""Preference pairs before training: flipped labels, contradictions, and differences that are not about quality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.checks.registry import finding, register
from posttrain.checks.rows import count_of
from posttrain.checks.samples import answers_of
from posttrain.types import Finding, Row

__all__ = [
    "CHECKS",
    "JUDGED_CODES",
    "PAIR_CODES",
    "PAIR_TEXT_CODES",
    "SCORES",
    "PairScan",
    "check_judged",
    "check_pairs",
    "edit_distance",
    "nearly_equal",
    "scan_pairs",
    "score_columns",
]


PAIR_CODES = ("PT-D012", "PT-D020", "PT-D021", "PT-D022", "PT-D023", "PT-D024", "PT-D025")
JUDGED_CODES = ("PT-D025", "PT-D026")

LONGER = 0.85  # Share of pairs in which one side is longer, above which length is what there is to learn.
ENDS = 0.8  # Share of pairs of which one side alone ends.
CUT_ONE_SIDE = 0.05  # Share of pairs of which one answer alone was cut.
ENOUGH = 20  # Pairs below which shares say nothing.


def check_pairs(rows: Sequence[Row], *, limit: int | None = None, stops: Sequence[int] = ()) -> list[Finding]:
    """Findings about rows of two completions, chosen first; the worst first.

    Args:
        rows: Tokenised pairs.
        limit: ``max_length``: a longer side was cut.
        stops: Token ids that end an answer.

    >>> row = Row([1], [[2], [2]], [[1], [1]])
    >>> [finding.code for finding in check_pairs([row])]
    ['PT-D012']
    """
    pairs = [row for row in rows if len(row.completions) == 2]
    found = [finding for check in CHECKS if (finding := check(pairs, limit, frozenset(stops))) is not None]
    return sorted(found, key=lambda finding: ("error", "warning", "info").index(finding.severity))


def _where(indices: list[int], rows: Sequence[Row], what: str = "pairs") -> str:
    shown = ", ".join(map(str, indices[:5]))
    return f"{len(indices)} of {len(rows)} {what} (rows {shown}{', ...' if len(indices) > 5 else ''})"


def check_judged(rows: Sequence[Row], *, limit: int | None = None, stops: Sequence[int] = ()) -> list[Finding]:
    """Findings about rows of one completion with a ``label``: judged both ways, or without an end.

    Args:
        rows: Tokenised rows.
        limit: ``max_length``.
        stops: Token ids that end an answer.

    >>> rows = [Row([1], [[2]], [[1]], {"label": [label]}) for label in (1.0, 0.0)]
    >>> [(finding.code, finding.severity) for finding in check_judged(rows)]
    [('PT-D026', 'error')]
    """
    labels: dict[tuple, set[float]] = {}
    keys = [(tuple(row.prompt_ids), tuple(row.completions[0])) for row in rows]
    for row, key in zip(rows, keys, strict=True):
        labels.setdefault(key, set()).update(row.sequence_columns["label"])
    against = [index for index, key in enumerate(keys) if len(labels[key]) > 1]
    found = [finding for check in (unended,) if (finding := check(rows, limit, frozenset(stops))) is not None]
    if not against:
        return found
    everywhere = len(against) == len(rows)
    return [
        *found,
        Finding(
            "PT-D026",
            "error" if everywhere else "warning",
            "the same answer to the same prompt is labelled good and bad" + (", in every row" if everywhere else ""),
            _where(against, rows, "rows"),
            "the two cancel each other and teach nothing; of pairs that were taken apart, chosen and rejected are equal",
            "remove these rows; if all are of this kind, look at how answers and labels were made",
        ),
    ]


def _ended(answer: Sequence[int], stops: frozenset[int]) -> bool:
    """Whether an answer ends; templates may put a line break or two behind the end-of-turn token."""
    return not stops.isdisjoint(answer[-3:])


def identical(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Finding | None:
    """Pairs whose two answers are the same tokens: loss ln 2, no gradient."""
    same = [i for i, row in enumerate(rows) if row.completions[0] == row.completions[1]]
    if not same:
        return None
    everywhere = len(same) == len(rows)
    return Finding(
        "PT-D012",
        "error" if everywhere else "warning",
        "chosen and rejected are equal" + (" in every pair" if everywhere else ""),
        _where(same, rows),
        "such a pair has a loss of ln 2 and no gradient; it only lowers the accuracy",
        "remove these rows; if all are equal, look at how the two columns were made",
    )


def contradictory(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Finding | None:
    """The same two answers to one prompt, preferred both ways."""
    seen: dict[tuple, tuple[int, bool]] = {}
    against: list[int] = []
    for index, row in enumerate(rows):
        a, b = tuple(row.completions[0]), tuple(row.completions[1])
        if a == b:
            continue
        key = (tuple(row.prompt_ids), *sorted((a, b)))
        first = seen.setdefault(key, (index, a < b))
        if first[1] != (a < b):
            against.append(index)
    if not against:
        return None
    return Finding(
        "PT-D020",
        "warning",
        "the same two answers are preferred both ways",
        _where(against, rows),
        "the two pairs cancel each other; many of them mean that labels were flipped or averaged",
        "keep the more frequent direction, or use loss_type='robust' with label_smoothing near the share of flips",
    )


def repeated(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Finding | None:
    """Whole pairs that occur more than once."""
    seen: set[tuple] = set()
    again = []
    for index, row in enumerate(rows):
        key = (tuple(row.prompt_ids), *map(tuple, row.completions))
        if key in seen:
            again.append(index)
        seen.add(key)
    if not again:
        return None
    return Finding(
        "PT-D021",
        "warning" if len(again) > 0.01 * len(rows) else "info",
        "a pair occurs more than once",
        _where(again, rows),
        "repeated pairs weigh more than others, and leak into evaluation when the set is split",
        "remove duplicates before splitting",
    )


def length_bias(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Finding | None:
    """One side is nearly always longer: length alone predicts the label."""
    differing = [(len(row.completions[0]), len(row.completions[1])) for row in rows]
    differing = [(a, b) for a, b in differing if a != b]
    if len(differing) < ENOUGH:
        return None
    longer = sum(a > b for a, b in differing) / len(differing)
    if max(longer, 1 - longer) <= LONGER:
        return None
    side, share = ("chosen", longer) if longer > 0.5 else ("rejected", 1 - longer)
    return Finding(
        "PT-D022",
        "warning",
        f"the {side} answer is the longer one in {share:.0%} of the pairs",
        f"{len(differing)} pairs of different lengths",
        "summed log-ratios reward a difference in length, so length is the cheapest thing to learn",
        "balance lengths, or use loss_type='sigmoid_norm' or ld_alpha below 1, and watch the logged lengths of both sides",
    )


def cut_on_one_side(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Finding | None:
    """Pairs of which one answer was cut and the other was not."""
    if limit is None or not stops:
        return None
    one = []
    for index, row in enumerate(rows):
        full = [len(row.prompt_ids) + len(answer) >= limit for answer in row.completions]
        ended = [_ended(answer, stops) for answer in row.completions]
        cut = [f and not e for f, e in zip(full, ended, strict=True)]
        if cut[0] != cut[1]:
            one.append(index)
    if len(one) <= CUT_ONE_SIDE * len(rows):
        return None
    return Finding(
        "PT-D023",
        "warning",
        f"max_length={limit} cuts one answer of a pair and not the other",
        _where(one, rows),
        "the cut answer has lost its end and its eos, so the pair teaches how to stop, not what is better",
        "raise max_length, or leave these pairs out",
    )


def ends_on_one_side(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Finding | None:
    """One side ends with an end-of-turn token and the other does not, nearly always."""
    if not stops or len(rows) < ENOUGH:
        return None
    ended = [[_ended(answer, stops) for answer in row.completions] for row in rows]
    odd = [i for i, (a, b) in enumerate(ended) if a != b]
    if len(odd) < ENDS * len(rows):
        return None
    side = "chosen" if ended[odd[0]][0] else "rejected"
    return Finding(
        "PT-D024",
        "warning",
        f"only the {side} answers end with an end-of-turn token",
        _where(odd, rows),
        "the last token alone tells the two sides apart, and the model learns to stop or never to stop",
        "end both answers alike (give messages, or strings without a template)",
    )


def unended(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Finding | None:
    """Answers that were not cut and still do not end with an end-of-turn token, more than half of them."""
    whole = [
        (index, _ended(answer, stops))
        for index, row in enumerate(rows)
        for answer in row.completions
        if limit is None or len(row.prompt_ids) + len(answer) < limit
    ]
    open_ended = [index for index, ends in whole if not ends]
    if not stops or 2 * len(open_ended) <= len(whole):
        return None
    return Finding(
        "PT-D025",
        "warning",
        f"{len(open_ended)} of {len(whole)} answers do not end with an end-of-turn token",
        _where(sorted(set(open_ended)), rows, "rows"),
        "the model is not taught to stop, so that it goes on after each answer once it is trained",
        "use a chat template that ends the assistant's turns, or strings, which get an eos",
    )


CHECKS: tuple[Callable[[Sequence[Row], int | None, frozenset[int]], Finding | None], ...] = (
    identical,
    contradictory,
    repeated,
    length_bias,
    cut_on_one_side,
    ends_on_one_side,
    unended,
)


register("PT-D033", "pair-near-identical", moment="data", title="chosen and rejected hardly differ", page="f")
register("PT-D034", "pair-against-scores", moment="data", title="pairs that contradict their own scores", page="f")
register("PT-D035", "pair-swapped", moment="data", title="pairs that appear with both sides swapped", page="f")

PAIR_TEXT_CODES = ("PT-D033", "PT-D034", "PT-D035")
SCORES = ("score", "rating", "reward", "score_overall")  # chosen_score, score_chosen, ...
NEAR = 0.02  # Edits over the longer text.
COMPARED = 4000  # Characters of a text up to which edits are counted.
SOME = 0.001  # Share of near-equal pairs that every real set has.
SHOWN = 5
ENOUGH_TEXTS = 20  # Pairs that were judged twice, below which their share says nothing.


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
        if self.repeated >= ENOUGH_TEXTS and self.swapped:
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
