"""A step of DPO against the peer: the gain over the share of the prompt, and the arithmetic that bounds it.

Prediction: with prompts of P and answers of C tokens the peer computes 2 (P + C) tokens a pair, twice (policy, reference);
ours P + 2 C. The ratio is 2 (P + C) / (P + 2 C): 1.67 at P = 4 C, near 2 for long prompts, plus the output head, which the
peer runs on every position and ours on the answers' alone.
"""

from __future__ import annotations

import importlib
import json
import random
import time

import harness

PAIRS, TOTAL = 4, 200
WORDS = ["river", "stone", "apple", "winter", "yellow", "garden", "window", "music", "letter", "silver", "morning"]


def rows(steps: int, share: float) -> list[dict]:
    """Pairs of about 200 tokens a side, of which ``share`` is the prompt (one token a word)."""
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=max(1, count)))

    prompt, answer = round(TOTAL * share), round(TOTAL * (1 - share))
    return [
        {"prompt": words(prompt), "chosen": " " + words(answer), "rejected": " " + words(answer)}
        for _ in range(PAIRS * steps)
    ]


def run(side: str, model: str, steps: int, share: float) -> dict:
    """Train ``steps`` steps and tell times, memory, losses."""
    from datasets import Dataset

    library = importlib.import_module("posttrain" if side == "ours" else "trl")
    import transformers

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    config = library.DPOConfig(
        "/tmp/posttrain-bench",
        max_steps=steps,
        per_device_train_batch_size=PAIRS,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        model_init_kwargs={"dtype": "float32"},
        lr_scheduler_type="constant",
        seed=0,
    )
    data = Dataset.from_list(rows(steps, share))
    trainer = library.DPOTrainer(model, args=config, train_dataset=data, callbacks=[Clock()])
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


def bound(share: float) -> float:
    """The ratio of tokens, without what the head saves."""
    return 2 / (share + 2 * (1 - share))


def draw(points: list[tuple[float, float]]) -> None:
    """The curve beside its bound, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 3.6))
    shares = [i / 20 for i in range(1, 20)]
    axis.plot(shares, [bound(s) for s in shares], "--", color="gray", label="ratio of tokens")
    axis.plot(*zip(*points, strict=True), "o-", label="measured")
    axis.set(xlabel="share of the prompt in a sequence", ylabel="times faster than TRL 1.16.0")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(harness.RESULTS / "dpo.png", dpi=130)


def main() -> None:
    """The main figure, then the curve."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=3, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--share", type=float, default=0.8, help="share of the prompt")
    options.add_argument("--curve", action="store_true", help="measure shares 0.1 to 0.9 too, one pair of runs each")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.steps, args.share)))
        return
    model = args.model or harness.default_model()
    common = ["--model", model, "--steps", str(args.steps)]
    pairs = harness.alternate(__file__, args.pairs, *common, "--share", str(args.share))
    ours, peer = pairs[0]
    gap = abs(ours["loss"][0] - peer["loss"][0]) / abs(peer["loss"][0])
    speed = harness.ratios([(a["step_seconds"], b["step_seconds"]) for a, b in pairs])
    memory = harness.ratios([(b["peak_gb"], a["peak_gb"]) for a, b in pairs])
    faster = f"{speed['median']}x faster ({speed['min']} to {speed['max']})"
    print(f"{faster}, memory {memory['median']} of the peer's, step-1 gap {gap:.1e}")
    if gap > 1e-4:
        raise SystemExit("step 1 differs from the peer's: no speed is quoted before that is understood.")
    points = [(args.share, speed["median"])]
    for share in (0.1, 0.3, 0.5, 0.7, 0.9) if args.curve else ():
        [(a, b)] = harness.alternate(__file__, 1, *common, "--share", str(share))
        points.append((share, b["step_seconds"] / a["step_seconds"]))
    result = {"speed_up": speed, "memory_ratio": memory, "step_1_relative_gap": gap, "runs": pairs}
    harness.save("dpo", result | {"curve": sorted(points), "bound": [(s, bound(s)) for s, _ in sorted(points)]})
    if args.curve:
        draw(sorted(points))


if __name__ == "__main__":
    main()
