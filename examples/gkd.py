"""Distil a model that can add into one that cannot: python examples/gkd.py STUDENT TEACHER [--scores FILE]

TEACHER is a model that examples/grpo_add.py or `posttrain demo` trained. With --scores the teacher answers the questions itself,
its scores of those answers are written to a file, and the student is trained from the file, without the teacher in memory.
"""

import argparse
import random
import re

from datasets import Dataset

from posttrain import GKDConfig, GKDTrainer, complete, create_model_from_path
from posttrain.methods.distillation.teacher import score_dataset

LIMIT = 12  # Tokens of an answer.


def sums(count: int, seed: int) -> tuple[Dataset, Dataset]:
    """Questions with their answers, and 64 others that are never trained on."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Reply with just the number."}],
            "completion": [{"role": "assistant", "content": str(a + b)}],
        }
        for a, b in pairs[: 64 + count]
    ]
    return Dataset.from_list(rows[64:]), Dataset.from_list(rows[:64])


def exam(trainer: GKDTrainer, rows: Dataset) -> float:
    """Share of right answers, greedily: the last number counts."""
    said = complete(trainer.model, trainer.processing_class, rows["prompt"][:], max_new_tokens=LIMIT)
    numbers = [re.findall(r"\d+", text)[-1:] for text in said]
    return sum(found == [row[0]["content"]] for found, row in zip(numbers, rows["completion"], strict=True)) / len(rows)


def main() -> None:
    """Train, and show the accuracy on other sums before and after."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("student", help="hub id or folder of a chat model")
    options.add_argument("teacher", help="folder of a model that adds")
    options.add_argument("--scores", help="file to write the teacher's scores to, and to train from")
    options.add_argument("--steps", type=int, default=20)
    args = options.parse_args()
    train, held_out = sums(16 * args.steps, seed=0)
    config = GKDConfig(
        "runs/gkd",
        max_steps=args.steps,
        per_device_train_batch_size=16,
        lmbda=0.0 if args.scores else 1.0,
        beta=0.0 if args.scores else 1.0,
        teacher_scores=args.scores,
        max_new_tokens=LIMIT,
        learning_rate=2e-5,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
    )
    teacher = create_model_from_path(args.teacher)
    if args.scores:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.student)
        # Not the dataset's bare number: this teacher writes the sum out first, and hardly knows the number without it.
        said = complete(teacher, tokenizer, train["prompt"][:], max_new_tokens=LIMIT)
        answers = [[{"role": "assistant", "content": text}] for text in said]
        train = train.remove_columns("completion").add_column("completion", answers)
        score_dataset(teacher, train, tokenizer, args.scores, max_length=config.max_length)
    trainer = GKDTrainer(args.student, None if args.scores else teacher, config, train_dataset=train)
    before = exam(trainer, held_out)
    trainer.train()
    print(f"right: {before:.0%} before, {exam(trainer, held_out):.0%} after")


if __name__ == "__main__":
    main()
