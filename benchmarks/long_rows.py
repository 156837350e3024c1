"""Rows of thousands of tokens, against the peer: GRPO updates, preference pairs, packed documents; and how they grow.

A six-layer cut of SmolLM2-135M, float32, gradient checkpointing. Prediction for a GRPO update of G completions of C tokens on a
prompt of P: the peer computes G (P + C) tokens and G (P + C)^2 / 2 pairs of attention, ours P + G C tokens and
P^2 / 2 + G (P C + C^2 / 2) pairs. At P = 400, C = 512, G = 8: 1.62 times fewer tokens and 1.36 times fewer pairs; what is gained
beyond that are logits (the peer's are of all completions at once) and padding.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from itertools import pairwise

import grpo
import harness

LAYERS, PROMPT, GROUP = 6, 400, 8
CURVE = (128, 256, 512, 1024, 2048, 4096)
DOCUMENTS = [800, 150, 620, 410, 700, 333, 555, 460, 100, 780, 240, 610, 510, 380, 730, 290]  # Tokens of each.


def cut(model: str, folder: str) -> None:
    """The first layers of a model, as a checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    del whole.model.layers[LAYERS:]
    whole.config.num_hidden_layers = LAYERS
    if getattr(whole.config, "layer_types", None):
        whole.config.layer_types = whole.config.layer_types[:LAYERS]
    whole.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def tokens(rng: random.Random, count: int) -> list[int]:
    """Ids of no text."""
    return [rng.randrange(10, 40000) for _ in range(count)]


def grpo_trainer(library, side: str, model: str, steps: int, lengths: list[int], prompt: int = PROMPT, **options):
    """Updates on one group of given completions of these lengths, on prompts of about ``prompt`` tokens."""
    from datasets import Dataset

    rng = random.Random(1)
    settings = {
        "per_device_train_batch_size": len(lengths), "gradient_accumulation_steps": 1, "num_generations": len(lengths),
        "max_completion_length": max(lengths), "beta": 0.0, "learning_rate": 1e-5, "gradient_checkpointing": True,
        "shuffle_dataset": False,
    }  # fmt: skip
    peft = {"peft_config": options.pop("peft_config", None)}
    config = library.GRPOConfig(**harness.settings(steps, **settings | options))
    data = Dataset.from_list(grpo.questions(2 * steps, prompt - 72))
    trainer = library.GRPOTrainer(model, reward_funcs=grpo.reward, args=config, train_dataset=data, **peft)
    grpo.fix_completions(side, trainer, [tokens(rng, n) for n in lengths])
    return trainer


def dpo_trainer(library, model: str, steps: int):
    """Four pairs of answers of 800 tokens on prompts of 300."""
    from datasets import Dataset

    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choices(harness.WORDS, k=count))

    rows = [{"prompt": words(300), "chosen": " " + words(800), "rejected": " " + words(800)} for _ in range(2 * steps)]
    options = {"gradient_checkpointing": True, "train_sampling_strategy": "sequential", "max_length": 2048}
    config = library.DPOConfig(**harness.settings(steps, per_device_train_batch_size=2, **options))
    return library.DPOTrainer(model, args=config, train_dataset=Dataset.from_list(rows))


def sft_trainer(library, model: str, steps: int, lengths: list[int], length: int, **options):
    """Documents of these lengths, packed into rows of ``length``. One step is the whole set, so that it does not matter which
    documents a library packs together.
    """
    from datasets import Dataset

    rng = random.Random(0)
    rows = [{"input_ids": tokens(rng, n)} for n in lengths]
    settings = {
        "per_device_train_batch_size": -(-sum(lengths) // length), "packing": True, "max_length": length,
        "gradient_checkpointing": True, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    config = library.SFTConfig(**harness.settings(steps, **settings | options))
    return library.SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows))


def run(side: str, model: str, case: str, steps: int) -> dict:
    """One side of one case, ``grpo 512``, ``curve 512``, ``dpo`` or ``sft 2048``."""
    library = harness.import_side(side)
    kind, _, size = case.partition(" ")
    if kind in ("grpo", "curve"):
        spread = 0.5 if kind == "grpo" else 0.0  # Lengths are from 1 - spread to 1 + spread of the mean.
        lengths = [round(int(size) * (1 - spread + 2 * spread * i / (GROUP - 1))) for i in range(GROUP)]
        return harness.timed(grpo_trainer(library, side, model, steps, lengths))
    if kind == "dpo":
        return harness.timed(dpo_trainer(library, model, steps))
    return harness.timed(sft_trainer(library, model, steps, DOCUMENTS, int(size)))


def draw(points: dict[str, dict[str, dict]]) -> None:
    """Seconds and memory over the length of completions, ours beside the peer's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for axis, name, label in zip(
        axes, ("step_seconds", "peak_gb"), ("seconds per update", "peak memory, GB"), strict=True
    ):
        for side, marker in (("ours", "o-"), ("peer", "s--")):
            known = [(int(length), found[side][name]) for length, found in points.items() if side in found]
            axis.plot(*zip(*known, strict=True), marker, label={"ours": "posttrain", "peer": "TRL 1.16.0"}[side])
        axis.set(xscale="log", xlabel=f"tokens per completion (prompt of {PROMPT}, {GROUP} completions)", ylabel=label)
        axis.set_xticks([int(length) for length in points], labels=list(points))
        axis.minorticks_off()
        axis.set_ylim(0) if name == "peak_gb" else axis.set_yscale("log")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(harness.RESULTS / "long_rows.png", dpi=130)


def curve(model: str, most_peer: int) -> dict:
    """Ours at every length, the peer as far as memory goes."""
    points: dict[str, dict[str, dict]] = {}
    for length in CURVE:
        arguments = ("--model", model, "--case", f"curve {length}", "--steps", "2")
        found = {"ours": harness.child(sys.executable, __file__, "--side", "ours", *arguments)}
        if length <= most_peer:
            found["peer"] = harness.child(harness.peer_python(), __file__, "--side", "peer", *arguments)
        points[str(length)] = found
        print(length, {side: (one["step_seconds"], one["peak_gb"]) for side, one in found.items()}, flush=True)
    draw(points)
    ours = [points[str(length)]["ours"] for length in CURVE]
    growth = [(b["step_seconds"] / a["step_seconds"], b["peak_gb"] / a["peak_gb"]) for a, b in pairwise(ours)]
    print("each doubling multiplies time and memory by", [(round(t, 2), round(m, 2)) for t, m in growth])
    return {"points": points, "growth": growth}


def main() -> None:
    """All cases, or one."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=3, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--case", help="one case: 'grpo 512', 'grpo 1024', 'dpo', 'sft 2048' or 'curve'")
    options.add_argument(
        "--most-peer", type=int, default=2048, help="longest completions that the peer is given in the curve"
    )
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.case, args.steps)))
        return
    result = harness.earlier("long_rows", CASES)
    with tempfile.TemporaryDirectory() as folder:
        cut(args.model or harness.default_model(), folder)
        for case in [args.case] if args.case else CASES:
            if case == "curve":
                result[case] = curve(folder, args.most_peer)
                continue
            pairs = harness.alternate(
                __file__, args.pairs, "--model", folder, "--case", case, "--steps", str(args.steps)
            )
            result[case] = harness.compare(case, pairs)
            harness.save("long_rows", result)
    harness.save("long_rows", result)


CASES = ("grpo 512", "grpo 1024", "dpo", "sft 2048", "curve")

if __name__ == "__main__":
    main()
