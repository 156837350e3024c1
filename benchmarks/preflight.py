"""What checks cost: seconds before training, and their share of a step, on a real model with a check at every log line.

python benchmarks/preflight.py --model ~/.cache/posttrain/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets

WATCHED = ("check_step", "alarm", "watch_rewards", "_check_first_step", "check_start", "check_config")
BEFORE = ("check_start", "check_config")


def rows(count: int) -> datasets.Dataset:
    """Preference pairs; SFT takes the chosen side, GRPO the prompts."""
    made = []
    for i in range(count):
        prompt = [
            {"role": "user", "content": f"What is {i} plus {i % 97}? Explain in a sentence. " + "Please. " * (i % 40)}
        ]
        good = [{"role": "assistant", "content": f"Adding {i % 97} to {i} gives {i + i % 97}. " * (1 + i % 5)}]
        bad = [
            {"role": "assistant", "content": f"It is {i + 1}, I believe, though I am not sure at all. " * (1 + i % 3)}
        ]
        made.append({"prompt": prompt, "chosen": good, "rejected": bad, "answer": str(i + i % 97)})
    return datasets.Dataset.from_list(made)


def trainer_of(method: str, model: str, folder: str, data: datasets.Dataset, steps: int) -> Any:
    """A trainer of a method with the settings of a usual run on this machine."""
    import posttrain

    common = {
        "max_steps": steps, "logging_steps": 1, "per_device_train_batch_size": 8, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no",
    }  # fmt: skip
    if method == "sft":
        data = data.rename_column("chosen", "completion").remove_columns(["rejected", "answer"])
        return posttrain.SFTTrainer(model, posttrain.SFTConfig(folder, **common), train_dataset=data)
    if method == "dpo":
        return posttrain.DPOTrainer(model, args=posttrain.DPOConfig(folder, **common), train_dataset=data)

    def right(completions: list, answer: list[str], **_: Any) -> list[float]:
        return [float(gold in said[0]["content"]) for said, gold in zip(completions, answer, strict=True)]

    def short(completions: list, **_: Any) -> list[float]:
        return [-len(said[0]["content"]) / 200 for said in completions]

    args = posttrain.GRPOConfig(folder, **common, num_generations=8, max_completion_length=32)
    data = data.select_columns(["prompt", "answer"])
    return posttrain.GRPOTrainer(model, [right, short], args, train_dataset=data)


def measure(method: str, model: str, data: datasets.Dataset, steps: int) -> dict[str, Any]:
    """Seconds of checks before training and a step."""
    from posttrain.loop.trainer import PostTrainer

    spent = dict.fromkeys(WATCHED, 0.0)

    def timed(name: str, inner: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(self, *args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return run

    with tempfile.TemporaryDirectory() as folder:
        kind = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "grpo": "GRPOTrainer"}[method]
        import posttrain

        owner: type = getattr(posttrain, kind)
        kept = {name: getattr(owner, name) for name in WATCHED if hasattr(owner, name)}
        for name, function in kept.items():
            setattr(owner, name, timed(name, function))
        started = time.perf_counter()
        trainer = trainer_of(method, model, folder, data, steps)
        made = time.perf_counter() - started
        started = time.perf_counter()
        trainer.train()
        trained = time.perf_counter() - started
        for name in kept:
            delattr(owner, name)
        found = json.loads((Path(folder) / "preflight.json").read_text(encoding="utf-8"))
    assert isinstance(trainer, PostTrainer)
    before = sum(spent[name] for name in BEFORE)
    during = sum(spent[name] for name in WATCHED if name not in BEFORE) + found["seconds"].get("log_step", 0.0)
    return {
        "method": method,
        "rows": len(data),
        "preflight_s": round(before, 2),
        "construction_s": round(made, 2),
        "step_s": round(trained / steps, 3),
        "checks_ms_a_step": round(1000 * during / steps, 1),
        "share_of_step": round(during / trained, 5),
        "moments_s": found["seconds"],
        "told": [row["code"] for row in found["checks"] if row["findings"]],
    }


def main() -> None:
    """Measure and print one line of JSON a method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--methods", nargs="+", default=["sft", "dpo", "grpo"])
    options = parser.parse_args()
    data = rows(options.rows)
    for method in options.methods:
        print(json.dumps(measure(method, options.model, data, options.steps)), flush=True)


if __name__ == "__main__":
    main()
