#!/usr/bin/env python3
"""Write tests/durations.json, by which the longest files begin first, from the output of ``pytest --durations=0``.

make test ARGS="--durations=0 --durations-min=0.01" | tee log; python tools/durations.py log
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

AT_LEAST = 3.0  # Seconds: what is shorter ends a run unevenly by no more.
FILE = Path(__file__).parents[1] / "tests" / "durations.json"
LINE = re.compile(r"^(?P<seconds>[0-9.]+)s (?:setup|call|teardown) +(?P<file>[^:\s]+)::")


def main() -> None:
    seconds: Counter[str] = Counter()
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        if match := LINE.match(line):
            seconds[match["file"]] += float(match["seconds"])
    kept = {file: round(s) for file, s in seconds.most_common() if s >= AT_LEAST}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{len(kept)} files of {AT_LEAST:g} s and more in {FILE}")


if __name__ == "__main__":
    main()
