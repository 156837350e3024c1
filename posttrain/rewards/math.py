"""Rewards for a correct answer to a mathematical question."""

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
    (re.compile(r"^\(([A-Za-z])\)$"), r"\1"),  # A choice: (B) becomes B.
]
BRACE = re.compile(r"[{}]")
# Maximum passes over an answer. Without a limit, an answer with thousands of wrappers would take minutes.
LAYERS = 8
LISTED = re.compile(r"[\s$]*(?:,|(?:,\s*)?(?:and|or))[\s$]*")  # Separators between the boxes of a list of answers.


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, with balanced braces; None without a box.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    end = _closing(text, start + 6) if start >= 0 else None
    return None if end is None else text[start + 7 : end]


def answer_box(text: str) -> str | None:
    r"""Return the content of the last box, or None if that box continues a list of boxes.

    >>> answer_box(r"first \boxed{1}, so in the end \boxed{2}"), answer_box(r"\boxed{1} or \boxed{2}")
    ('2', None)
    """
    start = text.rfind("\\boxed{")
    before = text.rfind("\\boxed{", 0, max(start, 0))
    end = _closing(text, before + 6) if before >= 0 else None
    return None if end is not None and LISTED.fullmatch(text, end + 1, start) else boxed(text)


def _closing(text: str, opening: int) -> int | None:
    """Return the position of the brace that closes the one at ``opening``."""
    depth = 0
    for brace in BRACE.finditer(text, opening):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def bare(answer: object) -> str:
    """Remove an answer's box, dollar signs, formatting and final period, in up to `LAYERS` passes."""
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
    r"""Return whether an answer equals the reference. Words are compared as text without case, all else by math-verify.

    Args:
        pred: The answer; None or empty matches nothing.
        gold: The reference.

    Returns:
        None if the reference is empty or cannot be parsed, because no answer can be scored against it.

    Raises:
        MissingDependencyError: math-verify is not installed.

    >>> answers_match("1,000", "1000.0"), answers_match("Paris.", "paris")  # doctest: +SKIP
    (True, True)
    """
    answer = "" if pred is None else bare(pred)
    reward = _judge([f"\\boxed{{{answer}}}" if answer else ""], [gold], False, "answers_match")[0].reward
    return None if reward is None else bool(reward)


UNPARSEABLE, SKIPPED, INCOMPLETE, TIMED_OUT = "[unparseable]", "[skipped]", "[incomplete reasoning]", "[timed out]"
# Timeout for one formula, in seconds.
FORMULA_SECONDS = 5.0
# Maximum length and nesting of text that is parsed: the parser's time grows exponentially with the depth of open brackets.
FORMULA_CHARS, FORMULA_DEPTH = 1000, 20
# Words and dates are not formulas. Parsed as one, "yes" is the product y e s and equals "sey", and 05/01/2021 is 10/02/2021.
WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*|\d{4}-\d\d-\d\d|\d\d?/\d\d?/\d{4}", re.S)
# Number of batches without a parseable answer after which a warning explains the expected form.
SILENT_BATCHES = 3
_silent_batches = 0
_warned: set[str] = set()


class Verdict(NamedTuple):
    """Reward of one completion (None: the reference cannot be parsed), and how reference and answer were parsed."""

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
    r"""Return 1 where the boxed (or otherwise announced) answer is mathematically equal to the reference, else 0.

    Args:
        completions: n strings or lists of messages. The last assistant message with content is judged.
        solution: n references: a formula, a number, or a text that ends in one.
        log_extra: Function that logs the columns ``solution``, ``gold_parsed`` and ``answer_parsed``.
        lenient: Whether to accept an answer that is not announced ("The answer is 42." or "42").

    Returns:
        1.0, 0.0, or None where the reference cannot be parsed. Only the last 1,000 characters up to the last box are parsed;
        longer boxes are compared as text. Short formulas can be slow too: ``x^x^x...`` of 250 characters is. After
        `FORMULA_SECONDS` (5 s), the process that compares them is ended and the answer counts as wrong. For the reference ``42``:
        ``\boxed{42.0}`` and ``The final answer is $42$`` get 1, ``The answer is 42.`` gets 0 (1 if lenient),
        ``\boxed{41} or \boxed{42}`` gets 0 (a set). For ``0.5``: ``\boxed{50\%}`` and ``\boxed{1/2}`` get 1. For ``yes``:
        ``\boxed{Yes}`` gets 1, ``\boxed{no}`` gets 0.

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
    r"""Apply `accuracy_reward` to the text after the reasoning; 0 where the reasoning does not end.

    Args:
        completions: n strings or lists of messages.
        solution: n references.
        reasoning_delimiters: Texts that end the reasoning, by default ``["</think>"]``. The last occurrence counts.
        log_extra: Same as in `accuracy_reward`.

    Returns:
        1.0, 0.0, or None where the reasoning ended but the reference cannot be parsed. For the reference ``42``:
        ``why</think>\boxed{42}`` gets 1, ``<think>\boxed{42}</think>so`` gets 0, ``\boxed{42}`` gets 0 (no delimiter).

    Raises:
        MissingDependencyError: math-verify is not installed.

    >>> reasoning_accuracy_reward([r"<think>\boxed{1}</think>\boxed{2}", r"\boxed{2}"], ["2", "2"])  # doctest: +SKIP
    [1.0, 0.0]
    """
    texts = [text_with_reasoning(completion) for completion in completions]
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    # Start of the answer; -1 without a delimiter.
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
            f"{len(texts)} completions, but {len(solution)} solutions. There must be one solution per completion."
        )
    golds = ["" if gold is None else str(gold).strip() for gold in solution]
    read = {gold for gold in golds if gold and _to_parse(gold) == gold}
    formulas = list(dict.fromkeys(gold for gold in golds if gold in read and not WORDS.fullmatch(bare(gold))))
    # A reference that takes too long to parse is compared as text.
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
        # An answer identical to the reference is correct, even if the strict parser of answers rejects it (\frac13).
        same = (answer_box(text) or "").strip() == gold
        verdicts.append(Verdict(float(equal or same), parsed[gold], answer or UNPARSEABLE))
    return verdicts


def _to_parse(text: str) -> str | None:
    """Return a text up to its last box, at most its last `FORMULA_CHARS` characters.

    None: the box is longer, or its brackets are nested deeper than `FORMULA_DEPTH`. It is then compared as text.
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
    """Judge an answer as text: the reference is a word or empty, or one of the two is too long to be parsed."""
    wanted = _plain(gold)
    if not wanted:
        return Verdict(None, UNPARSEABLE, SKIPPED)
    answer = answer_box(text)
    said = _plain(text if answer is None and lenient else answer or "")
    return Verdict(float(said == wanted), wanted, said or UNPARSEABLE)


def _plain(text: str) -> str:
    return " ".join(bare(text).casefold().split())


def in_time(function: Callable, calls: Sequence[tuple]) -> list[Any]:
    """Return ``function(*call)`` for each call, run in a process; `TIMED_OUT` if it was killed, None if it raised."""
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
                f"the processes that compare formulas ended ({error}). Fix: free memory, or find the cause with "
                f"`{sys.executable} -c 'import math_verify'`."
            ) from error
        except Exception:
            results.append(None)
    return results


# Process pools of pebble, keyed by process id: a forked child cannot use its parent's pool.
_pools: dict[int, Any] = {}
_starting = threading.Lock()


def _pool() -> Any:
    """Return a pool of processes that can be killed, started at the first call and again after a fork or a crash.

    Threads cannot be stopped. A signal works only on the main thread, and not inside native code. A process can always be
    killed. Processes are spawned, because a fork would copy the locks of threads and the GPU's context.
    """
    with _starting:
        pool = _pools.get(os.getpid())
        if pool is None or not pool.active:
            workers = max(1, min(4, (os.cpu_count() or 1) // 2))
            # The timeout of a process's first call starts after `start_process`.
            options = {"initializer": math_verify.start_process, "context": math_verify.WithoutMain()}
            pool = _pools[os.getpid()] = require("pebble", "math-verify").ProcessPool(workers, **options)
        return pool


def _explain_silence(texts: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    """Warn after three batches in which no answer could be parsed, because the model does not write the expected form."""
    global _silent_batches
    judged = [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.answer != SKIPPED]
    silent = judged and all(verdict.answer in (UNPARSEABLE, SKIPPED) for verdict in verdicts)
    _silent_batches = _silent_batches + 1 if silent else 0
    if _silent_batches == SILENT_BATCHES:
        hint = " Its reasoning is in <think>: use reasoning_accuracy_reward." if "<think>" in judged[0] else ""
        logger.warning(
            "accuracy_reward found no answer in any completion of %d batches. It accepts \\boxed{42} or 'The final "
            "answer is $42$', but the model writes: %r.%s Fix: ask for that form in the prompt, or pass lenient=True.",
            SILENT_BATCHES, judged[0][-200:], hint,
        )  # fmt: skip


def _logged(
    verdicts: Sequence[Verdict], solution: Sequence[Any], log_extra: Callable[[str, list], None] | None
) -> list[float | None]:
    """Return the rewards. Warn once about comparisons that timed out, and once about references that cannot be parsed."""
    late, unread = (sum(verdict.answer == mark for verdict in verdicts) for mark in (TIMED_OUT, SKIPPED))
    if late:
        _warn_once(
            "%d of %d answers of this batch were not compared within %g s and count as wrong (answer_parsed is %r): either the "
            "formulas are too large, or the machine is too busy.", late, len(verdicts), FORMULA_SECONDS, TIMED_OUT,
        )  # fmt: skip
    if unread > 0.05 * len(verdicts):
        _warn_once(
            "%d of %d references of this batch cannot be parsed; their rows are not scored.", unread, len(verdicts)
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
