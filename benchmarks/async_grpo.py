"""Asynchronous against synchronous GRPO on the demo's task: seconds of a step, and samples to an accuracy.

``--part time``: the same model, prompts, group and lengths; synchronous with the native engine (``sync``), asynchronous with a
native worker (``native``, staleness 1, paced; ``corrected``: with ``vllm_importance_sampling_mode="token_truncate"``), and
asynchronous over a rollout server (``server``: at ``--server URL``, or one that is started here). ``--part samples``: accuracy
of the sampled answers, step by step and with the same questions in the same order and the same schedule of the learning rate,
for every seed; then the samples it takes until that accuracy, averaged over the seeds and 3 steps, is at ``--goal``, and what
is right of the held-out questions in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
MODEL = Path("~/.cache/posttrain/SmolLM2-135M-Instruct").expanduser()
RATE = 2e-5  # The demo's.
WINDOW = 3  # Steps whose mean accuracy counts.


def trainer_for(side: str, folder: str, server: str | None, seed: int, options: argparse.Namespace):
    """The demo's trainer, of one kind."""
    model, steps, prompts = options.model, options.steps, options.prompts
    common = {"learning_rate": options.learning_rate}
    common |= {"gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    common["shuffle_dataset"] = False  # Questions differ in how hard they are: every side gets the same ones.
    common |= {"lr_scheduler_type": "linear", "seed": seed}  # The demo's; the asynchronous default is constant.
    batch = {"per_device_train_batch_size": 8 * prompts}
    if side == "sync":
        import grpo_add

        from posttrain import GRPOConfig, GRPOTrainer

        train, held_out = grpo_add.questions(prompts * steps)
        config = GRPOConfig(
            folder, max_steps=steps, num_generations=8, max_completion_length=grpo_add.LIMIT, temperature=0.8,
            logging_steps=1, **common, **batch,
        )  # fmt: skip
        rewards = [grpo_add.accuracy, grpo_add.brevity]
        return GRPOTrainer(model, rewards, config, train_dataset=train, eval_dataset=held_out)
    import async_grpo

    own = {"vllm_importance_sampling_mode": "token_truncate" if side == "corrected" else None}
    own |= {"vllm_server_base_url": [server]} if side == "server" else {}
    return async_grpo.make_trainer(model, folder, steps, **common, **batch, **own)


def one(side: str, server: str | None, options: argparse.Namespace, *, seed: int = 0, last: int = 0) -> dict:
    """Train, ``last`` steps of the schedule where it is not 0, and examine what has then been learnt."""
    import grpo_add
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        """Notes when steps end."""

        def on_step_end(self, args, state, control, **_):
            ends.append(time.perf_counter())
            control.should_training_stop = control.should_training_stop or len(ends) == last

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(side, folder, server, seed, options)
        trainer.add_callback(Clock())
        began = time.perf_counter()
        trainer.train()
        said = grpo_add.exam(trainer) if last else []
    rows = [row for row in trainer.state.log_history if "loss" in row]
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    found = {
        "side": side,
        "seed": seed,
        "step_s": round(statistics.median(seconds), 2),
        "first_step_s": round(ends[0] - began, 2),
        "accuracy": [round(row["rewards/accuracy/mean"], 4) for row in rows],
        "samples_per_step": 8 * options.prompts,
    }
    if said:
        right = [grpo_add.last_number(text) == answer for _, answer, text in said]
        found["held_out"] = round(statistics.mean(right), 4)
    if side != "sync":
        found["staleness_max"] = max(row["sample/staleness_max"] for row in rows)
        found["sync_s"] = round(
            statistics.median(r["perf/weight_sync_s"] for r in rows if "perf/weight_sync_s" in r), 2
        )
        found["wait_s"] = round(statistics.median(row["perf/rollout_wait_s"] for row in rows), 2)
        found["dropped"] = rows[-1]["async/dropped"]
        found["clipped"] = [round(row["clip_ratio/region_mean"], 4) for row in rows]
        found["kl"] = [round(row["kl"], 5) for row in rows]
    return found


def samples_to(runs: list[dict], goal: float) -> int | None:
    """Samples after which the accuracy of the last steps, averaged over runs, was at the goal; None: never."""
    curve = [statistics.mean(values) for values in zip(*(run["accuracy"] for run in runs), strict=False)]
    for end in range(WINDOW, len(curve) + 1):
        if statistics.mean(curve[end - WINDOW : end]) >= goal:
            return end * runs[0]["samples_per_step"]
    return None


def samples(options: argparse.Namespace, kept: dict, side: str, url: str | None) -> Iterator[None]:
    """A run for every seed that is not there yet; their common curve is judged after each."""
    runs = [] if options.afresh else kept.get("runs", [])
    for seed in sorted(set(options.seeds) - {run["seed"] for run in runs}):
        runs.append(one(side, url, options, seed=seed, last=options.last))
        print(json.dumps(runs[-1]), flush=True)
        each = [samples_to([run], options.goal) for run in runs]
        kept |= {
            "goal": options.goal,
            "samples": samples_to(runs, options.goal),
            "samples_of_each_seed": each,
            "runs": runs,
        }
        kept["held_out"] = round(statistics.mean(run["held_out"] for run in runs), 4)
        yield


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("time", "samples"), default="time")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--steps", type=int, help="6 for the time, 16 for samples, which is also the schedule's length")
    parser.add_argument("--prompts", type=int, default=8, help="of a step, 8 completions each")
    parser.add_argument("--learning-rate", type=float, default=RATE)
    parser.add_argument("--goal", type=float, default=0.5)
    parser.add_argument("--last", type=int, default=12, help="step of the schedule after which runs for samples end")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of --part samples")
    parser.add_argument("--afresh", action="store_true", help="do not keep the seeds that are there")
    parser.add_argument("--server", help="URL of a rollout server; without it the side 'server' starts one")
    parser.add_argument(
        "--sides", nargs="*", default=["sync", "native", "server"], choices=("sync", "native", "corrected", "server")
    )
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "async_grpo.json"))
    options = parser.parse_args()
    options.steps = options.steps or {"time": 6, "samples": 16}[options.part]
    out = Path(options.out)
    for side in options.sides:
        with contextlib.ExitStack() as stack:
            url = options.server
            if side == "server" and url is None:
                from serving import serving

                url = stack.enter_context(serving(options.model, os.cpu_count() or 1))[0]
            kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
            kept["cores"] = os.cpu_count()
            part = kept.setdefault(options.part, {})
            if options.part == "samples":
                name = side if options.learning_rate == RATE else f"{side}, learning rate {options.learning_rate:g}"
                for _ in samples(options, part.setdefault(name, {}), side, url):
                    harness.write(out, kept)
                continue
            part[side] = one(side, url, options)
            print(json.dumps(part[side]), flush=True)
            harness.write(out, kept)


if __name__ == "__main__":
    main()
