"""Whether two answers are the same, however they are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from posttrain.errors import ConfigError, check_choice
from posttrain.integrations import is_available
from posttrain.rewards.format import completion_text
from posttrain.rewards.numbers import parse_number, same_number
from posttrain.rewards.symbolic import compare

__all__ = [
    "StringMatchReward",
    "answer_box",
    "answers_match",
    "bare",
    "boxed",
    "normalize_answer",
    "string_match_reward",
]

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
LONGEST_FORMULA = 1000  # Characters; an answer beyond is prose.


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

    Numbers become their shortest exact form (a unit is dropped, a percent sign kept), identifiers stay as they are,
    other text loses its case and doubled spaces.

    >>> [normalize_answer(t) for t in ("42.0", r"\boxed{1,000}", "forty-two", "1/3", "0.50", "007", "Yes.", "50 %")]
    ['42', '1000', '42', '1/3', '0.5', '007', 'yes', '50%']
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
    where math-verify is installed, and the rest as text without case. ``50%`` is ``0.5`` only when the reference has
    the percent sign, or in mode ``percent``.

    Args:
        pred: The answer; None or empty matches nothing.
        gold: The reference.
        mode: ``auto``, ``exact`` (identifiers: only the wrapping is taken off), ``number``, ``percent`` or ``text``.

    Returns:
        None when the reference says nothing (empty, or no number in a number mode): it can score no answer.

    Raises:
        ConfigError: An unknown mode.

    >>> answers_match("forty-two", "42"), answers_match("1,000", "1000.0"), answers_match("7", "007")
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
        return same_number(given, number, percent=mode == "percent")
    if mode in ("number", "percent"):
        return False
    return normalize_answer(said) == normalize_answer(reference) or (mode == "auto" and _symbolically(said, reference))


def _symbolically(said: str, gold: str) -> bool:
    """Formulas that math-verify can compare; words are not formulas (it reads them as products: yes = sey)."""
    if max(len(said), len(gold)) > LONGEST_FORMULA or not (FORMULA.search(said) and FORMULA.search(gold)):
        return False
    if not is_available("math_verify"):
        return False
    return compare([(f"${gold}$", f"\\boxed{{{said}}}")])[0].equal


class StringMatchReward:
    r"""1 where the answer equals the reference in a column, 0 where not, None where the column says nothing.

    Args:
        column: The dataset column with the reference.
        extract: A function, or a regular expression whose last match (its first group) is the answer. None takes the
            last ``\boxed{}`` (unless it continues a list: "1 or 2" is no answer), or else the whole text.
        mode: See `answers_match`.

    Against the reference ``42``: ``\boxed{42.0}`` 1, ``forty-two`` 1, ``It is 42`` 0, ``\boxed{42} or \boxed{41}`` 0;
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
