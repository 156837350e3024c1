"""Fill `posttrain/compat/trl_names.tsv` from wheels of TRL: methods of its trainers, and the releases that have each name.

    pip download --no-deps trl==1.16.0 -d WHEELS    # and one wheel of every other release line
    python tools/trl_names.py WHEELS

The wheels are parsed with `ast`; TRL is never imported. The columns ``action`` and ``replacement`` are written by hand and
kept. A method that is new in the wheels gets the action ``call`` if our trainer of that name has it, else ``refuse`` without
a replacement: the command lists these rows, and a test fails until each has a replacement.
"""

from __future__ import annotations

import argparse
import ast
import zipfile
from collections import defaultdict
from pathlib import Path

import posttrain
from posttrain.compat.trl_names import COLUMNS, TABLE, TRLName, rows

Functions = ast.FunctionDef | ast.AsyncFunctionDef
Release = tuple[int, int]


def release_of(wheel: Path) -> Release:
    """Major and minor version in a wheel's file name."""
    major, minor, *_ = wheel.name.split("-")[1].split(".")
    return int(major), int(minor)


def definitions(wheel: Path) -> tuple[dict[str, list[ast.ClassDef]], set[str]]:
    """All classes of a wheel by name, and the names of its top-level classes and functions."""
    classes, names = defaultdict(list), set()
    with zipfile.ZipFile(wheel) as archive:
        for path in archive.namelist():
            if not (path.startswith("trl/") and path.endswith(".py")):
                continue
            body = ast.parse(archive.read(path)).body
            guarded = [inner for node in body if isinstance(node, ast.If | ast.Try) for inner in node.body]
            for node in (*body, *guarded):
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(node)
                if isinstance(node, ast.ClassDef | Functions):
                    names.add(node.name)
    return classes, names


def methods(classes: dict[str, list[ast.ClassDef]], name: str, below: tuple[str, ...] = ()) -> set[str]:
    """Methods and properties of a class and of its bases within TRL, without dunders."""
    found = set()
    for node in classes.get(name, ()):
        for base in node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
            parent = inner.id if isinstance(inner, ast.Name) else getattr(inner, "attr", "")
            if parent not in (name, *below):
                found |= methods(classes, parent, (*below, name))
        found |= {item.name for item in node.body if isinstance(item, Functions) and not item.name.startswith("__")}
    return found


def span(releases: list[Release]) -> str:
    """First and last release line: ``0.7-0.28``."""
    return "-".join(f"{major}.{minor}" for major, minor in (min(releases), max(releases)))


def read(wheels: list[Path]) -> tuple[dict[str, str], dict[str, str]]:
    """Releases by ``Trainer.method``, for trainers that posttrain has by the same name, and by top-level name."""
    ours = [name for name in posttrain.__all__ if name.endswith("Trainer")]
    of_methods, of_names = defaultdict(list), defaultdict(list)
    for wheel in wheels:
        classes, names = definitions(wheel)
        for trainer in ours:
            for method in methods(classes, trainer):
                of_methods[f"{trainer}.{method}"].append(release_of(wheel))
        for name in names:
            of_names[name].append(release_of(wheel))
    return {name: span(found) for name, found in of_methods.items()}, {n: span(found) for n, found in of_names.items()}


def main() -> None:
    """Rewrite the table, and list the rows that need a replacement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheels", type=Path, help="folder with one wheel of TRL per release line")
    of_methods, of_names = read(sorted(parser.parse_args().wheels.glob("trl-*.whl"), key=release_of))
    known = {(row.kind, row.name): row for row in rows()}
    table = [row._replace(releases=of_names.get(row.name, row.releases)) for row in rows() if row.kind != "method"]
    for name, releases in of_methods.items():
        trainer, method = name.split(".")
        action = "call" if hasattr(getattr(posttrain, trainer), method) else "refuse"
        row = known.get(("method", name), TRLName(name, "method", releases, action, ""))
        table.append(row._replace(releases=releases))
        if row.action == "refuse" and not row.replacement:
            print(f"{name} ({releases}) needs a replacement")
    lines = ["\t".join(row) for row in sorted(table, key=lambda row: (row.kind, row.name))]
    TABLE.write_text("\n".join(["\t".join(COLUMNS), *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
