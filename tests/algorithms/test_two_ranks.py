"""Two gloo processes equal one with twice the accumulation: gradients, loss and metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# Names whose value depends on the clock, on how many passes there were, or on the process.
FREE = (
    "seconds",
    "per_second",
    "runtime",
    "step_time",
    "epoch",
    "replay/size",
)  # Each process has a buffer of its own.


def run(kind, folder, processes, batch, accumulation):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = command if processes > 1 else [sys.executable]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command += ["-m", "tests.algorithms.rank_worker", kind, str(folder), str(batch), str(accumulation)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["sft", "dapo", "grpo", "replay", "a2po"])
def test_two_ranks_equal_one_with_twice_the_accumulation(kind, tmp_path):
    one = run(kind, tmp_path / "one", 1, 4, 2)
    two = run(kind, tmp_path / "two", 2, 4, 1)
    a, b = torch.tensor(one["step"]), torch.tensor(two["step"])
    assert a.abs().max() > 1e-3
    assert (a - b).abs().max() < 1e-5
    several = {name for name in two["logs"] if name.startswith("balance/")}  # What ranks have among themselves.
    assert set(one["logs"]) == set(two["logs"]) - several
    for name, value in one["logs"].items():
        if not any(part in name for part in FREE):
            assert two["logs"][name] == pytest.approx(value, abs=1e-6, rel=1e-6), name


@pytest.mark.distributed
def test_t25_evaluation_on_two_ranks_is_that_of_one(tmp_path):
    """Five rows in batches of two: the last round has one row, and the other rank must not count the first ones again."""
    one, two = run("evaluation", tmp_path / "one", 1, 2, 1), run("evaluation", tmp_path / "two", 2, 2, 1)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["trained"] == one["trained"] == one["truth"]  # Every row once, in the order of the dataset.
