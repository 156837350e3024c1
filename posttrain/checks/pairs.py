"""Preference pairs before training: flipped labels, contradictions, and differences that are not about quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.checks.registry import finding, register
from posttrain.checks.rows import answers_of, count_of
from posttrain.data.chat import common_prefix
from posttrain.data.pictures import has_pictures
from posttrain.types import Finding, Row

__all__ = [
    "AGREEMENT_CODES",
    "CHECKS",
    "JUDGED_CODES",
    "PAIR_CODES",
    "PAIR_TEXT_CODES",
    "SCORES",
    "SIGHT_CODES",
    "PairScan",
    "SecondSight",
    "check_agreement",
    "check_judged",
    "check_pairs",
    "check_second_sight",
    "nearly_equal",
    "reference_mismatch",
    "reference_prefers_rejected",
    "scan_pairs",
    "score_columns",
]


PAIR_CODES = ("PT-D020", "PT-D022", "PT-D023", "PT-D024", "PT-D025")
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

    >>> rows = [Row([1], [[2], [3]], [[1], [1]]), Row([1], [[3], [2]], [[1], [1]])]
    >>> [finding.code for finding in check_pairs(rows)]
    ['PT-D020']
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


def contradictory(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Finding | None:
    """The same two answers to one prompt, preferred both ways."""
    seen: dict[tuple, tuple[int, bool]] = {}
    against: list[int] = []
    for index, row in enumerate(rows):
        a, b = tuple(row.completions[0]), tuple(row.completions[1])
        if a == b:
            continue
        key = (tuple(row.prompt_ids), tuple(map(tuple, row.pictures)), *sorted((a, b)))
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
    contradictory,
    length_bias,
    cut_on_one_side,
    ends_on_one_side,
    unended,
)


register("PT-D033", "pair-near-identical", moment="data", title="chosen and rejected hardly differ", page="f")
register("PT-D034", "pair-against-scores", moment="data", title="pairs that contradict their own scores", page="f")
register("PT-D035", "pair-swapped", moment="data", title="pairs that appear with both sides swapped", page="f")

PICTURED = ("prompt", "image", "images")
PAIR_TEXT_CODES = ("PT-D033", "PT-D034", "PT-D035")
SCORES = ("score", "rating", "reward", "score_overall")  # chosen_score, score_chosen, ...
NEAR = 0.02  # Of the longer text.
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
        # One question about another picture is another prompt.
        asked = str([row.get(name) for name in PICTURED]) if has_pictures([row]) else answers_of(row.get("prompt"))
        key = (hash(asked), *sorted((hash(chosen), hash(rejected))))
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
    """Whether two texts, white space and case aside, differ in one place by at most this share of the longer one.

    >>> nearly_equal("The answer to the question about the number of planets in our system is 8", "the  answer" +
    ...     " to the question about the number of planets in our system is 9")
    True
    """
    a, b = (" ".join(text.casefold().split()) for text in (first, second))
    most = int(share * max(len(a), len(b)))
    start = common_prefix(a, b)
    end = common_prefix(a[start:][::-1], b[start:][::-1])
    return max(len(a), len(b)) - start - end <= most


ENOUGH_PAIRS, FLIPPED = (
    20,
    0.9,
)  # Pairs below which a share says nothing, and the share above which labels look flipped.
# Measured on a 135M model before its first update: in the same batches policy and reference agree to the last bit, in float32,
# under autocast to bfloat16 and with bfloat16 weights. Log-probs that were computed beforehand, in other batches, differ by
# rounding, which tokens share unevenly: by 0.063, 0.017, 0.009 and 0.003 nats a token in answers of 4, 8, 15 and 60 words at
# most, 0.15 to 0.44 in the sum of an answer, and the first loss by 0.0085 at most. Twice and four times that; a reference of
# other weights is further away a token, one of another precision in the loss (0.055 was seen).
TOLERANCE = {"float32": 1e-3, "half": 0.15}  # Nats a token between policy and reference.
LOSS_OFF = {"float32": 0.02, "half": 0.04}  # Difference of the first sigmoid loss from ln 2.


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
    if len(chosen) < ENOUGH_PAIRS:
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
