"""A step of SFT against the peer at default settings: skewed lengths (as chats have) and uniform ones.

Prediction, SmolLM2-135M: the peer pads 8 rows to the longest; with lengths like 20..400 that computes about twice the
tokens and builds logits for all of them. Ours computes real tokens and no logits beyond a chunk.
"""

from __future__ import annotations

import json
import random

import harness

SKEWED = [24, 31, 42, 57, 78, 110, 190, 420]
UNIFORM = [128] * 8


def rows(lengths: list[int], steps: int) -> list[dict]:
    """Tokenised rows of these lengths, ``steps`` batches of them, every token trained."""
    rng = random.Random(0)
    return [{"input_ids": [rng.randrange(10, 40000) for _ in range(n)]} for _ in range(steps) for n in lengths]


def run(side: str, model: str, shape: str, steps: int) -> dict:
    """Train ``steps`` steps of one batch each and tell times, memory, losses."""
    from datasets import Dataset

    library = harness.import_side(side)
    lengths = SKEWED if shape == "skewed" else UNIFORM
    config = library.SFTConfig(**harness.settings(steps, train_sampling_strategy="sequential"))
    data = Dataset.from_list(rows(lengths, steps))
    return harness.timed(library.SFTTrainer(model, args=config, train_dataset=data)) | {"tokens": sum(lengths)}


def main() -> None:
    """Both shapes, both sides, in turn."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--shape", choices=["skewed", "uniform"], help="one of the cases; both when left out")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.shape, args.steps)))
        return
    model = args.model or harness.default_model()
    for shape in [args.shape] if args.shape else ("skewed", "uniform"):
        pairs = harness.alternate(__file__, args.pairs, "--model", model, "--shape", shape, "--steps", str(args.steps))
        harness.save(f"sft_{shape}", harness.compare(f"SFT, {shape}", pairs))


if __name__ == "__main__":
    main()
