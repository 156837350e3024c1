"""What the benchmarks share: the peer's own environment, alternating runs, and a result file that can be checked."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
WORDS = ["river", "stone", "apple", "winter", "yellow", "garden", "window", "music", "letter", "silver", "morning"]
CLOSE = 1e-4  # Relative difference of the first loss above which two runs are not the same work.
PEER = ["trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2", "pillow"]


def peer_python() -> str:
    """The interpreter of the peer's environment, built once in ``.venv-peer`` unless POSTTRAIN_PEER_PYTHON names one."""
    given = os.environ.get("POSTTRAIN_PEER_PYTHON")
    if given:
        return given
    python = ROOT / ".venv-peer" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, *PEER], check=True)
    return str(python)


def child(python: str, script: str, *arguments: str) -> dict[str, Any]:
    """Run a script in its own process; its last line of output is JSON."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    # Ours asks for large pages itself. The peer gets them too: how slowly a virtual machine gives memory is not compared.
    environment["THP_MEM_ALLOC_ENABLE"] = "1"
    done = subprocess.run(
        [python, script, *arguments], capture_output=True, text=True, env=environment, cwd=Path(script).parent
    )
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def alternate(script: str, pairs: int, *arguments: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(ours, peer) in the order A B A B, so that a machine that grows slow slows both."""
    found = []
    for number in range(pairs):
        ours = child(sys.executable, script, "--side", "ours", *arguments)
        peer = child(peer_python(), script, "--side", "peer", *arguments)
        print(f"pair {number + 1}: ours {ours}\n        peer {peer}", flush=True)
        found.append((ours, peer))
    return found


def peak_memory() -> float:
    """The most memory this process ever held, in GB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def ratios(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Median and spread of second / first."""
    values = sorted(b / a for a, b in pairs)
    return {
        "median": round(statistics.median(values), 3),
        "min": round(values[0], 3),
        "max": round(values[-1], 3),
        "pairs": len(values),
    }


def import_side(side: str) -> Any:
    """The package that a side trains with."""
    return importlib.import_module("posttrain" if side == "ours" else "trl")


def settings(steps: int, **more: Any) -> dict[str, Any]:
    """What the configs of all runs share: float32, every step logged, nothing saved."""
    common = {
        "output_dir": str(Path(tempfile.gettempdir()) / "posttrain-bench"), "max_steps": steps, "bf16": False,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 0,
        "model_init_kwargs": {"dtype": "float32"}, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return common | more


def log_of(trainer: Any) -> list[dict[str, Any]]:
    """The entries of optimiser steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def timed(trainer: Any) -> dict[str, Any]:
    """Train and return the median time of a step without the first, the peak of memory, and losses and gradients by step."""
    from transformers import TrainerCallback

    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

    trainer.add_callback(Clock())
    trainer.train()
    steps = [[b - a for a, b in zip(first, last, strict=True)] for first, last in pairwise(ends)]
    wall, cpu = (statistics.median(times) for times in zip(*steps, strict=True))
    log = log_of(trainer)
    return {
        "step_seconds": round(wall, 3),
        # Of all threads: what is left to compare where others use the machine.
        "cpu_seconds": round(cpu, 3),
        "peak_gb": round(peak_memory(), 3),
        "loss": [entry["loss"] for entry in log],
        "grad_norm": [float(entry["grad_norm"]) for entry in log],
    }


def step_1_gap(ours: dict[str, Any], peer: dict[str, Any]) -> float:
    """Relative difference of the first losses and gradients; the benchmark ends where it is not small.

    A loss below 0.001 is a sum that cancels (advantages of equal lengths), and rounding is all there is to compare: its
    difference is told against 0.001.
    """
    gap = abs(ours["loss"][0] - peer["loss"][0]) / max(abs(peer["loss"][0]), 1e-3)
    gap = max(gap, abs(ours["grad_norm"][0] - peer["grad_norm"][0]) / peer["grad_norm"][0])
    if gap > CLOSE:
        raise SystemExit(f"step 1 differs from the peer's by {gap:.1e}: no speed is quoted before that is understood.")
    return gap


def compare(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], *, same_work: bool = True) -> dict[str, Any]:
    """Speed-up, memory and the difference of step 1 over pairs of (ours, peer), told and returned.

    Args:
        name: For the line that is printed.
        pairs: Of `timed` runs.
        same_work: False where each side samples what it trains on, so that losses cannot be equal.
    """
    gap = step_1_gap(*pairs[0]) if same_work else None
    speed = ratios([(ours["step_seconds"], peer["step_seconds"]) for ours, peer in pairs])
    memory = ratios([(peer["peak_gb"], ours["peak_gb"]) for ours, peer in pairs])
    faster = f"{speed['median']}x faster ({speed['min']} to {speed['max']})"
    equal = "" if gap is None else f", step-1 gap {gap:.1e}"
    print(f"{name}: {faster}, memory {memory['median']} of the peer's{equal}")
    found = {"speed_up": speed, "memory_ratio": memory, "runs": pairs}
    return found if gap is None else found | {"step_1_relative_gap": gap}


def hardware() -> dict[str, Any]:
    """The machine in the words of its processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    wanted = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "flags": wanted}


# A path from the root, but no address, no share ("3/4") and no name with a stroke in it ("a/b").
ABSOLUTE = re.compile(r"(?<![\w./:-])(?:~|[A-Za-z]:)?(?:[/\\][\w.+-]+)*[/\\]([\w.+-]+)")


def without_folders(value: Any) -> Any:
    """A document in which every absolute path is its last name: where a machine keeps its files is nobody's business."""
    if isinstance(value, str):
        return ABSOLUTE.sub(r"\1", value)
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    return [without_folders(item) for item in value] if isinstance(value, list | tuple) else value


def write(path: Path, result: Any) -> None:
    """Write a result file; every benchmark does it by this function."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(without_folders(result), indent=1) + "\n", encoding="utf-8")


def earlier(name: str, cases: Iterable[str]) -> dict[str, Any]:
    """Return these cases of an earlier run in ``results/<name>.json``, so that a run of one case keeps the others."""
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {case: found[case] for case in cases if case in found}


def save(name: str, result: dict[str, Any]) -> None:
    """Write ``results/<name>.json`` with versions, machine and command."""
    packages = ("posttrain", "torch", "transformers", "accelerate", "datasets", "peft")
    whole = {
        "command": " ".join(["python", *[Path(sys.argv[0]).name], *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": {package: metadata.version(package) for package in packages} | {"peer": "trl 1.16.0"},
        **result,
    }
    path = RESULTS / f"{name}.json"
    write(path, whole)
    print(f"written to {path.relative_to(ROOT)}")


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every comparison has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--side", choices=["ours", "peer"], help="run one side in this process (used by the script itself)"
    )
    made.add_argument("--model", help="folder or hub id; by default the model of `posttrain demo`")
    made.add_argument("--pairs", type=int, default=3, help="alternating pairs of runs")
    return made


def both_sides(
    script: str, description: str, build: Callable[[Path, str], Any], side: Callable[[str, Path], Any]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What ``side`` finds for ours and for the peer, each in a process of its own; None in these processes themselves.

    Args:
        script: File of the caller.
        description: Of its command.
        build: Writes what both sides read into a folder, from the model of the command line.
        side: ``ours`` or ``peer`` and that folder to numbers by name.
    """
    options = parser(description)
    options.add_argument("--folder", help="(child) where the models are")
    args = options.parse_args()
    if args.side:
        print(json.dumps(side(args.side, Path(args.folder))))
        return None
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), args.model or default_model())
        ours = child(sys.executable, script, "--side", "ours", "--folder", folder)
        return ours, child(peer_python(), script, "--side", "peer", "--folder", folder)


def default_model() -> str:
    """The model of the demo."""
    from posttrain.cli.demo import find_model

    return find_model()
