"""`migrate_shell`: rewrite ``trl COMMAND`` word by word in shell scripts and notebooks."""

from __future__ import annotations

import ast
import re
from typing import Any

import posttrain
from posttrain.cli.commands import TRAINING
from posttrain.cli.train import GRPOScriptArguments
from posttrain.compat import old_names
from posttrain.compat.trl_names import value_row
from posttrain.extensions.migrate.behavior import REMOVED
from posttrain.extensions.migrate.note import Note

# A command is at the start of a line, or after another command or variable assignments.
SETTINGS = r"(?:\w+=\S*[ \t]+)*"
NAME = r"(?P<program>trl)[ \t]+(?P<name>[\w-]+)"
COMMAND = re.compile(rf"(?:^|[;&|(]|\bthen\b|\bdo\b)[ \t]*{SETTINGS}{NAME}", re.MULTILINE)
IN_NOTEBOOK = re.compile(rf"^[ \t]*!(?:.*[;&|])?[ \t]*{SETTINGS}{NAME}", re.MULTILINE)
SCRIPT = re.compile(r"(?:trl[/.]|examples/)scripts[/.](\w+?)(?:\.py)?(?=\s|$)")
# These patterns match an option with its values, or the end of a command.
SPACE = r"(?:\\\n|[ \t])+"
WORD = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|[^\s;&|<>'"\\#])+"""
FLAG = re.compile(
    rf"(?P<space>{SPACE})--(?P<name>[\w-]+)(?P<values>(?:={WORD})?(?:{SPACE}(?!-{{1,2}}[A-Za-z]){WORD})*)"
)
WORDS = re.compile(rf"(?:{SPACE}(?:-{{1,2}}[A-Za-z])?{WORD}|=)*")
SAME = ("env", "vllm-serve")  # Commands that have the same name in posttrain and do not take options of configs.


def migrate_shell(text: str, *, notebook: bool = False) -> tuple[str, list[Note]]:
    """Rewrite TRL's commands in a shell script, or in the lines of a notebook cell that begin with ``!``.

    Returns:
        The new text, and notes about places that must be changed manually.
    """
    notes, parts, end = [], [], 0
    for match in (IN_NOTEBOOK if notebook else COMMAND).finditer(text):
        line, name = text.count("\n", 0, match.start("program")) + 1, match["name"]
        if name not in (*TRAINING, *SAME):
            notes.append(Note(line, f"trl {name}: posttrain has no such command. See posttrain --help."))
            continue
        rest = WORDS.match(text, match.end())
        assert rest is not None
        options = rest[0] if name in SAME else _options(rest[0], name, line, notes)
        parts += [text[end : match.start("program")], "posttrain", text[match.end("program") : match.end()], options]
        end = rest.end()
    for match in SCRIPT.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        first = text.rfind("\n", 0, match.start()) + 1
        if match[1] in TRAINING and (not notebook or text[first : match.start()].lstrip().startswith("!")):
            notes.append(
                Note(line, f"{match[0]}: use posttrain {match[1]}, which also accepts the options of accelerate launch")
            )
    return "".join([*parts, text[end:]]), notes


def _options(text: str, command: str, line: int, notes: list[Note]) -> str:
    kinds = (GRPOScriptArguments, TRAINING[command].config, posttrain.ModelConfig)
    flags = {match["name"].replace("-", "_") for match in FLAG.finditer(text)}
    wrapped = "packing_strategy" not in flags and bool(REMOVED & flags)
    options = {"config", *(name for kind in kinds for name in kind.__dataclass_fields__)}

    def replace(found: re.Match[str]) -> str:
        name, values = found["name"].replace("-", "_"), found["values"]
        value = _value(values)
        if name == "packing" and value and wrapped:
            return f"{found[0]}{found['space']}--packing_strategy wrapped"
        where = line + text.count("\n", 0, found.start("name"))
        if name in options:
            old = next((row for kind in kinds if (row := value_row(kind, name, value))), None)
            if old is not None and old.action == "rename":
                return found[0].replace(str(value), old.replacement)
            if old is not None and old.action == "refuse":
                notes.append(Note(where, f"--{name} {value}: {old.replacement}"))
            return "" if old is not None and old.action == "ignore" else found[0]
        cls = old_names.owner(kinds, name)
        row: Any = None if cls is None else old_names.row_of(cls, name, value)
        if row is None or row.action == "keep":
            return found[0]
        target, _, literal = row.replacement.partition("=")
        if row.action == "ignore":
            return ""
        if not target.isidentifier() or row.action in ("refuse", "loss"):
            notes.append(Note(where, f"--{name}: {row.replacement}"))
            return found[0]
        if literal:
            return f"{found['space']}--{target} {ast.literal_eval(literal)}" if value else ""
        return f"{found['space']}--{target}{values}"

    return FLAG.sub(replace, text)


def _value(values: str) -> Any:
    """Return the value of a command-line option. Return True for an option without a value."""
    word = re.sub(r"\\\n", " ", values).strip().lstrip("=").strip("'\"")
    try:
        return ast.literal_eval({"true": "True", "false": "False", "": "True"}.get(word, word))
    except (ValueError, SyntaxError):
        return word
