"""The demo (GRPO on two-digit addition) with rollouts by a real vLLM: accuracy before and after, seconds, gap of log-probs.

python benchmarks/grpo_vllm.py --model FOLDER --mode served|colocate|native [--steps 20] [--dtype bfloat16] [--folder RUN]

Run it with the interpreter that has vLLM. ``served`` is `posttrain vllm-serve`, a process of its own; ``colocate`` is vLLM in the
trainer's process; ``native`` is the demo as it stands.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import harness
import requests

RESULTS = Path(__file__).parent / "results" / "grpo_vllm.json"
LENGTH = 128  # Prompt and completion of the demo have about 60 tokens.


def server_command(model: str, port: int, dtype: str) -> list[str]:
    """How the server is started."""
    command = [sys.executable, "-m", "posttrain.cli.main", "vllm-serve", "--model", model, "--dtype", dtype]
    return [*command, "--enforce-eager", "--max-model-len", str(LENGTH), "--port", str(port)]


@contextlib.contextmanager
def server(mode: str, model: str, core: str, dtype: str) -> Iterator[dict]:
    """Settings of a run over a server that is there for its time; none for modes without one."""
    if mode == "native":
        yield {}
        return
    if mode == "colocate":
        yield {"use_vllm": True, "vllm_max_model_length": LENGTH}
        return
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": core}
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        began = time.perf_counter()
        running = subprocess.Popen(server_command(model, port, dtype), stdout=log, stderr=log, env=environment)
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                assert running.poll() is None, Path(log.name).read_text()[-4000:]
                with contextlib.suppress(requests.ConnectionError):
                    if requests.get(url + "/health", timeout=10).status_code == 200:
                        break
                time.sleep(0.5)
            print(f"server ready after {time.perf_counter() - began:.0f} s", file=sys.stderr)
            yield {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        finally:
            running.terminate()
            running.wait(60)


def main() -> None:
    """One run."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True)
    options.add_argument("--mode", required=True, choices=["served", "colocate", "native"])
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="both sides compute in it")
    options.add_argument("--core", default="0", help="core that the server's threads are bound to")
    options.add_argument("--folder", type=Path, help="kept, and gone on with where it holds a checkpoint")
    options.add_argument("--out", type=Path)
    options.add_argument("--record", action="store_true", help=f"also into {RESULTS.name}, by mode")
    args = options.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB.
    from posttrain.cli.demo import example

    demo = example("grpo_add")

    with server(args.mode, args.model, args.core, args.dtype) as settings, tempfile.TemporaryDirectory() as passing:
        folder = str(args.folder or passing)
        kept = any(Path(folder).glob("checkpoint-*"))
        settings |= {"bf16": args.dtype == "bfloat16"}
        settings |= {"save_strategy": "steps" if args.folder else "no", "report_to": "none", "disable_tqdm": True}
        trainer = demo.make_trainer(args.model, folder, args.steps, **settings)

        def accuracy() -> float:
            rows = demo.exam(trainer)
            return demo.count_right(rows) / len(rows)

        first = Path(folder, "accuracy_before.json")  # Of a run that is gone on with.
        before, began = json.loads(first.read_text()) if kept and first.exists() else accuracy(), time.perf_counter()
        first.write_text(json.dumps(before))
        print(f"accuracy before: {before}", file=sys.stderr, flush=True)
        trainer.train(resume_from_checkpoint=kept)
        seconds, after = time.perf_counter() - began, accuracy()
        logs = [line for line in trainer.state.log_history if "loss" in line]
        trainer.engine.close()

    def column(name: str) -> list[float]:
        return [line[name] for line in logs if name in line]

    result = {
        "mode": args.mode, "steps": args.steps, "dtype": args.dtype, "accuracy_before": before, "accuracy_after": after,
        "train_seconds": round(seconds, 1), "step_seconds": [round(x, 1) for x in column("step_time")],
        "rollout_seconds": [round(x, 1) for x in column("rollouts/seconds")],
        "accuracy_of_samples": column("rewards/accuracy/mean"), "rewards": [round(x, 3) for x in column("reward")],
        "push_seconds": round(statistics.median(column("perf/weight_sync_s")), 2) if column("perf/weight_sync_s") else None,
        "logp_gap_max": max(column("sampling/sampling_logp_difference/max"), default=None),
        "logp_gap_mean": max(column("sampling/sampling_logp_difference/mean"), default=None),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if args.record:
        said = (
            f"python benchmarks/grpo_vllm.py --model MODEL --mode {args.mode} --steps {args.steps} --dtype {args.dtype}"
        )
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"cores": os.cpu_count()}
        known[args.mode] = {"command": said, **result}
        harness.write(RESULTS, known)
    if args.out is not None:
        harness.write(args.out, result)


if __name__ == "__main__":
    main()
