"""Formulas parsed and compared by math-verify, in processes that are killed when one takes too long.

A signal would bound it on the main thread only, and not inside long native calls.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError
from concurrent.futures.process import BrokenProcessPool
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from posttrain.errors import RewardError
from posttrain.integrations import is_available, require

__all__ = ["SECONDS", "TIMED_OUT", "compare_formulas", "need_math_verify", "parse_golds"]

# For one expression.
SECONDS = 5.0
WORKERS = max(1, min(4, (os.cpu_count() or 1) // 2))
# Bytes of address space of a process: 10**10**10 must fail there, not take the machine down.
MEMORY = 4 * 2**30
TIMED_OUT = "[timed out]"


def need_math_verify(purpose: str) -> None:
    """Raise `MissingDependencyError` when math-verify or pebble is not installed."""
    for package in ("math_verify", "pebble"):
        if not is_available(package):
            require(package, purpose)


def parse_golds(golds: Sequence[str]) -> dict[str, str | None]:
    """Each distinct reference as parsed; None where nothing in it is an expression, or parsing took too long."""
    distinct = list(dict.fromkeys(golds))
    found = _each(_shown_gold, [(gold,) for gold in distinct])
    return {gold: None if shown == TIMED_OUT else shown for gold, shown in zip(distinct, found, strict=True)}


def compare_formulas(pairs: Sequence[tuple[str, str]], *, lenient: bool = False) -> list[tuple[str | None, bool]]:
    """The answer as parsed (None: nothing found) and whether it equals the reference, one a pair.

    An answer that takes longer than 5 s is not equal, and reads `TIMED_OUT`.

    Args:
        pairs: Reference and answer; the answer is looked for after an anchor such as a box.
        lenient: Take any expression in the answer.
    """
    found = _each(_compare, [(gold, answer, lenient) for gold, answer in pairs])
    return [(TIMED_OUT, False) if verdict == TIMED_OUT else verdict or (None, False) for verdict in found]


def _each(function: Callable, calls: Sequence[tuple]) -> list[Any]:
    """What the function gives for each tuple of arguments; `TIMED_OUT` where it was killed, None where it raised."""
    futures = [_pool(os.getpid()).schedule(function, args=arguments, timeout=SECONDS) for arguments in calls]
    return [_result(future) for future in futures]


def _result(future: Any) -> Any:
    pebble = importlib.import_module("pebble")
    try:
        return future.result()
    except (TimeoutError, pebble.ProcessExpired):
        return TIMED_OUT
    except BrokenProcessPool as error:
        raise RewardError(
            f"the processes that compare formulas ended ({error}). Fix: free memory, or try `{sys.executable} -c 'import "
            "math_verify'`."
        ) from error
    except Exception:
        return None


# By process: a forked child must not use its parent's.
_pools: dict[int, Any] = {}
_starting = threading.Lock()


def _pool(pid: int) -> Any:
    with _starting:
        if pid not in _pools or not _pools[pid].active:
            pebble = importlib.import_module("pebble")
            _pools[pid] = pebble.ProcessPool(WORKERS, initializer=_start, context=_Context())
        return _pools[pid]


class _Process(SpawnProcess):
    """A spawned process that does not run the script of the main process again, which may have no main guard."""

    def start(self) -> None:
        main: Any = sys.modules["__main__"]
        with _spawning:
            spec, main.__spec__ = main.__spec__, ModuleSpec("__main__", None)
            try:
                super().start()
            finally:
                main.__spec__ = spec


_spawning = threading.Lock()


class _Context(SpawnContext):
    Process = _Process


def _start() -> None:
    """In each process, before its first task's clock runs."""
    logging.disable(logging.CRITICAL)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    importlib.import_module("math_verify")


@functools.lru_cache(maxsize=4096)
def _parse_gold(text: str) -> tuple:
    """The expressions in a reference: as it stands, as a formula, then boxed."""
    parse = importlib.import_module("math_verify").parse
    for form in (text, f"${text}$", f"\\boxed{{{text}}}"):
        found = parse(form, parsing_timeout=None)
        if found:
            return tuple(found)
    return ()


def _shown_gold(text: str) -> str | None:
    found = _parse_gold(text)
    return str(found[0]) if found else None


def _parse_answer(text: str, lenient: bool) -> list:
    """The expressions in an answer: LaTeX after an anchor, boxed first; anything that parses when ``lenient``."""
    checker = importlib.import_module("math_verify")
    if lenient:
        return checker.parse(text, parsing_timeout=None)
    rules = importlib.import_module("latex2sympy2_extended").NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all"
    )
    strict = checker.LatexExtractionConfig(
        try_extract_without_anchor=False, boxed_match_priority=0, normalization_config=rules
    )
    return checker.parse(text, extraction_config=[strict], extraction_mode="first_match", parsing_timeout=None)


def _compare(gold: str, answer: str, lenient: bool) -> tuple[str | None, bool]:
    verify = importlib.import_module("math_verify").verify
    parsed, said = list(_parse_gold(gold)), _parse_answer(answer, lenient)
    equal = bool(parsed and said and verify(parsed, said, timeout_seconds=None))
    return (str(said[0]) if said else None), equal
