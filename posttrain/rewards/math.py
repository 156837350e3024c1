"""Rewards for a right answer to a mathematical question."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from posttrain.errors import ConfigError, RewardError, check_choice
from posttrain.integrations import is_available, math_verify, require
from posttrain.rewards.format import completion_text, text_with_reasoning
from posttrain.rewards.pool import BoundedProcesses, WithoutMain

__all__ = [
    "StringMatchReward",
    "accuracy_reward",
    "answer_box",
    "answers_match",
    "bare",
    "boxed",
    "normalize_answer",
    "reasoning_accuracy_reward",
    "string_match_reward",
]

logger = logging.getLogger(__name__)


Mode = Literal["auto", "exact", "number", "percent", "text"]
MODES = ("auto", "exact", "number", "percent", "text")

WRAPPERS = [
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"^\$\$(.*)\$\$$", re.S), r"\1"),
    (re.compile(r"^\$([^$]*)\$$", re.S), r"\1"),
    (re.compile(r"^\\\((.*)\\\)$", re.S), r"\1"),
    (re.compile(r"^\\\[(.*)\\\]$", re.S), r"\1"),
    (re.compile(r"^\*\*(.*)\*\*$", re.S), r"\1"),
    (re.compile(r'^"(.*)"$', re.S), r"\1"),
    (re.compile(r"^\(([A-Za-z])\)$"), r"\1"),  # A choice: (B) is B.
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!;]|\\,(?!\d)"), ""),
]
# What names something is not computed with: 007 is not 7, a date no difference, a telephone number no subtraction.
IDENTIFIER = re.compile(
    r"0\d+(?:[-/:.]\d+)*|\d+(?:[-/.]\d+){2,}|\d{3,}-\d{4,}|(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z0-9][\w-]*"
)
LISTED = re.compile(r"[\s$]*(?:,|,?\s*and|,?\s*or)[\s$]*")  # Between two boxes: a list of answers.
FORMULA = re.compile(r"[\\^_=+*/(){}\[\]]|\d")
# Words are not formulas: math-verify would read them as products (yes = sey) or drop them (5 km = 5).
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
LONGEST_FORMULA = 1000  # Characters; an answer beyond is prose.

DIGITS = r"(?:\d{1,3}(?:[,\s]\d{3})+|\d+)(?:\.\d+)?|\.\d+"
DECIMAL = re.compile(rf"({DIGITS})(?:e([+-]?\d{{1,3}}))?", re.I)
RATIO = re.compile(rf"({DIGITS})\s*/\s*({DIGITS})|\\[dt]?frac\s*\{{(-?\d+)\}}\s*\{{(\d+)\}}")
LONGEST_NUMBER = 400  # Characters; beyond, a "number" is an attack on the arithmetic.
CLOSE = Fraction(1, 10**6)


def parse_number(text: str) -> tuple[Fraction, bool] | None:
    r"""Read a text that is one number and nothing else: its exact value, and whether a percent sign follows it.

    >>> parse_number("1,000.5"), parse_number(r"\frac{3}{4}"), parse_number("50%"), parse_number("5 apples")
    ((Fraction(2001, 2), False), (Fraction(3, 4), False), (Fraction(50, 1), True), None)
    """
    if len(text) > LONGEST_NUMBER:
        return None
    body, percent = text.strip().replace("−", "-"), False
    if body.endswith("%"):
        body, percent = body[:-1].rstrip("\\ "), True
    sign = -1 if body.startswith("-") else 1
    body = body.removeprefix("-").removeprefix("+").strip()
    for space in ("{,}", r"\,"):
        body = body.replace(space, ",")
    if found := DECIMAL.fullmatch(body):
        return sign * _exact(found[1]) * Fraction(10) ** int(found[2] or 0), percent
    if found := RATIO.fullmatch(body):
        top, bottom = (_exact(found[i] or found[i + 2]) for i in (1, 2))
        return (sign * top / bottom, percent) if bottom else None
    return None


def _exact(digits: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", digits))


def _same_number(answer: tuple[Fraction, bool], gold: tuple[Fraction, bool], percent: bool) -> bool:
    """Equal within ``max(1e-6, 1e-6 |gold|)``; ``50%`` is also ``0.5`` if the reference has the sign, or with ``percent``."""
    (value, signed), (wanted, gold_signed) = answer, gold
    if _close(value, wanted):
        return True
    if gold_signed and not signed:
        return _close(value, wanted / 100)
    return percent and signed and not gold_signed and _close(value / 100, wanted)


def _close(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= max(CLOSE, abs(b) * CLOSE)


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, braces balanced; None without one.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    end = _closing(text, start + 6) if start >= 0 else None
    return None if end is None else text[start + 7 : end]


def answer_box(text: str) -> str | None:
    r"""The content of the last box; None where it only continues a list of boxes.

    >>> answer_box(r"first \boxed{1}, so in the end \boxed{2}"), answer_box(r"\boxed{1} or \boxed{2}")
    ('2', None)
    """
    start = text.rfind("\\boxed{")
    before = text.rfind("\\boxed{", 0, max(start, 0))
    end = _closing(text, before + 6) if before >= 0 else None
    return None if end is not None and LISTED.fullmatch(text, end + 1, start) else boxed(text)


def _closing(text: str, opening: int) -> int | None:
    """The position of the brace that closes the one at ``opening``."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None


def bare(answer: Any) -> str:
    """An answer without its box, dollar signs, formatting and final period."""
    text = str(answer).strip()
    before = None
    while text != before:
        before = text
        if text.startswith("\\boxed{") and _closing(text, 6) == len(text) - 1:
            text = text[7:-1].strip()
        for pattern, replacement in WRAPPERS:
            text = pattern.sub(replacement, text).strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
    return text


def _is_identifier(text: str) -> bool:
    return IDENTIFIER.fullmatch(text) is not None and (text.startswith("0") or parse_number(text) is None)


def normalize_answer(text: Any) -> str:
    r"""One spelling for equal answers, for use in exact-match rewards.

    Numbers become their shortest exact form (a percent sign is kept), identifiers stay as they are, other text loses its
    case and doubled spaces.

    >>> [normalize_answer(t) for t in ("42.0", r"\boxed{1,000}", "1/3", "0.50", "007", "Yes.", "50 %")]
    ['42', '1000', '1/3', '0.5', '007', 'yes', '50%']
    """
    plain = bare(text)
    if _is_identifier(plain):
        return plain
    number = parse_number(plain)
    if number is None:
        return re.sub(r"\s*([,;:=+*/^()\[\]{}])\s*", r"\1", " ".join(plain.casefold().split()))
    value, percent = number
    # A fraction with up to 12 decimal places is written with them.
    places = next((n for n in range(13) if (value * 10**n).denominator == 1), None)
    shown = str(value) if places is None else f"{Decimal(int(value * 10**places)).scaleb(-places):f}"
    return shown + ("%" if percent else "")


def answers_match(pred: Any, gold: Any, mode: Mode = "auto") -> bool | None:
    r"""Whether an answer equals the reference.

    ``auto`` compares identifiers exactly, numbers by value (``|a - b| <= max(1e-6, 1e-6 |b|)``), formulas by math-verify
    where it is installed (``posttrain[math]``), and the rest as text without case. ``50%`` is ``0.5`` only when
    the reference has the percent sign, or in mode ``percent``. Units and number words are text.

    Args:
        pred: The answer; None or empty matches nothing.
        gold: The reference.
        mode: ``auto``, ``exact`` (identifiers: only boxes and formatting are removed), ``number``, ``percent`` or ``text``.

    Returns:
        None when the reference says nothing (empty, or no number in a number mode): it can score no answer.

    Raises:
        ConfigError: An unknown mode.

    >>> answers_match("42.0", "42"), answers_match("1,000", "1000.0"), answers_match("7", "007")
    (True, True, False)
    >>> answers_match("x", "") is None
    True
    """
    check_choice("mode", mode, MODES)
    reference, answer = ("" if value is None else bare(value) for value in (gold, pred))
    number = None if mode in ("exact", "text") else parse_number(reference)
    if not reference or (mode in ("number", "percent") and number is None):
        return None
    if not answer:
        return False
    if mode == "exact" or (mode == "auto" and _is_identifier(reference)):
        return answer == reference
    given = parse_number(answer)
    if number is not None and given is not None:
        return _same_number(given, number, mode == "percent")
    if mode in ("number", "percent"):
        return False
    return normalize_answer(answer) == normalize_answer(reference) or (mode == "auto" and _formulas(answer, reference))


def _formulas(answer: str, gold: str) -> bool:
    """Whether two formulas are equal, where math-verify is installed to compare them."""
    for text in (answer, gold):
        if len(text) > LONGEST_FORMULA or not FORMULA.search(text) or WORD.search(text):
            return False
    if not (is_available("math_verify") and is_available("pebble")):
        return False
    verdict = in_time(math_verify.compare, [(f"${gold}$", f"\\boxed{{{answer}}}", False)])[0]
    return isinstance(verdict, tuple) and verdict[1]


class StringMatchReward:
    r"""1 where the answer equals the reference in a column, 0 where not, None where the column says nothing.

    Args:
        column: The dataset column with the reference.
        extract: A function, or a regular expression whose last match (its first group) is the answer. None takes the
            last ``\boxed{}`` (unless it continues a list: "1 or 2" is no answer), or else the whole text.
        mode: See `answers_match`.

    Against the reference ``42``: ``\boxed{42.0}`` 1, ``42.0`` 1, ``It is 42`` 0, ``\boxed{42} or \boxed{41}`` 0;
    an empty reference gives None.
    """

    __name__ = "string_match_reward"

    def __init__(
        self, column: str = "answer", extract: Callable[[str], str | None] | str | None = None, mode: Mode = "auto"
    ) -> None:
        check_choice("mode", mode, MODES)
        if isinstance(extract, str):
            try:
                re.compile(extract)
            except re.error as error:
                raise ConfigError(f"extract={extract!r} is not a regular expression: {error}.") from error
        self.column, self.extract = column, extract
        self.mode: Mode = mode

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """One number a completion."""
        if self.column not in columns:
            raise ConfigError(f"string_match_reward needs the column {self.column!r}; it got {sorted(columns)}.")
        rows = zip(completions, columns[self.column], strict=True)
        matches = [answers_match(self._answer(completion_text(c)), gold, self.mode) for c, gold in rows]
        return [None if match is None else float(match) for match in matches]

    def _answer(self, text: str) -> str | None:
        if self.extract is None:
            inside = answer_box(text)
            return text if inside is None else inside
        if callable(self.extract):
            return self.extract(text)
        found = list(re.finditer(self.extract, text))
        return (found[-1][1] if found[-1].re.groups else found[-1][0]) if found else None


def string_match_reward(
    column: str = "answer", extract: Callable[[str], str | None] | str | None = None, mode: Mode = "auto"
) -> StringMatchReward:
    r"""See `StringMatchReward`.

    >>> string_match_reward("gold", extract=r"is (\d+)")(completions=["It is 42.", "7"], gold=["42.0", "7"])
    [1.0, 0.0]
    """
    return StringMatchReward(column, extract, mode)


UNPARSEABLE, SKIPPED, INCOMPLETE, TIMED_OUT = "[unparseable]", "[skipped]", "[incomplete reasoning]", "[timed out]"
# For one formula.
SECONDS = 5.0
# Words are no formulas: read as one, "yes" is the product y e s and equals "sey".
WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*", re.S)
# Batches without one readable answer before the expected form is explained.
PATIENCE = 3
_silent_batches = 0
_warned: set[str] = set()


class Verdict(NamedTuple):
    """The reward of one completion (None: the reference cannot be read), and how reference and answer were parsed."""

    reward: float | None
    gold: str
    answer: str


def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any],
    log_extra: Callable[[str, list], None] | None = None,
    *,
    lenient: bool = False,
    **_: Any,
) -> list[float | None]:
    r"""1 where the boxed (or otherwise announced) answer equals the reference mathematically, else 0.

    Args:
        completions: n strings or lists of messages; the last assistant message with content is judged.
        solution: n references: a formula, a number, or a text that ends in one.
        log_extra: Receives ``solution``, ``gold_parsed`` and ``answer_parsed``.
        lenient: Take an answer that is not announced ("The answer is 42." or "42").

    Returns:
        1.0, 0.0, or None where the reference cannot be read. Against ``42``: ``\boxed{42.0}`` and ``The final answer is
        $42$`` 1, ``The answer is 42.`` 0 (1 when lenient), ``\boxed{41} or \boxed{42}`` 0 (a set). Against ``0.5``:
        ``\boxed{50\%}`` and ``\boxed{1/2}`` 1. Against ``yes``: ``\boxed{Yes}`` 1, ``\boxed{no}`` 0.

    Raises:
        MissingDependencyError: math-verify is not installed.

    >>> accuracy_reward([r"\boxed{0.5}", "0.5"], [r"\frac{1}{2}", "1/2"])  # doctest: +SKIP
    [1.0, 0.0]
    """
    texts = [completion_text(completion) for completion in completions]
    verdicts = _judge(texts, solution, lenient, "accuracy_reward")
    _explain_silence(texts, verdicts)
    return _logged(verdicts, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **_: Any,
) -> list[float | None]:
    r"""`accuracy_reward` of the text after the reasoning; 0 where the reasoning never ends.

    Args:
        completions: n strings or lists of messages.
        solution: n references.
        reasoning_delimiters: Texts that end the reasoning, by default ``["</think>"]``; the last occurrence counts.
        log_extra: As in `accuracy_reward`.

    Returns:
        1.0, 0.0, or None where the reference cannot be read and the reasoning did end. Against ``42``:
        ``why</think>\boxed{42}`` 1, ``<think>\boxed{42}</think>so`` 0, ``\boxed{42}`` 0 (no delimiter).

    Raises:
        MissingDependencyError: math-verify is not installed.

    >>> reasoning_accuracy_reward([r"<think>\boxed{1}</think>\boxed{2}", r"\boxed{2}"], ["2", "2"])  # doctest: +SKIP
    [1.0, 0.0]
    """
    texts = [text_with_reasoning(completion) for completion in completions]
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    # Where the answer begins; -1 without a delimiter.
    starts = [max((t.rfind(d) + len(d) for d in delimiters if d in t), default=-1) for t in texts]
    answers = [text[max(start, 0) :] for text, start in zip(texts, starts, strict=True)]
    verdicts = _judge(answers, solution, False, "reasoning_accuracy_reward")
    incomplete = Verdict(0.0, INCOMPLETE, INCOMPLETE)
    verdicts = [incomplete if start < 0 else v for v, start in zip(verdicts, starts, strict=True)]
    return _logged(verdicts, solution, log_extra)


def _judge(texts: Sequence[str], solution: Sequence[Any], lenient: bool, name: str) -> list[Verdict]:
    for package in ("math_verify", "pebble"):
        if not is_available(package):
            require(package, name)
    if len(texts) != len(solution):
        raise RewardError(f"{len(texts)} completions and {len(solution)} solutions; there must be one each.")
    golds = ["" if gold is None else str(gold).strip() for gold in solution]
    formulas = list(dict.fromkeys(gold for gold in golds if gold and not WORDS.fullmatch(bare(gold))))
    # A reference that takes too long to parse is compared as text.
    found = in_time(math_verify.show_gold, [(gold,) for gold in formulas])
    parsed = {gold: shown for gold, shown in zip(formulas, found, strict=True) if shown and shown != TIMED_OUT}
    rows = [i for i, gold in enumerate(golds) if gold in parsed]
    compared = dict(zip(rows, in_time(math_verify.compare, [(golds[i], texts[i], lenient) for i in rows]), strict=True))
    verdicts = []
    for i, (text, gold) in enumerate(zip(texts, golds, strict=True)):
        if i not in compared:
            verdicts.append(_judge_words(text, gold, lenient))
            continue
        answer, equal = (TIMED_OUT, False) if compared[i] == TIMED_OUT else compared[i] or ("", False)
        # The very text of the reference is right, also where the strict reading of answers refuses it (\frac13).
        same = (answer_box(text) or "").strip() == gold
        verdicts.append(Verdict(float(equal or same), parsed[gold], answer or UNPARSEABLE))
    return verdicts


def _judge_words(text: str, gold: str, lenient: bool) -> Verdict:
    """For a reference that is a word, not a formula; or that says nothing."""
    if not gold:
        return Verdict(None, UNPARSEABLE, SKIPPED)
    answer = answer_box(text)
    answer = text if answer is None and lenient else answer
    match = answers_match(answer, gold)
    shown = UNPARSEABLE if answer is None else normalize_answer(answer)
    return Verdict(None if match is None else float(match), normalize_answer(gold), shown)


def in_time(function: Callable, calls: Sequence[tuple]) -> list[Any]:
    """``function(*call)`` for each call, in a process; `TIMED_OUT` where it was killed, None where it raised."""
    expired = require("pebble", "math-verify").ProcessExpired
    results: list[Any] = []
    for future in _processes.submit(function, calls, SECONDS):
        try:
            results.append(future.result())
        except (TimeoutError, expired):
            results.append(TIMED_OUT)
        except BrokenProcessPool as error:
            raise RewardError(
                f"the processes that compare formulas ended ({error}). Fix: free memory, or try `{sys.executable} -c 'import "
                "math_verify'`."
            ) from error
        except Exception:
            results.append(None)
    return results


_processes = BoundedProcesses(
    max(1, min(4, (os.cpu_count() or 1) // 2)), math_verify.start_process, context=WithoutMain()
)


def _explain_silence(texts: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    """Warn after three batches in which no answer could be read: the model does not write the expected form."""
    global _silent_batches
    judged = [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.answer != SKIPPED]
    silent = judged and all(verdict.answer in (UNPARSEABLE, SKIPPED) for verdict in verdicts)
    _silent_batches = _silent_batches + 1 if silent else 0
    if _silent_batches == PATIENCE:
        hint = " Its reasoning is in <think>: use reasoning_accuracy_reward." if "<think>" in judged[0] else ""
        logger.warning(
            "accuracy_reward found no answer in any completion of %d batches. It reads \\boxed{42} or 'The final "
            "answer is $42$'; the model writes: %r.%s Fix: ask for that form in the prompt, or pass lenient=True.",
            PATIENCE, judged[0][-200:], hint,
        )  # fmt: skip


def _logged(
    verdicts: Sequence[Verdict], solution: Sequence[Any], log_extra: Callable[[str, list], None] | None
) -> list[float | None]:
    """The rewards. Warns once of comparisons that took too long, and once of references that cannot be read."""
    late, unread = (sum(verdict.answer == mark for verdict in verdicts) for mark in (TIMED_OUT, SKIPPED))
    if late:
        _warn_once(
            "%d of %d answers of this batch were not compared within %g s and count as wrong (answer_parsed is %r): either "
            "formulas that explode, or a machine too busy to compare them.", late, len(verdicts), SECONDS, TIMED_OUT,
        )  # fmt: skip
    if unread > 0.05 * len(verdicts):
        _warn_once(
            "%d of %d references of this batch cannot be read; their rows are not scored.", unread, len(verdicts)
        )
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
        log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
    return [verdict.reward for verdict in verdicts]


def _warn_once(message: str, *values: Any) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message, *values)
