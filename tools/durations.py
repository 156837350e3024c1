#!/usr/bin/env python3
"""Write tests/durations.json, by which the longest tests begin first, from the output of ``pytest --durations=0``.

make test ARGS=--durations=0 | tee log; python tools/durations.py log
"""

import json
import re
import sys
from pathlib import Path

AT_LEAST = 3.0  # Seconds: what is shorter ends a run unevenly by no more.
FILE = Path(__file__).parents[1] / "tests" / "durations.json"
LINE = re.compile(r"^(?P<seconds>[0-9.]+)s (?:call|setup) +(?P<test>[^\[\s]+)")


def main() -> None:
    longest: dict[str, float] = {}
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        if match := LINE.match(line):
            test, seconds = match["test"], float(match["seconds"])
            longest[test] = max(seconds, longest.get(test, 0.0))
    kept = {test: round(s) for test, s in sorted(longest.items(), key=lambda one: -one[1]) if s >= AT_LEAST}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{len(kept)} tests of {AT_LEAST:g} s and more in {FILE}")


if __name__ == "__main__":
    main()
