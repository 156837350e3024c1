"""Teach a small chat model to count letters with RLOO, and to keep close to where it began: python examples/rloo.py MODEL"""

import argparse
import random
import re

from datasets import Dataset

from posttrain import RLOOConfig, RLOOTrainer, complete

WORDS = "banana letter school coffee bottle summer little pepper kitten ribbon cheese tomorrow balloon mirror apple"


def questions(count: int, seed: int) -> Dataset:
    """How often a letter is in a word."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        word = draw.choice(WORDS.split())
        letter = draw.choice(sorted(set(word)))
        text = f"How many times does the letter {letter} occur in the word {word}? Reply with just the number."
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": str(word.count(letter))})
    return Dataset.from_list(rows)


def right(completions: list, answer: list, **_) -> list[float]:
    """1 for the right number alone, 0.2 for any number alone."""
    said = [c[0]["content"].strip().rstrip(".") for c in completions]
    return [1.0 if text == a else 0.2 * bool(re.fullmatch(r"\d+", text)) for text, a in zip(said, answer, strict=True)]


def exam(trainer: RLOOTrainer, rows: Dataset) -> float:
    """Share of right answers, greedily."""
    said = complete(trainer.model, trainer.processing_class, rows["prompt"][:], max_new_tokens=8)
    return sum(text.strip().rstrip(".") == answer for text, answer in zip(said, rows["answer"], strict=True)) / len(
        rows
    )


def main() -> None:
    """Train, and show accuracy on other questions before and after."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a chat model")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--answers", type=int, default=64, help="of a step, 8 to a question")
    args = options.parse_args()
    config = RLOOConfig(
        "runs/rloo",
        max_steps=args.steps,
        per_device_train_batch_size=args.answers,
        num_generations=8,
        max_completion_length=8,
        beta=0.02,
        learning_rate=2e-5,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = RLOOTrainer(args.model, right, config, train_dataset=questions(args.answers // 8 * args.steps, seed=1))
    held_out = questions(64, seed=2)
    before = exam(trainer, held_out)
    trainer.train()
    print(f"right: {before:.0%} before, {exam(trainer, held_out):.0%} after")


if __name__ == "__main__":
    main()
