"""2048 with a model that knows no tools: random games show it how to call them, GRPO teaches it to go on playing.

python examples/game_2048_small.py MODEL
"""

import argparse
import random

from datasets import Dataset
from game_2048 import Game2048, make_trainer
from tool_use_warm_up import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import SFTConfig, SFTTrainer

WAYS = ("left", "right", "up", "down")
TOOLS = [{"type": "function", "function": {"name": "move"}}]


def games(count: int, moves: int) -> Dataset:
    """Games of a player who moves at random, but never where nothing moves."""
    rows = []
    for seed in range(count):
        draw, game = random.Random(seed), Game2048()
        prompt, turns = [{"role": "user", "content": game.reset(group_seed=1000 + seed)}], []
        for _ in range(moves):
            way = draw.choice([w for w in WAYS if game._after(w)[0] != game.board])
            call = {"type": "function", "function": {"name": "move", "arguments": {"direction": way}}}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            turns.append({"role": "tool", "name": "move", "content": game.move(way)})
        rows.append({"prompt": prompt, "completion": turns[:-1], "tools": TOOLS})
    return Dataset.from_list(rows)


def main() -> None:
    """Warm up, train, and say what became of the score."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a chat model whose template has ChatML's words")
    options.add_argument("--warm_up", type=int, default=8, help="steps of imitation")
    options.add_argument("--steps", type=int, default=10)
    args = options.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, chat_template=TEMPLATE)
    common = {"bf16": False, "gradient_checkpointing": False, "logging_steps": 1, "report_to": "none", "seed": 0}
    warm_up = SFTConfig(
        "runs/game_2048_sft", max_steps=args.warm_up, learning_rate=5e-5, per_device_train_batch_size=4,
        assistant_only_loss=True, save_strategy="no", **common,
    )  # fmt: skip
    SFTTrainer(model, warm_up, train_dataset=games(4 * args.warm_up, moves=4), processing_class=tokenizer).train()
    sizes = {"num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 256}
    trainer = make_trainer(
        model, "runs/game_2048_small", args.steps, processing_class=tokenizer,
        learning_rate=1e-5, save_strategy="no", **sizes, **common,
    )  # fmt: skip
    trainer.train()
    scores = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    last = scores[-3:]
    print(f"mean of log(1 + points): {scores[0]:.2f} in the first step, {sum(last) / len(last):.2f} in the last three")


if __name__ == "__main__":
    main()
