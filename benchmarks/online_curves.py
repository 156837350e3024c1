"""GRPO, RLOO and PPO from one start on tasks of reasoning-gym: held-out accuracy against tokens, three seeds each.

Every method samples the same number of completions of the same prompts and trains on them; PPO takes its usual passes over
each batch, the others one. The prompts that runs are judged on are not among those they train on, and are answered greedily.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness

TASKS = {  # Short ones whose answers spread: always saying the commonest takes a fifth of them at most, and is drawn too.
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 9},
}  # fmt: skip
METHODS = ("grpo", "rloo", "ppo")
ASK = {"system_prompt": "Reply with just the number.", "extract": "last_number"}
PROMPTS, GROUP, NEW = 8, 8, 6
EVERY = 5  # Updates between two looks at the accuracy.


def shaped(reward):
    """The task's score, and a little off for everything around the number: without it a right guess is too rare to learn from."""

    def answer(completions, **columns):
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        scores = reward(completions, **columns)
        digits = [sum(c.isdigit() or c == "-" for c in t.strip()) / max(len(t.strip()), 1) for t in texts]
        return [s + 0.2 * d for s, d in zip(scores, digits, strict=True)]

    return answer


def accuracy(model, tokenizer, dataset, reward) -> float:
    """Share of greedy answers that the task's scorer takes."""
    from posttrain import complete

    said = complete(model, tokenizer, dataset["prompt"], max_new_tokens=NEW)
    columns = {name: dataset[name] for name in ("task_index", "answer")}
    return sum(s >= 0.99 for s in reward([t.strip() for t in said], **columns)) / len(said)


def held_out(task: str):
    """Distinct problems that no run trains on, the scorer, and the prompts' texts."""
    from posttrain import reasoning_gym_task

    held, judge = reasoning_gym_task(task, size=64, seed=1_000, **ASK, **TASKS[task])
    first = {str(held["prompt"][row]): row for row in reversed(range(len(held)))}
    return held.select(sorted(first.values())), judge, set(first)


def shortcuts(task: str) -> dict[str, float]:
    """What is right without the arithmetic that a task asks for."""
    held, *_ = held_out(task)
    answers = [int(answer) for answer in held["answer"]]
    pairs = [[int(x) for x in re.findall(r"\d+", prompt[-1]["content"])][:2] for prompt in held["prompt"]]
    said = {
        "the commonest answer": [Counter(answers).most_common(1)[0][0]] * len(answers),
        "the first number": [a for a, _ in pairs],
        "the second number": [b for _, b in pairs],
        "the larger number": [max(pair) for pair in pairs],
        "the sum, whatever the sign": [sum(pair) for pair in pairs],
    }
    return {name: sum(map(int.__eq__, given, answers)) / len(answers) for name, given in said.items()}


def trainer_of(method: str, model: str, reward, data, settings: dict):
    """The trainer of a method, at the same completions per update."""
    import posttrain
    from posttrain.models.load import create_model_from_path, load_tokenizer

    if method == "ppo":
        tokenizer = load_tokenizer(model)
        tokenizer.pad_token = "<|endoftext|>"  # PPO reads lengths by it, so it may not be the end token too.
        config = posttrain.PPOConfig(
            **settings, num_ppo_epochs=2, response_length=NEW, temperature=1.0, kl_coef=0.0, num_sample_generations=0,
            stop_token="eos", shuffle_dataset=False,
        )  # fmt: skip
        policy = create_model_from_path(model)
        return posttrain.PPOTrainer(config, tokenizer, policy, None, reward, data, None)
    name = method.upper()
    common = {"num_generations": GROUP, "max_completion_length": NEW, "beta": 0.0, "temperature": 1.0}
    if method == "grpo":  # A group's spread would make differences of format as large as those of right and wrong.
        common["scale_rewards"] = "none"
    config = getattr(posttrain, f"{name}Config")(**settings, **common)
    return getattr(posttrain, f"{name}Trainer")(model, reward, config, train_dataset=data)


def run(method: str, task: str, seed: int, model: str, updates: int) -> dict:
    """Train, and tell the accuracy before, every few updates and after."""
    import torch
    from transformers import TrainerCallback

    from posttrain import reasoning_gym_task

    torch.set_num_threads(1)
    steps = 2 * updates if method == "ppo" else updates  # PPO passes twice over each batch.
    held, judge, texts = held_out(task)
    # The tasks have few problems: drawn from another seed, most of those held out would be trained on too.
    data, reward = reasoning_gym_task(task, size=4 * updates * PROMPTS, seed=seed, **ASK, **TASKS[task])
    data = data.filter(lambda row: str(row["prompt"]) not in texts).select(range(updates * PROMPTS))
    if method == "ppo":  # The same prompts, as often as the others answer each.
        data = data.select([row for row in range(len(data)) for _ in range(GROUP)])
    settings = harness.settings(
        steps, output_dir=tempfile.mkdtemp(), seed=seed, learning_rate=2e-5, gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP,
    )  # fmt: skip
    trainer = trainer_of(method, model, shaped(reward), data, settings)
    points = []

    class Judge(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            done = state.global_step // (steps // updates)
            if state.global_step % (steps // updates) == 0 and (done % EVERY == 0 or done == updates):
                points.append((done, accuracy(trainer.model, trainer.processing_class, held, judge)))

    points.append((0, accuracy(trainer.model, trainer.processing_class, held, judge)))
    trainer.add_callback(Judge())
    trainer.train()
    found = {"method": method, "task": task, "seed": seed, "updates": updates, "model": Path(model).name}
    return found | {"held_out": len(held), "points": points}


def draw(runs: list[dict], easy: dict[str, dict[str, float]], path: Path) -> None:
    """One panel a task: the mean over seeds, and each seed; and the best of the shortcuts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(r["task"] for r in runs))
    figure, panels = plt.subplots(1, len(tasks), figsize=(4.2 * len(tasks), 3.4), sharey=True, squeeze=False)
    colours = dict(zip(METHODS, ("#1f77b4", "#2ca02c", "#d62728"), strict=True))
    for panel, task in zip(panels[0], tasks, strict=True):
        for method in METHODS:
            mine = [r["points"] for r in runs if (r["task"], r["method"]) == (task, method)]
            for points in mine:
                panel.plot(*zip(*points, strict=True), color=colours[method], alpha=0.25, linewidth=1)
            mean = [(p[0][0], sum(y for _, y in p) / len(p)) for p in zip(*mine, strict=True)]
            if mean:
                panel.plot(*zip(*mean, strict=True), color=colours[method], label=method.upper(), marker="o")
        best = max(easy[task], key=easy[task].__getitem__)
        panel.axhline(easy[task][best], color="0.4", linestyle=":", linewidth=1, label="best shortcut")
        panel.text(
            0.02, easy[task][best], best, color="0.4", fontsize=8, va="bottom", transform=panel.get_yaxis_transform()
        )
        panel.set_title(task)
        panel.set_xlabel(f"updates of {PROMPTS} x {GROUP} completions")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("held-out accuracy")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncol=len(METHODS) + 1, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    """All runs, two at a time with one thread each, then the picture and the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--updates", type=int, default=10)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options.add_argument("--resume", action="store_true", help="go on with the runs that the result file lacks")
    options.add_argument("--one", nargs=3, metavar=("METHOD", "TASK", "SEED"), help="(child) a single run")
    args = options.parse_args()
    model = args.model or harness.default_model()
    if args.one:
        method, task, seed = args.one
        print(json.dumps(run(method, task, int(seed), model, args.updates)))
        return
    path = harness.RESULTS / "online_curves.json"
    runs = json.loads(path.read_text())["runs"] if args.resume and path.exists() else []
    same = {"updates": args.updates, "model": Path(model).name}
    runs = [r for r in runs if r["task"] in args.tasks and {name: r.get(name) for name in same} == same]
    done = {(r["method"], r["task"], r["seed"]) for r in runs}
    wanted = [(m, t, s) for s in range(args.seeds) for t in args.tasks for m in args.methods if (m, t, s) not in done]
    common = ["--model", model, "--updates", str(args.updates)]
    lock, easy = threading.Lock(), {task: shortcuts(task) for task in args.tasks}

    def start(which: tuple[str, str, int]) -> None:
        found = harness.child(sys.executable, __file__, "--one", *map(str, which), *common)
        print(found, flush=True)
        with lock:  # Kept one by one: a run takes minutes, and all of them an hour.
            runs.append(found)
            harness.save("online_curves", {"runs": runs, "shortcuts": easy})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, wanted))
    draw(runs, easy, harness.RESULTS / "online_curves.png")


if __name__ == "__main__":
    main()
