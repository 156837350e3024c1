"""Every ``raise`` that making a run or its first step can reach has a config that `posttrain check` refuses, or a reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from posttrain.cli.main import main
from posttrain.errors import PosttrainError
from tests.faults.made import make_named
from tests.faults.raises import reachable
from tests.faults.refusals import MODEL, NO_CONFIG, NULL, REFUSED, ROWS, SAMPLES, USUAL

RAISES = reachable()


def explained(name):
    return any(name.startswith(beginning) for beginning in NO_CONFIG)


def test_every_reachable_raise_has_a_config_or_a_reason():
    missing = [name for name in RAISES if name not in REFUSED and not explained(name)]
    assert not missing, "a new raise needs a config in tests/faults/refusals.py, or a reason there"
    assert set(REFUSED) <= set(RAISES) and not [name for name in REFUSED if explained(name)]
    assert not [beginning for beginning in NO_CONFIG if not any(name.startswith(beginning) for name in RAISES)]


@pytest.fixture
def raised(monkeypatch):
    """Names of the raises that make our errors."""
    found = []

    def init(self, *args, **options):
        frame = sys._getframe(1)
        while (
            frame
            and frame.f_code.co_name == "__init__"
            and "self" in frame.f_locals
            and isinstance(frame.f_locals["self"], Exception)
        ):
            frame = frame.f_back
        place = (Path(frame.f_code.co_filename), frame.f_lineno)
        found.extend(
            one.name for one in RAISES.values() if one.file == place[0] and one.lines[0] <= place[1] <= one.lines[1]
        )
        super(PosttrainError, self).__init__(*args, **options)

    monkeypatch.setattr(PosttrainError, "__init__", init, raising=False)
    return found


# The fast subset: command lines and choices.
CASES = [
    pytest.param(name, marks=() if name.startswith(("cli/", "errors.py")) else pytest.mark.slow) for name in REFUSED
]


@pytest.mark.parametrize("name", CASES)
def test_check_refuses_the_config(name, tiny_model_dir, tmp_path, monkeypatch, raised, capsys):
    command, options = REFUSED[name]
    options = dict(options)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # Named functions are found from the working directory.
    rows = ROWS[options.pop("rows", USUAL[command])]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": "rows.jsonl",
        "output_dir": "out",
        "bf16": False,
        "report_to": "none",
    }
    if command in ("distillation", "gkd"):
        config["teacher_model_name_or_path"] = tiny_model_dir
    elif USUAL[command] == "prompts":
        config |= SAMPLES if command != "online-dpo" else {"reward_funcs": "think_format_reward"}
    config = {key: value for key, value in (config | options).items() if value is not None}
    make_named(config, Path(tiny_model_dir))
    text = yaml.safe_dump({key: None if value == NULL else value for key, value in config.items()})
    Path("run.yaml").write_text(text.replace(MODEL, tiny_model_dir))
    assert main(["check", command, "--config", "run.yaml"]) != 0
    assert name in raised, (raised, capsys.readouterr())
