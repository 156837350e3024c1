"""Which tests one checkout has and another has not: `python tools/test_difference.py OLD NEW`.

A test counts as gone when no function of its name is left in any file, so that moves between files do not show. Of the gone
ones those are marked whose module under test is gone too: they went with what they tested.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path


def tests_of(root: Path) -> dict[str, Path]:
    """Names of test functions, each with the file it stands in."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[node.name] = path.relative_to(root)
    return found


def main() -> int:
    """Print the difference; the last line has the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    given = parser.parse_args()
    old, new = tests_of(given.old), tests_of(given.new)
    gone = {name: path for name, path in old.items() if name not in new}
    for path, count in sorted(Counter(gone.values()).items()):
        what = "still there" if (given.new / path).exists() else "file gone or moved"
        print(f"{path}: {count} gone ({what})")
        print(*(f"    {name}" for name, place in gone.items() if place == path), sep="\n")
    added = len([name for name in new if name not in old])
    print(f"{len(old)} test functions before, {len(new)} now: {len(gone)} gone or renamed, {added} new or renamed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
