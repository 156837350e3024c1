"""Rollouts on the trainer's own weights against transformers' `generate`: 4 prompts x 8 completions of 48 tokens each.

Prediction: per token the weights cost 2 x 135M FLOPs both ways; `generate` prefills 32 prompts where native prefills 4,
concatenates its cache at every step, repeats key-value heads three times and samples with a sort.
"""

from __future__ import annotations

import argparse
import time

import harness
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import NativeEngine, Request, Sampling

TEXT = "Explain in simple words why the sky is blue and why it turns red at sunset, with an example. "


def by_generate(model, prompts: list[list[int]], group: int, new: int, pad: int) -> int:
    """What trainers do without an engine: left-padded repeated prompts; no token ends a completion here."""
    width = max(map(len, prompts))
    rows = [[pad] * (width - len(p)) + p for p in prompts for _ in range(group)]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts for _ in range(group)]
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=pad,
        )  # fmt: skip
    return out[:, width:].numel()


def worst_logprob_gap(model, rollouts) -> float:
    """Largest difference between what the engine said and a plain forward pass."""
    worst = 0.0
    for rollout in rollouts[::8]:
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        with torch.no_grad():
            logp = model(ids, use_cache=False).logits[0].log_softmax(-1)
        start = len(rollout.prompt_ids)
        truth = logp[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1)
        worst = max(worst, float((truth - torch.tensor(rollout.logp)).abs().max()))
    return worst


def main() -> None:
    """A B A B in one process, on one copy of the weights."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--new", type=int, default=48)
    args = options.parse_args()
    folder = args.model or harness.default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": f"{number}. {TEXT * 6}"}] for number in range(4)]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    engine = NativeEngine(model, pad_token_id=tokenizer.pad_token_id)
    requests = [Request(prompt, 8) for prompt in prompts]

    def native() -> list:
        return engine.generate(requests, Sampling(args.new, seed=1))

    gap = worst_logprob_gap(model, native())
    by_generate(model, prompts, 8, args.new, tokenizer.pad_token_id)
    pairs = []
    for number in range(args.pairs):
        start = time.perf_counter()
        ours = sum(len(r.token_ids) for r in native()) / (time.perf_counter() - start)
        start = time.perf_counter()
        theirs = by_generate(model, prompts, 8, args.new, tokenizer.pad_token_id) / (time.perf_counter() - start)
        print(f"pair {number + 1}: native {ours:.0f} tokens/s, generate {theirs:.0f}", flush=True)
        pairs.append((theirs, ours))
    speed = harness.ratios(pairs)
    print(
        f"native is {speed['median']}x faster ({speed['min']} to {speed['max']}); log-probs differ by at most {gap:.1e}"
    )
    harness.save(
        "rollouts",
        {
            "speed_up": speed,
            "tokens_per_second": [{"generate": round(a, 1), "native": round(b, 1)} for a, b in pairs],
            "worst_logprob_gap": gap,
            "prompt_tokens": [len(p) for p in prompts],
        },
    )


if __name__ == "__main__":
    main()
