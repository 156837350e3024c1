"""Where a decoding step on a CPU goes: products, attention, norms and activations, sampling, scheduling, Python.

Prediction, SmolLM2-135M, 16 rows, float32: the step reads 540 MB of weights, so products are most of it; the rest is 30 layers
of four compiled functions each, or of about ten small operations where no compiler is. Times are wall time inside each part,
without the parts inside it.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import harness
import torch
from transformers import AutoModelForCausalLM

from posttrain import NativeEngine, Request, Sampling
from posttrain.rollouts.native import attention
from posttrain.rollouts.native import layers as fused
from posttrain.rollouts.native import layers as products
from posttrain.rollouts.native import scheduler as run
from posttrain.rollouts.native.sampler import TokenSampler

SMALL = "norms, activations, rotary, embedding"


class Clock:
    """Adds up wall time by part; a part inside another is taken from the outer one."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.open: list[float] = []
        self.running = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time noted while a step runs."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self.running:
                return function(*args, **kwargs)
            begin = time.perf_counter()
            self.open.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.perf_counter() - begin
                self.spent[name] += whole - self.open.pop()
                if self.open:
                    self.open[-1] += whole

        return wrapped

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The whole step: what no other part claims is the scheduler's and the model's Python."""
        inner = self.timed("Python of model and scheduler", function)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.running = True
            try:
                return inner(*args, **kwargs)
            finally:
                self.running = False

        return wrapped


@contextmanager
def watched(model: torch.nn.Module, clock: Clock) -> Iterator[None]:
    """Time the parts of every decoding step; layers that run as transformers wrote them have modules for the small ones."""
    whole = any(fused.fusable(module) for module in model.modules())
    small = [m for m in model.modules() if not list(m.children()) and not isinstance(m, torch.nn.Linear)]
    small = [] if whole else small  # A module with a forward of its own would not be fused.
    for module in small:
        module.forward = clock.timed(SMALL, module.forward)
    parts = [
        (products, "_forward", "products"), (products.Packed, "product", "products"),
        (attention, "native_attention", "attention"), (fused.Layer, "attended", "attention"),
        (fused.Layer, "normalised", SMALL), (fused.Layer, "rotate", SMALL), (TokenSampler, "draw", "sampling"),
    ]  # fmt: skip
    patches = [mock.patch.object(home, name, clock.timed(part, getattr(home, name))) for home, name, part in parts]
    patches.append(mock.patch.object(run.Run, "_step", clock.step(run.Run._step)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
        for module in small:
            del module.forward


def profile(model: Any, rows: int, prompt: int, tokens: int, kind: str) -> dict[str, Any]:
    """Shares of a decoding step."""
    engine = NativeEngine(model, pad_token_id=0, products=kind)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40_000, (max(1, rows // 8), prompt), generator=generator).tolist()
    requests = [Request(p, min(8, rows)) for p in ids]
    clock = Clock()
    with engine.prefix_cache():  # Copies of the weights that the first call makes serve the second.
        engine.generate(requests, Sampling(12, seed=0))
        with watched(model, clock):
            engine.generate(requests, Sampling(tokens, seed=0))
    whole = sum(clock.spent.values())
    shares = {name: round(100 * s / whole, 1) for name, s in sorted(clock.spent.items(), key=lambda x: -x[1])}
    return {
        "rows": rows,
        "products": kind,
        "step_ms": round(1e3 * whole / engine.counts["steps"], 1),
        "percent": shares,
    }


def main() -> None:
    """One line for each number of rows and kind of products."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    options.add_argument("--prompt", type=int, default=130)
    options.add_argument("--tokens", type=int, default=40)
    options.add_argument("--kinds", nargs="+", default=["exact", "bfloat16"])
    args = options.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model or harness.default_model(), dtype=torch.float32).eval()
    found = []
    for rows in args.rows:
        for kind in args.kinds:
            found.append(profile(model, rows, args.prompt, args.tokens, kind))
            print(found[-1], flush=True)
    harness.save("rollout_profile", {"threads": torch.get_num_threads(), "steps": found})


if __name__ == "__main__":
    main()
