"""A whole GRPO step (rollout, scoring, reference, update) against the peer: same model, data, precision, same script.

Prediction, SmolLM2-135M, 2 prompts of about 130 tokens x 8 completions of 48: the peer computes 16 rows of 178 tokens, 2848,
in each training pass, a forest 2 x (130 + 8 x 48) = 1028, 2.8 times fewer; rollouts prefill 260 tokens instead of 2080.
"""

from __future__ import annotations

import importlib
import json
import random
import time

import harness

WORDS = ["river", "stone", "apple", "winter", "yellow", "garden", "window", "music", "letter", "silver", "morning"]


def questions(count: int) -> list[dict]:
    """Prompts of about 130 tokens in SmolLM2's chat template."""
    rng = random.Random(0)
    told = [" ".join(rng.choices(WORDS, k=88)) for _ in range(count)]
    return [
        {"prompt": [{"role": "user", "content": f"Use some of these words in a story: {words}."}]} for words in told
    ]


def reward(completions: list, **_) -> list[float]:
    """Distinct letters: any number that differs within a group."""
    return [len(set(c[0]["content"])) / 10 for c in completions]


def scripted(prompts: int, group: int, vocabulary: int) -> list[list[int]]:
    """Completions of different lengths for the comparison of losses; the same on both sides."""
    rng = random.Random(1)
    return [[rng.randrange(10, vocabulary) for _ in range(rng.randrange(4, 48))] for _ in range(prompts * group)]


def run(side: str, model: str, steps: int, parity: bool) -> dict:
    """Train ``steps`` steps and tell times, memory, losses."""
    from datasets import Dataset

    library = importlib.import_module("posttrain" if side == "ours" else "trl")
    import transformers

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    config = library.GRPOConfig(
        "/tmp/posttrain-bench",
        max_steps=steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=48,
        beta=0.04,
        use_bias_correction_kl=False,  # The two defaults differ.
        learning_rate=1e-5,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        lr_scheduler_type="constant",
        seed=0,
    )
    trainer = library.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(questions(2 * steps)),
        callbacks=[Clock()],
    )
    if parity:
        fix_completions(side, trainer)
    start = time.perf_counter()
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    times = [b - a for a, b in zip([start, *ends], ends, strict=False)]
    return {
        "step_seconds": round(sum(times[1:]) / max(1, len(times) - 1), 3),
        "peak_gb": round(harness.peak_memory(), 3),
        "loss": [entry["loss"] for entry in log],
        "grad_norm": [float(entry["grad_norm"]) for entry in log],
        "kl": [entry.get("kl") for entry in log],
        "mean_length": [entry.get("completions/mean_length") for entry in log],
    }


def fix_completions(side: str, trainer) -> None:
    """Make both sides train on the same tokens, so that losses can be compared."""
    tokens = scripted(2, 8, 40000)
    if side == "ours":
        from posttrain import ScriptedEngine

        trainer.engine = ScriptedEngine(tokens)
        return

    def generate(prompt_ids, *_):
        return [list(line) for line in tokens], None

    trainer._generate_single_turn = generate


def main() -> None:
    """Both sides, in turn."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--parity", action="store_true", help="(child) train on fixed completions")
    options.add_argument("--parity-only", action="store_true", help="compare losses and stop")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.steps, args.parity)))
        return
    model = args.model or harness.default_model()
    [(ours, peer)] = harness.alternate(__file__, 1, "--model", model, "--parity", "--steps", "3")
    gap = [abs(a - b) / max(abs(b), 1e-8) for a, b in zip(ours["loss"], peer["loss"], strict=True)]
    parity = {"loss": {"ours": ours["loss"], "peer": peer["loss"]}, "relative_gap": gap}
    parity["grad_norm"] = {"ours": ours["grad_norm"], "peer": peer["grad_norm"]}
    print(f"loss, relative difference by step: {gap}")
    if gap[0] > 1e-4:
        raise SystemExit("step 1 differs from the peer's: no speed is quoted before that is understood.")
    if args.parity_only:
        harness.save("grpo_parity", {"parity": parity})
        return
    pairs = harness.alternate(__file__, args.pairs, "--model", model, "--steps", str(args.steps))
    speed = harness.ratios([(a["step_seconds"], b["step_seconds"]) for a, b in pairs])
    memory = harness.ratios([(b["peak_gb"], a["peak_gb"]) for a, b in pairs])
    print(
        f"GRPO step: {speed['median']}x faster ({speed['min']} to {speed['max']}), memory {memory['median']} of the peer's"
    )
    harness.save("grpo", {"speed_up": speed, "memory_ratio": memory, "parity": parity, "runs": pairs})


if __name__ == "__main__":
    main()
