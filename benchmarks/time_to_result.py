"""Seconds of training until 60 % of held-out sums are right, ours and the peer's, with the demo's rewards, questions and seeds.

    python benchmarks/time_to_result.py --pairs 5 --picture docs/img/time_to_result.svg
    python benchmarks/time_to_result.py --seeds 10    # No peer, no clock: does the demo learn with every seed?

Every few steps both sides answer the demo's 64 held-out questions greedily, with `generate` of transformers; that is not counted.
Wants a quiet machine: a busy one slows the side whose turn it is.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import tempfile
import time
from pathlib import Path

import harness

GOAL = 0.6
UNSEEN = 512  # Held-out questions that the demo answers with each seed; the first 64 are the demo's own.
EVERY = 2  # Steps between two exams.


def demo():
    """The demo's questions and rewards; its file needs no package but datasets for them, and the peer has no posttrain."""
    path = harness.ROOT / "examples" / "grpo_add.py"
    source = path.read_text(encoding="utf-8").replace("from posttrain import GRPOConfig, GRPOTrainer, complete", "")
    source = re.sub(r"def make_trainer.*?(?=def count_right)", "", source, flags=re.S)
    spec = importlib.util.spec_from_loader("demo_task", loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def exam(model, tokenizer, rows, count_right) -> float:
    """Share of right greedy answers."""
    import torch

    was = model.training
    model.eval()
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    inputs = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    said = [("", row["answer"], text) for row, text in zip(rows, answers, strict=True)]
    model.train(was)
    return count_right(said) / len(said)


def run(side: str, model: str, steps: int, seed: int) -> dict:
    """``curve``: (seconds of training, share right) every few steps."""
    from transformers import TrainerCallback

    library, task = harness.import_side(side), demo()
    train, held_out = task.questions(8 * steps, seed)
    options = {
        "per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 12, "temperature": 0.8,
        "learning_rate": 2e-5, "gradient_checkpointing": False, "lr_scheduler_type": "linear",
    }  # fmt: skip
    config = library.GRPOConfig(**(harness.settings(steps, **options) | {"seed": seed}))
    trainer = library.GRPOTrainer(model, reward_funcs=[task.accuracy, task.brevity], args=config, train_dataset=train)
    curve: list[tuple[float, float]] = []
    clock = {"spent": 0.0, "since": 0.0}

    class Exams(TrainerCallback):
        def look(self, model) -> float:
            curve.append((round(clock["spent"], 1), exam(model, trainer.processing_class, held_out, task.count_right)))
            clock["since"] = time.perf_counter()
            return curve[-1][1]

        def on_train_begin(self, args, state, control, model=None, **_):
            self.look(model)

        def on_step_end(self, args, state, control, model=None, **_):
            clock["spent"] += time.perf_counter() - clock["since"]
            clock["since"] = time.perf_counter()
            if state.global_step % EVERY == 0 and self.look(model) >= GOAL:
                control.should_training_stop = True

    trainer.add_callback(Exams())
    trainer.train()
    reached = next((seconds for seconds, share in curve if share >= GOAL), None)
    return {"curve": curve, "seconds_to_goal": reached, "peak_gb": round(harness.peak_memory(), 3)}


def learn(model: str, seed: int, folder: str) -> dict:
    """Run the demo's training with another seed, and ask its 64 held-out questions and more that are not trained on.

    Returns:
        ``right``: share of greedy answers whose last number is the sum, after training. ``exact``: share of those that are the
        sum and nothing else. ``right_of_64``: the demo's own count, before and after. ``accuracy``: mean reward of each step.
    """
    from posttrain.cli.demo import example

    task = example("grpo_add")
    trainer = task.make_trainer(model, folder, seed=seed, report_to="none", disable_tqdm=True, save_strategy="no")
    trained = len(trainer.train_dataset)
    more, held_out = task.questions(trained + UNSEEN - len(trainer.eval_dataset), seed)
    before = task.count_right(task.exam(trainer))
    trainer.train()
    said = task.exam(trainer, [*held_out, *more.select(range(trained, len(more)))])
    return {
        "seed": seed,
        "questions": len(said),
        "right": task.count_right(said) / len(said),
        "exact": sum(answer == text for _, answer, text in said) / len(said),
        "right_of_64": [before, task.count_right(said[: len(held_out)])],
        "accuracy": [round(float(entry["rewards/accuracy/mean"]), 4) for entry in harness.log_of(trainer)],
    }


def draw(pairs: list, path: Path) -> None:
    """Both curves of every pair in one picture."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for number, pair in enumerate(pairs):
        for found, name, color in zip(pair, ("posttrain", "TRL 1.16"), ("#3b6fd4", "#c2571a"), strict=True):
            seconds, shares = zip(*found["curve"], strict=True)
            axis.plot(seconds, [100 * share for share in shares], color=color, label=None if number else name)
    axis.axhline(100 * GOAL, color="grey", linewidth=0.8, linestyle=":")
    axis.set(xlabel="seconds of training, exams aside", ylabel="held-out sums right (%)")
    axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def judged(pair: list) -> tuple[float, float]:
    """Seconds of both, against us where one did not get there: ours never would have, the peer with its next step."""
    ours, peer = pair
    return ours["seconds_to_goal"] or math.inf, peer["seconds_to_goal"] or peer["curve"][-1][0]


def main() -> None:
    parser = harness.parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="most optimiser steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair or run; others follow")
    parser.add_argument("--seeds", type=int, help="instead of pairs: run the demo as it is, with so many seeds")
    parser.add_argument("--picture", help="file of the picture")
    args = parser.parse_args()
    model = args.model or harness.default_model()
    if args.side and args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(learn(model, args.seed, folder)))
        return
    if args.side:
        print(json.dumps(run(args.side, model, args.steps, args.seed)))
        return
    if args.seeds:
        done = harness.RESULTS / "demo_seeds.json"  # Seeds in it are not run again.
        runs: list[dict] = json.loads(done.read_text(encoding="utf-8"))["runs"] if done.exists() else []
        for seed in sorted({*range(args.seed, args.seed + args.seeds)} - {found["seed"] for found in runs}):
            options = ("--side", "ours", "--seeds", "1", "--seed", str(seed), "--model", model)
            runs.append(harness.child(sys.executable, __file__, *options))
            print(runs[-1], flush=True)
            learned = sum(found["right"] > GOAL for found in runs)
            harness.save("demo_seeds", {"goal": GOAL, "seeds": len(runs), "above_goal": learned, "runs": runs})
        return
    pairs = []
    for seed in range(args.seed, args.seed + args.pairs):
        pairs += harness.alternate(__file__, 1, "--model", model, "--steps", str(args.steps), "--seed", str(seed))
    times = [(ours["seconds_to_goal"], peer["seconds_to_goal"]) for ours, peer in pairs]
    result = {
        "goal": GOAL,
        "seconds_to_goal": times,
        "runs": pairs,
        "speed_up": harness.ratios(list(map(judged, pairs))),
    }
    harness.save("time_to_result", result)
    if args.picture:
        draw(pairs, Path(args.picture))


if __name__ == "__main__":
    main()
