"""Budgets of the code: the text that a step runs through, and what ties rooms together, only go down; functions stay small."""

import ast
import functools
import json
import re
from collections import Counter
from pathlib import Path

import posttrain
from tests import forks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "posttrain"
EXCEPTIONS = ROOT / "tests" / "budget_exceptions.txt"
# Files of public trainers.
SIGNED = {
    PACKAGE / f"{module.replace('.', '/')}.py" for name, module in posttrain._PUBLIC.items() if name.endswith("Trainer")
}
MAX_FUNCTION, MAX_PARAMETERS, WINDOW, MAX_COPIED = 80, 8, 6, 0.03


def files():
    return sorted(p for p in PACKAGE.rglob("*.py") if not p.is_symlink() or p.exists())


def allowed():
    """``path[:function]  # reason`` lines; the list may only shrink."""
    lines = [line for line in EXCEPTIONS.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        assert "  # " in line, f"an exception needs its reason: {line!r}"
    return {line.split("  # ")[0].strip() for line in lines}


@functools.cache
def over_budget():
    found = {}
    for path in files():
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            size = node.end_lineno - node.lineno + 1
            doc = node.body[0]
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str):
                size -= doc.end_lineno - doc.lineno + 1
            positional = len(node.args.posonlyargs) + len(node.args.args)
            if path in SIGNED and node.name == "__init__":
                continue  # Signatures are TRL's, written out where a user meets them.
            if size > MAX_FUNCTION:
                found[f"{name}:{node.name}"] = f"{size} lines, at most {MAX_FUNCTION}"
            if positional > MAX_PARAMETERS + (
                node.args.args[:1] != [] and node.args.args[0].arg in ("self", "cls", "ctx")
            ):
                found[f"{name}:{node.name}"] = f"{positional} positional parameters, at most {MAX_PARAMETERS}"
    return found


def test_functions_and_signatures_stay_within_budget():
    found = over_budget()
    new = {k: v for k, v in found.items() if k not in allowed()}
    assert not new, new


def test_no_exception_outlives_its_reason():
    assert allowed() <= set(over_budget())


def test_copied_windows_of_six_lines_stay_under_three_percent():
    windows, total = Counter(), 0
    for path in files():
        text = path.read_text()
        if path in SIGNED:  # Signatures and the docs of their parameters are written out, and are alike.
            text = re.sub(r'    """.*?"""\n', "", text, flags=re.S)
            text = re.sub(r"    def __init__\(\n.*?\n    \) -> None:\n", "", text, flags=re.S)
            text = re.sub(r"        super\(\).__init__\(\n.*?\n        \)\n", "", text, flags=re.S)
        lines = [line.strip() for line in text.splitlines()]
        code = [x for x in lines if x and not x.startswith(("#", '"""', "import ", "from ")) and len(x) > 3]
        total += len(code)
        windows.update(tuple(code[i : i + WINDOW]) for i in range(len(code) - WINDOW + 1))
    copied = sum(count - 1 for count in windows.values() if count > 1) * WINDOW
    assert copied <= MAX_COPIED * total, f"{copied} of {total} lines"


RATCHETS = ROOT / "tests" / "snapshots" / "house.json"
# A log line is written at a time of its own: a watcher that looks now and then is in some traces and not in others.
JITTER = {"road": 10, "quiet": 10, "start": 40}
# What a figure may lie below its ratchet before the ratchet must follow: lines change with every commit.
SLACK = {
    "code": 300,
    "core": 300,
    "any_parameters": 20,
    "getattrs": 20,
    "road": 20,
    "quiet": 20,
    "machines": 40,
    "start": 80,
}


def measured():
    """All figures of the house and of the road of SFT, DPO and GRPO."""
    done = [forks.run([f"tools/{name}.py", "--json"], check=True) for name in ("house", "flow")]
    figures = {name: value for one in done for name, value in json.loads(one.stdout.splitlines()[-1]).items()}
    return {name: value for name, value in figures.items() if name != "lines"}  # It counts explanations.


def kind_of(figure):
    return figure.rpartition("_")[0] if figure.rpartition("_")[2] in ("sft", "dpo", "grpo") else figure


def test_the_figures_of_the_house_and_of_the_road_only_go_down():
    """`python -m tests.test_budgets` lowers the ratchets."""
    now, held = measured(), json.loads(RATCHETS.read_text())
    assert now.pop("docstring_share") >= 0.15
    assert not {name: (v, held[name]) for name, v in now.items() if v > held[name] + JITTER.get(kind_of(name), 0)}
    loose = {name: (v, held[name]) for name, v in now.items() if v < held[name] - SLACK.get(kind_of(name), 0)}
    assert not loose, f"better than the ratchet, which should follow: {loose}"


if __name__ == "__main__":
    RATCHETS.write_text(json.dumps({k: v for k, v in measured().items() if k != "docstring_share"}, indent=1) + "\n")
