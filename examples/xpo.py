"""XPO with an adapter, whose reference is the same model with the adapter off: python examples/xpo.py MODEL"""

import argparse

from datasets import Dataset
from peft import LoraConfig

from posttrain import XPOConfig, XPOTrainer, complete
from posttrain.models.load import load_tokenizer

NAMES = "Ada Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Noa Oli Pia"


def greets(completions: list, name: list, **_) -> list[float]:
    """1 for an answer that uses the name, and a little for a short one."""
    texts = [c[0]["content"] for c in completions]
    return [float(n in text) - 0.005 * len(text) for text, n in zip(texts, name, strict=True)]


def main() -> None:
    """Train, and show the reward of greedy answers to other names before and after."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a chat model")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--prompts", type=int, default=12, help="of a step, with two answers each")
    args = options.parse_args()
    rows = [
        {"prompt": [{"role": "user", "content": f"Hi, my name is {name}. Greet me."}], "name": name}
        for name in NAMES.split()
    ]
    config = XPOConfig(
        "runs/xpo",
        max_steps=args.steps,
        num_train_epochs=100,
        per_device_train_batch_size=args.prompts,
        max_new_tokens=24,
        alpha=[1e-5],
        learning_rate=2e-4,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
    )
    tokenizer = load_tokenizer(args.model)
    trainer = XPOTrainer(
        args.model,
        reward_funcs=greets,
        args=config,
        train_dataset=Dataset.from_list(rows[:12]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )

    def exam() -> float:
        said = complete(trainer.model, tokenizer, [row["prompt"] for row in rows[12:]], max_new_tokens=24)
        return sum(greets([[{"content": text}] for text in said], NAMES.split()[12:])) / len(said)

    before = exam()
    trainer.train()
    print(f"mean reward of greedy answers: {before:.3f} before, {exam():.3f} after")


if __name__ == "__main__":
    main()
