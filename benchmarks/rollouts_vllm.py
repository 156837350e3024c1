"""(Child of rollouts.py) The same work in vLLM, by the interpreter that has it: prefix caching on, float32 or bfloat16."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


def main() -> None:
    """Reads works from a file, writes seconds of each to another."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--works", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--load-format", default="auto", help="dummy: random weights of the model's shape")
    args = options.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB.
    from vllm import LLM, SamplingParams

    works = json.loads(args.works.read_text())
    longest = max(len(p) + max(w["lengths"]) for w in works for p in w["prompts"])
    engine = LLM(
        model=args.model, dtype=args.dtype, enforce_eager=True, enable_prefix_caching=True, max_model_len=longest + 8,
        max_num_seqs=256, load_format=args.load_format, disable_log_stats=True,
    )  # fmt: skip
    engine.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=4), use_tqdm=False)
    found = []
    for work in works:
        prompts = [{"prompt_token_ids": p} for p in work["prompts"] for _ in range(work["group"])]
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0)
            for n in work["lengths"]
        ]
        times = []
        for _ in range(args.repeats):
            engine.reset_prefix_cache()  # The weights of a trainer are new in every step.
            begin = time.perf_counter()
            outputs = engine.generate(prompts, sampling, use_tqdm=False)
            times.append(time.perf_counter() - begin)
            assert [len(o.outputs[0].token_ids) for o in outputs] == work["lengths"]
        found.append(min(times))
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
