"""The table of TRL's names: complete by the census of the wheels, and nothing in it that is also a name here."""

import dataclasses
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

import posttrain
from posttrain.cli.commands import TRAINING
from posttrain.cli.train import parser_for
from posttrain.compat import old_names
from posttrain.compat.trl_names import NAME, imports, rows
from posttrain.errors import ConfigError
from tests.wordings import raises

CENSUS = json.loads((Path(__file__).parents[1] / "snapshots" / "trl_names.json").read_text(encoding="utf-8"))
OLD = [row for row in rows() if row.kind in ("option", "argument")]


def names(spans):
    return [name for words in spans.values() for name in words.split()]


def test_every_public_name_of_trl_is_here_or_has_a_row():
    assert not set(names(CENSUS["imports"])) - set(posttrain.__all__) - set(imports())
    assert len(names(CENSUS["imports"])) > 350


@pytest.mark.parametrize("kind", ["options", "arguments"])
def test_every_option_and_argument_of_trl_is_here_or_has_a_row(kind):
    listed = [(owner, name) for owner, spans in CENSUS[kind].items() for name in names(spans)]
    assert len(listed) > 300
    assert not [(o, name) for o, name in listed if old_names.is_unknown(getattr(posttrain, o), name)]


@pytest.mark.parametrize(
    "path", sorted(set(names(CENSUS["modules"])) - {"losses"})
)  # Here the package of loss functions.
def test_every_module_path_of_trl_can_be_imported(path):
    importlib.import_module(f"posttrain.{path}")


@pytest.mark.parametrize("name", sorted(row.name for row in imports().values() if row.action == "rename"))
def test_a_renamed_import_is_the_present_object_with_one_warning(name):
    path, _, present = imports()[name].replacement.rpartition(".")
    vars(posttrain).pop(name, None)
    with pytest.warns(FutureWarning, match=f"{name} of older releases is now {path}.{present}") as caught:
        exec(f"from posttrain import {name}", made := {})
    assert made[name] is getattr(importlib.import_module(path), present) and len(caught) == 1
    vars(posttrain).pop(name)


def test_an_unknown_name_is_an_import_error_with_the_nearest_name():
    with pytest.raises(ImportError, match=r"no such name \(did you mean 'selective_log_softmax'\?\). Fix: copy"):
        importlib.import_module("posttrain.trainer.utils").selective_logsoftmax  # noqa: B018


def test_actions_and_kinds_are_those_of_the_documentation():
    kinds = {"import": {"rename", "refuse"}, "argument": {"rename", "ignore", "refuse"}, "method": {"call", "ignore", "refuse"},
             "option": {"rename", "convert", "ignore", "keep", "loss", "refuse"}, "value": {"rename", "ignore", "refuse"}, "default": {"set"}}  # fmt: skip
    assert {row.kind: {r.action for r in rows() if r.kind == row.kind} for row in rows()} == kinds
    assert all(row.replacement for row in rows() if row.action != "call")
    assert len({(row.kind, row.name) for row in rows()}) == len(rows())


@pytest.mark.parametrize("row", OLD, ids=lambda row: row.name)
def test_a_row_of_an_option_or_argument_names_what_exists(row):
    owner, name = row.plain.split(".")
    shared = {"Config": posttrain.PostTrainingConfig, "Trainer": posttrain.PostTrainer}
    cls = shared.get(owner) or getattr(posttrain, owner)
    config = cls if dataclasses.is_dataclass(cls) else cls.config_class
    options = {item.name for item in dataclasses.fields(config)}
    parameters = set(re.findall(r"\w+", str(importlib.import_module("inspect").signature(cls.__init__))))
    if row.name == row.plain:
        assert name not in (
            parameters if row.kind == "argument" else {f.name for f in dataclasses.fields(config) if f.init}
        )
    if row.action in ("rename", "convert"):
        target = re.match(r"\w+", row.replacement)[0]
        assert target in (options if row.kind == "option" else parameters | options)
    assert NAME.match(row.name) and re.fullmatch(r"-|(transformers )?\d+\.\d+-\d+\.\d+", row.releases)


@pytest.mark.parametrize("row", [row for row in rows() if row.kind == "value"], ids=lambda row: row.name)
def test_an_old_value_is_converted_with_one_warning_or_refused(row, tmp_path):
    owner, _, name = row.plain.partition(".")
    cls = posttrain.SFTConfig if owner == "Config" else getattr(posttrain, owner)
    old = 64 if row.name == row.plain else eval(row.name.removeprefix(f"{row.plain}="))
    new = None if row.action == "ignore" else row.replacement
    if row.action == "refuse":
        with raises(ConfigError, f"{name}={old!r}", row.replacement):
            cls(str(tmp_path), **{name: old})
        return
    with pytest.warns(FutureWarning, match=f"{name}={old!r} .*{row.replacement}") as caught:
        config = cls(str(tmp_path), **{name: old})
    assert len(caught) == 1 and getattr(config, name) in (new, [new])
    command = next(word for word, known in TRAINING.items() if known.method == cls.__name__.removesuffix("Config"))
    with pytest.warns(FutureWarning):
        parsed = parser_for(command).parse_args_and_config(["--output_dir", "o", f"--{name}", str(old)])[1]
    assert getattr(parsed, name) == getattr(config, name)


@pytest.mark.parametrize("row", [row for row in rows() if row.kind == "default"], ids=lambda row: row.name)
def test_an_older_default_differs_from_the_present_one(row):
    owner, _, name = row.name.partition(".")
    cls = posttrain.SFTConfig if owner == "Config" else getattr(posttrain, owner)
    (option,) = [item for item in dataclasses.fields(cls) if item.name == name]
    assert re.split(r"[ ,]", row.replacement)[0] != repr(option.default)


def test_the_page_on_migration_is_current():
    spec = importlib.util.spec_from_file_location(
        "trl_names_tool", Path(__file__).parents[2] / "tools" / "trl_names.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
    assert tool.render(page, rows()) == page, "run `python tools/trl_names.py`"
    names = re.findall(r"^\| `([^`]+)` \| (import|option|argument|value|default) \|", page, re.M)
    assert sorted(names) == sorted((row.name, row.kind) for row in rows() if row.kind != "method")
