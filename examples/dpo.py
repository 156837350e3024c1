"""Teach a small chat model a form of answer with DPO, on pairs a machine judged: python examples/dpo.py MODEL

Questions come from `reasoning-gym` (PyPI, Apache-2.0): pip install reasoning-gym. The chosen answer is the right one in the
wanted form; the rejected one is what the model itself says before training.
"""

import argparse
import re

import reasoning_gym
from datasets import Dataset

from posttrain import DPOConfig, DPOTrainer, complete
from posttrain.models.load import create_model_from_path, load_tokenizer

TASKS = ["basic_arithmetic", "letter_counting", "calendar_arithmetic", "gcd"]
FORM = re.compile(r"The answer is (\S+?)\.?\s*$")


def questions(count: int, seed: int) -> list[dict]:
    """Short questions of four kinds with their right answers."""
    found = [e for t in TASKS for e in reasoning_gym.create_dataset(t, size=count // len(TASKS), seed=seed)]
    prompts = [[{"role": "user", "content": e["question"].strip()}] for e in found]
    return [{"prompt": p, "answer": e["answer"]} for p, e in zip(prompts, found, strict=True)]


def pairs(rows: list[dict], said: list[str]) -> Dataset:
    """The right answer in form against what the model says."""
    made = []
    for row, text in zip(rows, said, strict=True):
        chosen, rejected = f"The answer is {row['answer']}.", text.strip() or "I do not know."
        answers = {
            name: [{"role": "assistant", "content": t}] for name, t in (("chosen", chosen), ("rejected", rejected))
        }
        made.append({"prompt": row["prompt"], **answers})
    return Dataset.from_list(made)


def judge(said: list[str]) -> float:
    """Share of answers in the wanted form."""
    return sum(FORM.search(text.strip()) is not None for text in said) / len(said)


def main() -> None:
    """Sample, train, and show the judged form and the implicit reward's accuracy on questions never trained on."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a chat model")
    options.add_argument("--count", type=int, default=240, help="training questions")
    args = options.parse_args()
    model, tokenizer = create_model_from_path(args.model), load_tokenizer(args.model)
    train, held_out = questions(args.count, seed=1), questions(48, seed=2)
    say = [complete(model, tokenizer, [r["prompt"] for r in rows], max_new_tokens=24) for rows in (train, held_out)]
    config = DPOConfig(
        "runs/dpo",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=1e-5,
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, 0.5],
        gradient_checkpointing=False,
        logging_steps=5,
        save_strategy="no",
    )
    trainer = DPOTrainer(
        model,
        args=config,
        train_dataset=pairs(train, say[0]),
        eval_dataset=pairs(held_out, say[1]),
        processing_class=tokenizer,
    )
    trainer.train()
    after = complete(trainer.model, tokenizer, [row["prompt"] for row in held_out], max_new_tokens=24)
    print("implicit reward, held-out accuracy:", round(trainer.evaluate()["eval_rewards/accuracies"], 3))
    print(f"answers in form: {judge(say[1]):.0%} before, {judge(after):.0%} after")
    for row, old, new in list(zip(held_out, say[1], after, strict=True))[:3]:
        print(f"{row['prompt'][0]['content'][:60]!r}\n  before: {old!r}\n  after:  {new!r}")


if __name__ == "__main__":
    main()
