"""Rewards for a right answer to a mathematical question."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from posttrain.errors import ConfigError, RewardError, check_choice
from posttrain.integrations import is_available
from posttrain.integrations.math_verify import (
    SECONDS,
    TIMED_OUT,
    compare_formulas,
    need_math_verify,
    parse_golds,
)
from posttrain.rewards.format import completion_text, text_with_reasoning

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

DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
DECIMAL = re.compile(
    rf"(?P<mantissa>{DIGITS})(?:\s*(?:e|(?:[x*×·]|\\times|\\cdot)\s*10\s*\^)\s*\{{?(?P<power>[+-]?\d+)\}}?)?", re.I
)
RATIO = re.compile(rf"(?:(?P<whole>\d+)\s+)?(?P<top>{DIGITS})\s*/\s*(?P<bottom>{DIGITS})")
LATEX_RATIO = re.compile(r"(?P<whole>\d+)?\s*\\[dt]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(-?\d+)\}|(\d))")
THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|\{,\}|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))")
# Beyond these a "number" is an attack on the arithmetic.
LONGEST_NUMBER, HIGHEST_POWER = 400, 400
CLOSE = Fraction(1, 10**6)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written: its exact value before a percent sign is applied, and whether there is one."""

    value: Fraction
    percent: bool = False


def parse_number(text: str) -> Number | None:
    r"""Read a text that is one number and nothing else; None when it is not.

    >>> parse_number("1,000.5").value, parse_number("-1 1/2").value, parse_number(r"\frac{3}{4}").value
    (Fraction(2001, 2), Fraction(-3, 2), Fraction(3, 4))
    >>> parse_number("50%"), parse_number("5 apples")
    (Number(value=Fraction(50, 1), percent=True), None)
    """
    if len(text) > LONGEST_NUMBER:
        return None
    body = text.strip().replace("−", "-").replace("–", "-")
    body, percent = (body.rstrip("%").rstrip("\\ "), True) if body.endswith("%") else (body, False)
    sign = -1 if body.startswith("-") else 1
    body = body.removeprefix("-").removeprefix("+").lstrip()
    value = _value(body)
    return None if value is None else Number(sign * value, percent)


def _value(text: str) -> Fraction | None:
    if found := DECIMAL.fullmatch(THIN_SPACE.sub(",", text)):
        power = int(found["power"] or 0)
        mantissa = Fraction(found["mantissa"].replace(",", ""))
        return mantissa * Fraction(10) ** power if abs(power) <= HIGHEST_POWER else None
    if found := RATIO.fullmatch(text):
        top, bottom = (Fraction(found[side].replace(",", "")) for side in ("top", "bottom"))
    elif found := LATEX_RATIO.fullmatch(text):
        top, bottom = Fraction(found[2] or found[3]), Fraction(found[4] or found[5])
    else:
        return None
    return int(found["whole"] or 0) + top / bottom if bottom else None


def _same_number(said: Number, gold: Number, percent: bool) -> bool:
    """Equal within ``max(1e-6, 1e-6 |gold|)``; ``50%`` is also ``0.5`` if the reference has the sign, or with ``percent``."""
    if _close(said.value, gold.value):
        return True
    if gold.percent and not said.percent:
        return _close(said.value, gold.value / 100)
    return percent and said.percent and not gold.percent and _close(said.value / 100, gold.value)


def _close(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= max(CLOSE, abs(b) * CLOSE)


def boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}``, braces balanced; None without one.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    end = _closing(text, start + 6) if start >= 0 else None
    return None if end is None else text[start + 7 : end]


def answer_box(text: str) -> str | None:
    r"""The box that is the answer: the last one, but None where it only continues a list of boxes.

    >>> answer_box(r"first \boxed{1}, so in the end \boxed{2}"), answer_box(r"\boxed{1} or \boxed{2}")
    ('2', None)
    """
    start = text.rfind("\\boxed{")
    before = text.rfind("\\boxed{", 0, max(start, 0))
    end = _closing(text, before + 6) if before >= 0 else None
    return None if end is not None and LISTED.fullmatch(text, end + 1, start) else boxed(text)


def _closing(text: str, opening: int) -> int | None:
    """Where the brace at ``opening`` closes."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None


def bare(answer: Any) -> str:
    """Without box, dollar signs, formatting, and the period at its end."""
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
    value, shift = number.value, 0
    while shift < 12 and (value * 10**shift).denominator != 1:
        shift += 1
    if (value * 10**shift).denominator != 1:
        shown = str(value)
    else:
        digits = f"{abs(int(value * 10**shift)):0{shift + 1}d}"
        shown = ("-" if value < 0 else "") + (f"{digits[:-shift]}.{digits[-shift:]}" if shift else digits)
    return shown + ("%" if number.percent else "")


def answers_match(pred: Any, gold: Any, mode: Mode = "auto") -> bool | None:
    r"""Whether an answer equals the reference.

    ``auto`` compares identifiers exactly, numbers by value (``|a - b| <= max(1e-6, 1e-6 |b|)``), formulas symbolically
    where math-verify is installed (``posttrain[math]``), and the rest as text without case. ``50%`` is ``0.5`` only when
    the reference has the percent sign, or in mode ``percent``. Units and number words are text.

    Args:
        pred: The answer; None or empty matches nothing.
        gold: The reference.
        mode: ``auto``, ``exact`` (identifiers: only the wrapping is taken off), ``number``, ``percent`` or ``text``.

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
    reference = bare(gold) if gold is not None else ""
    if not reference:
        return None
    number = None if mode in ("exact", "text") else parse_number(reference)
    if mode in ("number", "percent") and number is None:
        return None
    said = bare(pred) if pred is not None else ""
    if not said:
        return False
    if mode == "exact" or (mode == "auto" and _is_identifier(reference)):
        return said == reference
    given = parse_number(said) if number is not None else None
    if number is not None and given is not None:
        return _same_number(given, number, mode == "percent")
    if mode in ("number", "percent"):
        return False
    return normalize_answer(said) == normalize_answer(reference) or (mode == "auto" and _symbolically(said, reference))


def _symbolically(said: str, gold: str) -> bool:
    """Formulas that math-verify can compare, where it is installed."""
    for text in (said, gold):
        if len(text) > LONGEST_FORMULA or not FORMULA.search(text) or WORD.search(text):
            return False
    if not (is_available("math_verify") and is_available("pebble")):
        return False
    return compare_formulas([(f"${gold}$", f"\\boxed{{{said}}}")])[0][1]


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


UNPARSEABLE, SKIPPED, INCOMPLETE = "[unparseable]", "[skipped]", "[incomplete reasoning]"
# Words are no formulas: read as one, "yes" is the product y e s and equals "sey".
WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*", re.S)
PATIENCE = 3  # Batches without one readable answer before the expected form is explained.
_silent_batches = 0


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
        completions: Strings or lists of messages; the last assistant message that says something is judged.
        solution: References: a formula, a number, or a text that ends in one. None is given where one says nothing.
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
    need_math_verify("accuracy_reward")
    _check_rows(completions, solution)
    texts = [completion_text(completion) for completion in completions]
    rewards, golds, answers = _judge(texts, solution, lenient)
    _watch(texts, answers)
    _log(log_extra, solution, golds, answers)
    return rewards


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **_: Any,
) -> list[float | None]:
    r"""`accuracy_reward` of what follows the reasoning; 0 where the reasoning never ends.

    Args:
        completions: Strings or lists of messages.
        solution: References.
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
    need_math_verify("reasoning_accuracy_reward")
    _check_rows(completions, solution)
    delimiters = list(reasoning_delimiters) if reasoning_delimiters is not None else ["</think>"]
    ends = [_after(text_with_reasoning(completion), delimiters) for completion in completions]
    done = [i for i, end in enumerate(ends) if end is not None]
    judged = _judge([str(ends[i]) for i in done], [solution[i] for i in done], lenient=False)
    rewards: list[float | None] = [0.0] * len(ends)
    golds, answers = [INCOMPLETE] * len(ends), [INCOMPLETE] * len(ends)
    for i, reward, gold, answer in zip(done, *judged, strict=True):
        rewards[i], golds[i], answers[i] = reward, gold, answer
    _tell(judged[2])
    _log(log_extra, solution, golds, answers)
    return rewards


def _check_rows(completions: Sequence[Any], solution: Sequence[Any]) -> None:
    if len(completions) != len(solution):
        raise RewardError(f"{len(completions)} completions and {len(solution)} solutions; there must be one each.")


def _after(text: str, delimiters: Sequence[str]) -> str | None:
    ends = [text.rfind(delimiter) + len(delimiter) for delimiter in delimiters if delimiter in text]
    return text[max(ends) :] if ends else None


def _judge(
    texts: Sequence[str], solution: Sequence[Any], lenient: bool
) -> tuple[list[float | None], list[str], list[str]]:
    """Rewards, and what was read in references and answers."""
    golds = ["" if gold is None else str(gold).strip() for gold in solution]
    parsed = parse_golds([gold for gold in golds if gold and not _is_words(gold)])
    rewards: list[float | None] = [None] * len(texts)
    shown, answers = [UNPARSEABLE] * len(texts), [SKIPPED] * len(texts)
    formulas = [i for i, gold in enumerate(golds) if parsed.get(gold)]
    verdicts = compare_formulas([(golds[i], texts[i]) for i in formulas], lenient=lenient)
    for i, (answer, equal) in zip(formulas, verdicts, strict=True):
        # The very text of the reference is right, also where the strict reading of answers refuses it (\frac13).
        inside = answer_box(texts[i])
        same = inside is not None and bool(golds[i]) and inside.strip() == golds[i]
        rewards[i], shown[i] = float(equal or same), str(parsed[golds[i]])
        answers[i] = answer if answer is not None else UNPARSEABLE
    for i, gold in enumerate(golds):
        if gold and rewards[i] is None:
            _judge_words(i, texts[i], gold, lenient, (rewards, shown, answers))
    return rewards, shown, answers


def _is_words(gold: str) -> bool:
    return WORDS.fullmatch(bare(gold)) is not None


def _judge_words(i: int, text: str, gold: str, lenient: bool, into: tuple[list, list, list]) -> None:
    """A reference that is no formula: a word."""
    rewards, shown, answers = into
    said = answer_box(text)
    if said is None and lenient:
        said = text
    match = answers_match(said, gold)
    rewards[i] = None if match is None else float(match)
    shown[i] = normalize_answer(gold)
    answers[i] = UNPARSEABLE if said is None else normalize_answer(said)


def _watch(texts: Sequence[str], answers: Sequence[str]) -> None:
    """Say what is wrong when no answer could ever be read, or references cannot."""
    global _silent_batches
    judged = [i for i, answer in enumerate(answers) if answer != SKIPPED]
    _silent_batches = _silent_batches + 1 if judged and all(answers[i] == UNPARSEABLE for i in judged) else 0
    if _silent_batches == PATIENCE:
        sample = texts[judged[0]]
        hint = (
            " Its reasoning is in <think>: reasoning_accuracy_reward may be what you want."
            if "<think>" in sample
            else ""
        )
        logger.warning(
            "accuracy_reward found no answer in any completion of %d batches. It reads \\boxed{42} or 'The final "
            "answer is $42$'; the model writes: %r.%s Ask for that form in the prompt, or pass lenient=True.",
            PATIENCE, sample[-200:], hint,
        )  # fmt: skip
    _tell(answers)


def _tell(answers: Sequence[str]) -> None:
    """Say once that references cannot be read, and once that comparisons were given up."""
    late = sum(answer == TIMED_OUT for answer in answers)
    if late and "late" not in _told:
        _told.add("late")
        logger.warning(
            "%d of %d answers of this batch were not compared within %g s and count as wrong (answer_parsed is %r): either "
            "formulas that explode, or a machine too busy to compare them.", late, len(answers), SECONDS, TIMED_OUT,
        )  # fmt: skip
    missing = sum(answer == SKIPPED for answer in answers)
    if missing > 0.05 * len(answers) and "gold" not in _told:
        _told.add("gold")
        logger.warning(
            "%d of %d references of this batch cannot be read; their rows are not scored.", missing, len(answers)
        )


_told: set[str] = set()


def _log(log_extra: Callable[[str, list], None] | None, solution: Sequence[Any], golds: list, answers: list) -> None:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", golds)
        log_extra("answer_parsed", answers)
