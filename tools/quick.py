#!/usr/bin/env python3
"""The loop of a change, within a minute: style and import rules, types of what changed, one proof of each kind, tests of what changed.

    python tools/quick.py [--base COMMIT] [pytest options]

What is always run is chosen by claim: the package imports without torch, every objective has the shared properties, any layout
of rows computes each sequence as if alone, and SFT, DPO and GRPO train as they did. Beside it run the test files that changed
since the base (by default the last commit), and those that mirror a changed module. `make check` runs everything.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
CLAIMS = [
    "tests/test_package.py::test_all_is_sorted_and_every_name_is_there",
    "tests/test_package.py::test_importing_the_package_is_fast_and_loads_no_torch",
    "tests/losses/test_properties.py",
    "tests/data/test_forest.py",
    "tests/models/test_forward.py",
    *(
        f"tests/test_golden.py::test_twenty_steps_of_a_trainer_are_what_they_were[{name}]"
        for name in ("sft", "dpo", "grpo")
    ),
]


def changed(base: str) -> list[Path]:
    """Python files that differ from ``base`` or are new, relative to the root."""
    lines = []
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        lines += done.stdout.splitlines()
    return [Path(line) for line in lines if line.endswith(".py") and (ROOT / line).is_file()]


def tests_of(files: list[Path]) -> list[str]:
    """Test files among them, and those whose folder and name mirror a module."""
    tests = set()
    for path in files:
        if path.parts[0] == "posttrain":
            folder = ROOT / "tests" / Path(*path.parts[1:-1])
            stem = path.parent.name if path.stem in ("__init__", "trainer", "config") else path.stem
            tests |= {*folder.glob(f"test_{stem}.py"), *folder.parent.glob(f"test_{stem}.py")}
        elif path.name.startswith("test_") and path.parts[0] == "tests":
            tests.add(ROOT / path)
    return sorted(str(path.relative_to(ROOT)) for path in tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="HEAD", help="the commit that changes are counted from")
    args, rest = parser.parse_known_args()
    files = changed(args.base)
    ours = [str(path) for path in files if path.parts[0] == "posttrain"]
    steps = {
        "style": [BIN / "ruff", "check", "-q", "."],
        "format": [BIN / "ruff", "format", "--check", "-q", "."],
        "imports": [BIN / "lint-imports", "--no-logo"],
    }
    if ours:
        steps["types"] = [BIN / "pyright", *ours]
    workers = ["-n", str(min(os.cpu_count() or 1, 4))]
    steps["tests"] = [sys.executable, "-m", "pytest", *workers, *CLAIMS, *tests_of(files), *rest]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    began, failed = time.monotonic(), []
    for name, command in steps.items():
        start = time.monotonic()
        done = subprocess.run(
            [str(part) for part in command], cwd=ROOT, env=env, capture_output=name != "tests", text=True
        )
        if done.returncode:
            failed.append(name)
            print(done.stdout or "", done.stderr or "")
        print(f"{name}: {'failed' if done.returncode else 'ok'}, {time.monotonic() - start:.0f} s", flush=True)
    print(f"quick: {', '.join(failed) + ' failed' if failed else 'ok'}, {time.monotonic() - began:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
