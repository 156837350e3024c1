"""Preparing chat rows for SFT, or preference rows for DPO, against the peer: from messages to ids, on one thread.

Prediction: rendering costs both the same; the peer tokenises each row in a call of its own, ours a batch in one call.
The limit is the time of the chat template and of the tokenizer alone, for the texts of SFT.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time

import harness


def rows(count: int, kind: str = "sft") -> list[dict]:
    """Conversations of two to six turns, of 5 to 60 words each. For DPO, with two last turns."""
    rng = random.Random(0)

    def said(role: str) -> dict:
        return {"role": role, "content": " ".join(rng.choices(harness.WORDS, k=rng.randrange(5, 60)))}

    found = []
    for _ in range(count):
        turns = [said(r) for _ in range(rng.randrange(1, 4)) for r in ("user", "assistant")]
        pair = {"prompt": turns[:-1], "chosen": turns[-1:], "rejected": [said("assistant")]}
        found.append({"messages": turns} if kind == "sft" else pair)
    return found


def run(side: str, model: str, count: int, kind: str) -> dict:
    """Build the trainer around an untrained one-layer model and time its preparation of the data."""
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
    folder = tempfile.mkdtemp()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    options = harness.settings(1)
    del options["model_init_kwargs"]
    method = kind.upper()
    args = getattr(library, f"{method}Config")(**options)
    held = rows(count, kind)
    data = datasets.Dataset.from_list(held)
    start = time.perf_counter()
    trainer = getattr(library, f"{method}Trainer")(folder, args=args, train_dataset=data, processing_class=tokenizer)
    found = {"seconds": round(time.perf_counter() - start, 2), "rows": len(trainer.train_dataset)}
    if kind == "sft":
        found["tokens"] = sum(map(len, trainer.train_dataset["input_ids"][:]))
        start = time.perf_counter()
        texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in held]
        tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        found["limit"] = round(time.perf_counter() - start, 2)
    return found


def main() -> None:
    """Both sides, in turn."""
    options = harness.parser(__doc__)
    options.add_argument("--count", type=int, default=20_000, help="rows")
    options.add_argument("--kind", choices=("sft", "dpo"), default="sft", help="chat rows or preference rows")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.count, args.kind)))
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    model = args.model or harness.default_model()
    pairs = harness.alternate(__file__, args.pairs, "--model", model, "--count", str(args.count), "--kind", args.kind)
    ours, peer = pairs[0]
    if any(ours[key] != peer[key] for key in {"rows", "tokens"} & set(ours)):
        raise SystemExit(f"not the same work: {ours} and {peer}")
    speed = harness.ratios([(a["seconds"], b["seconds"]) for a, b in pairs])
    print(f"preparing {args.count} rows ({args.kind}): {speed['median']}x faster ({speed['min']} to {speed['max']})")
    harness.save(f"data_prep_{args.kind}", {"speed_up": speed, "runs": pairs})


if __name__ == "__main__":
    main()
