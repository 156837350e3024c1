"""The page of traps: every known trap has a row, and every row a test that bears its number."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
VISION = {"22", "32", "33", "T19", "T20", "R13"}  # Vision models are not trained yet.
REMOVED = {"T11", "T32", "S40"}  # Of process reward models and the agent harness, which are gone.
REMOVED = {"T11", "T32", "S40"}  # Of process reward models and the agent harness, which are gone.
# Traps without a row, each with what is missing. The list may only shrink.
PENDING: dict[str, str] = {}
KNOWN = [str(number) for number in range(1, 49)] + [f"T{number}" for number in range(1, 54)]
KNOWN += [f"R{number}" for number in range(1, 51)] + [f"O{number}" for number in range(1, 18)]  # Online training.
KNOWN += ["P39", "P40", "P41"]  # Preference data: those of methods that generate.

# Those of the system layer.
SERVERS = [
    1, 2, 5, 6, 7, 9, 10, 11, 12, 13, 14, 16, 19, 20, 21, 22, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 39, 40, 41, 42,
    43, 44, 45, 47, 48, 49, 52, 53, 54, 57,
]  # fmt: skip
KNOWN += [f"S{number}" for number in SERVERS]  # Rollout servers, asynchronous rollouts, the system.


def rows():
    """Trap number to the cells of its row."""
    found = {}
    for line in (ROOT / "docs" / "traps.md").read_text(encoding="utf-8").splitlines():
        match = re.match(r"\| ([TROPS]?\d+) \|", line)
        if match:
            assert match[1] not in found, f"trap {match[1]} has two rows"
            found[match[1]] = [cell.strip() for cell in line.strip("|").split("|")]
    return found


@functools.cache
def defined_tests():
    """Names of all test functions."""
    files = (ROOT / "tests").rglob("test_*.py")
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def names_of(cell):
    return re.findall(r"`(test_\w+)`", cell)


def test_every_known_trap_in_scope_has_a_row():
    assert set(rows()) == set(KNOWN) - VISION - REMOVED - set(PENDING)


def test_rows_stand_in_order_and_are_complete():
    assert list(rows()) == sorted(rows(), key=KNOWN.index)
    assert all(len(cells) == 4 and all(cells) for cells in rows().values())


def test_every_row_names_tests_that_exist_and_bear_its_number():
    known = defined_tests()
    for number, (_, _, _, tests) in rows().items():
        assert names_of(tests), number
        assert set(names_of(tests)) <= known, (number, set(names_of(tests)) - known)
        mark = f"_trap_{number}_" if number.isdigit() else f"_{number.lower()}_"
        assert all(mark in name for name in names_of(tests)), number


def test_every_test_named_after_a_trap_of_the_data_is_in_its_row():
    found = rows()
    for name in defined_tests():
        match = re.match(r"test_trap_(\d+)_", name)
        if match and match[1] in found:
            assert any(name in names_of(cells[3]) for cells in found.values()), name


def test_checks_that_rows_mention_exist():
    from posttrain.checks import machine, tokenizers
    from posttrain.loop import checks

    mentioned = {name for cells in rows().values() for name in re.findall(r"`(check_\w+)`", cells[2])}
    assert mentioned
    assert mentioned <= {name for module in (machine, tokenizers, checks) for name in vars(module)}
