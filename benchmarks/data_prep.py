"""Preparing 50,000 chat rows for SFT against the peer: from messages to ids and labels, in one process.

Prediction: rendering costs both the same; the peer tokenises each row in a call of its own, ours a batch in one call.
"""

from __future__ import annotations

import json
import random
import time

import harness


def rows(count: int) -> list[dict]:
    """Conversations of two to six turns, of 5 to 60 words each."""
    rng = random.Random(0)

    def said(role: str) -> dict:
        return {"role": role, "content": " ".join(rng.choices(harness.WORDS, k=rng.randrange(5, 60)))}

    return [
        {"messages": [said(r) for _ in range(rng.randrange(1, 4)) for r in ("user", "assistant")]} for _ in range(count)
    ]


def run(side: str, model: str, count: int) -> dict:
    """Build the trainer around an untrained two-layer model and time its preparation of the data."""
    import datasets
    import torch
    import transformers

    datasets.disable_caching()
    datasets.disable_progress_bars()
    library = harness.import_side(side)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    tiny = transformers.LlamaForCausalLM(config)
    options = harness.settings(1)
    del options["model_init_kwargs"]
    args = library.SFTConfig(**options)
    data = datasets.Dataset.from_list(rows(count))
    start = time.perf_counter()
    trainer = library.SFTTrainer(tiny, args=args, train_dataset=data, processing_class=tokenizer)
    seconds = time.perf_counter() - start
    tokens = sum(map(len, trainer.train_dataset["input_ids"][:]))
    return {"seconds": round(seconds, 2), "rows": len(trainer.train_dataset), "tokens": tokens}


def main() -> None:
    """Both sides, in turn."""
    options = harness.parser(__doc__)
    options.add_argument("--count", type=int, default=50_000, help="rows")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.count)))
        return
    model = args.model or harness.default_model()
    pairs = harness.alternate(__file__, args.pairs, "--model", model, "--count", str(args.count))
    ours, peer = pairs[0]
    if (ours["rows"], ours["tokens"]) != (peer["rows"], peer["tokens"]):
        raise SystemExit(f"not the same work: {ours} and {peer}")
    speed = harness.ratios([(a["seconds"], b["seconds"]) for a, b in pairs])
    print(f"preparing {args.count} rows: {speed['median']}x faster ({speed['min']} to {speed['max']})")
    harness.save("data_prep", {"speed_up": speed, "runs": pairs})


if __name__ == "__main__":
    main()
