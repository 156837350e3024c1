"""Draw the picture of each method's page: its curves on the demo's sums, from a run made here.

    python tools/method_curves.py [METHOD ...] [--steps 16] [--teacher runs/demo]
    python tools/method_curves.py [METHOD ...] --small --steps 40

Each method trains SmolLM2-135M-Instruct for a few steps on questions of two-digit sums; what it logs is drawn into
docs/img/curves/METHOD.svg, and the numbers stay beside it in curves.json. The runs are short: they show what to expect of the
first steps, not how good a method can be. ``--small`` takes seconds: a two-layer model with random weights is rewarded for the
share of its tokens that are among the first 60 of its vocabulary; gkd's teacher is one that has learned that by GRPO. vision is
DPO of a two-layer model with a tower, which is to name the colour of a disc, and small alone.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from datasets import Dataset
from transformers import AutoTokenizer

import posttrain
from posttrain.cli.demo import find_model

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "examples"),
]  # Workers of an asynchronous run import its rewards by their module's name.
import dpo_vlm  # noqa: E402
import grpo_add  # noqa: E402

FOLDER = ROOT / "docs" / "img" / "curves"
# Data, then what is drawn: (metric, label) on the left axis and on the right one.
METHODS = {
    "sft": ("SFT", "answers", ("loss", "loss (nats a token)"), ("mean_token_accuracy", "token accuracy")),
    "dpo": ("DPO", "pairs", ("loss", "loss"), ("rewards/accuracies", "preference accuracy")),
    "kto": ("KTO", "judged", ("loss", "loss"), ("rewards/margins", "margin")),
    "orpo": ("ORPO", "pairs", ("loss", "loss"), ("rewards/accuracies", "preference accuracy")),
    "reward": ("Reward", "pairs", ("loss", "loss"), ("accuracy", "accuracy")),
    "grpo": ("GRPO", "prompts", ("reward", "reward"), ("completions/mean_length", "mean length (tokens)")),
    "rloo": ("RLOO", "prompts", ("reward", "reward"), ("completions/mean_length", "mean length (tokens)")),
    "ppo": ("PPO", "prompts", ("objective/scores", "reward"), ("objective/kl", "KL from the start (nats)")),
    "async_grpo": (
        "AsyncGRPO",
        "prompts",
        ("reward", "reward"),
        ("sample/staleness_mean", "age of rollouts (updates)"),
    ),
    "a2po": ("A2PO", "prompts", ("reward", "reward"), ("v_star", "value of the prompts (V*)")),
    "gmpo": ("GMPO", "prompts", ("reward", "reward"), ("completions/mean_length", "mean length (tokens)")),
    "online_dpo": ("OnlineDPO", "prompts", ("objective/scores", "reward"), ("rewards/margins", "margin")),
    "gkd": ("GKD", "answers", ("distill/divergence", "divergence (nats a token)"), ("distill/agreement", "agreement")),
    "vision": ("DPO", "discs", ("loss", "loss"), ("rewards/accuracies", "preference accuracy")),
}
GROUPS = {"num_generations": 8, "max_completion_length": 12, "temperature": 0.8}
SAMPLING = {
    "ppo": {"response_length": 12, "stop_token": "eos", "temperature": 0.8, "num_ppo_epochs": 2},
    "online_dpo": {"max_new_tokens": 12, "temperature": 0.8, "per_device_train_batch_size": 16},
    "async_grpo": GROUPS
    | {"max_staleness": 1, "staleness_policy": "pace", "vllm_importance_sampling_mode": "token_truncate"},
    "a2po": {"num_value_samples": 4, "max_completion_length": 12, "temperature": 0.8, "filter_all_incorrect": False},
}


def rows(kind, count):
    if kind == "discs":
        return dpo_vlm.pairs(count, seed=1)
    train, _ = grpo_add.questions(count)
    made = []
    for row in train:
        say = lambda text: [{"role": "assistant", "content": text}]
        right, wrong = say(row["answer"]), say(str(int(row["answer"]) + 10))
        if kind == "answers":
            made.append({"messages": row["prompt"] + right})
        elif kind == "pairs":
            made.append({"prompt": row["prompt"], "chosen": right, "rejected": wrong})
        elif kind == "judged":
            good = len(made) % 2 == 0
            made.append({"prompt": row["prompt"], "completion": right if good else wrong, "label": good})
        else:
            made.append(row)
    return Dataset.from_list(made)


def share(completion_ids, **_):
    return [sum(token < 60 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def small(folder):
    """A two-layer model with random weights."""
    from tests.conftest import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    build_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_with_tower():
    """The same with a tower for pictures, of Qwen2-VL's kind, and its processor."""
    from tests.vision_families import build

    return build("qwen2_vl")


def train(name, steps, folder, args):
    stem, kind, *_ = METHODS[name]
    sampled, extra = kind == "prompts", {}
    if kind == "discs":
        model, extra["processing_class"] = small_with_tower()
    else:
        model = small(f"{folder}/model") if args.small else find_model()
    rewards = [share] if args.small else [grpo_add.accuracy, grpo_add.brevity]
    settings = {
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 0,
        "learning_rate": 5e-3 if args.small else 2e-5,
    }
    settings |= {"per_device_train_batch_size": 32 if sampled else 8, "gradient_checkpointing": False}
    settings |= SAMPLING.get(name, GROUPS) if sampled else {}
    if name == "ppo" and args.small:
        settings |= {"temperature": 1.0, "kl_coef": 1e-3}  # A share is small beside 0.05 times its KL.
    if sampled:
        extra["reward_model" if name == "ppo" else "reward_funcs"] = rewards
    if name == "online_dpo":
        extra["processing_class"] = AutoTokenizer.from_pretrained(model)
    if name == "gkd":
        settings |= {"lmbda": 1.0, "beta": 1.0, "max_new_tokens": 12}
        extra = {"teacher_model": args.teacher}
        if args.small:
            extra = {"teacher_model": f"{folder}/teacher"}
            train("grpo", steps, folder, args).save_model(f"{folder}/teacher")
    config = getattr(posttrain, f"{stem}Config")(str(folder), **settings)
    trainer = getattr(posttrain, f"{stem}Trainer")(
        model=model, args=config, train_dataset=rows(kind, 64 if name == "a2po" else 32 * steps), **extra
    )
    trainer.train()
    return trainer


def draw(name, history):
    *_, (left, label), (right, other) = METHODS[name]
    figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    points = lambda metric: zip(*[(line["step"], line[metric]) for line in history if metric in line], strict=True)
    axis.plot(*points(left), color="#3b6fd4", marker="o", markersize=3)
    axis.set(xlabel="optimiser step", ylabel=label)
    axis.yaxis.label.set_color("#3b6fd4")
    second = axis.twinx()
    second.plot(*points(right), color="#c2571a", marker="s", markersize=3)
    second.set_ylabel(other, color="#c2571a")
    for one in (axis, second):
        one.spines["top"].set_visible(False)
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], default=list(METHODS))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--teacher", default="runs/demo", help="gkd's: a folder of the demo's (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a two-layer model, in seconds")
    args = parser.parse_args()
    for name in args.methods:
        with tempfile.TemporaryDirectory() as folder:
            log = train(name, args.steps, folder, args).state.log_history
        history = [line for line in log if "train_runtime" not in line]
        draw(name, history)
        file = FOLDER / "curves.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        kept = [metric for metric, _ in METHODS[name][2:]]
        known[name] = {metric: [line[metric] for line in history if metric in line] for metric in kept}
        file.write_text(json.dumps(known, indent=1) + "\n")
        sys.stdout.write(f"{name}: {known[name]}\n")


if __name__ == "__main__":
    main()
