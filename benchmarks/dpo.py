"""A step of DPO against the peer: the gain over the share of the prompt, and the arithmetic that bounds it.

Prediction: with prompts of P and answers of C tokens the peer computes 2 (P + C) tokens a pair, twice (policy, reference);
ours P + 2 C. The ratio is 2 (P + C) / (P + 2 C): 1.67 at P = 4 C, near 2 for long prompts, plus the output head, which the
peer runs on every position and ours on the answers' alone.
"""

from __future__ import annotations

import json
import random

import harness

PAIRS, TOTAL = 4, 200


def rows(steps: int, share: float) -> list[dict]:
    """Pairs of about 200 tokens a side, of which ``share`` is the prompt (one token a word)."""
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choices(harness.WORDS, k=max(1, count)))

    prompt, answer = round(TOTAL * share), round(TOTAL * (1 - share))
    return [
        {"prompt": words(prompt), "chosen": " " + words(answer), "rejected": " " + words(answer)}
        for _ in range(PAIRS * steps)
    ]


def run(side: str, model: str, steps: int, share: float) -> dict:
    """Train ``steps`` steps and tell times, memory, losses."""
    from datasets import Dataset

    library = harness.import_side(side)
    options = {"gradient_checkpointing": False, "train_sampling_strategy": "sequential"}
    config = library.DPOConfig(**harness.settings(steps, per_device_train_batch_size=PAIRS, **options))
    data = Dataset.from_list(rows(steps, share))
    return harness.timed(library.DPOTrainer(model, args=config, train_dataset=data))


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
    result = harness.compare("DPO", pairs)
    points = [(args.share, result["speed_up"]["median"])]
    for share in (0.1, 0.3, 0.5, 0.7, 0.9) if args.curve else ():
        [(a, b)] = harness.alternate(__file__, 1, *common, "--share", str(share))
        points.append((share, b["step_seconds"] / a["step_seconds"]))
    harness.save("dpo", result | {"curve": sorted(points), "bound": [(s, bound(s)) for s, _ in sorted(points)]})
    if args.curve:
        draw(sorted(points))


if __name__ == "__main__":
    main()
