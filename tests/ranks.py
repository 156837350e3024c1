"""The same work on one process and on several: how tests start it, and where it leaves what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
# Names of metrics whose value depends on the clock, on how many passes there were, or on the process.
FREE = ("seconds", "per_second", "runtime", "step_time", "epoch")


def run_ranks(
    module: str, *arguments: object, processes: int, folder: Path, timeout: float = 240, python: str | None = None
) -> Any:
    """Run ``python -m module arguments`` on ``processes`` gloo processes and read what the first one `leave`\\ s.

    Through a file: lines that several processes print to one pipe can run into each other.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python or sys.executable, *(launch if processes > 1 else []), "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=env | {"POSTTRAIN_TEST_RESULT": str(result)}, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and result.exists(), done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(result.read_text(encoding="utf-8"))


def leave(found: Any) -> None:
    """Called by one process alone."""
    result = Path(os.environ["POSTTRAIN_TEST_RESULT"])
    result.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
    result.with_suffix(".part").replace(result)


def part() -> None:
    """The last call of every process: all are done, and nobody's threads are left to abort at the interpreter's end.

    An abort of one makes the launcher end the others, the one that writes its result among them.
    """
    from accelerate import PartialState

    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


def weights(trainer: Any) -> torch.Tensor:
    """A copy of all parameters in one row."""
    return torch.cat([p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()])


def step_taken(trainer: Any, before: torch.Tensor) -> dict[str, Any]:
    """How far the parameters moved from ``before``, and the logged row with the loss."""
    moved = before - weights(trainer)
    return {"step": moved.tolist(), "logs": next(row for row in trainer.state.log_history if "loss" in row)}


def assert_same_step(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Both moved the weights, and by the same."""
    a, b = torch.tensor(one["step"]), torch.tensor(two["step"])
    assert a.abs().max() > 1e-3
    assert (a - b).abs().max() < 1e-5
