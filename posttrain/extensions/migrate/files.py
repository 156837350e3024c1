"""Find files, migrate them, and print the differences and the places to change manually. `run` implements the command."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.errors import DataError
from posttrain.extensions.migrate.note import Note
from posttrain.integrations import require

SUFFIXES = (".py", ".ipynb", ".yaml", ".yml", ".sh")
SKIPPED = {"node_modules", "site-packages", "__pycache__"}
MARK = "# posttrain migrate: cell "
MAGIC = "pass  # posttrain migrate: "


class Rewritten(NamedTuple):
    """Content of a file before and after the migration.

    Attributes:
        before: Parts of the file before the migration: the whole text, or the text of each code cell of a notebook.
        after: The same parts after the migration.
        text: Content of the whole file after the migration.
        notes: Places that must be changed or checked manually.
    """

    before: list[str]
    after: list[str]
    text: str
    notes: list[Note]


def migrate_file(path: Path) -> Rewritten:
    """Convert the content of a file in memory, without writing the file.

    Raises:
        DataError: The file cannot be parsed. The message contains the file and the line.
        MissingDependencyError: libcst is not installed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        from posttrain.extensions.migrate.recipes import migrate_recipe

        after, notes = migrate_recipe(text, path)
        return Rewritten([text], [after], after, notes)
    if path.suffix == ".sh":
        from posttrain.extensions.migrate.shell import migrate_shell

        after, notes = migrate_shell(text)
        return Rewritten([text], [after], after, notes)
    require("libcst", "posttrain migrate")
    if path.suffix == ".ipynb":
        return _notebook(text, path)
    from posttrain.extensions.migrate.scripts import migrate_script

    after, notes = migrate_script(text, str(path))
    return Rewritten([text], [after], after, notes)


def _notebook(text: str, path: Path) -> Rewritten:
    """Convert the code cells of a notebook as one script, in which a comment marks the beginning of each cell."""
    from posttrain.extensions.migrate.scripts import migrate_script, parsed
    from posttrain.extensions.migrate.shell import migrate_shell

    try:
        content = json.loads(text)
        cells: list[Any] = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: the file is not a notebook (JSON with a list of cells): {error!r}") from error
    before = ["".join(cell["source"]) for cell in cells]
    script = "".join(f"{MARK}{number}\n{hide_magics(cell)}\n" for number, cell in enumerate(before, 1))
    starts = [at for at, line in enumerate(script.split("\n"), 1) if line.startswith(MARK)]

    def place(line: int) -> tuple[int, int]:
        cell = sum(start < line for start in starts)
        return line - starts[cell - 1], cell

    for number, cell in enumerate(before, 1):
        parsed(hide_magics(cell), f"{path}:cell {number}")
    changed, notes = migrate_script(script, str(path))
    parts = re.split(rf"^{re.escape(MARK)}\d+\n", changed, flags=re.MULTILINE)[1:]
    after = [re.sub(rf"{re.escape(MAGIC)}(.*)", lambda m: json.loads(m[1]), part)[:-1] for part in parts]
    of_shell = []
    for number, cell in enumerate(before):
        shell = re.match(r"%%(bash|sh)\b", cell.lstrip()) is not None
        after[number] = migrate_shell(after[number], notebook=not shell)[0]
        of_shell += [note._replace(cell=number + 1) for note in migrate_shell(cell, notebook=not shell)[1]]
    for cell, old, new in zip(cells, before, after, strict=True):
        if old != new:
            cell["source"] = new.splitlines(keepends=True) if isinstance(cell["source"], list) else new
    indent = re.match(r"\{\n( *)", text)
    written = json.dumps(content, indent=len(indent[1]) if indent else None, ensure_ascii=False)
    notes = [*(note._replace(line=place(note.line)[0], cell=place(note.line)[1]) for note in notes), *of_shell]
    return Rewritten(before, after, written + "\n" * text.endswith("\n") if before != after else text, notes)


def hide_magics(cell: str) -> str:
    """Replace lines with IPython syntax by Python statements. Each statement contains the original line as text."""
    if cell.lstrip().startswith("%%"):
        return MAGIC + json.dumps(cell)
    lines, inside = [], False
    for line in cell.split("\n"):
        if inside:
            lines[-1] = (
                MAGIC.join(lines[-1].rsplit(MAGIC, 1)[:1])
                + MAGIC
                + json.dumps(json.loads(lines[-1].rsplit(MAGIC, 1)[1]) + "\n" + line)
            )
        elif line.lstrip().startswith(("!", "%")) or re.match(r"\s*[\w.]+\?+$", line):
            bare = line.lstrip()
            lines.append(line[: len(line) - len(bare)] + MAGIC + json.dumps(bare))
        else:
            lines.append(line)
            continue
        inside = line.rstrip().endswith("\\")
    return "\n".join(lines)


def found(paths: list[str]) -> Iterator[Path]:
    """Yield the files in ``paths``. For a folder in ``paths``, yield all scripts, notebooks and YAML files below it.

    Raises:
        DataError: A path does not exist, or is a file of another type.
    """
    for path in map(Path, paths):
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                parts = file.relative_to(path).parts
                hidden = any(part.startswith(".") or part in SKIPPED for part in parts)
                if file.suffix in SUFFIXES and file.is_file() and not hidden:
                    yield file
        elif path.is_file() and path.suffix in SUFFIXES:
            yield path
        else:
            raise DataError(f"{path}: it is neither a folder nor a file with the extension {', '.join(SUFFIXES)}.")


def run(argv: list[str]) -> int:
    """Run `posttrain migrate`: print the changes, and write the migrated files if ``--write`` is set.

    Returns:
        0, or 1 if a file could not be parsed. All other files are migrated in any case.
    """
    parser = argparse.ArgumentParser(
        prog="posttrain migrate",
        description="Migrate code that was written for TRL 0.7 to 1.16: imports, options, arguments that moved "
        "to configs, and shell commands. Prints the differences, and a list of places that must be changed manually.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="Python or shell script, notebook, YAML file, or a folder with such files",
    )
    parser.add_argument("--write", action="store_true", help="change the files")
    arguments = parser.parse_args(argv)
    failed, changed, notes, checks = 0, 0, [], []
    for path in found(arguments.paths):
        try:
            result = migrate_file(path)
        except DataError as error:
            sys.stderr.write(f"{error}\n")
            failed += 1
            continue
        notes += [note.at(path) for note in result.notes if not note.check]
        checks += [note.at(path) for note in result.notes if note.check]
        for number, (before, after) in enumerate(zip(result.before, result.after, strict=True), 1):
            name = f"{path}:cell {number}" if path.suffix == ".ipynb" else str(path)
            lines = (f"{text}\n".splitlines(keepends=True) for text in (before.rstrip("\n"), after.rstrip("\n")))
            sys.stdout.writelines(difflib.unified_diff(*lines, name, name))
        if result.before != result.after:
            changed += 1
            if arguments.write:
                path.write_text(result.text, encoding="utf-8")
    for title, part in (("change manually", notes), ("check: the code runs, but not as in older releases", checks)):
        if part:
            sys.stdout.write(f"\nTo {title}:\n" + "".join(f"  {note}\n" for note in part))
    verb = "changed" if arguments.write else "to change (--write)"
    sys.stdout.write(
        f"\n{changed} file{'s' * (changed != 1)} {verb}, {len(notes)} to do manually, {len(checks)} to check, "
        f"{failed} not read.\n"
    )
    return 1 if failed else 0
