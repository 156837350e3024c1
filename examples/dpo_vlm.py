"""Prefer what is in the picture over what is not, with DPO: python examples/dpo_vlm.py MODEL

The script draws one shape a picture; the chosen answer names its colour, the rejected one another. A pair's picture is encoded
once, for both answers. Any model of a family in docs/vision.md; HuggingFaceTB/SmolVLM-256M-Instruct is a small one.
"""

import argparse
import random

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from PIL import ImageDraw

from posttrain import DPOConfig, DPOTrainer

COLOURS = ["red", "green", "blue", "yellow", "black"]


def said(text: str) -> list[dict]:
    """The assistant's message."""
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def pairs(rows: int, seed: int) -> Dataset:
    """One disc a picture, its colour against another one."""
    draw, made = random.Random(seed), []
    for _ in range(rows):
        right, wrong = draw.sample(COLOURS, 2)
        picture = Pictures.new("RGB", (96, 96), "white")
        x, y = draw.randint(8, 40), draw.randint(8, 40)
        ImageDraw.Draw(picture).ellipse((x, y, x + 40, y + 40), fill=right)
        question = [{"type": "image", "text": None}, {"type": "text", "text": "Which colour is the disc?"}]
        prompt = [{"role": "user", "content": question}]
        answers = {"chosen": said(f"The disc is {right}."), "rejected": said(f"The disc is {wrong}.")}
        made.append({"images": [picture], "prompt": prompt, **answers})
    message = [{"role": Value("string"), "content": [{"type": Value("string"), "text": Value("string")}]}]
    features = {"images": List(Image()), "prompt": message, "chosen": message, "rejected": message}
    return Dataset.from_list(made, features=Features(features))


def main() -> None:
    """Train, and show how often the policy prefers the right colour on unseen pictures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a vision-language model")
    options.add_argument("--rows", type=int, default=500, help="training pairs")
    args = options.parse_args()
    config = DPOConfig(
        "runs/dpo_vlm",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=1e-6,
        max_length=None,
        freeze_vision=True,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
    )
    trainer = DPOTrainer(
        args.model, args=config, train_dataset=pairs(args.rows, seed=1), eval_dataset=pairs(60, seed=2)
    )
    trainer.train()
    print("held-out accuracy of the implicit reward:", round(trainer.evaluate()["eval_rewards/accuracies"], 3))


if __name__ == "__main__":
    main()
