"""A process of its own that parses and compares mathematical expressions, one JSON line in, one out.

It may hang or eat memory on adversarial input; `posttrain.rewards.symbolic` then kills it. It imports nothing of the
package.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import signal
import sys

LAST_RESORT = 60  # Seconds for one question when nobody is left to kill this process.
MEMORY = 4 * 2**30  # Bytes of address space: 10**10**10 must fail here, not take the machine down.


def limit_memory() -> None:
    """Bound this process where the system can."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        return


@functools.lru_cache(maxsize=4096)
def parse_gold(text: str) -> tuple:
    """The expressions in a reference: as it stands, as a formula, then boxed."""
    parse = importlib.import_module("math_verify").parse
    for form in (text, f"${text}$", f"\\boxed{{{text}}}"):
        found = parse(form, parsing_timeout=None)
        if found:
            return tuple(found)
    return ()


def parse_answer(text: str, lenient: bool) -> list:
    """The expressions in an answer: LaTeX after an anchor, boxed first; anything that parses when ``lenient``."""
    checker = importlib.import_module("math_verify")
    parse = checker.parse
    if lenient:
        return parse(text, parsing_timeout=None)
    rules = importlib.import_module("latex2sympy2_extended").NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all"
    )
    strict = checker.LatexExtractionConfig(
        try_extract_without_anchor=False, boxed_match_priority=0, normalization_config=rules
    )
    return parse(text, extraction_config=[strict], extraction_mode="first_match", parsing_timeout=None)


def answer(request: dict) -> dict:
    """Parse a reference (``gold``), or compare an answer with it (``gold`` and ``answer``)."""
    verify = importlib.import_module("math_verify").verify
    gold = list(parse_gold(request["gold"]))
    if "answer" not in request:
        return {"gold": str(gold[0]) if gold else None}
    said = parse_answer(request["answer"], request.get("lenient", False))
    equal = bool(gold and said and verify(gold, said, timeout_seconds=None))
    return {"answer": str(said[0]) if said else None, "equal": equal}


def main() -> None:
    """Answer until the other side closes."""
    logging.disable(logging.CRITICAL)
    limit_memory()
    importlib.import_module("math_verify")  # Loaded before the first question's clock runs.
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if hasattr(signal, "alarm"):
            signal.alarm(LAST_RESORT)  # Its default action ends the process, in native code too.
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
