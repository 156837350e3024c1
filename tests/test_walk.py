"""The walk of a row in docs/concepts.md names the files that a step really runs."""

import re
import sys
import threading
from pathlib import Path

import pytest

import posttrain
from tests.methods.helpers import grpo, sft

PACKAGE = Path(posttrain.__file__).parent
PAGE = PACKAGE.parent / "docs" / "concepts.md"
# What the page leaves out: what every row uses anywhere, and what happens beside its way.
ASIDE = ("checks/", "report/", "integrations/", "errors.py", "fields.py", "metrics.py", "types.py")
ASIDE += ("rollouts/server/", "rollouts/engines.py")
ASIDE += (
    "models/load.py",
    "models/parallel.py",
    "models/memory.py",
    "models/memory_estimate.py",
    "models/lean_layers.py",
    "models/probe.py",
    "models/quantised.py",
    "models/token_split.py",
    "methods/config.py",
)
ASIDE += tuple(
    f"loop/{name}.py"
    for name in ("checkpoint", "attributes", "checks", "data_report", "dry_step", "memory_profile", "token_split")
)
ASIDE += ("loop/evaluation.py",)


def walked(method):
    """Files that the page names for a method."""
    section = PAGE.read_text(encoding="utf-8").split("## One row, from dataset to loss")[1].split("\n## ")[0]
    before, _, online = section.partition("**GRPO.**")
    return set(re.findall(r"`([\w/]+\.py)`", online if method == "grpo" else before.split("**SFT.**")[1]))


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


MAKERS = {
    "sft": lambda folder, tokenizer: sft(folder, tokenizer, max_steps=1),
    "grpo": lambda folder, tokenizer: grpo(folder, tokenizer, engine="native", max_steps=1, beta=0.1),
}


@pytest.mark.parametrize("method", MAKERS)
def test_the_walk_names_every_file_that_a_row_passes_and_no_other(method, tiny_tokenizer, tmp_path):
    MAKERS[method](tmp_path / "first", tiny_tokenizer).train()  # Imports are not the way of a row.
    files, named = ran(lambda: MAKERS[method](tmp_path / "second", tiny_tokenizer)), walked(method)
    assert len(named) > 10
    assert {name for name in named if not (PACKAGE / name).exists()} == set()
    assert named - files == set(), "named, and did not run"
    assert {name for name in files if not name.startswith(ASIDE)} - named == set(), "ran, and is not named"
