"""A whole GRPO step (rollout, scoring, reference, update) against the peer: same model, data, precision, same script.

Prediction, SmolLM2-135M, 2 prompts of about 130 tokens x 8 completions of 48: the peer computes 16 rows of 178 tokens, 2848,
in each training pass, a forest 2 x (130 + 8 x 48) = 1028, 2.8 times fewer; rollouts prefill 260 tokens instead of 2080.
"""

from __future__ import annotations

import json
import random

import harness

# Words of a prompt (with the template about 135 and 512 tokens), most new tokens, whether completions are given, and
# completions of a micro-batch: 16 of the last case take the peer more than 24 GB.
CASES = {"short": (88, 48, False, 16), "long": (415, 64, False, 16), "update": (415, 128, True, 8)}


def questions(count: int, words: int = 88) -> list[dict]:
    """Prompts in SmolLM2's chat template."""
    rng = random.Random(0)
    told = [" ".join(rng.choices(harness.WORDS, k=words)) for _ in range(count)]
    return [
        {"prompt": [{"role": "user", "content": f"Use some of these words in a story: {words}."}]} for words in told
    ]


def reward(completions: list, **_) -> list[float]:
    """Distinct letters: any number that differs within a group."""
    return [len(set(c[0]["content"])) / 10 for c in completions]


def scripted(count: int, vocabulary: int, longest: int, equal: bool) -> list[list[int]]:
    """Completions that are the same on both sides, of different lengths or of one."""
    rng = random.Random(1)
    lengths = [longest if equal else rng.randrange(4, longest) for _ in range(count)]
    return [[rng.randrange(10, vocabulary) for _ in range(n)] for n in lengths]


def run(side: str, model: str, steps: int, parity: bool, case: str) -> dict:
    """Train ``steps`` steps and tell times, memory, losses."""
    from datasets import Dataset

    library = harness.import_side(side)
    words, new, fixed, rows = CASES[case]
    options = {
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": 16 // rows, "num_generations": 8,
        "max_completion_length": new, "beta": 0.04, "learning_rate": 1e-5, "gradient_checkpointing": False,
        "shuffle_dataset": False, "use_bias_correction_kl": False,  # The two defaults differ.
    }  # fmt: skip
    config = library.GRPOConfig(**harness.settings(steps, **options))
    trainer = library.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(questions(2 * steps, words)),
    )
    if parity or fixed:
        fix_completions(side, trainer, scripted(16, 40000, new, equal=fixed))
    logged = {"kl": "kl", "mean_length": "completions/mean_length"}
    found = harness.timed(trainer)
    return found | {name: [entry.get(key) for entry in harness.log_of(trainer)] for name, key in logged.items()}


def fix_completions(side: str, trainer, tokens: list[list[int]]) -> None:
    """Make both sides train on the same tokens, so that losses can be compared."""
    if side == "ours":
        from posttrain import ScriptedEngine

        trainer.engine = ScriptedEngine(tokens)
        return

    def generate(prompt_ids, *_):
        return [list(line) for line in tokens], None

    trainer._generate_single_turn = generate


def equal_work(model: str) -> dict:
    """Losses and gradients of both sides on the same completions; ends where the first losses differ."""
    [(ours, peer)] = harness.alternate(__file__, 1, "--model", model, "--parity", "--steps", "3")
    gap = [abs(a - b) / max(abs(b), 1e-8) for a, b in zip(ours["loss"], peer["loss"], strict=True)]
    print(f"loss, relative difference by step: {gap}")
    harness.step_1_gap(ours, peer)
    norms = {"ours": ours["grad_norm"], "peer": peer["grad_norm"]}
    return {"loss": {"ours": ours["loss"], "peer": peer["loss"]}, "relative_gap": gap, "grad_norm": norms}


def main() -> None:
    """Both sides, in turn."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--parity", action="store_true", help="(child) train on fixed completions")
    options.add_argument("--parity-only", action="store_true", help="compare losses and stop")
    options.add_argument("--no-parity", action="store_true", help="times and memory alone")
    options.add_argument("--case", choices=list(CASES), help="one of the cases; all when left out")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.steps, args.parity, args.case or "short")))
        return
    model = args.model or harness.default_model()
    result = {} if args.no_parity else {"parity": equal_work(model)}
    if args.parity_only:
        harness.save("grpo_parity", result)
        return
    for case in [args.case] if args.case else CASES:
        common = ("--model", model, "--steps", str(args.steps), "--case", case)
        pairs = harness.alternate(__file__, args.pairs, *common)
        result[case] = harness.compare(f"GRPO, {case}", pairs, same_work=CASES[case][2])
        harness.save("grpo" if not args.case else f"grpo_{args.case}", result)


if __name__ == "__main__":
    main()
