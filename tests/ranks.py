"""The same work on one process and on several: how tests start it, and where it leaves what it found."""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
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

    Each process is forked from one that has imported the libraries, and that served no other rank: ranks have hash seeds of
    their own, as under torchrun. Another interpreter than this one (``python``) is started by torchrun itself.
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
    running = {}
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
        template = _template(rank, pretends)
        ask = {"argv": argv, "env": env | (ranked if processes > 1 else {}), "log": str(log)}
        template.stdin.write(json.dumps(ask) + "\n")
        template.stdin.flush()
        running[template.stdout] = (int(template.stdout.readline()), log)
    failed = ""
    while running:
        ready, _, _ = select.select(list(running), [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            for pid, _ in running.values():
                os.kill(pid, signal.SIGUSR1)
            time.sleep(1)  # For each to write where it stands.
            _kill(pid for pid, _ in running.values())
            for stdout in running:
                stdout.readline()
            stand = "\n".join(log.read_text(encoding="utf-8", errors="replace")[-3000:] for _, log in running.values())
            raise subprocess.TimeoutExpired(argv, deadline, output=stand)
        for stdout in ready:
            _, log = running.pop(stdout)
            if int(stdout.readline()) and not failed:
                failed = log.read_text(encoding="utf-8", errors="replace")[-8000:] or "no output"
                _kill(pid for pid, _ in running.values())
    return failed


def _kill(pids: Any) -> None:
    for pid in pids:
        os.kill(pid, 9)


@functools.cache
def _template(rank: int, pretends: bool = False) -> Any:
    """A process that has imported the libraries and forks itself for each request; it ends with its standard input."""
    env = os.environ | ENVIRONMENT | {"TEMPLATE_OF_RANK": str(rank)} | ({"PRETENDS": "1"} if pretends else {})
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ranks"], cwd=ROOT, env=env,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _serve() -> None:
    """Fork for each line of standard input; write the child's id, and its exit status once it has ended."""
    answers = os.fdopen(os.dup(1), "w")
    if os.environ.get("PRETENDS"):
        from tests.gpu.device import pretend

        pretend()
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401

    import posttrain

    for name in ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "PPOTrainer", "KTOTrainer", "RewardTrainer"):
        getattr(posttrain, name)
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            answers.close()
            _run(**json.loads(line))
        print(pid, file=answers, flush=True)
        print(os.waitpid(pid, 0)[1], file=answers, flush=True)


def _run(argv: list[str], env: dict[str, str], log: str) -> None:
    """Be the program ``python -m argv`` and never return."""
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv[:]
    faulthandler.register(signal.SIGUSR1)
    code = 1
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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


if __name__ == "__main__":
    _serve()
