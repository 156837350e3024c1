"""Peak memory of per-token log-probs, forward and backward: chunked against dense logits, as tokens grow.

Dense holds logits, their log-softmax and its gradient, 3 x N x V x 4 bytes; chunked holds a few chunks of them.
"""

from __future__ import annotations

import argparse
import json
import sys

import harness
import torch

HIDDEN, VOCABULARY = 256, 49152


def measure(kind: str, tokens: int, chunk: int) -> dict:
    """Peak of one process beyond what its inputs, weights and gradients hold."""
    from posttrain.models.logprob import token_logprobs

    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (tokens,))
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    (torch.ones(8, 8) @ torch.ones(8, 8)).sum()  # Start the thread pools before the measurement.
    before = harness.peak_memory()
    if kind == "dense":
        logp = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])
    else:
        logp = token_logprobs(hidden, weight, targets, chunk_size=chunk).logp
    logp.sum().backward()
    return {"kind": kind, "tokens": tokens, "chunk": chunk, "peak_mb": round(1000 * (harness.peak_memory() - before))}


def main() -> None:
    """A table, and the result file."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--one", nargs=3, metavar=("KIND", "TOKENS", "CHUNK"), help="(child) one measurement")
    args = options.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), int(args.one[2]))))
        return
    wanted = [("dense", 1024, 0), ("dense", 2048, 0), ("dense", 4096, 0)]
    wanted += [("chunked", n, c) for c in (128, 256, 512) for n in (1024, 2048, 4096, 8192)]
    rows = [harness.child(sys.executable, __file__, "--one", kind, str(n), str(c)) for kind, n, c in wanted]
    for row in rows:
        print(f"{row['kind']:8} tokens {row['tokens']:5} chunk {row['chunk']:4}: {row['peak_mb']:6} MB")
    harness.save("logprob_memory", {"vocabulary": VOCABULARY, "hidden": HIDDEN, "rows": rows})


if __name__ == "__main__":
    main()
