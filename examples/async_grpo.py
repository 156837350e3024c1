"""Teach a small model to add, with rollouts written by a process of their own while the trainer trains."""

import random
import re
import sys

from datasets import Dataset

from posttrain import AsyncGRPOConfig, AsyncGRPOTrainer, complete

LIMIT = 12  # Tokens of an answer.


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
    found = re.findall(r"\d+", text)
    return found[-1] if found else None


# Reward functions run in the workers, which import this file: they stand at its top level, and what follows `__main__` does not.
def accuracy(completions: list, answer: list, **_) -> list[float]:
    """1 where the last number is the right one."""
    return [float(last_number(c[0]["content"]) == a) for c, a in zip(completions, answer, strict=True)]


def brevity(completions: list, answer: list, **_) -> list[float]:
    """A small cost for every character beyond the answer."""
    return [-0.01 * max(0, len(c[0]["content"].strip()) - len(a)) for c, a in zip(completions, answer, strict=True)]


def make_trainer(model: str, output_dir: str, steps: int = 20, **options) -> AsyncGRPOTrainer:
    """8 questions x 8 answers a step, each at most one version of the weights old."""
    train, held_out = questions(8 * steps)
    settings = {
        "max_steps": steps,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": LIMIT,
        "max_staleness": 1,
        "staleness_policy": "pace",  # Write no more than can be trained in time: nothing is thrown away.
        "temperature": 0.8,
        "learning_rate": 2e-5,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 0,
    }
    config = AsyncGRPOConfig(output_dir, **(settings | options))
    return AsyncGRPOTrainer(model, [accuracy, brevity], config, train, eval_dataset=held_out)


def exam(trainer: AsyncGRPOTrainer) -> int:
    """Right answers, greedily, to the 64 held-out questions."""
    rows = list(trainer.eval_dataset)
    said = complete(trainer.model, trainer.processing_class, [row["prompt"] for row in rows], max_new_tokens=LIMIT)
    return sum(last_number(text) == row["answer"] for row, text in zip(rows, said, strict=True))


if __name__ == "__main__":
    trainer = make_trainer(sys.argv[1], "runs/async_grpo")
    before = exam(trainer)
    trainer.train()
    print(f"before: {before} of 64 right, after: {exam(trainer)}")
