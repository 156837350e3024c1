"""A*-PO on additions: values of all prompts first, kept on disk, then one completion a prompt."""

import re
import sys

from datasets import Dataset

from posttrain import A2POConfig, A2POTrainer


def questions(count: int) -> Dataset:
    """Sums of one-digit numbers, which a small model solves sometimes."""
    pairs = [(i % 10, (i * 7 + i // 10) % 10) for i in range(count)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"What is {a} + {b}? Reply with just the number."}],
                "answer": str(a + b),
            }
            for a, b in pairs
        ]
    )


def right(completions: list, answer: list, **_) -> list[float]:
    """1 where the last number is the right one."""
    found = [re.findall(r"\d+", c[0]["content"]) for c in completions]
    return [float(bool(numbers) and numbers[-1] == a) for numbers, a in zip(found, answer, strict=True)]


def main(model: str, output_dir: str = "runs/a2po", steps: str = "20", prompts: str = "64") -> None:
    """Estimate, train, and say what became of the reward."""
    config = A2POConfig(
        output_dir,
        num_value_samples=8,
        max_completion_length=12,
        per_device_train_batch_size=16,
        learning_rate=1e-5,
        beta2=0.01,
        max_steps=int(steps),
        logging_steps=1,
        gradient_checkpointing=False,
        save_strategy="no",
    )
    trainer = A2POTrainer(model, right, config, train_dataset=questions(int(prompts)))
    trainer.train()  # Started again in the same folder, it reads the values from output_dir/v_star.jsonl.
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    first, last = rewards[:5], rewards[-5:]
    print(f"reward of the first steps {sum(first) / len(first):.2f}, of the last {sum(last) / len(last):.2f}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M-Instruct"]))
