"""A whole GRPO step (rollout, scoring, reference, update) against the peer: same model, data, precision, same script.

Prediction, SmolLM2-135M, 2 prompts of about 130 tokens x 8 completions of 48: the peer computes 16 rows of 178 tokens, 2848,
in each training pass, a forest 2 x (130 + 8 x 48) = 1028, 2.8 times fewer; rollouts prefill 260 tokens instead of 2080.
"""

from __future__ import annotations

import json
import random

import harness


def questions(count: int) -> list[dict]:
    """Prompts of about 130 tokens in SmolLM2's chat template."""
    rng = random.Random(0)
    told = [" ".join(rng.choices(harness.WORDS, k=88)) for _ in range(count)]
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

    library = harness.import_side(side)
    options = {
        "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 48, "beta": 0.04,
        "learning_rate": 1e-5, "gradient_checkpointing": False, "shuffle_dataset": False,
        "use_bias_correction_kl": False,  # The two defaults differ.
    }  # fmt: skip
    config = library.GRPOConfig(**harness.settings(steps, **options))
    trainer = library.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(questions(2 * steps)),
    )
    if parity:
        fix_completions(side, trainer)
    logged = {"kl": "kl", "mean_length": "completions/mean_length"}
    found = harness.timed(trainer)
    return found | {name: [entry.get(key) for entry in harness.log_of(trainer)] for name, key in logged.items()}


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
    harness.step_1_gap(ours, peer)
    if args.parity_only:
        harness.save("grpo_parity", {"parity": parity})
        return
    pairs = harness.alternate(__file__, args.pairs, "--model", model, "--steps", str(args.steps))
    harness.save("grpo", harness.compare("GRPO step", pairs, same_work=False) | {"parity": parity})


if __name__ == "__main__":
    main()
