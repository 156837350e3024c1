"""Preference pairs before training: flipped labels, contradictions, and differences that are not about quality."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.checks.registry import finding
from posttrain.checks.rows import answers_of, count_of, note_suspects, where
from posttrain.data.chat import common_prefix
from posttrain.data.formats import PROMPT_COLUMNS, has_pictures, maybe_convert_to_chatml
from posttrain.errors import ConfigError
from posttrain.losses.reduce import sequence_lengths
from posttrain.models import parallel
from posttrain.types import Batch, Finding, Row

if TYPE_CHECKING:
    from accelerate import Accelerator

    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import Tokenizer

PAIR_CODES = ("PT-D022", "PT-D023", "PT-D024")
JUDGED_CODES = ("PT-D026",)
PAIR_TEXT_CODES = ("PT-D033", "PT-D034", "PT-D035")
AGREEMENT_CODES = ("PT-D036",)

# Pairs below which a share says nothing.
PAIRS_NEEDED = 20
# Shares of the pairs: one side is longer, one side alone ends, one side alone was cut, the reference prefers rejected.
SHARE_LONGER, SHARE_ENDING, CUT_ONE_SIDE, SHARE_FLIPPED = 0.85, 0.8, 0.05, 0.9


# Tokenised rows ------------------------------------------------------------------------------------------------------


def check_pairs(rows: Sequence[Row], *, limit: int | None = None, stops: Sequence[int] = ()) -> list[Finding]:
    """Differences between chosen and rejected that are not about quality: lengths, cut answers, missing ends.

    Args:
        rows: Tokenised rows; those of two completions are looked at, chosen first.
        limit: ``max_length``: a longer side was cut.
        stops: Token ids that end an answer.
    """
    pairs = [row for row in rows if len(row.completions) == 2]
    return [*_length_bias(pairs), *_one_sided_ends(pairs, limit, frozenset(stops))]


def _length_bias(rows: Sequence[Row]) -> Iterator[Finding]:
    sizes = [[len(answer) for answer in row.completions] for row in rows]
    sizes = [(a, b) for a, b in sizes if a != b]
    longer = sum(a > b for a, b in sizes) / max(len(sizes), 1)
    side, share = ("chosen", longer) if longer > 0.5 else ("rejected", 1 - longer)
    if len(sizes) >= PAIRS_NEEDED and share > SHARE_LONGER:
        yield finding(
            "PT-D022",
            "warning",
            f"the {side} answer is the longer one in {share:.0%} of the pairs",
            f"{len(sizes)} pairs of different lengths",
            "summed log-ratios reward a difference in length, so length is the cheapest thing to learn",
            "balance lengths, or use loss_type='sigmoid_norm' or ld_alpha below 1, and watch the logged lengths of both sides",
        )


def _one_sided_ends(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Iterator[Finding]:
    if not stops:
        return
    # Templates may put a line break or two behind the end-of-turn token.
    ended = [[not stops.isdisjoint(answer[-3:]) for answer in row.completions] for row in rows]
    odd = [index for index, (a, b) in enumerate(ended) if a != b]
    # The answer without an end reaches the limit: it was cut.
    cut = [
        i for i in odd if limit and len(rows[i].prompt_ids) + len(rows[i].completions[ended[i].index(False)]) >= limit
    ]
    if len(cut) > CUT_ONE_SIDE * len(rows):
        yield finding(
            "PT-D023",
            "warning",
            f"max_length={limit} cuts one answer of a pair and not the other, in {count_of(len(cut), len(rows))}",
            where(cut),
            "the cut answer has lost its end and its eos, so the pair teaches how to stop, not what is better",
            "raise max_length, or leave these pairs out",
        )
    if len(rows) >= PAIRS_NEEDED and len(odd) >= SHARE_ENDING * len(rows):
        yield finding(
            "PT-D024",
            "warning",
            f"only the {'chosen' if ended[odd[0]][0] else 'rejected'} answers end with an end-of-turn token",
            where(odd),
            "the last token alone tells the two sides apart, and the model learns to stop or never to stop",
            "end both answers alike (give messages, or strings without a template)",
        )


def check_judged(rows: Sequence[Row]) -> Finding | None:
    """Rows of one completion with a ``label``: the same answer judged both ways.

    >>> rows = [Row([1], [[2]], [[1]], {"label": [label]}) for label in (1.0, 0.0)]
    >>> finding = check_judged(rows)
    >>> finding.code, finding.severity
    ('PT-D026', 'error')
    """
    labels: dict[tuple, set[float]] = {}
    keys = [(tuple(row.prompt_ids), tuple(row.completions[0])) for row in rows]
    for row, key in zip(rows, keys, strict=True):
        labels.setdefault(key, set()).update(row.sequence_columns["label"])
    against = [index for index, key in enumerate(keys) if len(labels[key]) > 1]
    if not against:
        return None
    return finding(
        "PT-D026",
        "error" if len(against) == len(rows) else "warning",
        f"the same answer to the same prompt is labelled good and bad in {count_of(len(against), len(rows))}",
        where(against),
        "the two cancel each other and teach nothing; of pairs that were taken apart, chosen and rejected are equal",
        "remove these rows; if all are of this kind, look at how answers and labels were made",
    )


# Pairs as text -------------------------------------------------------------------------------------------------------

# chosen_score, score_chosen, ...
SCORES = ("score", "rating", "reward", "score_overall")
# Difference of two texts that count as equal, of the longer one; and share of such pairs that every real set has.
NEAR_DIFFERENCE, NEAR_SHARE = 0.02, 0.001


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
        if self.repeated >= PAIRS_NEEDED and self.swapped:
            against = min(0.5, len(self.swapped) / 2 / self.repeated)
            estimates.append(0.5 - (0.25 - against / 2) ** 0.5)
        return (min(estimates), max(estimates)) if estimates else None

    def findings(self) -> list[Finding]:
        """What to tell."""
        rate = self.flip_rate()
        smoothing = f"label_smoothing={rate[1]:.2f}" if rate else "label_smoothing near the share of flips"
        estimate = f" Estimated flip rate {_span(*rate)}." if rate else ""
        robust = (
            f", or use a loss that expects flips: loss_type='robust' (or 'sigmoid') with {smoothing}. bad_rows='drop' leaves out "
            "pairs that appear both ways round."
        )
        near = self.near if len(self.near) > NEAR_SHARE * self.total else []
        return [
            finding(
                code,
                "warning",
                f"{count_of(len(rows), self.total)} {what}",
                where(rows),
                "what such pairs prefer is noise: they pull against the others, and a margin measured on them means nothing.",
                f"look at them in suspect_pairs.jsonl; remove them{advice}",
            )
            for code, rows, what, advice in (
                ("PT-D035", self.swapped, f"appear with chosen and rejected swapped.{estimate}", robust),
                ("PT-D034", self.contradicted, f"contradict their own scores.{estimate}", robust),
                ("PT-D033", near, f"differ by {NEAR_DIFFERENCE:.0%} of their text at most.", "."),
            )
            if rows
        ]


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
        asked = (
            str([row.get(name) for name in PROMPT_COLUMNS]) if has_pictures([row]) else answers_of(row.get("prompt"))
        )
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


def nearly_equal(first: str, second: str, share: float = NEAR_DIFFERENCE) -> bool:
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


# Policy, reference and judge before and while training ---------------------------------------------------------------

# Log-probs that were computed beforehand, in other batches, differ from the policy's by rounding: at most 0.063 nats a token
# (short answers) and 0.0085 in the first loss, on a 135M model in bfloat16. Twice and four times that are allowed; a reference
# of other weights is further away a token, one of another precision in the loss (0.055 was seen).
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
    return finding(
        "PT-P001",
        "info" if given else "warning",
        f"policy and reference differ by {gap:.2g} nats a token before the first update{seen}",
        "the first training batch",
        "the reference has other weights, another dtype or active dropout, or its precomputed log-probs are stale",
        "nothing where another ref_model is meant; to start from the model's own weights, leave it out"
        if given
        else "set disable_dropout=True, recompute the precomputed columns, or pass the model you mean as ref_model",
    )


def reference_prefers_rejected(chosen: Sequence[float], rejected: Sequence[float]) -> Finding | None:
    """Summed log-probs of the reference: where it finds the rejected answer likelier nearly always, labels may be flipped."""
    if len(chosen) < PAIRS_NEEDED:
        return None
    share = sum(r > c for c, r in zip(chosen, rejected, strict=True)) / len(chosen)
    if share <= SHARE_FLIPPED:
        return None
    return finding(
        "PT-P002",
        "warning",
        f"the reference finds the rejected answer likelier in {share:.0%} of the pairs",
        f"{len(chosen)} pairs",
        "the columns may be swapped, or the chosen answers are much longer",
        "look at some pairs with posttrain inspect; rename the columns if they are swapped",
    )


# Two careful people agree on which answer is better in 63 % (arXiv:2204.05862, section 2.2) to 73 % of the pairs
# (arXiv:2203.02155, section 3.4); a judge that agrees less often with labels than this does not see in them what people do.
AGREES, INVERTED = 0.55, 0.45


def check_agreement(scores: Mapping[int, tuple[float, float]], model: str) -> Finding | None:
    """How often a reward model prefers the chosen answer; a tie is half an agreement.

    Args:
        scores: Of the chosen and the rejected answer, by number of the pair.
        model: Name of the reward model.

    >>> finding = check_agreement({0: (1.0, 0.0), 1: (2.0, 0.5)}, "judge")
    >>> finding.severity, finding.what
    ('info', 'judge prefers the chosen answer in 2 of 2 pairs (100 %).')
    """
    if not scores:
        return None
    agree = sum((good > bad) + (good == bad) / 2 for good, bad in scores.values())
    share = agree / len(scores)
    # Two standard errors of a judge that tosses a coin.
    noise = 2 * math.sqrt(0.25 / len(scores))
    why = "it agrees with the labels."
    if share < min(INVERTED, 0.5 - noise):
        why = "labels may be inverted: it prefers the rejected answers."
    elif share < AGREES:
        why = (
            "people agree with each other more often: the labels are noisy, or this reward model judges something else."
        )
    return finding(
        "PT-D036",
        "info" if share >= AGREES else "warning",
        f"{model} prefers the chosen answer in {agree:g} of {len(scores)} pairs ({100 * share:.0f} %).",
        "the pairs",
        why,
        f"look at the pairs where it disagrees, in suspect_pairs.jsonl; swap the columns if {model} is right.",
    )


# The watch over a run's pairs ----------------------------------------------------------------------------------------

# Pairs that a reward model is shown, and characters of a text in suspect_pairs.jsonl.
PAIRS_JUDGED, EXCERPT = 512, 200
# Number, prompt, chosen, rejected.
Pair = tuple[int, Any, Any, Any]


class PairWatch:
    """Asks whether chosen answers are really better: by a reward model, and whether policy and reference begin alike.

    Args:
        args: `AnswerConfig`.
        checks: Of the run; findings are reported through it.
        tokenizer: Of the policy.
        branches: Columns of the answers.
        compared: Whether the loss compares policy and reference.
        given: Whether the reference was given, rather than made of the policy.
    """

    def __init__(
        self,
        args: PostTrainingConfig,
        checks: Any,
        tokenizer: Tokenizer,
        branches: tuple[str, ...],
        *,
        compared: bool,
        given: bool,
    ) -> None:
        self.args, self.checks, self.tokenizer, self.branches = args, checks, tokenizer, branches
        self.compared, self.given = compared, given
        self._begun = False

    # A reward model's opinion ------------------------------------------------------------------------------------

    def agreement(self, raw: object, accelerator: Accelerator) -> None:
        """Show up to 512 pairs to the reward model that ``pair_reward_model`` names; every rank must call it."""
        if self.args.pair_reward_model is None or not self.checks.preflight.active:
            return
        pairs = list(itertools.islice(self._text_pairs(raw), PAIRS_JUDGED))
        with self.checks.preflight.record_check("data", AGREEMENT_CODES):
            with parallel.failing_together(accelerator):
                mine = self._scores(pairs, accelerator)
            scores = dict(parallel.all_gather_objects(mine, accelerator))
            self.checks.report([check_agreement(scores, str(self.args.pair_reward_model))])
        against = {number for number, (good, bad) in scores.items() if bad > good}
        if accelerator.is_main_process:
            rows = [{"row": n, "prompt": _text(p), "chosen": _text(c), "rejected": _text(r)} for n, p, c, r in pairs]
            reason = f"{self.args.pair_reward_model} prefers the rejected answer"
            note_suspects(self.args.output_dir, reason, [row for row in rows if row["row"] in against])

    def _text_pairs(self, raw: object) -> Iterator[Pair]:
        """Pairs as they were given, spread over the set; of a stream its first ones."""
        from posttrain.data.preference import maybe_extract_prompt

        if not {"chosen", "rejected"} <= set(raw.column_names or ()):
            raise ConfigError(
                f"pair_reward_model={self.args.pair_reward_model!r} judges columns 'chosen' and 'rejected', and the training "
                f"set has {raw.column_names}. Leave it out, or give pairs."
            )
        rows: Iterable[tuple[int, Any]] = enumerate(raw)
        if isinstance(raw, Sized):
            take = min(PAIRS_JUDGED, len(raw))
            rows = ((i, raw[i]) for i in (len(raw) * k // take for k in range(take)))
        for number, row in rows:
            if row["chosen"] and row["rejected"] and row["chosen"] != row["rejected"]:
                parted = maybe_extract_prompt(maybe_convert_to_chatml(row))
                yield number, parted["prompt"], parted["chosen"], parted["rejected"]

    def _scores(self, pairs: Sequence[Pair], accelerator: Accelerator) -> list[tuple[int, tuple[float, float]]]:
        """Scores of one pair in so many, as there are processes."""
        from posttrain.rewards.model import ModelReward

        mine = pairs[accelerator.process_index :: accelerator.num_processes]
        judge = ModelReward(
            self.args.pair_reward_model,
            batch_size=self.args.per_device_eval_batch_size,
            trust_remote_code=self.args.trust_remote_code,
        ).to(self.args.device)
        judge.probe()
        prompts = [prompt for _, prompt, _, _ in mine]
        good, bad = (judge(prompts, [pair[side] for pair in mine]) for side in (2, 3))
        return [(pair[0], scores) for pair, scores in zip(mine, zip(good, bad, strict=True), strict=True)]

    # The first pass ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def first_pass(self, batch: Batch, log_ratio: Callable[[], Tensor], *, half: bool, loss: float | None) -> None:
        """Before the first update policy and reference must agree; later calls do nothing.

        Args:
            batch: The pass.
            log_ratio: Gives ``(S,)`` log-ratios of policy to reference, summed as the loss sums them.
            half: Whether the policy computes in half precision.
            loss: The mean loss where it must be ln 2 before the first update; else None.
        """
        if self._begun:
            return
        self._begun = True
        length = sequence_lengths(batch.loss_mask, batch.sequence, batch.num_sequences)
        gap = float((log_ratio().abs() / length).max())
        with self.checks.preflight.record_check("first_batch", ("PT-P001",)):
            self.checks.report([reference_mismatch(gap, half=half, loss=loss, given=self.given)])


def _text(value: object) -> str:
    return answers_of(value)[:EXCERPT]
