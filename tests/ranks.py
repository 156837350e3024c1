"""The same work on one process and on several: how tests start it, and where it leaves what it found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.forks import ENVIRONMENT as ENVIRONMENT
from tests.forks import ROOT as ROOT
from tests.forks import Forked

# Names of metrics whose value depends on the clock, on how many passes there were, or on the process.
FREE = ("seconds", "per_second", "runtime", "step_time", "epoch")


def run_ranks(
    module: str,
    *arguments: object,
    processes: int,
    folder: Path,
    timeout: float = 240,
    python: str | None = None,
    pretends: bool = False,
) -> Any:
    """Run ``python -m module arguments`` on ``processes`` gloo processes and read what the first one `leave`\\ s.

    Each process is forked from one that has imported the libraries, even ranks from another than odd ones: neighbours have
    different hash seeds, as under torchrun. Another interpreter than this one (``python``) is started by torchrun itself.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    env = os.environ | ENVIRONMENT | {"POSTTRAIN_TEST_RESULT": str(result)}
    if python is None:
        failed = _forked([module, *map(str, arguments)], env, processes, folder, time.monotonic() + timeout, pretends)
    else:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [python, *launch, "-m", module, *map(str, arguments)]
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            try:
                said, _ = run.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                run.terminate()  # Its ranks would outlive a launcher that is killed.
                raise
        failed = said[-8000:] if run.returncode else ""
    assert not failed and result.exists(), failed
    return json.loads(result.read_text(encoding="utf-8"))


def _forked(
    argv: list[str], env: dict[str, str], processes: int, folder: Path, deadline: float, pretends: bool = False
) -> str:
    """Run a module in a fork of each rank's template; the last lines of the first that failed, else an empty string.

    Raises:
        subprocess.TimeoutExpired: The deadline has passed; every process was killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: dict[Forked, Path] = {}
    for rank in range(processes):
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_PORT": port,
        }
        ranked = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
        log = folder / f"rank{rank}.log"
        with open(log, "w") as file:
            own = env | (ranked if processes > 1 else {})
            process = Forked(["-m", *argv], stdout=file, stderr=file, env=own, rank=rank, pretends=pretends)
        running[process] = log
    failed = ""
    while running:
        if time.monotonic() > deadline:
            for process in running:
                process.send_signal(signal.SIGUSR1)
            time.sleep(1)  # For each to write where it stands.
            _kill(running)
            stand = "\n".join(log.read_text(encoding="utf-8", errors="replace")[-3000:] for log in running.values())
            raise subprocess.TimeoutExpired(argv, deadline, output=stand)
        (first, *_) = running
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(0.02)
        for process in [one for one in running if one.poll() is not None]:
            log = running.pop(process)
            if process.returncode and not failed:
                failed = log.read_text(encoding="utf-8", errors="replace")[-8000:] or "no output"
                _kill(running)
    return failed


def _kill(processes: Iterable[Forked]) -> None:
    for process in processes:
        process.kill()


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
