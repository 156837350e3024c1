"""Preference pairs before training: flipped labels, contradictions, and differences that are not about quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.types import Finding, Row

__all__ = ["CHECKS", "JUDGED_CODES", "PAIR_CODES", "check_judged", "check_pairs"]

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
