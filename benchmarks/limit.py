"""The time of a step's matrix products alone and the bytes that must exist at once, compared with both libraries.

The limit of time is the sum of ``torch.mm`` at the shapes of all linear layers, for the tokens of posttrain's packed passes: one
product forward, and two backward where a pass has gradients. The output layer counts the positions of the loss. Sampling adds
one product per layer and decoding step. Attention, norms, activations, the optimizer and Python are not part of the limit, and
nothing is computed twice.

The limit of memory is weights, gradients, AdamW's two moments, the reference's weights if there is a reference, and the
activations that the backward pass of the largest pass reads.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache

import dpo
import grpo
import harness
import sft

CASES = {"sft": ("sft.py", "--shape", "skewed"), "dpo": ("dpo.py",), "grpo short": ("grpo.py", "--case", "short")} | {
    "grpo long": ("grpo.py", "--case", "update")
}
SEQUENCES, REFERENCES = 16, ("dpo", "grpo short", "grpo long")


def recorded(model: str, case: str, steps: int) -> dict:
    """Train, and return `harness.timed`'s figures with the passes of the last step: tokens, loss positions, gradients."""
    import torch
    from transformers import TrainerCallback

    from posttrain.models import forward

    passes, inner, whole = [], forward._token_head, harness.timed

    def counted(asked, *args):
        batch = asked.batch
        passes.append((batch.num_tokens, int(batch.loss_mask.sum()), torch.is_grad_enabled()))
        return inner(asked, *args)

    class Step(TrainerCallback):
        last: list = []  # noqa: RUF012

        def on_step_end(self, *args, **kwargs):
            self.last[:] = passes
            passes.clear()

    def timed(trainer):
        trainer.add_callback(Step())
        return whole(trainer)

    forward._token_head, harness.timed = counted, timed
    if case == "sft":
        found = sft.run("ours", model, "skewed", steps)
    elif case == "dpo":
        found = dpo.run("ours", model, steps, 0.8)
    else:
        found = grpo.run("ours", model, steps, False, "short" if case == "grpo short" else "update")
    return found | {"passes": Step.last}


@cache
def product(rows: int, inner: int, columns: int) -> float:
    """Return the seconds of one product, the best of five."""
    import torch

    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    best = float("inf")
    for _ in range(6):  # The first one is slower.
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return best


def limit(model: str, case: str, found: dict) -> dict:
    """Return the limits of a step in seconds and GB."""
    from transformers import AutoConfig

    cfg = AutoConfig.from_pretrained(model)
    h, i, v = cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size
    kv = cfg.num_key_value_heads * h // cfg.num_attention_heads
    layer = [(h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h)]  # Inputs and outputs of the linear layers.

    def seconds(rows: int, shapes: list[tuple[int, int]], grad: bool) -> float:
        forward = sum(product(rows, k, n) for k, n in shapes)
        backward = sum(product(rows, n, k) + product(n, rows, k) for k, n in shapes) if grad else 0.0
        return forward + backward

    spent = {
        "layers": sum(cfg.num_hidden_layers * seconds(tokens, layer, grad) for tokens, _, grad in found["passes"]),
        "output layer": sum(seconds(positions, [(h, v)], grad) for _, positions, grad in found["passes"]),
    }
    if case == "grpo short":
        steps = grpo.CASES["short"][1]
        rows = round(SEQUENCES * found["mean_length"][-1] / steps)
        spent["decoding"] = steps * (
            cfg.num_hidden_layers * seconds(rows, layer, False) + seconds(rows, [(h, v)], False)
        )
    weights = v * h * (1 if cfg.tie_word_embeddings else 2) + cfg.num_hidden_layers * sum(k * n for k, n in layer)
    # Inputs of the two norms, of q, k and v, of the output projection, and of the MLP; q, k, v; gate, up and their product.
    saved = cfg.num_hidden_layers * (5 * h + h + 2 * kv + 3 * i)
    largest = max(tokens for tokens, _, grad in found["passes"] if grad)
    numbers = weights * (4 + (case in REFERENCES)) + saved * largest
    return {"seconds": sum(spent.values()), "parts": spent, "gb": 4 * numbers / 1e9}


def compared(model: str, case: str, pairs: int, steps: int) -> dict:
    """Return the figures of one case: limits, and both libraries' medians divided by them."""
    script, *options = CASES[case]
    both = []
    for _ in range(pairs):
        ours = harness.child(
            sys.executable, __file__, "--side", "ours", "--model", model, "--case", case, "--steps", str(steps)
        )
        path = str(harness.Path(__file__).with_name(script))
        more = ("--share", "0.8") if case == "dpo" else ()
        arguments = ("--side", "peer", "--model", model, "--steps", str(steps), *options, *more)
        both.append((ours, harness.child(harness.peer_python(), path, *arguments)))
    least = limit(model, case, both[0][0])
    found = {"limit": least}
    for name, runs in zip(("posttrain", "TRL"), zip(*both, strict=True), strict=True):
        seconds, peak = (harness.statistics.median(run[key] for run in runs) for key in ("step_seconds", "peak_gb"))
        times, memory = seconds / least["seconds"], peak / least["gb"]
        found[name] = {"seconds": seconds, "gb": peak, "times": times, "memory": memory}
        print(
            f"{case}, {name}: {seconds:.2f} s, {times:.2f} times the limit; {peak:.2f} GB, {memory:.2f} times the limit"
        )
    return found


def main() -> None:
    """Run all cases, or one."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="optimizer steps of a run; the first is not timed")
    options.add_argument("--case", choices=list(CASES), help="one of the cases; all by default")
    args = options.parse_args()
    if args.side:
        print(json.dumps(recorded(args.model, args.case, args.steps)))
        return
    model = args.model or harness.default_model()
    result = harness.earlier("limit", CASES)
    for case in [args.case] if args.case else CASES:
        result[case] = compared(model, case, args.pairs, args.steps)
        harness.save("limit", result)


if __name__ == "__main__":
    main()
