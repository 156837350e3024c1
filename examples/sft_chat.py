"""Fine-tune a small chat model on 2,000 short conversations: python examples/sft_chat.py MODEL [--lora]

The conversations are made from the tasks of `reasoning-gym` (PyPI, Apache-2.0): pip install reasoning-gym
"""

import argparse
import random

import reasoning_gym
from datasets import Dataset
from peft import LoraConfig

from posttrain import SFTConfig, SFTTrainer, complete

TASKS = ["basic_arithmetic", "simple_equations", "letter_counting", "spell_backward", "family_relationships"]
TASKS += ["calendar_arithmetic", "time_intervals", "gcd"]
OPENINGS = ["Happy to help.", "Let me see.", "Good question."]


def answered(task: str, answer: str) -> str:
    """How the assistant shall speak: an opening, then the answer in one sentence."""
    return f"{OPENINGS[len(answer) % 3]} My answer to this {task.replace('_', ' ')} question is {answer}."


def conversations(count: int, seed: int) -> list[dict]:
    """Short questions of eight kinds with their right answers, in random order."""
    rows = []
    for task in TASKS:
        for entry in reasoning_gym.create_dataset(task, size=count // len(TASKS), seed=seed):
            user = {"role": "user", "content": entry["question"].strip()}
            said = {"role": "assistant", "content": answered(task, entry["answer"])}
            rows.append({"messages": [user, said], "task": task, "answer": entry["answer"]})
    random.Random(seed).shuffle(rows)
    return rows


def show(trainer: SFTTrainer, rows: list[dict], title: str) -> None:
    """What the model says to a few questions."""
    prompts = [row["messages"][:1] for row in rows]
    for row, said in zip(
        rows, complete(trainer.model, trainer.processing_class, prompts, max_new_tokens=32), strict=True
    ):
        print(f"[{title}] {row['messages'][0]['content'][:70]!r} -> {said!r}")


def main() -> None:
    """Train, and show answers and evaluation loss before and after."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a chat model")
    options.add_argument("--lora", action="store_true", help="train an adapter")
    args = options.parse_args()
    train, held_out = conversations(2000, seed=1), conversations(64, seed=2)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if args.lora else None
    config = SFTConfig(
        "runs/sft_chat",
        num_train_epochs=1,
        per_device_train_batch_size=16,
        learning_rate=1e-3 if args.lora else 5e-5,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
    )
    trainer = SFTTrainer(
        args.model,
        args=config,
        train_dataset=Dataset.from_list(train),
        eval_dataset=Dataset.from_list(held_out),
        peft_config=adapter,
    )
    show(trainer, held_out[:3], "before")
    print("loss before:", round(trainer.evaluate()["eval_loss"], 3))
    trainer.train()
    print("loss after:", round(trainer.evaluate()["eval_loss"], 3))
    show(trainer, held_out[:3], "after")
    trainer.save_model()


if __name__ == "__main__":
    main()
