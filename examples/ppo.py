"""Teach a small chat model to count letters with PPO, values on the policy's own trunk: python examples/ppo.py MODEL"""

import argparse
import random
import re

from datasets import Dataset

from posttrain import PPOConfig, PPOTrainer, complete

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


def exam(trainer: PPOTrainer, rows: Dataset) -> float:
    """Mean reward of greedy answers."""
    said = complete(trainer.model, trainer.processing_class, rows["prompt"][:], max_new_tokens=8)
    return sum(right([[{"content": text}] for text in said], rows["answer"][:])) / len(rows)


def main() -> None:
    """Train, and show the reward on other questions before and after."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a chat model")
    options.add_argument("--updates", type=int, default=30, help="rollout batches")
    options.add_argument("--answers", type=int, default=64, help="of a rollout batch")
    args = options.parse_args()
    config = PPOConfig(
        "runs/ppo",
        total_episodes=args.answers * args.updates,
        per_device_train_batch_size=args.answers,
        num_ppo_epochs=2,
        num_mini_batches=2,
        response_length=8,
        stop_token="eos",
        temperature=1.0,
        kl_coef=0.02,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        logging_steps=4,  # Once a rollout batch.
        save_strategy="no",
    )
    prompts = questions(args.answers * args.updates, seed=1)
    trainer = PPOTrainer(config, model=args.model, reward_model=right, train_dataset=prompts)
    held_out = questions(64, seed=2)
    before = exam(trainer, held_out)
    trainer.train()
    print(f"reward: {before:.2f} before, {exam(trainer, held_out):.2f} after")


if __name__ == "__main__":
    main()
