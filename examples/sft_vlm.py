"""Teach a vision-language model to count, on pictures that the script draws: python examples/sft_vlm.py MODEL

Any model of a family in docs/vision.md; HuggingFaceTB/SmolVLM-256M-Instruct is a small one.
"""

import argparse
import random

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from PIL import ImageDraw

from posttrain import SFTConfig, SFTTrainer

SIDE, CELL = 96, 32


def drawn(count: int, draw: random.Random) -> Pictures.Image:
    """Discs and squares of three colours in different cells of a 3 x 3 grid."""
    picture = Pictures.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    for cell in draw.sample(range(9), count):
        x, y = cell % 3 * CELL + 4, cell // 3 * CELL + 4
        shape = draw.choice([pen.ellipse, pen.rectangle])
        shape((x, y, x + CELL - 8, y + CELL - 8), fill=draw.choice(["red", "green", "blue"]))
    return picture


def counting(rows: int, seed: int, wrong: float = 0.0) -> Dataset:
    """Pictures with one to six shapes, the question, the right number as "answer", and a completion that may be off by one."""
    draw, made = random.Random(seed), []
    for _ in range(rows):
        count = draw.randint(1, 6)
        said = count + draw.choice([-1, 1]) if draw.random() < wrong else count
        question = [{"type": "image", "text": None}, {"type": "text", "text": "How many shapes?"}]
        made.append({
            "images": [drawn(count, draw)],
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": [{"type": "text", "text": str(said)}]}],
            "answer": str(count),
        })  # fmt: skip
    message = [{"role": Value("string"), "content": [{"type": Value("string"), "text": Value("string")}]}]
    features = {"images": List(Image()), "prompt": message, "completion": message}
    return Dataset.from_list(made, features=Features(features | {"answer": Value("string")}))


def main() -> None:
    """Train, and say how many tokens of unseen answers are right."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a vision-language model")
    options.add_argument("--rows", type=int, default=2000, help="training pictures")
    args = options.parse_args()
    config = SFTConfig(
        "runs/sft_vlm",
        num_train_epochs=1,
        per_device_train_batch_size=16,
        learning_rate=2e-5,
        max_length=None,
        freeze_vision=True,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
    )
    trainer = SFTTrainer(
        args.model, config, train_dataset=counting(args.rows, seed=1), eval_dataset=counting(100, seed=2)
    )
    trainer.train()
    print("held-out accuracy of answer tokens:", round(trainer.evaluate()["eval_mean_token_accuracy"], 3))


if __name__ == "__main__":
    main()
