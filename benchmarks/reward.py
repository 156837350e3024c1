"""A step of reward modelling against the peer: pairs that share a prompt four times as long as their answers.

Prediction: the peer computes each prompt twice, 2 (P + C) tokens a pair against P + 2 C: with P = 4 C 1.67 times fewer.
"""

from __future__ import annotations

import importlib
import json
import random
import time

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
    import transformers
    from datasets import Dataset

    library = importlib.import_module("posttrain" if side == "ours" else "trl")
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    config = library.RewardConfig(
        "/tmp/posttrain-bench",
        max_steps=steps,
        per_device_train_batch_size=PAIRS,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        model_init_kwargs={"dtype": "float32"},
        lr_scheduler_type="constant",
        learning_rate=1e-5,
        seed=0,
    )
    data = Dataset.from_list(rows(steps))
    trainer = library.RewardTrainer(model, args=config, train_dataset=data, callbacks=[Clock()])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head = trainer.model.score.weight
        head.copy_(0.05 * torch.randn(head.shape, generator=generator))
    start = time.perf_counter()
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    times = [b - a for a, b in zip([start, *ends], ends, strict=False)]
    return {
        "step_seconds": round(sum(times[1:]) / max(1, len(times) - 1), 3),
        "peak_gb": round(harness.peak_memory(), 3),
        "loss": [entry["loss"] for entry in log],
        "grad_norm": [float(entry["grad_norm"]) for entry in log],
    }


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
    ours, peer = pairs[0]
    gap = abs(ours["loss"][0] - peer["loss"][0]) / abs(peer["loss"][0])
    speed = harness.ratios([(a["step_seconds"], b["step_seconds"]) for a, b in pairs])
    memory = harness.ratios([(b["peak_gb"], a["peak_gb"]) for a, b in pairs])
    faster = f"{speed['median']}x faster ({speed['min']} to {speed['max']})"
    print(f"{faster}, memory {memory['median']} of the peer's, step-1 gap {gap:.1e}")
    if gap > 1e-4:
        raise SystemExit("step 1 differs from the peer's: no speed is quoted before that is understood.")
    harness.save("reward", {"speed_up": speed, "memory_ratio": memory, "step_1_relative_gap": gap, "runs": pairs})


if __name__ == "__main__":
    main()
