"""`reachable`: every ``raise`` of the loop, trainers and methods that making a run, or its first step, can reach by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2] / "posttrain"
ONLINE_DPO = "extensions/experimental/online_dpo"
SCOPE = (
    "loop",
    "trainers",
    "methods",
    "extensions/images/vision.py",
    f"{ONLINE_DPO}.py",
    f"{ONLINE_DPO}_method.py",
    "fields.py",
    "errors.py",
    "cli/train.py",
    "models/load.py",
)
# `plan`, `build` and the first step, as `posttrain check` runs them: the config, the trainer, and a step that is tried.
STARTS = (
    "__post_init__",
    "__init__",
    "plan",
    "build",
    "load_model",
    "try_step",
    "training_step",
    "evaluate",
    "parse",
    "make_trainer",
)


class Raise(NamedTuple):
    """A ``raise`` in the source.

    Attributes:
        name: File, function and number within the function, such as ``loop/build.py plan 1``.
        file: Path.
        lines: Its first and last line.
    """

    name: str
    file: Path
    lines: tuple[int, int]


class _Function(NamedTuple):
    file: Path
    path: str
    node: ast.FunctionDef | ast.AsyncFunctionDef


def _functions() -> list[_Function]:
    found: list[_Function] = []

    def look(node: ast.AST, file: Path, path: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = (*path, child.name) if named else path
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(_Function(file, ".".join(inner), child))
            look(child, file, inner)

    for part in SCOPE:
        place = ROOT / part
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            look(ast.parse(file.read_text(encoding="utf-8")), file, ())
    return found


def _own(node: ast.AST) -> list[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    nodes: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += [child, *_own(child)]
    return nodes


def reachable() -> dict[str, Raise]:
    """Return the statements by name. A function is reached if one that is reached names it, so it may be more than run."""
    by_name: dict[str, list[_Function]] = {}
    for function in _functions():
        by_name.setdefault(function.node.name, []).append(function)
    reached: dict[str, list[_Function]] = {}
    open_names = set(STARTS)
    while open_names:
        name = open_names.pop()
        reached[name] = by_name.get(name, [])
        for function in reached[name]:
            for node in ast.walk(function.node):
                used = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
                if used in by_name and used not in reached:
                    open_names.add(used)
    found = {}
    for function in (function for functions in reached.values() for function in functions):
        raises = [node for node in _own(function.node) if isinstance(node, ast.Raise) and node.exc is not None]
        for number, node in enumerate(sorted(raises, key=lambda node: node.lineno), 1):
            name = f"{function.file.relative_to(ROOT)} {function.path} {number}"
            found[name] = Raise(name, function.file, (node.lineno, node.end_lineno or node.lineno))
    return dict(sorted(found.items()))
