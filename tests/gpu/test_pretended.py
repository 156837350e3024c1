"""Trainers on a pretended GPU: the losses of a CPU, nothing on two devices at once, and no more waits than are known."""

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch

from tests.gpu import device
from tests.gpu.scenarios import FILE, SCENARIOS, gap, pretended, run
from tests.ranks import ROOT, run_ranks

pytestmark = pytest.mark.skipif(device.why_not() is not None, reason=str(device.why_not()))
# Waits of an optimiser step that logs; of one that draws nine times with the native engine, one a draw and fifteen more.
GOALS = {"sft": 6, "dpo": 12, "grpo native": 9 + 15, "grpo native, beginnings in common": 9 + 15}
LAYERS, TOKENS = 2, 8


on_cpu = {}  # What a CPU finds, of scenarios that differ by what is the device's alone once.


def of_cpu(name):
    scenario = SCENARIOS[name]
    key = scenario.kind, repr(scenario.settings), scenario.resumes
    if key not in on_cpu:
        with tempfile.TemporaryDirectory() as folder:
            on_cpu[key] = run(name, "cpu", Path(folder))
    return on_cpu[key]


def check(name, folder):
    """What a function of checks.py leaves in a process that sees the pretended device."""
    return run_ranks("tests.gpu.checks", name, processes=1, folder=folder, timeout=120, pretends=True)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_pretended_device_holds_what_it_assumes_of_torch(tmp_path):
    found = check("canary", tmp_path)
    wrong = [name for name, holds in found.items() if not holds]
    assert not wrong, (
        f"{wrong} no longer hold with torch {torch.__version__}; device.cpp was written for {device.TESTED}"
    )


@pytest.mark.matrix
@pytest.mark.slow
def test_a_host_tensor_among_device_tensors_is_refused_as_a_gpu_refuses_it(tmp_path):
    assert check("mixing", tmp_path) == {
        "ranked": "Expected all tensors to be on the same device, but aten::add was given [2] on cpu beside cuda:0",
        "number": 3.0,
        "index": [1.0],
    }


def test_every_wait_is_counted_once_by_its_kind(tmp_path):
    assert check("waits", tmp_path) == {
        "item": 1, "tolist": 1, "cpu": 1, "nonzero": 1, "a[mask]": 1, "a[mask] = 0": 0, "bool": 1, "unpinned, non_blocking": 1,
        "pinned, non_blocking": 0, "sum": 0, "upload": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", GOALS)
def test_known_waits_are_within_the_goals_and_none_is_in_a_layer(name):
    known = json.loads(FILE.read_text(encoding="utf-8"))[name]["wait"]
    assert sum(known.values()) <= GOALS[name], known
    inside = [
        line for line, count in known.items() if count >= LAYERS * TOKENS or ("/attention.py" in line and count > 2)
    ]
    assert not inside


def test_the_page_says_what_was_counted():
    names = {
        **{"SFT": "sft", "DPO": "dpo", "KTO": "kto", "reward model": "reward", "PPO, native engine": "ppo"},
        **{"GRPO, native engine, 9 draws": "grpo native", "GRPO, `paged`, 8 draws": "grpo paged"},
        "the same where prompts begin alike": "grpo native, beginnings in common",
    }
    known = json.loads(FILE.read_text(encoding="utf-8"))
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    for row, name in names.items():
        assert f"| {row} | {sum(known[name]['wait'].values())} |" in page, row
    assert f"{len(SCENARIOS)} scenarios" in page.replace("\n", " ")


def test_continuous_batching_takes_the_memory_that_its_requests_need(tmp_path):
    """It took half of what was free: of the 80 GiB that the device says it has, 42 GB for a model of two layers."""
    assert pretended("grpo paged", tmp_path)["peak"] < 8 * 2**20


@pytest.mark.matrix
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_trainer_on_the_device_is_the_trainer_on_a_cpu(name, tmp_path):
    found = pretended(name, tmp_path / "device")
    assert found["device"] == "cuda:0"
    assert len(found["losses"]) == 4
    assert all(math.isfinite(loss) for loss in found["losses"])
    if SCENARIOS[name].close < math.inf:
        assert gap(found, of_cpu(name)) <= SCENARIOS[name].close
    ceilings = json.loads(FILE.read_text(encoding="utf-8"))[name]
    more = {
        line: (count, ceilings[kind].get(line, 0))
        for kind, lines in found["waits"].items()
        for line, count in lines.items()
        if count > ceilings[kind].get(line, 0)
    }
    assert not more, (
        f"the host waits for the device more often than it did (now, before): {more}. Where that is meant: "
        f"python -m tests.gpu.scenarios {name!r}"
    )
