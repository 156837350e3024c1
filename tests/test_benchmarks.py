"""Results of benchmarks: what is committed names no folder of the machine that measured."""

import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
RESULTS = sorted((FOLDER / "results").glob("*.json"))
ABSOLUTE = re.compile(r"(?<![\w./:-])(/[\w.+-]+)+|~/|\b[A-Z]:\\\\")


def texts(value):
    """All strings of a document, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from (text for part in pair for text in texts(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in texts(part))


def test_there_are_results():
    assert len(RESULTS) > 15


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_a_committed_result_names_no_folder_of_the_machine_that_wrote_it(path):
    found = [text for text in texts(json.loads(path.read_text(encoding="utf-8"))) if ABSOLUTE.search(text)]
    assert not found


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("harness")
    sys.modules.pop("harness", None)


def test_what_is_saved_names_files_without_their_folders(harness, monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["/home/me/grpo.py", "--model", "/data/models/Tiny-1", f"--out={tmp_path}/a.json"])
    harness.save("one", {"runs": [{"/root/x/model": "see /var/log/y.txt, 3/4 of http://host/page and a/b"}]})
    found = json.loads((tmp_path / "one.json").read_text())
    assert found["command"] == "python grpo.py --model Tiny-1 --out=a.json"
    assert found["runs"] == [{"model": "see y.txt, 3/4 of http://host/page and a/b"}]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.name)
def test_results_are_written_by_the_one_function_that_leaves_folders_out(path):
    text = path.read_text(encoding="utf-8")
    assert path.name == "harness.py" or "results" not in text.lower() or 'indent=1) + "\\n"' not in text


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("parity_grpo", ["grpo/token/everything x2", "vespo/token/engine weights"]),
        ("parity_online", ["rloo/plain", "gmpo/kl x2", "a2po/plain", "online_dpo/ipo"]),
    ],
)
def test_our_side_of_the_parity_of_losses_runs(harness, script, names):
    """The other side wants TRL, so that nobody would see a name of ours that has moved."""
    module = importlib.import_module(script)
    for name in names:
        found = module.our_case(*module.cases()[name])
        assert math.isfinite(found["loss"]) and any(found["logp_grad"]) and (found["metrics"] or name.endswith("x2"))
