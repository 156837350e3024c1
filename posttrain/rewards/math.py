"""Rewards for a right answer to a mathematical question."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.errors import RewardError
from posttrain.rewards.answers import answer_box, answers_match, bare, normalize_answer
from posttrain.rewards.format import completion_text, text_with_reasoning
from posttrain.rewards.symbolic import SECONDS, TIMED_OUT, compare, need_math_verify, parse_golds

__all__ = ["accuracy_reward", "reasoning_accuracy_reward"]

logger = logging.getLogger(__name__)

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
        ``\boxed{50\%}`` and ``\boxed{1/2}`` 1. Against ``forty two``: ``\boxed{42}`` 1, ``\boxed{24}`` 0.

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
    verdicts = compare([(golds[i], texts[i]) for i in formulas], lenient=lenient)
    for i, verdict in zip(formulas, verdicts, strict=True):
        # The very text of the reference is right, also where the strict reading of answers refuses it (\frac13).
        inside = answer_box(texts[i])
        same = inside is not None and bool(golds[i]) and inside.strip() == golds[i]
        rewards[i], shown[i] = float(verdict.equal or same), str(parsed[golds[i]])
        answers[i] = verdict.answer if verdict.answer is not None else UNPARSEABLE
    for i, gold in enumerate(golds):
        if gold and rewards[i] is None:
            _judge_words(i, texts[i], gold, lenient, (rewards, shown, answers))
    return rewards, shown, answers


def _is_words(gold: str) -> bool:
    return WORDS.fullmatch(bare(gold)) is not None


def _judge_words(i: int, text: str, gold: str, lenient: bool, into: tuple[list, list, list]) -> None:
    """A reference that is no formula: a word, a number in words."""
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
