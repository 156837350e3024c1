"""Teach a small model to use a calculator with GRPO: python examples/tool_use.py MODEL [STEPS]

A model that knows no tools is shown the format first: python examples/tool_use_warm_up.py MODEL, then give its folder here.
Started again, it goes on from its last checkpoint.
"""

import json
import random
import re
import sys
from pathlib import Path

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer


def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: Such as 12 * (3 + 4).
    """
    if not re.fullmatch(r"[\d+\-*/(). ]{1,40}", expression) or "**" in expression:
        raise ValueError("only numbers, + - * / and brackets")
    return str(eval(expression))


def problems(count: int, seed: int) -> list[dict]:
    """Products and sums that a small model cannot do in its head."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        a, b, c = draw.randint(100, 999), draw.randint(11, 99), draw.randint(100, 999)
        text, right = draw.choice([("{} * {}", f"{a}*{b}"), ("{} * {} + {}", f"{a}*{b}+{c}"), ("{} + {}", f"{a}+{c}")])
        prompt = [{"role": "user", "content": f"What is {text.format(a, b if '*' in right else c, c)}?"}]
        rows.append({"prompt": prompt, "expression": right, "answer": str(eval(right))})
    return rows


def correct(completions: list, answer: list, **_) -> list[float]:
    """1 where the last message is the right number."""
    said = [re.sub(r"[^\d.-]", "", c[-1]["content"] or "").rstrip(".") for c in completions]
    return [float(s == a) for s, a in zip(said, answer, strict=True)]


def main(model: str, steps: str = "10", folder: str = "runs/tool_use") -> None:
    """Train, and show the share of right answers to other problems."""
    config = GRPOConfig(
        folder,
        max_steps=int(steps),
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=96,
        learning_rate=2e-5,
        eval_strategy="steps",
        eval_steps=5,
        num_generations_eval=1,
        per_device_eval_batch_size=64,
        save_steps=5,
        save_total_limit=1,
        logging_steps=1,
        gradient_checkpointing=False,
    )
    train, held_out = [Dataset.from_list(problems(n, seed)) for n, seed in ((80, 1), (64, 2))]
    trainer = GRPOTrainer(model, correct, config, train_dataset=train, eval_dataset=held_out, tools=[calculator])
    begun = any(Path(folder).glob("checkpoint-*"))
    if not begun:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=begun)
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    key = "eval_rewards/correct/mean"
    print("right answers, by step:", {line["step"]: f"{line[key]:.0%}" for line in lines if key in line})


if __name__ == "__main__":
    main(*sys.argv[1:])
