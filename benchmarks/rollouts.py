"""Rollouts on the trainer's own weights against every other way: transformers' `generate` and continuous batching, vLLM.

Prediction: per token the weights cost 2 x 135M operations in every way; `generate` prefills every copy of a prompt, runs until
the longest completion is done, concatenates its cache at every step, repeats key-value heads three times and samples with a
sort. At skewed lengths (log-normal, mean 40 % of the longest) it therefore computes about 2.5 times the tokens. Continuous
batching computes each token once, but gathers pages at every step. vLLM shares prompts by its prefix cache.

Every engine has both cores; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import torch
from engines import Work, lengths, measure, seconds_at_least
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.models.memory import KeepHostMemory

CASES = [  # Prompt tokens, prompts, completions of each, most new tokens, shape of lengths.
    (130, 4, 8, 48, "equal"), (130, 8, 8, 96, "skewed"), (64, 1, 8, 64, "equal"), (2048, 1, 8, 32, "equal"),
    (512, 4, 8, 96, "skewed"), (512, 4, 8, 64, "equal"), (64, 16, 8, 64, "skewed"), (64, 32, 8, 48, "skewed"),
]  # fmt: skip
SLOW = {"continuous": 2, "generate": 5}  # Cases that these engines run, from the first: each takes minutes.


def works(cases: list[tuple], vocabulary: int) -> list[Work]:
    """Random prompts, equal for all engines."""
    generator = torch.Generator().manual_seed(0)
    return [
        Work(
            torch.randint(100, vocabulary, (prompts, prompt), generator=generator).tolist(),
            group,
            lengths(prompts * group, new, shape),
        )
        for prompt, prompts, group, new, shape in cases
    ]


def by_vllm(python: str, model: str, all_works: list[Work], repeats: int, **options: str) -> list[float]:
    """Seconds of each work in vLLM, all in one process of its interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "works.json", Path(folder) / "seconds.json"
        given.write_text(
            json.dumps([{"prompts": w.prompts, "group": w.group, "lengths": w.lengths} for w in all_works])
        )
        script = str(Path(__file__).with_name("rollouts_vllm.py"))
        flags = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
        command = [
            python,
            script,
            "--model",
            model,
            "--works",
            str(given),
            "--out",
            str(out),
            "--repeats",
            str(repeats),
        ]
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        settings = {"VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | settings
        done = subprocess.run([*command, *flags], capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"vLLM failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(out.read_text())


def told(
    case: tuple, work: Work, seconds: dict[str, float], gaps: dict[str, float | None], floor: tuple
) -> dict[str, Any]:
    """One line of the table."""
    prompt, prompts, group, new, shape = case
    ours = seconds["native"]
    found = {
        "prompt": prompt, "batch": prompts * group, "group": group, "new": new, "lengths": shape, "sampled": work.tokens,
        "seconds": {name: round(s, 3) for name, s in seconds.items()},
        "tokens_per_second": {name: round(work.tokens / s, 1) for name, s in seconds.items()},
        "native_is_faster": {name: round(s / ours, 2) for name, s in seconds.items() if name != "native"},
        "logprob_gap": {name: gap for name, gap in gaps.items() if gap is not None},
        "floor_arithmetic": round(floor[0], 3), "floor_traffic": round(floor[1], 3),
        "measured_over_floor": round(ours / max(floor), 2),
    }  # fmt: skip
    print(found, flush=True)
    return found


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The real model in float32."""
    folder = args.model or harness.default_model()
    vocabulary = len(tokenizer := AutoTokenizer.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).eval()
    chosen = [CASES[i] for i in args.cases if i < len(CASES)]
    all_works = works(chosen, vocabulary)
    foreign = by_vllm(args.vllm_python, folder, all_works, args.repeats, dtype=args.dtype) if args.vllm_python else []
    # As while training: freed memory stays with the process, and everybody has run once.
    KeepHostMemory().on_train_begin(SimpleNamespace(device=model.device), None, None)
    few = Work([list(range(100, 164))], 8, [4] * 8)
    measure(model, few, pad_token_id=tokenizer.pad_token_id, engines=tuple(args.engines), repeats=1)
    found = []
    for number, (case, work) in enumerate(zip(chosen, all_works, strict=True)):
        engines = tuple(name for name in args.engines if args.all or number < SLOW.get(name, len(CASES)))
        figures = measure(model, work, pad_token_id=tokenizer.pad_token_id, engines=engines, repeats=args.repeats)
        seconds = {f.name: f.seconds for f in figures} | ({"vllm": foreign[number]} if foreign else {})
        floor = seconds_at_least(model, work, slots=64)
        found.append(told(case, work, seconds, {f.name: f.gap for f in figures}, floor))
    return {"threads": torch.get_num_threads(), "cases": found}


def main() -> None:
    """All cases in one process, on one copy of the weights; engines in turn, the best of the repeats each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="numbers of cases")
    options.add_argument(
        "--engines",
        nargs="+",
        default=["native", "native_bf16", "generate", "continuous"],
        help="of posttrain and transformers",
    )
    options.add_argument("--all", action="store_true", help="slow engines on every case, not on the first ones alone")
    options.add_argument("--vllm-python", help="interpreter of an environment with vLLM's CPU build")
    args = options.parse_args()
    harness.save("rollouts", measured(args))


if __name__ == "__main__":
    main()
