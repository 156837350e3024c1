"""Does a reward function compare answers by their spelling? Its verdicts against `answers_match`, on a few rows."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.rewards.answers import answer_box, answers_match, normalize_answer
from posttrain.rewards.format import completion_text

__all__ = ["Disagreement", "audit_answers", "said_answer"]

REFERENCES = ("answer", "solution", "ground_truth", "target")
SAMPLES = 64
SHORT = 60  # Characters of a completion that may be nothing but an answer.
ANNOUNCED = re.compile(r"(?:answer\s*(?:is|:)|<answer>|####)\s*(.+?)\s*(?:</answer>|\.?\s*$)", re.I | re.M)
ENOUGH = 2  # One odd row is an accident.


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How often a reward function and `answers_match` judge an answer differently.

    Attributes:
        column: Reference column that was compared with.
        judged: Rows that both could judge.
        missed: (answer, reference) pairs that are equal and were given nothing.
        given: Pairs that are unequal and were given as much as a right answer.
    """

    column: str
    judged: int
    missed: list[tuple[str, str]]
    given: list[tuple[str, str]]

    @property
    def share(self) -> float:
        """Rows judged differently, of those judged."""
        return (len(self.missed) + len(self.given)) / max(self.judged, 1)

    def describe(self, name: str) -> str | None:
        """A sentence when there are enough of them, with three examples."""
        kind = "0" if len(self.missed) >= len(self.given) else "a right answer's reward"
        pairs, relation = (self.missed, "look equal to") if kind == "0" else (self.given, "differ from")
        if len(pairs) < ENOUGH:
            return None
        examples = ", ".join(f"{said!r} vs {gold!r}" for said, gold in dict.fromkeys(pairs[:3]))
        return (
            f"{name} scored {kind} for {len(pairs)} of {self.judged} answers that {relation} the reference in "
            f"{self.column!r}, e.g. {examples}. Use posttrain.rewards.answers_match."
        )


def said_answer(completion: Any) -> str | None:
    r"""The answer in a completion: the last box, what is announced as one, or a text so short that it is one.

    >>> said_answer(r"so \boxed{42}"), said_answer("The answer is 7."), said_answer("42.0")
    ('42', '7', '42.0')
    """
    text = completion_text(completion).rpartition("</think>")[2].strip()
    box = answer_box(text)
    if box is not None:
        return box
    announced = ANNOUNCED.findall(text)
    if announced:
        return announced[-1].strip()
    return text if text and len(text) <= SHORT and "\n" not in text else None


def audit_answers(
    function: Callable, scores: Sequence[float], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> Disagreement | None:
    """Compare zero and non-zero scores with `answers_match`; None where the function is not of that kind.

    Only a function that names a reference column and gives exactly two values, one of them 0, is a judge of answers: a
    format bonus or a penalty is not.

    Args:
        function: The reward function.
        scores: n numbers, NaN where it did not apply.
        completions: n strings or lists of messages.
        columns: Dataset columns, n values each.
    """
    column = next((name for name in REFERENCES if name in columns and _reads(function, name)), None)
    values = {score for score in scores if score == score}
    if column is None or not values <= {0.0, max(values, default=0.0)} or max(values, default=0.0) < 0:
        return None
    judged, missed, given, known = 0, [], [], False
    for score, completion, gold in list(zip(scores, completions, columns[column], strict=True))[:SAMPLES]:
        said = said_answer(completion)
        equal = None if said is None or score != score else answers_match(said, gold)
        if equal is None:
            continue
        judged += 1
        pair = (str(said)[:40], str(gold)[:40])
        known |= bool(equal) and score > 0
        if equal and score == 0:
            missed.append(pair)
        elif not equal and score > 0 and _comparable(gold):
            given.append(pair)
    # Where no right answer got it, the one value may be what a wrong one gets for its form.
    return Disagreement(column, judged, missed, given if known else []) if judged else None


def _comparable(gold: Any) -> bool:
    """A reference so short that it is the answer itself and not its derivation."""
    return len(normalize_answer(gold)) <= SHORT


def _reads(function: Callable, column: str) -> bool:
    """Whether a column is a parameter of the function, or a word in its code."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        named = column in inspect.signature(function).parameters
    except (TypeError, ValueError):
        named = False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return named or (code is not None and column in code.co_consts)
