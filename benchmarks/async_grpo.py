"""Asynchronous against synchronous GRPO on the demo's task: seconds of a step, and samples to an accuracy.

``--part time``: the same model, prompts, group and lengths; synchronous with the native engine (``sync``), asynchronous with a
native worker (``native``, staleness 1, paced; ``corrected``: with ``is_correction="token_truncate"``), and asynchronous over a
rollout server (``server``: at ``--server URL``, or one that is started here). ``--part samples``: accuracy of the sampled
answers, step by step and with the same questions in the same order, until it has stayed at ``--goal`` for 3 steps on average;
there a run ends.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
MODEL = Path("~/.cache/posttrain/SmolLM2-135M-Instruct").expanduser()
WINDOW = 3  # Steps whose mean accuracy counts.


def trainer_for(side: str, model: str, folder: str, steps: int, server: str | None, prompts: int):
    """The demo's trainer, of one kind."""
    common = {"gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    common["shuffle_dataset"] = False  # Questions differ in how hard they are: every side gets the same ones.
    batch = {"per_device_train_batch_size": 8 * prompts}
    if side == "sync":
        import grpo_add

        from posttrain import GRPOConfig, GRPOTrainer

        train, _ = grpo_add.questions(prompts * steps)
        config = GRPOConfig(
            folder, max_steps=steps, num_generations=8, max_completion_length=grpo_add.LIMIT, temperature=0.8,
            learning_rate=2e-5, logging_steps=1, seed=0, **common, **batch,
        )  # fmt: skip
        return GRPOTrainer(model, [grpo_add.accuracy, grpo_add.brevity], config, train_dataset=train)
    import async_grpo

    own = {"server": {"vllm_server_base_url": [server]}, "corrected": {"is_correction": "token_truncate"}}.get(side, {})
    return async_grpo.make_trainer(model, folder, steps, **common, **batch, **own)


def one(side: str, model: str, steps: int, server: str | None, prompts: int, goal: float | None = None) -> dict:
    """Train, at most until the goal; seconds between the ends of steps, and accuracy of each step's samples."""
    from transformers import TrainerCallback

    ends: list[float] = []
    accuracy: list[float] = []

    class Clock(TrainerCallback):
        """Notes when steps end."""

        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

        def on_log(self, args, state, control, logs=None, **_):
            accuracy.extend([logs["rewards/accuracy/mean"]] if "loss" in logs else [])
            reached = goal is not None and len(accuracy) >= WINDOW and statistics.mean(accuracy[-WINDOW:]) >= goal
            control.should_training_stop = control.should_training_stop or reached

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(side, model, folder, steps, server, prompts)
        trainer.add_callback(Clock())
        began = time.perf_counter()
        trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    found = {
        "side": side,
        "step_s": round(statistics.median(seconds), 2),
        "first_step_s": round(ends[0] - began, 2),
        "accuracy": [round(value, 4) for value in accuracy],
        "samples_per_step": 8 * prompts,
    }
    if side != "sync":
        found["staleness_max"] = max(row["async/staleness_max"] for row in rows)
        found["sync_s"] = round(
            statistics.median(r["weight_sync_time_s"] for r in rows if "weight_sync_time_s" in r), 2
        )
        found["wait_s"] = round(statistics.median(row["queue_wait_time_s"] for row in rows), 2)
        found["dropped"] = rows[-1]["async/dropped"]
    return found


def samples_to(found: dict, goal: float) -> int | None:
    """Samples after which the accuracy of the last steps was at the goal; None: never."""
    curve = found["accuracy"]
    for end in range(WINDOW, len(curve) + 1):
        if statistics.mean(curve[end - WINDOW : end]) >= goal:
            return end * found["samples_per_step"]
    return None


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("time", "samples"), default="time")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, 8 completions each")
    parser.add_argument("--goal", type=float, default=0.5)
    parser.add_argument("--server", help="URL of a rollout server; without it the side 'server' starts one")
    parser.add_argument(
        "--sides", nargs="*", default=["sync", "native", "server"], choices=("sync", "native", "corrected", "server")
    )
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "async_grpo.json"))
    options = parser.parse_args()
    out = Path(options.out)
    kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    goal = options.goal if options.part == "samples" else None
    for side in options.sides:
        with contextlib.ExitStack() as stack:
            url = options.server
            if side == "server" and url is None:
                from serving import serving

                url = stack.enter_context(serving(options.model, os.cpu_count() or 1))[0]
            found = one(side, options.model, options.steps, url, options.prompts, goal)
        if options.part == "samples":
            found["goal"], found["samples"] = options.goal, samples_to(found, options.goal)
        print(json.dumps(found), flush=True)
        kept.setdefault(options.part, {})[side] = found
        out.write_text(json.dumps(kept | {"cores": os.cpu_count()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
