"""A step of reward modelling against the peer: pairs that share a prompt four times as long as their answers.

Prediction: the peer computes each prompt twice, 2 (P + C) tokens a pair against P + 2 C: with P = 4 C 1.67 times fewer.
"""

from __future__ import annotations

import json
import random

import harness

PAIRS, PROMPT, ANSWER = 6, 160, 40


def rows(steps: int) -> list[dict]:
    """Tokenised pairs: a shared prompt and two answers."""
    rng = random.Random(0)

    def draw(n: int) -> list[int]:
        return [rng.randrange(10, 40000) for _ in range(n)]

    prompts = [draw(PROMPT) for _ in range(PAIRS * steps)]
    return [{"chosen_ids": p + draw(ANSWER), "rejected_ids": p + draw(ANSWER)} for p in prompts]


def run(side: str, model: str, steps: int) -> dict:
    """Train ``steps`` steps and tell times, memory, losses. The head is set to the same numbers on both sides."""
    import torch
    from datasets import Dataset

    library = harness.import_side(side)
    options = {"gradient_checkpointing": False, "train_sampling_strategy": "sequential", "learning_rate": 1e-5}
    config = library.RewardConfig(**harness.settings(steps, per_device_train_batch_size=PAIRS, **options))
    data = Dataset.from_list(rows(steps))
    trainer = library.RewardTrainer(model, args=config, train_dataset=data)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head = trainer.model.score.weight
        head.copy_(0.05 * torch.randn(head.shape, generator=generator))
    return harness.timed(trainer)


def main() -> None:
    """Both sides, in turn."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="optimiser steps of a run; the first is not timed")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.steps)))
        return
    model = args.model or harness.default_model()
    pairs = harness.alternate(__file__, args.pairs, "--model", model, "--steps", str(args.steps))
    harness.save("reward", harness.compare("reward model", pairs))


if __name__ == "__main__":
    main()
