"""What the benchmarks share: the peer's own environment, alternating runs, and a result file that can be checked."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PEER = ["trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2"]


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


def hardware() -> dict[str, Any]:
    """The machine in the words of its processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    wanted = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "flags": wanted}


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
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
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


def default_model() -> str:
    """The model of the demo."""
    from posttrain.cli.demo import find_model

    return find_model()
