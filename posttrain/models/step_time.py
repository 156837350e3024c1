"""How long a step takes on this device: operations counted from the config, products timed here for a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.heads import causal_lm
from posttrain.models.memory_estimate import Generating, Workload, compute_flops_per_token
from posttrain.models.memory_trace import Shadow

__all__ = ["Rates", "StepTime", "measure_rates", "step_time"]

SECONDS = 0.3  # Of each measurement.
UPDATE_BYTES = (
    7  # An AdamW update reads weight, gradient and two moments, and writes three of them back, for each weight.
)
# What norms, activations, attention masks and Python add to the products; benchmarks/estimate.py measures it.
BESIDE_PRODUCTS = {"cpu": 1.25, "cuda": 1.6}


@dataclass(frozen=True)
class Rates:
    """What this device was measured to do.

    Attributes:
        training: Operations a second of this model's products with as many rows as a pass has tokens.
        decoding: The same with as many rows as completions are live.
        bandwidth: Bytes a second of a copy, read and written.
        rows, slots: Those numbers of rows.
        device: Its type.
    """

    training: float
    decoding: float
    bandwidth: float
    rows: int
    slots: int
    device: str


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step, by part; how they were told."""

    parts: dict[str, float]
    how: str

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.parts.values())


def _shapes(shadow: Shadow) -> list[tuple[int, int]]:
    """``(out, in)`` of the products of one layer."""
    inner: Any = causal_lm(shadow.model)
    layer = next((m for m in inner.modules() if isinstance(m, GradientCheckpointingLayer)), inner)
    found = [(m.out_features, m.in_features) for m in layer.modules() if isinstance(m, nn.Linear)]
    hidden = inner.config.get_text_config().hidden_size
    return found or [(4 * hidden, hidden), (hidden, 4 * hidden)]


def _rate(shapes: Sequence[tuple[int, int]], rows: int, device: str, dtype: torch.dtype) -> float:
    pairs = [
        (torch.randn(rows, wide, device=device, dtype=dtype), torch.randn(out, wide, device=device, dtype=dtype))
        for out, wide in shapes
    ]
    flops = sum(2 * rows * out * wide for out, wide in shapes)

    def run() -> None:
        for x, weight in pairs:
            F.linear(x, weight)
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    return flops / _fastest(run)


def _fastest(run: Any) -> float:
    """Median time of a call, of as many as fit `SECONDS`, at least three."""
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def measure_rates(work: Workload, shadow: Shadow) -> Rates:
    """Time this model's own products on this device; about a second."""
    dtype = work.autocast or work.policy.dtype
    rows = max(batch.input_ids.numel() for batch in work.batches)
    slots = min(work.generating.slots, work.generating.sequences) if work.generating else 1
    shapes = _shapes(shadow)
    source = torch.ones(2**24, device=work.device)
    target = torch.empty_like(source)

    def copied() -> None:
        target.copy_(source)
        if work.device == "cuda":
            torch.cuda.synchronize()

    copied()
    bandwidth = 2 * source.nbytes / _fastest(copied)
    training = _rate(shapes, rows, work.device, dtype)
    decoding = _rate(shapes, slots, work.device, dtype) if work.generating else training
    return Rates(training, decoding, bandwidth, rows, slots, work.device)


def step_time(work: Workload, shadow: Shadow, rates: Rates, *, accumulation: int, generations: float = 1.0) -> StepTime:
    """Seconds of one optimiser step at the lengths of ``work``.

    With f operations of the layers for a token, N computed and M trained tokens, V and H the sizes of the head, and r the
    share of layers that are computed again::

        update = N f (3 + r) + 8 M V H        reference = N f + 2 M V H        sampling = (prompts + completions) f + 2 C V H

    Args:
        work: The passes of a micro-batch, and what is sampled.
        shadow: Its policy.
        rates: From `measure_rates`.
        accumulation: Micro-batches of a step.
        generations: Generations of a step.

    Raises:
        ModelError: A model whose operations cannot be counted.
    """
    config = causal_lm(shadow.model).config.get_text_config()
    head = 2 * config.vocab_size * config.hidden_size
    tokens = sum(b.input_ids.numel() for b in work.batches) * accumulation
    trained = sum(int(b.loss_mask.sum()) for b in work.batches) * accumulation if work.policy.kind == "causal" else 0
    width = max(b.input_ids.shape[1] for b in work.batches)
    layers = _layer_flops(config, width)
    again = _share_again(shadow, work)
    backward = 1 if work.policy.peft_config is not None else 2  # Frozen weights have no gradient of their own.
    slow = BESIDE_PRODUCTS.get(rates.device, 1.25) / rates.training
    update = tokens * layers * (1 + again + backward) + trained * head * (3 + (backward == 2))
    parts = {"forward and backward": update * slow * (1 + (work.critic is not None))}
    if work.reference:
        parts["reference"] = (tokens * layers + trained * head) * slow
    learns = sum(p.numel() for p in shadow.model.parameters() if p.requires_grad)
    parts["update"] = learns * work.policy.dtype.itemsize * UPDATE_BYTES / rates.bandwidth
    if work.generating is not None:
        made = _sampling(work.generating, layers, head, rates)
        parts["sampling"] = generations * made
    how = (
        f"products of this model timed on this device: {rates.training / 1e9:.0f} GFLOP/s with {rates.rows} rows"
        + (f", {rates.decoding / 1e9:.0f} with {rates.slots}" if work.generating is not None else "")
        + f", copies {rates.bandwidth / 1e9:.1f} GB/s; operations from the config, and "
        f"{BESIDE_PRODUCTS.get(rates.device, 1.25)} times that for what is no product"
    )
    return StepTime({name: seconds for name, seconds in parts.items() if seconds}, how)


def _layer_flops(config: Any, width: int) -> float:
    """Forward operations of all layers for a token, without embedding and head."""
    embeddings = 2 * config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return compute_flops_per_token(config, width) / 3 - embeddings


def _share_again(shadow: Shadow, work: Workload) -> float:
    layers = [m for m in causal_lm(shadow.model).modules() if isinstance(m, GradientCheckpointingLayer)]
    if not work.checkpointing or not layers:
        return 0.0
    return sum(layer.gradient_checkpointing for layer in layers) / len(layers)


def _sampling(asked: Generating, layers: float, head: int, rates: Rates) -> float:
    """Prompts at the rate of large products, completions at that of few rows."""
    slow = BESIDE_PRODUCTS.get(rates.device, 1.25)
    prompts = asked.prompts if asked.shares_prompts else asked.sequences
    read = prompts * asked.prompt_tokens * layers / rates.training
    written = asked.sequences * asked.completion_tokens * (layers + head) / rates.decoding
    return asked.models * slow * (read + written)
