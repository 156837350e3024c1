"""Checks of preference pairs: flipped or contradictory labels, and differences between the two answers that are not related
to quality.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.checks.registry import Context, finding, probe
from posttrain.checks.rows import answers_of, count_of, note_suspects, where
from posttrain.data.chat import common_prefix
from posttrain.data.formats import PROMPT_COLUMNS, has_pictures, known_columns, maybe_convert_to_chatml
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

# Minimum number of pairs for findings with a percentage.
PAIRS_NEEDED = 20
# Maximum fractions of affected preference pairs. A larger fraction is reported. SHARE_LONGER is the maximum fraction of
# pairs in which the same side (chosen or rejected) is longer. SHARE_ENDING is the maximum fraction of pairs in which only
# one answer has an end token. CUT_ONE_SIDE is the maximum fraction of pairs in which only one answer is truncated.
# SHARE_FLIPPED is the maximum fraction of pairs in which the reference prefers the rejected answer.
SHARE_LONGER, SHARE_ENDING, CUT_ONE_SIDE, SHARE_FLIPPED = 0.85, 0.8, 0.05, 0.9


# Tokenized rows ------------------------------------------------------------------------------------------------------


def check_pairs(rows: Sequence[Row], *, limit: int | None = None, stops: Sequence[int] = ()) -> list[Finding]:
    """Find systematic differences between chosen and rejected answers: length, truncation and missing end tokens.

    Args:
        rows: Tokenized rows. Only rows with two completions are checked. The first completion is the chosen one.
        limit: ``max_length``, the length at which answers were truncated.
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
            "sums of log-ratios depend on length, so the model can learn the difference in length instead of quality.",
            "balance the lengths, or use loss_type='sigmoid_norm' or ld_alpha below 1, and watch the logged lengths.",
        )


def _one_sided_ends(rows: Sequence[Row], limit: int | None, stops: frozenset[int]) -> Iterator[Finding]:
    if not stops:
        return
    # Some templates add one or two line breaks after the end-of-turn token. The last three tokens are therefore searched.
    ended = [[not stops.isdisjoint(answer[-3:]) for answer in row.completions] for row in rows]
    odd = [index for index, (a, b) in enumerate(ended) if a != b]
    # Treat an answer as truncated if it reaches the limit and has no end token.
    cut = [
        i for i in odd if limit and len(rows[i].prompt_ids) + len(rows[i].completions[ended[i].index(False)]) >= limit
    ]
    if len(cut) > CUT_ONE_SIDE * len(rows):
        yield finding(
            "PT-D023",
            "warning",
            f"max_length={limit} truncates only one of the two answers, in {count_of(len(cut), len(rows))}",
            where(cut),
            "the truncated answer has no end token, so the model learns when to stop instead of which answer is better.",
            "increase max_length, or remove these pairs.",
        )
    if len(rows) >= PAIRS_NEEDED and len(odd) >= SHARE_ENDING * len(rows):
        yield finding(
            "PT-D024",
            "warning",
            f"only the {'chosen' if ended[odd[0]][0] else 'rejected'} answers end with an end-of-turn token",
            where(odd),
            "the end-of-turn token alone distinguishes chosen from rejected answers, so the model learns to always stop, or "
            "to never stop.",
            "end both answers in the same way: pass messages, or strings without a template.",
        )


def check_judged(rows: Sequence[Row]) -> Finding | None:
    """Find answers that are labeled both good and bad. Rows have one completion and a ``label``.

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
        f"the same answer to the same prompt is labeled good and bad in {count_of(len(against), len(rows))}",
        where(against),
        "the two labels cancel each other. If the rows come from pairs, chosen and rejected are equal.",
        "remove these rows. If all rows are affected, check how answers and labels were created.",
    )


# Names of prompt columns in public datasets.
PROMPT_NAMES = ("question", "query", "instruction", "input", "problem", "user", "prompts", "prompt_text")


@probe("data", "PT-D037")
def prompt_left_over(context: Context) -> Iterator[Finding]:
    """Find a column that looks like the prompt, in a dataset of text pairs without a prompt column."""
    names = {name.casefold(): name for name in known_columns(context.train_dataset)}
    column = next((names[name] for name in PROMPT_NAMES if name in names), None)
    if column is None or "prompt" in names or not {"chosen", "rejected"} <= set(names):
        return
    row = next(iter(context.train_dataset), {})
    prompt, chosen = row.get(column), row.get("chosen")
    if isinstance(prompt, str) and isinstance(chosen, str) and prompt.strip() and prompt.strip() not in chosen:
        yield finding(
            "PT-D037",
            "warning",
            f"the pairs have no column 'prompt', but the column {column!r}, which is not read, looks like the prompt",
            f"row 0: {column}={prompt[:60]!r}, chosen={chosen[:60]!r}",
            "the common beginning of chosen and rejected is used as prompt, so the model is trained without the question.",
            f"rename the column: dataset = dataset.rename_column({column!r}, 'prompt').",
        )


# Pairs as text -------------------------------------------------------------------------------------------------------

# Names of score columns. The words "chosen" and "rejected" are added as a prefix or suffix, for example chosen_score and
# score_chosen.
SCORES = ("score", "rating", "reward", "score_overall")
# NEAR_DIFFERENCE is the maximum difference of nearly equal texts, as a fraction of the length of the longer text. NEAR_SHARE
# is the usual fraction of pairs with nearly equal answers in real datasets.
NEAR_DIFFERENCE, NEAR_SHARE = 0.02, 0.001


@dataclass
class PairScan:
    """Suspicious pairs of a dataset, which were found by comparing the texts of all pairs.

    Attributes:
        total: Number of pairs.
        suspects: First reason for each suspicious row. The key is the row's number.
        swapped: Rows whose pair also occurs with chosen and rejected swapped.
        contradicted: Rows whose rejected answer has the higher score.
        near: Rows whose answers are nearly equal.
        repeated: Number of pairs that repeat an earlier pair, in the same order or swapped.
        scored: Number of pairs with scores.
    """

    total: int = 0
    suspects: dict[int, str] = field(default_factory=dict)
    swapped: list[int] = field(default_factory=list)
    contradicted: list[int] = field(default_factory=list)
    near: list[int] = field(default_factory=list)
    repeated: int = 0
    scored: int = 0

    def flip_rate(self) -> tuple[float, float] | None:
        """Return a lower and an upper estimate of the fraction of flipped labels. If no labels seem to be flipped, return
        None.

        If each label is flipped with probability p, two labels of the same pair disagree with probability 2 p (1 - p).
        """
        estimates = []
        if self.scored and self.contradicted:
            estimates.append(len(self.contradicted) / self.scored)
        if self.repeated >= PAIRS_NEEDED and self.swapped:
            against = min(0.5, len(self.swapped) / 2 / self.repeated)
            estimates.append(0.5 - (0.25 - against / 2) ** 0.5)
        return (min(estimates), max(estimates)) if estimates else None

    def findings(self) -> list[Finding]:
        """Return the findings about the suspicious pairs."""
        rate = self.flip_rate()
        smoothing = f"label_smoothing={rate[1]:.2f}" if rate else "label_smoothing near the fraction of flipped labels"
        estimate = f" Estimated flip rate {_span(*rate)}." if rate else ""
        robust = (
            f", or use a loss for noisy labels: loss_type='robust' (or 'sigmoid') with {smoothing}. bad_rows='drop' drops "
            "pairs that also occur swapped."
        )
        near = self.near if len(self.near) > NEAR_SHARE * self.total else []
        return [
            finding(
                code,
                "warning",
                f"{count_of(len(rows), self.total)} {what}",
                where(rows),
                "the labels of these pairs are noise, because they contradict other pairs or scores, or because the two "
                "answers hardly differ.",
                f"look at the pairs in suspect_pairs.jsonl, and remove them{advice}",
            )
            for code, rows, what, advice in (
                ("PT-D035", self.swapped, f"appear with chosen and rejected swapped.{estimate}", robust),
                ("PT-D034", self.contradicted, f"contradict their own scores.{estimate}", robust),
                ("PT-D033", near, f"differ by at most {NEAR_DIFFERENCE:.0%} of their text.", "."),
            )
            if rows
        ]


def _span(low: float, high: float) -> str:
    return f"{100 * low:.2g} %" if round(100 * low) == round(100 * high) else f"{100 * low:.2g}-{100 * high:.2g} %"


def score_columns(columns: Iterable[str]) -> tuple[str, str] | None:
    """Return the names of the score columns of chosen and rejected answers. If there are none, return None.

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
    """Find swapped duplicates, scores that contradict the labels, and nearly equal answers among all pairs.

    Args:
        rows: Rows with ``chosen`` and ``rejected``, and optionally ``prompt``.
        scores: Names of the score columns of chosen and rejected answers.

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
        # Treat equal questions with different images as different prompts.
        prompt = (
            str([row.get(name) for name in PROMPT_COLUMNS]) if has_pictures([row]) else answers_of(row.get("prompt"))
        )
        key = (hash(prompt), *sorted((hash(chosen), hash(rejected))))
        seen.setdefault(key, []).append((index, chosen < rejected))
        if nearly_equal(chosen, rejected):
            scan.near.append(index)
    for places in seen.values():
        scan.repeated += len(places) - 1
        if len({way for _, way in places}) > 1:
            scan.swapped += [index for index, _ in places]
    scan.swapped.sort()
    for reason, indices in (
        ("the pair also appears with both sides swapped", scan.swapped),
        ("its scores contradict the label", scan.contradicted),
        ("its answers are nearly equal", scan.near),
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
    """Return whether two texts differ in only one place, by at most a fraction of the length of the longer text. Ignore
    whitespace and case.

    >>> nearly_equal("The answer to the question about the number of planets in our system is 8", "the  answer" +
    ...     " to the question about the number of planets in our system is 9")
    True
    """
    a, b = (" ".join(text.casefold().split()) for text in (first, second))
    most = int(share * max(len(a), len(b)))
    start = common_prefix(a, b)
    end = common_prefix(a[start:][::-1], b[start:][::-1])
    return max(len(a), len(b)) - start - end <= most


# Policy, reference and judge, before and during training ---------------------------------------------------------------

# Maximum difference between policy and reference at the start, in nats per token. Precomputed log-probs have different
# rounding errors, because they were computed with batches of a different shape. On a 135M model in bfloat16, the maximum
# difference was 0.063 nats per token for short answers. The first loss differed by up to 0.0085. The tolerances below are
# about two and four times these values. A reference with different weights exceeds the tolerance per token. A reference in a
# different precision exceeds the tolerance of the loss: in a test, the loss differed by 0.055.
TOLERANCE = {"float32": 1e-3, "half": 0.15}
LOSS_OFF = {"float32": 0.02, "half": 0.04}  # Maximum difference between the first sigmoid loss and ln 2.


def reference_mismatch(gap: float, *, half: bool, loss: float | None = None, given: bool = False) -> Finding | None:
    """Check that policy and reference are equal before the first update. The log-ratio should be 0, and the sigmoid loss ln
    2.

    Args:
        gap: Maximum absolute log-ratio per token of a sequence, in nats.
        half: Whether the run computes in half precision. The tolerance is then larger.
        loss: The first loss, if it is the plain sigmoid loss. Long answers can change this loss even if ``gap`` is small.
        given: Whether the user passed the reference model. A difference may then be intended.
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
        f"policy and reference differ by {gap:.2g} nats per token before the first update{seen}",
        "the first training batch",
        "the reference has other weights, another dtype or active dropout, or its precomputed log-probs are outdated.",
        "do nothing if you intend to use another model as reference. To start from the model's own weights, remove ref_model."
        if given
        else "set disable_dropout=True, recompute the precomputed columns, or pass the intended model as ref_model.",
    )


def reference_prefers_rejected(chosen: Sequence[float], rejected: Sequence[float]) -> Finding | None:
    """Check whether the reference prefers nearly all rejected answers, i.e. gives them higher summed log-probs. The labels
    may then be flipped.
    """
    if len(chosen) < PAIRS_NEEDED:
        return None
    share = sum(r > c for c, r in zip(chosen, rejected, strict=True)) / len(chosen)
    if share <= SHARE_FLIPPED:
        return None
    return finding(
        "PT-P002",
        "warning",
        f"the reference gives the rejected answer a higher likelihood in {share:.0%} of the pairs",
        f"{len(chosen)} pairs",
        "the columns may be swapped, or the chosen answers are much longer.",
        "look at some pairs with posttrain inspect. Rename the columns if they are swapped.",
    )


# Two human annotators prefer the same answer in 63 % (arXiv:2204.05862, section 2.2) to 73 % of the pairs (arXiv:2203.02155,
# section 3.4). If the agreement is below AGREES, the labels are wrong, or the criteria of the reward model differ from those
# of annotators.
AGREES, INVERTED = 0.55, 0.45


def check_agreement(scores: Mapping[int, tuple[float, float]], model: str) -> Finding | None:
    """Compute how often a reward model prefers the chosen answer. Equal scores are counted as half an agreement.

    Args:
        scores: Scores of the chosen and the rejected answer. The key is the number of the pair.
        model: Name of the reward model.

    >>> finding = check_agreement({0: (1.0, 0.0), 1: (2.0, 0.5)}, "judge")
    >>> finding.severity, finding.what
    ('info', 'judge prefers the chosen answer in 2 of 2 pairs (100 %).')
    """
    if not scores:
        return None
    agree = sum((good > bad) + (good == bad) / 2 for good, bad in scores.values())
    share = agree / len(scores)
    # Twice the standard error of the agreement rate of a random judge.
    noise = 2 * math.sqrt(0.25 / len(scores))
    why = "it agrees with the labels."
    if share < min(INVERTED, 0.5 - noise):
        why = "labels may be inverted, because it prefers the rejected answers."
    elif share < AGREES:
        why = "annotators agree more often. The labels are noisy, or this reward model uses other criteria."
    return finding(
        "PT-D036",
        "info" if share >= AGREES else "warning",
        f"{model} prefers the chosen answer in {agree:g} of {len(scores)} pairs ({100 * share:.0f} %).",
        "the pairs",
        why,
        f"look at the pairs in suspect_pairs.jsonl, for which it disagrees. If {model} is right, swap the columns chosen and "
        "rejected.",
    )


# Checks of a run's pairs ----------------------------------------------------------------------------------------

# PAIRS_JUDGED is the maximum number of pairs that the reward model scores. EXCERPT is the maximum number of characters of a
# text in suspect_pairs.jsonl.
PAIRS_JUDGED, EXCERPT = 512, 200
# Type of a pair, which consists of the row number, prompt, chosen answer and rejected answer.
Pair = tuple[int, Any, Any, Any]


class PairWatch:
    """Checks of a run's pairs: agreement of a reward model with the labels, and equality of policy and reference.

    Args:
        args: Config of the method (`AnswerConfig`).
        checks: Checks of the run. They report the findings.
        tokenizer: Tokenizer of the policy.
        branches: Columns with the answers.
        compared: Whether the loss compares policy and reference.
        given: Whether the user passed the reference model. Otherwise the reference is a copy of the policy.
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

    # Agreement with a reward model ------------------------------------------------------------------------------------

    def agreement(self, raw: object, accelerator: Accelerator) -> None:
        """Score up to 512 pairs with the reward model in ``pair_reward_model``. All ranks must call this method."""
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
        """Yield raw pairs. The pairs are evenly spaced over a dataset, or the first pairs of a stream."""
        from posttrain.data.preference import maybe_extract_prompt

        if not {"chosen", "rejected"} <= set(raw.column_names or ()):
            raise ConfigError(
                f"pair_reward_model={self.args.pair_reward_model!r} needs the columns 'chosen' and 'rejected', but the training "
                f"set has the columns {raw.column_names}. Fix: remove pair_reward_model, or use a dataset with pairs."
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
        """Score the pairs of this process. The pairs are distributed over all processes."""
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
        """Check that policy and reference are equal before the first update. Later calls have no effect.

        Args:
            batch: The first micro-batch.
            log_ratio: Function that returns the log-ratios ``(S,)`` of policy and reference. Log-probs are summed over
                tokens in the same way as in the loss.
            half: Whether the policy computes in half precision.
            loss: Mean loss, if it must be ln 2 before the first update. Otherwise None.
        """
        if self._begun:
            return
        self._begun = True
        length = sequence_lengths(*batch.by_sequence)
        gap = float((log_ratio().abs() / length).max())
        with self.checks.preflight.record_check("first_batch", ("PT-P001",)):
            self.checks.report([reference_mismatch(gap, half=half, loss=loss, given=self.given)])


def _text(value: object) -> str:
    return answers_of(value)[:EXCERPT]
