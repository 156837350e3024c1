"""Reward functions that compare answers to mathematical questions with reference answers."""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from posttrain.errors import RewardError
from posttrain.integrations import is_available, math_verify, require
from posttrain.rewards.texts import completion_text, text_with_reasoning

logger = logging.getLogger(__name__)


WRAPPERS = [
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"^\$\$(.*)\$\$$", re.S), r"\1"),
    (re.compile(r"^\$([^$]*)\$$", re.S), r"\1"),
    (re.compile(r"^\\\((.*)\\\)$", re.S), r"\1"),
    (re.compile(r"^\\\[(.*)\\\]$", re.S), r"\1"),
    (re.compile(r"^\*\*(.*)\*\*$", re.S), r"\1"),
    (re.compile(r'^"(.*)"$', re.S), r"\1"),
    # Answer to a multiple-choice question: (B) becomes B.
    (re.compile(r"^\(([A-Za-z])\)$"), r"\1"),
]
BRACE = re.compile(r"[{}]")
# Maximum number of iterations in `bare`. Without this limit, an answer with thousands of nested wrappers would take minutes.
LAYERS = 8
# Separators between the boxes of a list of answers.
LISTED = re.compile(r"[\s$]*(?:,|(?:,\s*)?(?:and|or))[\s$]*")


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with balanced braces. If there is no box, return None.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    end = _closing(text, start + 6) if start >= 0 else None
    return None if end is None else text[start + 7 : end]


def answer_box(text: str) -> str | None:
    r"""Return the content of the last box. If the last box is part of a list of boxes, return None.

    >>> answer_box(r"first \boxed{1}, so in the end \boxed{2}"), answer_box(r"\boxed{1} or \boxed{2}")
    ('2', None)
    """
    start = text.rfind("\\boxed{")
    before = text.rfind("\\boxed{", 0, max(start, 0))
    end = _closing(text, before + 6) if before >= 0 else None
    return None if end is not None and LISTED.fullmatch(text, end + 1, start) else boxed(text)


def _closing(text: str, opening: int) -> int | None:
    """Return the position of the brace that closes the brace at ``opening``. If there is none, return None."""
    depth = 0
    for brace in BRACE.finditer(text, opening):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def bare(answer: object) -> str:
    """Remove the box, dollar signs, formatting and the final period from an answer. Nested wrappers are removed as well."""
    text = str(answer).strip()
    for _ in range(LAYERS):
        before = text
        if text.startswith("\\boxed{") and _closing(text, 6) == len(text) - 1:
            text = text[7:-1].strip()
        for pattern, replacement in WRAPPERS:
            text = pattern.sub(replacement, text).strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        if text == before:
            break
    return text


def answers_match(pred: Any, gold: Any) -> bool | None:
    r"""Return whether an answer equals the reference answer.

    If the reference is a word or a date, answer and reference are compared as text. Case is ignored. Otherwise math-verify
    compares them as formulas.

    Args:
        pred: Answer. None and an empty answer do not match any reference.
        gold: Reference answer.

    Returns:
        True or False. None if the reference is empty or cannot be parsed.

    Raises:
        MissingDependencyError: math-verify is not installed.

    >>> answers_match("1,000", "1000.0"), answers_match("Paris.", "paris")  # doctest: +SKIP
    (True, True)
    """
    answer = "" if pred is None else bare(pred)
    reward = _judge([f"\\boxed{{{answer}}}" if answer else ""], [gold], False, "answers_match")[0].reward
    return None if reward is None else bool(reward)


UNPARSEABLE, SKIPPED, INCOMPLETE, TIMED_OUT = "[unparseable]", "[skipped]", "[incomplete reasoning]", "[timed out]"
# Maximum seconds for parsing or comparing a formula.
FORMULA_SECONDS = 5.0
# Maximum number of characters and maximum bracket depth of a parsed text. The parser's time grows exponentially with the
# depth.
FORMULA_CHARS, FORMULA_DEPTH = 1000, 20
# Pattern of words and dates, which must not be parsed as formulas. As formulas, "yes" and "sey" would be the same product of
# y, e and s.
WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*|\d{4}-\d\d-\d\d|\d\d?/\d\d?/\d{4}", re.S)
# Number of consecutive batches without a parseable answer after which a warning explains the expected format.
SILENT_BATCHES = 3
_silent_batches = 0
_warned: set[str] = set()


class Verdict(NamedTuple):
    """Result for a completion: its reward, the parsed reference and the parsed answer. The reward is None if the reference
    cannot be parsed.
    """

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
    r"""Return 1 for each completion whose answer is mathematically equal to the reference. Otherwise return 0.

    The answer must be in ``\boxed{...}``, or follow an announcement such as "The final answer is $42$".

    Args:
        completions: n strings or lists of messages. In a list, the last assistant message with content is scored.
        solution: n references. A reference is a formula, a number, or a text that ends in a formula or number.
        log_extra: Function that logs the columns ``solution``, ``gold_parsed`` and ``answer_parsed``.
        lenient: Whether to accept answers without an announcement ("The answer is 42." or "42").

    Returns:
        1.0 or 0.0. None if the reference cannot be parsed. At most 1,000 characters are parsed, up to the end of the last
        box. A longer box is compared as text. The comparison runs in a separate process. If it takes longer than
        `FORMULA_SECONDS` (5 s), the process is killed, and the answer is treated as wrong. Even short formulas can take this
        long, e.g. ``x^x^x...`` with 250 characters.

        Examples for the reference ``42``:

        - ``\boxed{42.0}`` and ``The final answer is $42$`` get 1;
        - ``The answer is 42.`` gets 0, or 1 with ``lenient``;
        - ``\boxed{41} or \boxed{42}`` gets 0, because it is a list of answers.

        For the reference ``0.5``, ``\boxed{50\%}`` and ``\boxed{1/2}`` get 1. For the reference ``yes``, ``\boxed{Yes}``
        gets 1 and ``\boxed{no}`` gets 0.

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
    r"""Score the text after the reasoning with `accuracy_reward`. If the reasoning does not end, the reward is 0.

    Args:
        completions: n strings or lists of messages.
        solution: n references.
        reasoning_delimiters: Texts that end the reasoning. The default is ``["</think>"]``. The answer starts after the last
            delimiter.
        log_extra: Function that logs columns, as in `accuracy_reward`.

    Returns:
        1.0 or 0.0. None if the reference cannot be parsed. Examples for the reference ``42``: ``why</think>\boxed{42}`` gets
        1. ``<think>\boxed{42}</think>so`` gets 0. ``\boxed{42}`` gets 0, because it has no delimiter.

    Raises:
        MissingDependencyError: math-verify is not installed.

    >>> reasoning_accuracy_reward([r"<think>\boxed{1}</think>\boxed{2}", r"\boxed{2}"], ["2", "2"])  # doctest: +SKIP
    [1.0, 0.0]
    """
    texts = [text_with_reasoning(completion) for completion in completions]
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    # Index of the answer in each text. It is -1 if the text has no delimiter.
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
        raise RewardError(
            f"got {len(texts)} completions, but {len(solution)} solutions. Fix: pass one solution per completion."
        )
    golds = ["" if gold is None else str(gold).strip() for gold in solution]
    read = {gold for gold in golds if gold and _to_parse(gold) == gold}
    formulas = list(dict.fromkeys(gold for gold in golds if gold in read and not WORDS.fullmatch(bare(gold))))
    # References that exceed the time limit for parsing are compared as text.
    shown_golds = in_time(math_verify.show_gold, [(gold,) for gold in formulas])
    parsed = {gold: shown for gold, shown in zip(formulas, shown_golds, strict=True) if shown and shown != TIMED_OUT}
    answers = {i: _to_parse(texts[i]) for i, gold in enumerate(golds) if gold in parsed}
    calls = {i: (golds[i], answer, lenient) for i, answer in answers.items() if answer is not None}
    compared = dict(zip(calls, in_time(math_verify.compare, [*calls.values()]), strict=True))
    verdicts = []
    for i, (text, gold) in enumerate(zip(texts, golds, strict=True)):
        if i not in compared:
            verdicts.append(_judge_words(text, gold, lenient))
            continue
        answer, equal = (TIMED_OUT, False) if compared[i] == TIMED_OUT else compared[i] or ("", False)
        # An answer with the same text as the reference is correct, even if the strict parser rejects it (e.g. \frac13).
        same = (answer_box(text) or "").strip() == gold
        verdicts.append(Verdict(float(equal or same), parsed[gold], answer or UNPARSEABLE))
    return verdicts


def _to_parse(text: str) -> str | None:
    """Remove the text after the last box. Keep only the last `FORMULA_CHARS` characters of the result.

    If the box is longer, or if brackets are nested deeper than `FORMULA_DEPTH`, return None. The caller then compares texts.
    """
    if len(text) > FORMULA_CHARS and (start := text.rfind("\\boxed{")) >= 0:
        closing = _closing(text, start + 6)
        if closing is None or closing - start >= FORMULA_CHARS:
            return None
        text = text[: closing + 1]
    text = text[-FORMULA_CHARS:].strip()
    steps = ((sign in "{([") - (sign in "})]") for sign in text)
    depths = itertools.accumulate(steps, lambda depth, step: max(0, depth + step), initial=0)
    return text if max(depths) <= FORMULA_DEPTH else None


def _judge_words(text: str, gold: str, lenient: bool) -> Verdict:
    """Compare answer and reference as texts. References that are words, and texts that are too long for parsing, are
    compared in this way.
    """
    wanted = _plain(gold)
    if not wanted:
        return Verdict(None, UNPARSEABLE, SKIPPED)
    answer = answer_box(text)
    extracted = _plain(text if answer is None and lenient else answer or "")
    return Verdict(float(extracted == wanted), wanted, extracted or UNPARSEABLE)


def _plain(text: str) -> str:
    return " ".join(bare(text).casefold().split())


def in_time(function: Callable, calls: Sequence[tuple]) -> list[Any]:
    """Compute ``function(*call)`` for each call in worker processes. If a call takes too long, its process is killed, and
    its result is `TIMED_OUT`. If a call raises an error, its result is None.
    """
    expired = require("pebble", "math-verify").ProcessExpired
    results: list[Any] = []
    pool = _pool()
    for future in [pool.schedule(function, args=call, timeout=FORMULA_SECONDS) for call in calls]:
        try:
            results.append(future.result())
        except (TimeoutError, expired):
            results.append(TIMED_OUT)
        except BrokenProcessPool as error:
            raise RewardError(
                f"the processes that compare formulas ended unexpectedly ({error}), probably because memory ran out. Fix: free "
                f"memory. If the error remains, run `{sys.executable} -c 'import math_verify'` to find the cause."
            ) from error
        except Exception:
            results.append(None)
    return results


# Process pool of each process id. A forked process needs its own pool, because it cannot use the pool of its parent.
_pools: dict[int, Any] = {}
_starting = threading.Lock()


def _pool() -> Any:
    """Return the pool of worker processes for this process. It is created on the first call, and again after a fork or a
    crash.

    Workers are processes, because a process can always be killed. A thread cannot be stopped. A signal handler runs only in
    the main thread, and does not interrupt native code. Workers are spawned, because a fork would copy held locks and the
    GPU context.
    """
    with _starting:
        pool = _pools.get(os.getpid())
        if pool is None or not pool.active:
            workers = max(1, min(4, (os.cpu_count() or 1) // 2))
            # The initializer of a worker imports modules. Its duration does not count toward the timeout of the first call.
            options = {"initializer": math_verify.start_process, "context": math_verify.WithoutMain()}
            pool = _pools[os.getpid()] = require("pebble", "math-verify").ProcessPool(workers, **options)
        return pool


def _explain_silence(texts: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    """Log a warning after `SILENT_BATCHES` consecutive batches without a parseable answer. The prompt then probably does not
    request the expected format.
    """
    global _silent_batches
    judged = [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.answer != SKIPPED]
    silent = judged and all(verdict.answer in (UNPARSEABLE, SKIPPED) for verdict in verdicts)
    _silent_batches = _silent_batches + 1 if silent else 0
    if _silent_batches == SILENT_BATCHES:
        hint = " The model's reasoning is in <think>: use reasoning_accuracy_reward." if "<think>" in judged[0] else ""
        logger.warning(
            "accuracy_reward found no answer in any completion of %d batches. It accepts \\boxed{42} or 'The final "
            "answer is $42$', but the model writes: %r.%s Fix: request one of these formats in the prompt, or pass lenient=True.",
            SILENT_BATCHES, judged[0][-200:], hint,
        )  # fmt: skip


def _logged(
    verdicts: Sequence[Verdict], solution: Sequence[Any], log_extra: Callable[[str, list], None] | None
) -> list[float | None]:
    """Log the columns of `accuracy_reward`, and return the rewards. Warn once about timeouts and unparseable references."""
    late, unread = (sum(verdict.answer == mark for verdict in verdicts) for mark in (TIMED_OUT, SKIPPED))
    if late:
        _warn_once(
            "%d of %d answers of this batch could not be compared with their references within %g s, so they count as wrong "
            "(answer_parsed is %r). Either the formulas are too large, or the machine is overloaded.",
            late, len(verdicts), FORMULA_SECONDS, TIMED_OUT,
        )  # fmt: skip
    if unread > 0.05 * len(verdicts):
        _warn_once(
            "%d of %d references of this batch cannot be parsed, so the completions of these rows get no reward.",
            unread,
            len(verdicts),
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
