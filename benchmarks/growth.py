"""How time and memory of a training step grow with the work, compared with TRL.

Each axis changes one number of a GRPO update: a six-layer cut of SmolLM2-135M in float32 with gradient checkpointing, one prompt
of 400 tokens, 8 given completions of 128 tokens, full training. The axis ``sft rows`` changes the rows of an SFT step.

Prediction: TRL's time grows with G (P + C), posttrain's with P + G C, so the advantage grows with G and P and falls with C.
TRL's memory grows with G C V, because it holds all logits of a pass, and posttrain's does not grow with V.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import harness
import long_rows
import sft

BASE = {"completions": 8, "prompt": 400, "completion length": 128, "vocabulary": 49_152}
AXES = {
    "completions": (2, 8, 16, 32), "prompt": (100, 400, 1000, 4000), "completion length": (128, 512, 2048),
    "vocabulary": (49_152, 131_072, 262_144), "lora": (0, 1), "sft rows": (1, 4, 16, 64),
}  # fmt: skip
LABELS = {
    "completions": "completions per prompt", "prompt": "tokens of the prompt", "completion length": "tokens per completion",
    "vocabulary": "vocabulary", "sft rows": "SFT: rows per step",
}  # fmt: skip


def run(side: str, model: str, axis: str, value: int, steps: int) -> dict:
    """Return time, memory and losses of one library at one point of an axis."""
    library = harness.import_side(side)
    if axis == "sft rows":
        options = {"per_device_train_batch_size": value, "packing": False}
        lengths = (sft.SKEWED * value)[:value] if value > 1 else [128]
        return harness.timed(long_rows.sft_trainer(library, model, steps, lengths * steps, 2048, **options))
    work = BASE | {axis: value}
    lengths = [work["completion length"]] * work["completions"]
    options = {}
    if axis == "lora" and value:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return harness.timed(long_rows.grpo_trainer(library, side, model, steps, lengths, work["prompt"], **options))


def resize(model: str, folder: str, size: int) -> None:
    """Write the checkpoint with embeddings for a vocabulary of this size."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    network.resize_token_embeddings(size)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def point(model: str, axis: str, value: int, pairs: int, steps: int) -> dict:
    """Return the comparison at one point of an axis."""
    common = ("--model", model, "--axis", axis, "--value", str(value), "--steps", str(steps))
    return harness.compare(f"{axis} {value}", harness.alternate(__file__, pairs, *common))


def draw(found: dict[str, dict[str, dict]]) -> None:
    """Draw seconds and memory over each axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axes = list(LABELS)
    figure, plots = plt.subplots(2, len(axes), figsize=(3 * len(axes), 5.2), squeeze=False)
    for column, axis in enumerate(axes):
        values = [int(value) for value in found[axis]]
        for row, name in enumerate(("step_seconds", "peak_gb")):
            plot = plots[row][column]
            for side, marker in ((0, "o-"), (1, "s--")):
                medians = [
                    harness.statistics.median(pair[side][name] for pair in one["runs"]) for one in found[axis].values()
                ]
                plot.plot(values, medians, marker, label=("posttrain", "TRL 1.16.0")[side])
            plot.set(xscale="log", yscale="log" if row == 0 else "linear", xlabel=LABELS[axis] if row else "")
            plot.set_xticks(values, labels=[f"{value // 1024}k" if value > 9999 else str(value) for value in values])
            plot.minorticks_off()
            plot.grid(alpha=0.25)
            if row:
                plot.set_ylim(0)
    plots[0][0].set_ylabel("seconds per step")
    plots[1][0].set_ylabel("peak memory, GB")
    plots[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(harness.RESULTS / "growth.png", dpi=110)


def main() -> None:
    """Run all axes, or one."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=2, help="optimizer steps of a run; the first is not timed")
    options.add_argument("--axis", choices=list(AXES), help="one of the axes; all by default")
    options.add_argument("--value", type=int, help="(child) the point of the axis")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.axis, args.value, args.steps)))
        return
    result = harness.earlier("growth", AXES)
    with tempfile.TemporaryDirectory() as folder:
        long_rows.cut(args.model or harness.default_model(), folder)
        for axis in [args.axis] if args.axis else AXES:
            found = {}
            for value in AXES[axis]:
                model = folder
                if axis == "vocabulary" and value != BASE[axis]:
                    model = str(Path(folder) / str(value))
                    resize(folder, model, value)
                base = result.get("completions", {}).get(str(BASE["completions"]))
                same = base if value == BASE.get(axis, 0) and axis != "completions" else None
                found[str(value)] = same or point(model, axis, value, args.pairs, args.steps)
                result[axis] = found
                harness.save("growth", result)
    if set(AXES) <= set(result):
        draw(result)


if __name__ == "__main__":
    main()
