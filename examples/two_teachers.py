"""Distil two models, one that adds and one that subtracts, into one that does both: python examples/two_teachers.py STUDENT

The teachers are made first, each by supervised fine-tuning of STUDENT on its own kind of question. Then STUDENT answers questions
of both kinds, and the column teacher_id says whose distributions each answer is compared with.
"""

import argparse
import random
import re

from datasets import Dataset
from transformers import AutoTokenizer

from posttrain import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer, complete, create_model_from_path

LIMIT = 12  # Tokens of an answer.
HELD_OUT = 64  # Questions of each kind that are never trained on.
SIGNS = {"adder": "+", "subtracter": "-"}
COMMON = {"learning_rate": 2e-5, "gradient_checkpointing": False, "logging_steps": 5, "save_strategy": "no"}


def questions(name: str, seed: int = 0) -> list[dict]:
    """All questions of one kind with their answers, in a random order."""
    sign, pairs = SIGNS[name], [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} {sign} {b}? Reply with just the number."}],
            "completion": [{"role": "assistant", "content": str(a + b if sign == "+" else a - b)}],
            "teacher_id": name,
        }
        for a, b in pairs
    ]


def exam(model, tokenizer, name: str) -> float:
    """Share of right answers to held-out questions, greedily: the last number counts."""
    rows = questions(name)[:HELD_OUT]
    said = complete(model, tokenizer, [row["prompt"] for row in rows], max_new_tokens=LIMIT)
    numbers = [re.findall(r"-?\d+", text)[-1:] for text in said]
    return sum(found == [row["completion"][0]["content"]] for found, row in zip(numbers, rows, strict=True)) / len(rows)


def show(title: str, model, tokenizer) -> None:
    """A line of the table of right answers."""
    print(f"{title:32}", *(f"{SIGNS[name]} {exam(model, tokenizer, name):4.0%}  " for name in SIGNS), flush=True)


def main() -> None:
    """Make two teachers, distil them into one student, and show what each can do."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("student", help="hub id or folder of a chat model")
    options.add_argument("--steps", type=int, default=24, help="of distillation, 16 questions each")
    options.add_argument("--teacher_steps", type=int, default=60, help="of supervised fine-tuning, 32 answers each")
    options.add_argument("--weights", type=float, nargs=2, help="mix both teachers for every row instead")
    options.add_argument("--only", choices=SIGNS, help="ask this teacher alone, about questions of both kinds")
    args = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.student)
    teachers = {}
    for name in SIGNS:
        data = Dataset.from_list(questions(name)[HELD_OUT : HELD_OUT + 32 * args.teacher_steps])
        config = SFTConfig(f"runs/{name}", max_steps=args.teacher_steps, per_device_train_batch_size=32, **COMMON)
        trainer = SFTTrainer(create_model_from_path(args.student), config, train_dataset=data)
        trainer.train()
        teachers[name] = trainer.model
        show(f"the {name}", trainer.model, tokenizer)
    rows = [row for name in SIGNS for row in questions(name)[-8 * args.steps :]]
    data = Dataset.from_list(rows).remove_columns("completion")
    weights = dict(zip(SIGNS, args.weights, strict=True)) if args.weights else None
    own = {"max_steps": args.steps, "per_device_train_batch_size": 16, "max_completion_length": LIMIT}
    config = DistillationConfig("runs/two_teachers", teacher_weights=weights, **own, **COMMON)
    asked = {name: model for name, model in teachers.items() if args.only in (None, name)}
    trainer = DistillationTrainer(args.student, asked, config, train_dataset=data)
    show("the student before", trainer.model, tokenizer)
    trainer.train()
    show(f"the student of {' and '.join(asked)}", trainer.model, tokenizer)


if __name__ == "__main__":
    main()
