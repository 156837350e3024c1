"""``python -m tests.faults.table``: play every case, print what noticed it, and write the table of docs/faults.md."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.faults import data_cases, healthy, machine_cases, reward_cases, server_cases
from tests.faults.scene import Case, Result, play

FAULTS: tuple[Case, ...] = (*data_cases.CASES, *reward_cases.CASES, *machine_cases.CASES, *server_cases.CASES)
HEALTHY: tuple[Case, ...] = healthy.CASES
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- table: made by python -m tests.faults.table --write -->", "<!-- end of the table -->"
AREAS = ("data", "template", "tokenizer", "reward", "reference", "training", "server", "version", "machine")
WIDTH = 150


def line(result: Result) -> str:
    """A row of the table."""
    found = result.detection
    when = found.moment if found else "**not noticed**"
    code = found.code if found and found.code else "warning" if found else "-"
    text = shortened(found.text) if found else result.crashed or "-"
    return f"| {result.case.area} | {result.case.title} | {when} | {code} | {text} | {result.lost} |"


def shortened(text: str) -> str:
    """The first words of a message, as a cell."""
    flat = " ".join(text.split()).replace(f"{ROOT}{os.sep}", "").replace("|", "\\|").replace("<", "&lt;")
    flat = flat.split(": ", 1)[1] if flat.startswith("PT-") else flat
    return flat if len(flat) <= WIDTH else flat[: WIDTH - 3].rsplit(" ", 1)[0] + " ..."


def summary(faults: Sequence[Result], good: Sequence[Result]) -> str:
    """The sentence above the table."""
    noticed = sum(result.in_time for result in faults)
    kept = sum(result.lost == "nothing" for result in faults)
    said = sum(len(result.notices) for result in good)
    return (
        f"{noticed} of {len(faults)} faults were noticed before or at the first step at which they can be known; in {kept} of "
        f"them nothing was lost. {len(good)} healthy runs: {said} warnings or errors."
    )


def page(faults: Sequence[Result], good: Sequence[Result]) -> str:
    """The table, and the sentence above it."""
    ordered = sorted(faults, key=lambda result: AREAS.index(result.case.area))
    head = "| What | Fault | Noticed | Code | Message (its beginning) | Lost |\n|---|---|---|---|---|---|"
    return f"{BEGIN}\n{summary(faults, good)}\n\n{head}\n" + "\n".join(map(line, ordered)) + f"\n{END}"


def main(argv: Sequence[str] | None = None) -> int:
    """Play the cases; 1 when something was missed, lost, or said of a healthy run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="without the cases that start other processes")
    parser.add_argument("--only", default="", help="cases whose title holds this")
    parser.add_argument("--write", action="store_true", help="put the table into docs/faults.md")
    options = parser.parse_args(argv)
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("posttrain").propagate = False
    faults, good = ([_timed(case) for case in cases if _wanted(case, options)] for cases in (FAULTS, HEALTHY))
    sys.stdout.write(summary(faults, good) + "\n")
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + page(faults, good) + rest.partition(END)[2], encoding="utf-8")
    bad = [result for result in faults if not result.in_time or result.lost != "nothing"]
    return 1 if bad or any(result.notices for result in good) else 0


def _wanted(case: Case, options: argparse.Namespace) -> bool:
    return options.only in case.title and not (options.fast and case.slow)


def _timed(case: Case) -> Result:
    started = time.perf_counter()
    result = play(case)
    fine = not result.notices if case.area == "healthy" else result.in_time and result.lost == "nothing"
    sys.stdout.write(f"{'ok ' if fine else 'BAD'} {time.perf_counter() - started:5.1f} s  {line(result)}\n")
    if not fine:
        for notice in result.notices:
            sys.stdout.write(f"      {notice.moment}, {notice.severity}: {notice.text[:300]!r}\n")
    sys.stdout.flush()
    return result


if __name__ == "__main__":
    sys.exit(main())
