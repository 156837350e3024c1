"""PPO and RLOO beside GRPO: a whole step of each on 16 completions, and what their other passes may cost.

GRPO with a reference: rollout, one pass of the reference, one update. RLOO charges the divergence to the reward: the same
passes. PPO asks 16 different prompts, and runs the policy once more for log-probs and values before it trains: these passes
and the tokens of unshared prompts are what it may take longer, at the arithmetic rate of this machine's own training pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import harness
from grpo import questions, reward

NEW, GROUP, COMPLETIONS = 48, 8, 16
METHODS = ("grpo", "rloo", "ppo")


def trainer_of(method: str, model: str, steps: int):
    """A trainer that samples and trains 16 completions a step, none of which ends early on its own account."""
    from datasets import Dataset

    import posttrain
    from posttrain.models.load import create_model_from_path, load_tokenizer

    common = {"per_device_train_batch_size": COMPLETIONS, "learning_rate": 1e-5, "gradient_checkpointing": False}
    if method == "ppo":
        settings = harness.settings(
            steps, **common, num_ppo_epochs=1, num_mini_batches=1, response_length=NEW, temperature=1.0,
            num_sample_generations=0, stop_token="eos",
        )  # fmt: skip
        settings.pop("model_init_kwargs")
        tokenizer = load_tokenizer(model)
        tokenizer.pad_token = "<|endoftext|>"
        policy = create_model_from_path(model, dtype="float32")
        data = Dataset.from_list(questions(COMPLETIONS * steps))
        return posttrain.PPOTrainer(posttrain.PPOConfig(**settings), tokenizer, policy, None, reward, data, None)
    common |= {"num_generations": GROUP, "max_completion_length": NEW, "beta": 0.04, "shuffle_dataset": False}
    config = getattr(posttrain, f"{method.upper()}Config")(**harness.settings(steps, **common))
    trainer = getattr(posttrain, f"{method.upper()}Trainer")
    return trainer(model, reward, config, train_dataset=Dataset.from_list(questions(COMPLETIONS // GROUP * steps)))


def rate(model) -> float:
    """Operations a second of a forward and backward pass over 1,024 tokens, the better of two."""
    import torch

    ids = torch.randint(100, 10_000, (8, 128))
    weights = sum(p.numel() for p in model.parameters())
    best = float("inf")
    for _ in range(2):
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        best = min(best, time.perf_counter() - begin)
    return 6 * weights * ids.numel() / best


def run(method: str, model: str, steps: int) -> dict:
    """Seconds of a step; and the machine's rate, of which the run with GRPO is asked."""
    trainer = trainer_of(method, model, steps)
    found = harness.timed(trainer)
    log = harness.log_of(trainer)
    names = ("completions/mean_length", "num_tokens", "sampling/sampling_logp_difference/mean")
    found["log"] = [{name: entry.get(name) for name in names} for entry in log]
    weights = sum(p.numel() for p in trainer.model.parameters())
    return found | {"weights": weights} | ({"rate": rate(trainer.model)} if method == "grpo" else {})


def allowed(method: str, grpo: dict, prompt: int) -> float:
    """Seconds of GRPO's step and of what the method computes beyond it."""
    if method != "ppo":
        return grpo["step_seconds"]
    shared, apart = COMPLETIONS // GROUP * prompt, COMPLETIONS * prompt  # Prompt tokens of a pass.
    passes = 1 + 1 + 3  # Rollout, reference, and the update, which counts three.
    extra = (apart - shared) * passes + (apart + COMPLETIONS * NEW)  # And the policy's own pass, for values.
    return grpo["step_seconds"] + 2 * grpo["weights"] * extra / grpo["rate"]


def main() -> None:
    """All three in turn, as often as asked."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--steps", type=int, default=3, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--one", choices=METHODS, help="(child) one run")
    args = options.parse_args()
    model = args.model or harness.default_model()
    if args.one:
        print(json.dumps(run(args.one, model, args.steps)))
        return
    runs: dict[str, list[dict]] = {method: [] for method in METHODS}
    for _ in range(args.repeats):
        for method in METHODS:
            told = ("--one", method, "--model", model, "--steps", str(args.steps))
            runs[method].append(harness.child(sys.executable, __file__, *told))
            print(method, runs[method][-1], flush=True)
    best = {method: min(found, key=lambda r: r["step_seconds"]) for method, found in runs.items()}
    result = {
        method: {
            "step_seconds": best[method]["step_seconds"],
            "allowed_seconds": round(allowed(method, best["grpo"], prompt=135), 3),
            "peak_gb": best[method]["peak_gb"],
        }
        for method in METHODS
    }
    print(json.dumps(result, indent=1))
    harness.save("online_methods", {"methods": result, "runs": runs})


if __name__ == "__main__":
    main()
