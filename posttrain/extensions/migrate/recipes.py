"""`migrate_recipe`: rename old options in a YAML file. Lines are changed one by one, so that comments are preserved."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

import posttrain
from posttrain.cli.commands import TRAINING
from posttrain.cli.train import GRPOScriptArguments
from posttrain.compat import old_names
from posttrain.compat.trl_names import value_row
from posttrain.errors import DataError
from posttrain.extensions.migrate.behavior import PACKING, REMOVED, changed_defaults
from posttrain.extensions.migrate.note import Note

OF_RECIPES = {"output_dir", "model_name_or_path", "learning_rate", "per_device_train_batch_size"}


def migrate_recipe(text: str, path: Path) -> tuple[str, list[Note]]:
    """Rename old options in a YAML file with training options. Other YAML files are returned unchanged.

    Raises:
        DataError: The file is not valid YAML.
    """
    try:
        documents = list(yaml.compose_all(text, yaml.SafeLoader))
        options = yaml.safe_load(text) if len(documents) == 1 else None
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        raise DataError(f"{path}:{mark.line + 1 if mark else 1}: the file is not valid YAML: {error}") from error
    if not isinstance(options, dict) or not OF_RECIPES & options.keys():
        return text, []
    (node,) = documents
    kinds = (GRPOScriptArguments, config_of(options), posttrain.ModelConfig)
    lines, notes = text.splitlines(keepends=True), []
    for key, value in reversed(node.value):
        name, setting = key.value, options.get(key.value)
        _convert_value(kinds, key, value, setting, lines, notes)
        cls = old_names.owner(kinds, name)
        if cls is None or any(name in kind.__dataclass_fields__ for kind in kinds):
            continue
        row = _row_of(cls, name, options)
        target, _, literal = row.replacement.partition("=")
        first, last = key.start_mark.line, value.end_mark.line + (value.end_mark.column > 0)
        if row.action == "refuse" or (
            row.action in ("loss", "rename") and setting is not None and not target.isidentifier()
        ):
            notes.append(Note(first + 1, f"{name}: {row.replacement}"))
        elif row.action == "loss" and setting is not None:
            notes.append(Note(first + 1, f"{name}: add {target!r} to loss_type, and {setting} to loss_weights"))
        elif target in options and row.action != "ignore" and setting is not None:
            if options[target] != setting:
                notes.append(Note(first + 1, f"{name}={setting!r} and {target}={options[target]!r} are both set"))
                continue
            del lines[first:last]
        elif row.action == "rename" and setting is not None:
            column = key.start_mark.column
            lines[first] = lines[first][:column] + target + lines[first][key.end_mark.column :]
        elif row.action == "convert" and setting:
            lines[first:last] = [f"{target}: {yaml.safe_dump(ast.literal_eval(literal)).splitlines()[0]}\n"]
        elif row.action != "keep":
            del lines[first:last]
    checks = _keep_behavior(kinds[1], node, options, lines)
    return "".join(lines), [*notes[::-1], *checks]


def _row_of(cls: type, name: str, options: dict[str, Any]) -> Any:
    """Return the row of an old option in the table of names. Without ``use_vllm``, refused options of vLLM are ignored
    instead.
    """
    row: Any = old_names.row_of(cls, name, options[name])
    unused = row.action == "refuse" and name.startswith("vllm_") and not options.get("use_vllm")
    return row._replace(action="ignore") if unused else row


def _keep_behavior(config: type, node: yaml.MappingNode, options: dict[str, Any], lines: list[str]) -> list[Note]:
    """Add the option with which packing works as in older releases, if the file has old options. Return notes about changed
    defaults.
    """
    rows = {name: old_names.row_of(config, name) for name in options.keys() - config.__dataclass_fields__.keys()}
    old = {name: row.replacement.partition("=")[0] for name, row in rows.items() if row}
    notes = []
    if old and options.get("packing") and "packing_strategy" not in options:
        place = next((at for at, text in enumerate(lines) if re.match(r"packing\s*:", text)), None)
        if place is not None and REMOVED & old.keys():
            lines.insert(place + 1, "packing_strategy: wrapped\n")
        else:
            line = next(key.start_mark.line for key, _ in node.value if key.value == "packing")
            notes.append(Note(line + 1, PACKING, check=True))
    if old and (text := changed_defaults(config, {*options, *old.values()})):
        notes.append(Note(1, text, check=True))
    return notes


def _convert_value(kinds: Any, key: Any, value: Any, given: object, lines: list[str], notes: list[Note]) -> None:
    """Replace an outdated value of an option whose name did not change. If there is no new value, add a note."""
    matches = (value_row(kind, key.value, given) for kind in kinds if given is not None)
    row = next((row for row in matches if row), None)
    if row is not None and row.action == "refuse":
        notes.append(Note(key.start_mark.line + 1, f"{key.value}={given!r}: {row.replacement}"))
    elif row is not None and row.action == "ignore":
        del lines[key.start_mark.line : value.end_mark.line + (value.end_mark.column > 0)]
    elif row is not None:
        line, first, last = value.start_mark.line, value.start_mark.column, value.end_mark.column
        lines[line] = lines[line][:first] + row.replacement + lines[line][last:]


def config_of(options: dict[str, Any]) -> type:
    """Return the config class to which most of the options belong. Options that a config rejects have less weight. If
    several classes have the same number of options, return the first of them.
    """

    def known(kind: type) -> float:
        names = {item.name for item in fields(kind)}
        rows = (old_names.row_of(kind, name) for name in options if name not in names)
        return len(names & options.keys()) + sum(0.2 if row.action == "refuse" else 1 for row in rows if row)

    configs = [command.config for command in TRAINING.values() if command.plugin is None]
    return max(configs, key=known)
