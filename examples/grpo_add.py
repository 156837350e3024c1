"""Teach a small language model to add two-digit numbers with GRPO: two rewards, one trainer, a few minutes on a CPU."""

import random
import re
import sys

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, complete

LIMIT = 12  # Tokens of an answer: enough to repeat the question, or to learn not to.


def question(a: int, b: int) -> dict:
    """One row: a prompt for the model, and the answer for the reward functions."""
    text = f"What is {a} + {b}? Reply with just the number."
    return {"prompt": [{"role": "user", "content": text}], "answer": str(a + b)}


def questions(count: int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Training questions, and 64 others that are never trained on."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    held_out, train = pairs[:64], pairs[64 : 64 + count]
    return Dataset.from_list([question(*p) for p in train]), Dataset.from_list([question(*p) for p in held_out])


def last_number(text: str) -> str | None:
    """The last number in a text: models like to repeat the question first."""
    return (re.findall(r"\d+", text) or [None])[-1]


def accuracy(completions: list, answer: list, **_) -> list[float]:
    """1 where the last number is the right one."""
    return [float(last_number(c[0]["content"]) == a) for c, a in zip(completions, answer, strict=True)]


def brevity(completions: list, answer: list, **_) -> list[float]:
    """A small cost for every character beyond a right answer.

    A wrong answer costs nothing, however long. Otherwise short answers win in groups without a right one, and the model learns to
    leave the sum out.
    """
    texts = [c[0]["content"].strip() for c in completions]
    return [0.01 * (len(a) - len(t)) * (last_number(t) == a) for t, a in zip(texts, answer, strict=True)]


def make_trainer(model: str, output_dir: str, steps: int = 40, seed: int = 0, **options) -> GRPOTrainer:
    """GRPO with 8 questions x 8 answers a step."""
    train, held_out = questions(8 * steps, seed)
    config = GRPOConfig(
        output_dir, max_steps=steps, per_device_train_batch_size=64, num_generations=8, max_completion_length=LIMIT,
        temperature=0.8, learning_rate=2e-5, gradient_checkpointing=False, logging_steps=1, save_steps=5,
        save_total_limit=2, seed=seed, **options,
    )  # fmt: skip
    return GRPOTrainer(model, [accuracy, brevity], config, train_dataset=train, eval_dataset=held_out)


def exam(trainer: GRPOTrainer, rows: list | None = None) -> list[tuple[str, str, str]]:
    """(question, right answer, what the model says), greedily, on the held-out questions or on other rows."""
    rows = rows or list(trainer.eval_dataset)
    said = complete(trainer.model, trainer.processing_class, [row["prompt"] for row in rows], max_new_tokens=LIMIT)
    return [(r["prompt"][0]["content"], r["answer"], s.strip()) for r, s in zip(rows, said, strict=True)]


def count_right(rows: list[tuple[str, str, str]]) -> int:
    """How many of the answers of an exam are right."""
    return sum(last_number(said) == answer for _, answer, said in rows)


if __name__ == "__main__":
    trainer = make_trainer(sys.argv[1], "runs/grpo_add", *map(int, sys.argv[2:]))
    before = count_right(exam(trainer))
    trainer.train()
    print(f"of 64 held-out questions, {before} right before training and {count_right(exam(trainer))} after")
