"""Rollouts on the trainer's own weights against transformers' `generate`, at equal and at skewed lengths.

Prediction: per token the weights cost 2 x 135M operations both ways; `generate` prefills every copy of a prompt, runs until the
longest completion is done, concatenates its cache at every step, repeats key-value heads three times and samples with a sort.
At skewed lengths (log-normal, mean 40 % of the longest) it therefore computes about 2.5 times the tokens.
"""

from __future__ import annotations

import argparse

import harness
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.rollouts.measure import Work, lengths, measure, seconds_at_least

CASES = [  # Prompt tokens, prompts, completions of each, most new tokens, shape of lengths.
    (130, 2, 8, 48, "equal"), (130, 4, 8, 48, "equal"), (130, 4, 8, 96, "skewed"), (512, 2, 8, 64, "equal"),
    (512, 2, 8, 96, "skewed"), (64, 16, 8, 64, "skewed"), (2048, 1, 8, 32, "equal"),
]  # fmt: skip


def main() -> None:
    """All cases in one process, on one copy of the weights; engines in turn, the best of three each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="numbers of cases")
    args = options.parse_args()
    folder = args.model or harness.default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).eval().to(device)
    generator, found = torch.Generator().manual_seed(0), []
    for prompt, prompts, group, new, shape in (CASES[i] for i in args.cases):
        ids = torch.randint(100, len(tokenizer), (prompts, prompt), generator=generator).tolist()
        work = Work(ids, group, lengths(prompts * group, new, shape))
        native, other = measure(model, work, pad_token_id=tokenizer.pad_token_id, repeats=args.repeats)
        arithmetic, traffic = seconds_at_least(model, work, slots=64)
        case = {"prompt": prompt, "prompts": prompts, "group": group, "new": new, "lengths": shape}
        figures = {
            "native_seconds": round(native.seconds, 3), "generate_seconds": round(other.seconds, 3),
            "speed_up": round(other.seconds / native.seconds, 2), "logprob_gap": native.gap,
            "floor_arithmetic": round(arithmetic, 3), "floor_traffic": round(traffic, 3),
        }  # fmt: skip
        print(case | figures, flush=True)
        found.append(case | figures)
    harness.save("rollouts", {"cases": found})


if __name__ == "__main__":
    main()
