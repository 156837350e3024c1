"""Take a census of TRL's wheels: names that `posttrain/compat/trl_names.tsv` lacks, and the releases of those it has.

    pip download --no-deps trl==1.16.0 -d WHEELS    # and one wheel of every other release line
    python tools/trl_names.py WHEELS
    python tools/trl_names.py                       # only writes the pages, after a change of the table

The wheels are parsed with `ast`; TRL is never imported. The command

- writes the public names, config fields and trainer arguments of all releases to `tests/snapshots/trl_names.json`, which a test
  compares with the package;
- corrects the column ``releases`` of the table. The columns ``action`` and ``replacement`` are written by hand and kept;
- adds methods of trainers with the action ``call`` if our trainer has them, else ``refuse`` without a replacement;
- lists the rows without a replacement, and the names without a row;
- writes the tables of `docs/migration.md` and `docs/hooks.md`.

A name is public if a package's ``__init__`` imports it, or if it is defined without an underscore in a module that scripts import
from (`PUBLIC`). Programs (``trl.cli``, ``trl.commands``, ``trl.skills``, ``trl.scripts`` but for its ``utils``) and helpers inside
``trl.experimental``, ``trl.kernels`` and ``trl.losses`` that no ``__init__`` imports are internal.

Wheels of transformers in the same folder give the releases of options that TRL's configs inherit from it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import posttrain
from posttrain.compat import old_names, overrides
from posttrain.compat.trl_names import COLUMNS, TABLE, TRLName, rows

Functions = ast.FunctionDef | ast.AsyncFunctionDef
Release = tuple[int, int]
Classes = dict[str, list[ast.ClassDef]]
ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "tests" / "snapshots" / "trl_names.json"
BEGIN, END = "<!-- names -->", "<!-- end of names -->"
PUBLIC = ("core", "data_utils", "import_utils", "env_utils", "chat_template_utils", "trainer.", "models.", "extras.", "environment.",
          "generation.", "scripts.utils", "commands.cli_utils")  # fmt: skip
PROGRAMS = ("cli", "skills", "scripts.", "commands.", "_compat")
CONSTANTS = (
    "core",
    "data_utils",
    "import_utils",
    "trainer.utils",
    "models.utils",
)  # Modules whose constants are public.
# Of transformers, which packages of TRL import.
FOREIGN = {"OptionalDependencyNotAvailable", "main"}


def release_of(wheel: Path) -> Release:
    """Major and minor version in a wheel's file name."""
    major, minor, *_ = wheel.name.split("-")[1].split(".")
    return int(major), int(minor)


def modules(wheel: Path) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the path below ``trl`` of each module of a wheel, and its statements, those of ``if`` and ``try`` blocks included."""
    with zipfile.ZipFile(wheel) as archive:
        for file in archive.namelist():
            if file.startswith("trl/") and file.endswith(".py"):
                path = file.removesuffix(".py").removeprefix("trl/").replace("/", ".")
                body = ast.parse(archive.read(file)).body
                guarded = [
                    part for node in body if isinstance(node, ast.If | ast.Try) for part in (*node.body, *node.orelse)
                ]
                yield path, [*body, *guarded]


def exported(body: list[ast.stmt]) -> Iterator[str]:
    """Names that an ``__init__`` imports from its package, directly or by its table of lazy imports."""
    for node in (inner for part in body for inner in ast.walk(part)):
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("trl")):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Dict):
            lists = [value for value in node.values if isinstance(value, ast.List)]
            yield from (item.value for part in lists for item in part.elts if isinstance(item, ast.Constant))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("append", "extend") and node.args:
            yield from (item.value for item in ast.walk(node.args[0]) if isinstance(item, ast.Constant))


def public(path: str, body: list[ast.stmt]) -> set[str]:
    """Public names of a module."""
    if path == "trainer.test" or (path.startswith(PROGRAMS) and not path.startswith(PUBLIC)):
        return set()
    found: set[str] = set()
    if path.rpartition(".")[2] == "__init__":
        found |= set(exported(body))
    if path.startswith(PUBLIC):
        found |= {node.name for node in body if isinstance(node, ast.ClassDef | Functions)}
    if path in CONSTANTS:
        constants = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
        found |= {node.id for node in constants if isinstance(node, ast.Name) and node.id.isupper()}
    return {name for name in found if isinstance(name, str) and name.isidentifier() and name[0] != "_"} - FOREIGN


def lineage(classes: Classes, name: str, below: tuple[str, ...] = ()) -> Iterator[ast.ClassDef]:
    """Yield the definitions of a class and of its bases within TRL."""
    for node in classes.get(name, ()):
        yield node
        for base in node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
            parent = inner.id if isinstance(inner, ast.Name) else getattr(inner, "attr", "")
            if parent not in (name, *below):
                yield from lineage(classes, parent, (*below, name))


def methods(classes: Classes, name: str) -> set[str]:
    """Methods and properties of a class, without dunders."""
    items = (item for node in lineage(classes, name) for item in node.body if isinstance(item, Functions))
    return {item.name for item in items if not item.name.startswith("__")}


def options(classes: Classes, name: str) -> set[str]:
    """Fields of a config."""
    items = (item for node in lineage(classes, name) for item in node.body if isinstance(item, ast.AnnAssign))
    named = {item.target.id: ast.unparse(item.annotation) for item in items if isinstance(item.target, ast.Name)}
    return {option for option, kind in named.items() if "ClassVar" not in kind and not option.startswith("_")}


def arguments(classes: Classes, name: str) -> set[str]:
    """Parameters of a trainer's constructor."""
    items = (item for node in classes.get(name, ()) for item in node.body if isinstance(item, Functions))
    makers = [item.args for item in items if item.name == "__init__"]
    return {argument.arg for made in makers for argument in (*made.args[1:], *made.kwonlyargs)}


def span(releases: Iterable[Release]) -> str:
    """First and last release line: ``0.7-0.28``."""
    found = sorted(releases)
    return "-".join(f"{major}.{minor}" for major, minor in (found[0], found[-1]))


class Census:
    """Releases by name: of imports, modules with public names, fields of configs, arguments and methods of trainers."""

    def __init__(self, wheels: list[Path]) -> None:
        self.imports: dict[str, set[Release]] = defaultdict(set)
        self.defined: dict[str, set[Release]] = defaultdict(set)  # At the top of any module.
        self.modules: dict[str, set[Release]] = defaultdict(set)
        self.options: dict[tuple[str, str], set[Release]] = defaultdict(set)
        self.arguments: dict[tuple[str, str], set[Release]] = defaultdict(set)
        self.methods: dict[tuple[str, str], set[Release]] = defaultdict(set)
        for wheel in wheels:
            self.read(wheel)

    def read(self, wheel: Path) -> None:
        """Add the names of a wheel."""
        release, classes = release_of(wheel), defaultdict(list)
        for path, body in modules(wheel):
            for name in public(path, body):
                self.imports[name].add(release)
                self.modules[path.removesuffix("__init__").rstrip(".")].add(release)
            for node in body:
                if isinstance(node, ast.ClassDef | Functions):
                    self.defined[node.name].add(release)
                if isinstance(node, ast.ClassDef) and (not path.startswith(PROGRAMS) or path.startswith(PUBLIC)):
                    classes[node.name].append(node)
        for name in posttrain.__all__:
            if name.endswith(("Config", "Arguments")):
                for option in options(classes, name):
                    self.options[name, option].add(release)
            elif name.endswith("Trainer"):
                for argument in arguments(classes, name):
                    self.arguments[name, argument].add(release)
                for method in methods(classes, name):
                    self.methods[name, method].add(release)

    def of_rows(self) -> dict[tuple[str, str], set[Release]]:
        """Releases by kind and plain name of the table's rows."""
        found: dict[tuple[str, str], set[Release]] = defaultdict(set)
        for name, releases in (*self.imports.items(), *self.defined.items()):
            found["import", name] |= releases
        for (trainer, method), releases in self.methods.items():
            found["method", f"{trainer}.{method}"] |= releases
        for (owner, name), releases in (*self.options.items(), *self.arguments.items()):
            cls = getattr(posttrain, owner)
            for kind in (cls, getattr(cls, "config_class", None)):
                if kind is not None and (row := old_names.row_of(kind, name)):
                    found[row.kind, row.plain] |= releases
                    break
        return found

    def snapshot(self) -> dict[str, dict]:
        """Names by span of releases."""

        def by_span(names: dict[str, set[Release]]) -> dict[str, str]:
            groups: dict[str, list[str]] = defaultdict(list)
            for name in sorted(names):
                groups[span(names[name])].append(name)
            return {key: " ".join(groups[key]) for key in sorted(groups)}

        def by_owner(names: dict[tuple[str, str], set[Release]]) -> dict[str, dict[str, str]]:
            owners: dict[str, dict[str, set[Release]]] = defaultdict(dict)
            for (owner, name), releases in names.items():
                owners[owner][name] = releases
            return {owner: by_span(owners[owner]) for owner in sorted(owners)}

        parts = {"imports": by_span(self.imports), "modules": by_span({k: v for k, v in self.modules.items() if k})}
        return parts | {"options": by_owner(self.options), "arguments": by_owner(self.arguments)}


def of_transformers(wheels: list[Path]) -> dict[str, set[Release]]:
    """Releases of the fields of `transformers.TrainingArguments`."""
    found: dict[str, set[Release]] = defaultdict(set)
    for wheel in wheels:
        body = ast.parse(zipfile.ZipFile(wheel).read("transformers/training_args.py")).body
        classes = {node.name: [node] for node in body if isinstance(node, ast.ClassDef)}
        for option in options(classes, "TrainingArguments"):
            found[f"Config.{option}"].add(release_of(wheel))
    return found


def table(census: Census, inherited: dict[str, set[Release]]) -> list[TRLName]:
    """Return the rows with the releases of the census, and a row for every method."""
    found, known = census.of_rows(), {(row.kind, row.name): row for row in rows()}
    result = []
    for row in rows():
        if row.kind == "method":
            continue
        releases = row.releases if row.releases != "?" else "-"
        if (row.kind, row.plain) in found:
            releases = span(found[row.kind, row.plain])
        elif row.kind == "option" and row.plain in inherited:
            releases = f"transformers {span(inherited[row.plain])}"
        result.append(row._replace(releases=releases))
    for (trainer, method), releases in census.methods.items():
        action = "call" if hasattr(getattr(posttrain, trainer), method) else "refuse"
        name = f"{trainer}.{method}"
        row = known.get(("method", name), TRLName(name, "method", "", action, ""))
        result.append(row._replace(releases=span(releases)))
    return result


def group_of(row: TRLName) -> tuple[int, int, str]:
    """Return the last release of a row as a key to sort by, and its heading."""
    if row.releases.startswith("transformers"):
        return 1000, 0, "Options of transformers"
    if row.releases == "-":
        return 1001, 0, "Never in TRL, but often written"
    major, minor = re.findall(r"(\d+)\.(\d+)", row.releases)[-1]
    return int(major), int(minor), f"Last in TRL {major}.{minor}"


def meaning(row: TRLName) -> str:
    """What happens to a name."""
    if row.action == "loss":
        return f"runs as the weight of `{row.replacement!r}` in `loss_type` and `loss_weights`"
    if row.action in ("rename", "convert"):
        return f"runs as `{row.replacement}`"
    if row.kind == "default":
        return f"the default was {row.replacement}"
    if row.kind == "import":
        return row.replacement if row.replacement.startswith("nothing") else f"use {row.replacement}"
    return {"ignore": "ignored", "keep": "runs", "refuse": "refused"}[row.action] + f": {row.replacement}"


def render(page: str, names: tuple[TRLName, ...]) -> str:
    """Return the page on migration with a table for each release."""
    groups: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    for row in sorted(names, key=lambda row: row.name.lower()):
        if row.kind != "method":
            groups[group_of(row)].append(f"| `{row.name}` | {row.kind} | {row.releases} | {meaning(row)} |")
    tables = (
        "\n".join([f"### {key[2]}", "", "| name | kind | in releases | here |", "|---|---|---|---|", *groups[key]])
        for key in sorted(groups)
    )
    return page.split(BEGIN)[0] + BEGIN + "\n" + "\n\n".join(tables) + "\n" + END + page.split(END)[1]


def write_pages() -> None:
    """Write the tables of both pages."""
    page, hooks = ROOT / "docs" / "migration.md", ROOT / "docs" / "hooks.md"
    page.write_text(render(page.read_text(encoding="utf-8"), rows()), encoding="utf-8")
    first, *_ = overrides.table().splitlines()
    old = re.search(rf"^{re.escape(first)}\n(\|.*\n)*", text := hooks.read_text(encoding="utf-8"), re.MULTILINE)
    assert old is not None
    hooks.write_text(text.replace(old[0], overrides.table() + "\n"), encoding="utf-8")


def main() -> None:
    """Correct the table, write the snapshot and the pages, and list what needs a person."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheels", type=Path, nargs="?", help="folder with one wheel of TRL per release line")
    folder = parser.parse_args().wheels
    if folder is None:
        return write_pages()
    census = Census(sorted(folder.glob("trl-*.whl"), key=release_of))
    result = table(census, of_transformers(sorted(folder.glob("transformers-*.whl"), key=release_of)))
    lines = ["\t".join(row) for row in sorted(result, key=lambda row: (row.kind, row.name))]
    TABLE.write_text("\n".join(["\t".join(COLUMNS), *lines]) + "\n", encoding="utf-8")
    rows.cache_clear()
    write_pages()
    SNAPSHOT.write_text(json.dumps(census.snapshot(), indent=1) + "\n", encoding="utf-8")
    for row in result:
        if row.action == "refuse" and not row.replacement:
            print(f"{row.name} ({row.releases}) needs a replacement")
    for name, releases in sorted(census.imports.items()):
        if name not in posttrain.__all__ and ("import", name) not in {(row.kind, row.name) for row in result}:
            print(f"{name} ({span(releases)}) has no row")
    for (owner, name), releases in sorted((*census.options.items(), *census.arguments.items())):
        cls = getattr(posttrain, owner)
        if old_names.is_unknown(cls, name):
            print(f"{owner}.{name} ({span(releases)}) has no row")


if __name__ == "__main__":
    main()
