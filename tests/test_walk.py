"""The walk of a row in docs/concepts.md names the files that a step really runs."""

import json
import re
import sys
import threading
from pathlib import Path

import datasets
import pytest

import posttrain
from posttrain import DPOConfig, DPOTrainer
from tests.conftest import build_model
from tests.methods.helpers import grpo, sft

PACKAGE = Path(posttrain.__file__).parent
PAGE = PACKAGE.parent / "docs" / "concepts.md"
# What the page leaves out: what every row uses anywhere, and what happens beside its way.
ASIDE = ("checks/", "report/", "integrations/", "errors.py", "fields.py", "metrics.py", "types.py")
ASIDE += ("redaction.py", "compat/overrides.py")
ASIDE += ("__init__.py",)  # Its finder is asked for each optional package that is not installed.
ASIDE += ("rollouts/engines.py", "rollouts/shared_memory.py")
ASIDE += (
    "models/load.py",
    "models/parallel.py",
    "models/memory.py",
    "models/memory_estimate.py",
    "models/lean_layers.py",
    "models/probe.py",
    "models/quantised.py",
    "models/recurrent/",
    "models/token_split.py",
    "methods/config.py",
)
ASIDE += tuple(
    f"loop/{name}.py" for name in ("checkpoint", "attributes", "checks", "data_report", "dry_step", "memory_profile")
)
ASIDE += ("loop/evaluation.py",)


def walked(method):
    """Files that the page names for a method."""
    section = PAGE.read_text(encoding="utf-8").split("## One row, from dataset to loss")[1].split("\n## ")[0]
    parts = dict(zip(*[iter(re.split(r"\*\*(\w+)\.\*\*", section)[1:])] * 2, strict=True))
    return set(re.findall(r"`([\w/]+\.py)`", parts[method.upper()]))


def ran(make):
    """Files of the package in which a function ran while a trainer was made and took a step."""
    seen = set()

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        make().train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    home = f"{PACKAGE}/"
    return {name.removeprefix(home) for name in seen if name.startswith(home)}


def dpo(folder, tokenizer):
    """A DPO trainer on a two-layer model."""
    rows = [{"prompt": f"Say {i}:", "chosen": " yes yes", "rejected": " no"} for i in range(4)]
    args = DPOConfig(str(folder), report_to="none", bf16=False, save_strategy="no", max_steps=1)
    data = datasets.Dataset.from_list(rows)
    return DPOTrainer(build_model(len(tokenizer)), args=args, train_dataset=data, processing_class=tokenizer)


MAKERS = {
    "dpo": dpo,
    "sft": lambda folder, tokenizer: sft(folder, tokenizer, max_steps=1),
    "grpo": lambda folder, tokenizer: grpo(folder, tokenizer, engine="native", max_steps=1, beta=0.1),
}


@pytest.mark.parametrize("method", MAKERS)
def test_the_page_says_through_how_much_text_a_step_runs(method):
    """To 5 %: the ratchets hold the exact number."""
    counted = json.loads((PACKAGE.parent / "tests" / "snapshots" / "house.json").read_text(encoding="utf-8"))
    told = re.search(rf"\*\*{method.upper()}\.\*\* .*?([\d,]+) lines", PAGE.read_text(encoding="utf-8"))
    assert told is not None
    lines = counted[f"road_{method}"] + counted[f"machines_{method}"]
    assert int(told[1].replace(",", "")) == pytest.approx(lines, rel=0.05)


@pytest.mark.parametrize("method", MAKERS)
def test_the_walk_names_every_file_that_a_row_passes_and_no_other(method, tiny_tokenizer, tmp_path):
    MAKERS[method](tmp_path / "first", tiny_tokenizer).train()  # Imports are not the way of a row.
    files, named = ran(lambda: MAKERS[method](tmp_path / "second", tiny_tokenizer)), walked(method)
    assert len(named) > 10
    assert {name for name in named if not (PACKAGE / name).exists()} == set()
    assert named - files == set(), "named, and did not run"
    assert {name for name in files if not name.startswith(ASIDE)} - named == set(), "ran, and is not named"
