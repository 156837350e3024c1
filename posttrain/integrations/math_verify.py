"""Parsing and comparison of formulas with math-verify. math-verify may run forever, so call these functions in a process with
a time limit.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
import threading
from decimal import Decimal
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

# Maximum address space of a worker process in bytes. An expression such as 10**10**10 then fails in the worker instead of
# filling the machine's memory.
MEMORY = 4 * 2**30


def start_process() -> None:
    """Prepare a worker process: set the memory limit, disable logging, and import modules that load slowly."""
    logging.disable(logging.CRITICAL)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    importlib.import_module("math_verify")


# A spawned process imports the module that defines its class. This module imports neither torch nor transformers, so that
# worker processes start fast.
class _WithoutMain(SpawnProcess):
    def start(self) -> None:
        main: Any = sys.modules["__main__"]
        with _spawning:
            spec, main.__spec__ = main.__spec__, ModuleSpec("__main__", None)
            try:
                super().start()
            finally:
                main.__spec__ = spec


_spawning = threading.Lock()


class WithoutMain(SpawnContext):
    """Spawn context whose processes do not run the main script again. The script may have no ``if __name__ == "__main__"``
    guard.
    """

    Process = _WithoutMain


# ANCHOR matches the beginning of LaTeX for math-verify. COMMAND matches a LaTeX command with a text argument. WORD matches a
# word or a currency sign. UNIT matches a number with its unit. SCIENTIFIC matches a number in scientific notation.
ANCHOR = re.compile(r"\$|\\[(\[]|\\boxed")
COMMAND = re.compile(r"\\[A-Za-z]+(?:\s*\{[A-Za-z\s.]*\})?")
WORD = re.compile(r"[^\W\d_]{3}|[#€£¥]")
UNIT = re.compile(r"[+-]?\d[\d.,/]*(?<!,)\s+(?!or\b)[^-+=*<>(){}\\,]*")
SCIENTIFIC = re.compile(r"[+-]?\d*\.?\d+e[+-]?\d{1,3}", re.I)


def as_formula(text: str) -> str:
    r"""Convert a text that consists only of a formula to ``$text$``. Without dollar signs, math-verify reads ``2\sqrt{3}`` as
    2. Other text is returned unchanged.

    >>> as_formula(r"2\sqrt{3}"), as_formula("1e-05"), as_formula("72 apples")
    ('$2\\sqrt{3}$', '$0.00001$', '72 apples')
    """
    if SCIENTIFIC.fullmatch(text.strip()):
        return f"${Decimal(text.strip()):f}$"
    words = ANCHOR.search(text) or WORD.search(COMMAND.sub("", text)) or UNIT.fullmatch(text.strip())
    return text if words else f"${text}$"


@functools.lru_cache(maxsize=4096)
def parse_gold(text: str) -> tuple:
    r"""Parse a reference answer. Several forms of the text are tried until one can be parsed: the result of `as_formula`, the
    unchanged text, ``$text$`` and ``\boxed{text}``.
    """
    parse = importlib.import_module("math_verify").parse
    for form in dict.fromkeys((as_formula(text), text, f"${text}$", f"\\boxed{{{text}}}")):
        expressions = parse(form, parsing_timeout=None)
        if expressions:
            return tuple(expressions)
    return ()


def parse_answer(text: str, lenient: bool) -> list:
    """Parse a model's answer, which must be LaTeX after an anchor such as ``$``. Boxed expressions have priority. With
    ``lenient``, any text that can be parsed is accepted.
    """
    checker = importlib.import_module("math_verify")
    if lenient:
        return checker.parse(as_formula(text), parsing_timeout=None) or checker.parse(text, parsing_timeout=None)
    rules = importlib.import_module("latex2sympy2_extended").NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all"
    )
    strict = checker.LatexExtractionConfig(
        try_extract_without_anchor=False, boxed_match_priority=0, normalization_config=rules
    )
    return checker.parse(text, extraction_config=[strict], extraction_mode="first_match", parsing_timeout=None)


def show_gold(text: str) -> str:
    """Return the first expression of a reference answer as text. Return "" if the answer contains no expression."""
    expressions = parse_gold(text)
    return str(expressions[0]) if expressions else ""


def compare(gold: str, answer: str, lenient: bool) -> tuple[str, bool]:
    """Compare an answer with the reference answer. Return the parsed answer as text ("" if it cannot be parsed), and whether
    both are equal.
    """
    parsed, reply = list(parse_gold(gold)), parse_answer(answer, lenient)
    equal = bool(
        parsed and reply and importlib.import_module("math_verify").verify(parsed, reply, timeout_seconds=None)
    )
    return str(reply[0]) if reply else "", equal
