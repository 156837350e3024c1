#!/usr/bin/env python3
"""Show that every claim of an earlier commit's tests has its test now.

    python tools/claims.py main            # main against the working tree; exits 1 while a claim is missing
    python tools/claims.py before after    # two commits, or files that `--save` wrote
    python tools/claims.py --save claims.txt main

A claim is the name of a test function and the id of its parameters; the file it stands in does not matter. A claim whose name
is gone is still there where a test with the same docstring has as many cases. What was merged on purpose, cases into a loop or
a test into another, is a line of `tests/claims.json`: the claim of before, or a function's name for all its cases, and the
test of now that shows it.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MERGED = ROOT / "tests" / "claims.json"


def collected(root: Path) -> list[list[str]]:
    """Function, parameters and docstring of every test below ``root``, slow ones and those of GPUs too."""
    env = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", "-p", "no:xdist", "--rootdir", str(root)]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{root}: not all tests are collected\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    docs = {path: docstrings(root / path) for path in {line.partition("::")[0] for line in tests(done.stdout)}}
    claims = []
    for line in tests(done.stdout):
        path, _, rest = line.partition("::")
        name, _, case = rest.partition("[")
        function = name.rpartition("::")[2]
        claims.append([function, case.removesuffix("]"), docs[path].get(function, "")])
    return sorted(claims)


def tests(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]


def docstrings(path: Path) -> dict[str, str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name: ast.get_docstring(node) or "" for node in nodes if isinstance(node, ast.FunctionDef)}


def claims_of(what: str | None) -> list[list[str]]:
    """Of a file, a commit, or None: of the working tree."""
    if what is None:
        return collected(ROOT)
    if Path(what).is_file():
        return json.loads(Path(what).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", what], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return collected(Path(folder))


def label(function: str, case: str) -> str:
    return f"{function}[{case}]" if case else function


def missing(before: list[list[str]], after: list[list[str]], merged: dict[str, str]) -> list[str]:
    """Claims of before without a test after.

    Raises:
        SystemExit: The map names a test that is not there.
    """
    now = Counter((function, case) for function, case, _ in after)
    functions, told = {function for function, _, _ in after}, Counter(doc for _, _, doc in after if doc)
    names = functions | {label(function, case) for function, case in now}
    if wrong := sorted({test for test in merged.values() if test not in names}):
        sys.exit(f"{MERGED.name} names tests that are not there: {wrong}")
    lost, left = [], Counter((function, case) for function, case, _ in before) - now
    docs, cases = {function: doc for function, _, doc in before}, Counter(function for function, _, _ in before)
    for function, case in left.elements():
        renamed = function not in functions and told[docs[function]] >= cases[function]
        if not (renamed or label(function, case) in merged or function in merged):
            lost.append(label(function, case))
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", help="a commit, or a file that --save wrote")
    parser.add_argument("after", nargs="?", help="the same; by default the working tree")
    parser.add_argument("--save", type=Path, metavar="FILE", help="only write the claims of BEFORE")
    args = parser.parse_args()
    before = claims_of(args.before)
    if args.save is not None:
        args.save.write_text(json.dumps(before, indent=0), encoding="utf-8")
        return
    after = claims_of(args.after)
    lost = missing(before, after, json.loads(MERGED.read_text(encoding="utf-8")))
    print("\n".join([*lost, f"{len(before)} claims before, {len(after)} after, {len(lost)} missing"]))
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
