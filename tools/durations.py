#!/usr/bin/env python3
"""Write tests/durations.json from the output of ``pytest --durations=0``: files of `AT_LEAST` seconds, and tests of `MATRIX` seconds.

The longest files begin first. `tests.conftest` treats the parameters of such a test as a matrix: the first cell and a sixth of the others
run in ``make test``, all others in ``make test-matrix``.

make test ARGS="--durations=0 --durations-min=0.01 -m 'not gpu and (matrix or not slow)'" | tee log; python tools/durations.py log
"""

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

AT_LEAST = 3.0  # Seconds: what is shorter ends a run unevenly by no more.
MATRIX = 1.0  # Seconds of a test with at least `CELLS` cells.
CELLS = 3
FILE = Path(__file__).parents[1] / "tests" / "durations.json"
LINE = re.compile(
    r"^(?P<seconds>[0-9.]+)s (?:setup|call|teardown) +(?P<file>[^:\s]+)(?P<test>::[^\[\s]+)(?P<cell>\[.*)?"
)


def main() -> None:
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    cells: dict[str, set[str]] = defaultdict(set)
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        if match := LINE.match(line):
            seconds[match["file"]] += float(match["seconds"])
            if match["cell"]:
                tests[match["file"] + match["test"]] += float(match["seconds"])
                cells[match["file"] + match["test"]].add(match["cell"])
    kept = {file: round(s) for file, s in seconds.most_common() if s >= AT_LEAST}
    kept |= {name: round(s) for name, s in tests.most_common() if s >= MATRIX and len(cells[name]) >= CELLS}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{len(kept)} files and tests in {FILE}")


if __name__ == "__main__":
    main()
