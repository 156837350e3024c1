"""A step of SFT against the peer at default settings: skewed lengths (as chats have) and uniform ones.

Prediction, SmolLM2-135M: the peer pads 8 rows to the longest; with lengths like 20..400 that computes about twice the
tokens and builds logits for all of them. Ours computes real tokens and no logits beyond a chunk.
"""

from __future__ import annotations

import importlib
import json
import random
import time

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

    library = importlib.import_module("posttrain" if side == "ours" else "trl")
    import transformers

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    lengths = SKEWED if shape == "skewed" else UNIFORM
    config = library.SFTConfig(
        "/tmp/posttrain-bench",
        max_steps=steps,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        model_init_kwargs={"dtype": "float32"},
        lr_scheduler_type="constant",
        seed=0,
    )
    data = Dataset.from_list(rows(lengths, steps))
    trainer = library.SFTTrainer(model, args=config, train_dataset=data, callbacks=[Clock()])
    start = time.perf_counter()
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    times = [b - a for a, b in zip([start, *ends], ends, strict=False)]
    return {
        "step_seconds": round(sum(times[1:]) / max(1, len(times) - 1), 3),
        "peak_gb": round(harness.peak_memory(), 3),
        "loss": [entry["loss"] for entry in log],
        "grad_norm": [float(entry["grad_norm"]) for entry in log],
        "tokens": sum(lengths),
    }


def main() -> None:
    """Both shapes, both sides, in turn."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--shape", choices=["skewed", "uniform"], help="(child) which lengths")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.shape, args.steps)))
        return
    model = args.model or harness.default_model()
    result = {}
    for shape in ("skewed", "uniform"):
        pairs = harness.alternate(__file__, args.pairs, "--model", model, "--shape", shape, "--steps", str(args.steps))
        ours, peer = pairs[0]
        gap = abs(ours["loss"][0] - peer["loss"][0]) / abs(peer["loss"][0])
        if gap > 1e-4:
            raise SystemExit(
                f"step 1 differs from the peer's by {gap:.1e}: no speed is quoted before that is understood."
            )
        speed = harness.ratios([(a["step_seconds"], b["step_seconds"]) for a, b in pairs])
        memory = harness.ratios([(b["peak_gb"], a["peak_gb"]) for a, b in pairs])
        print(f"SFT, {shape}: {speed['median']}x faster ({speed['min']} to {speed['max']}), memory {memory['median']}")
        result[shape] = {"speed_up": speed, "memory_ratio": memory, "step_1_relative_gap": gap, "runs": pairs}
    harness.save("sft", result)


if __name__ == "__main__":
    main()
