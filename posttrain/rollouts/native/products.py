"""Matrix products of a decoding step on a CPU, a few rows with a whole weight: in the order that is read fastest."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "PACK_FROM",
    "PACK_STEPS",
    "PACK_TOKENS",
    "Packed",
    "Products",
    "can_pack",
    "few_rows_product",
    "has_bfloat16",
    "pack_bytes",
    "packs",
    "quick_products",
    "worth_packing",
]

Products = Literal["exact", "plain", "bfloat16", "auto"]

# Measured, float32, 2 threads, the 210 weights of SmolLM2-135M one after another: F.linear 62.7 ms at 16 rows and 91 ms at
# 32, weight @ rows.T 44 and 61 ms, equal from 64 rows on: the product streams the large operand, and repacks the small one.
MOST_ROWS = 64
ROWS_HINT = 16  # oneDNN chooses the layout of a packed weight for this many rows; it serves any number.
# Measured there, one thread, milliseconds for 88M parameters at 1, 16, 64 and 1024 rows: F.linear 41, 70, 161, 2365; packed
# float32 28, 39, 118, 1734; packed bfloat16 18, 26, 63, 899. Packing them takes 207 ms, rounded to bfloat16 114 ms.
# A step of 8 rows and 2 threads: 61 ms with the weights as they are, 37 packed.
PACK_FROM = 8  # Decoding steps after which a copy pays.
PACK_STEPS = 16  # Steps that may be asked for, for which a copy pays from the start.
PACK_TOKENS = 1024  # Tokens, prompts included, for which a copy pays from the start.
PACK_SHARE = 4  # A packed copy may take this part of the memory that is free.


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` as ``(weight @ x.T).T``.

    Args:
        x: ``(..., K)``, few rows.
        weight: ``(N, K)``.
        bias: ``(N,)``.

    Returns:
        ``(..., N)``, contiguous.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.mm(weight, rows.t()).t().contiguous().view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class Packed:
    """Copies of linear layers' weights in oneDNN's blocked order, which a product of a few rows reads once, in sequence.

    The weights themselves are not touched. A copy is made by `pack` and lives as long as this object: whoever keeps it
    while weights change packs again.

    Args:
        bfloat16: Round the copies, and what is multiplied with them, to bfloat16; products are summed in float32. The
            output layer stays as it is: its rounding would go into the log-probs undiminished.

    Attributes:
        layers: What is to be packed.
        together: Layers among them that read the same input, and are packed as one.
        weights: The copies, by the layers they are of.
    """

    def __init__(self, *, bfloat16: bool = False) -> None:
        self.bfloat16 = bfloat16
        self.layers: list[nn.Linear] = []
        self.together: list[tuple[nn.Linear, ...]] = []
        self.weights: dict[tuple[nn.Linear, ...], Tensor] = {}
        self.biases: dict[tuple[nn.Linear, ...], Tensor] = {}

    def pack(self, head: nn.Module | None = None) -> None:
        """Copy the weights of ``layers`` as they are now."""
        self.weights.clear()
        self.biases.clear()
        joined = {layer for group in self.together for layer in group}
        for group in (*self.together, *((layer,) for layer in self.layers if layer not in joined)):
            dtype = group[0].weight.dtype
            if self.bfloat16 and group[0] is not head:
                dtype = torch.bfloat16 if dtype == torch.float32 else dtype
            if packs(dtype):
                weight = side_by_side([layer.weight for layer in group]).to(dtype)
                self.weights[group] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
                if any(layer.bias is not None for layer in group):
                    some = (
                        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
                        for layer in group
                    )
                    self.biases[group] = side_by_side(list(some))

    def product(self, group: tuple[nn.Linear, ...], x: Tensor) -> Tensor:
        """What these layers make of ``x (n, K)``, one beside the other; by the weights themselves where there is no copy."""
        weight, bias = self.weights.get(group), self.biases.get(group)
        if weight is None:
            parts = [plain_product(layer, x) for layer in group]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        out = torch.ops.mkldnn._linear_pointwise.default(x.to(weight.dtype), weight, None, "none", [], "").to(x.dtype)
        return out if bias is None else out.add_(bias)


def plain_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """``layer(x)`` with the weight as it lies, in the order that is quicker for so many rows."""
    if 1 < x.numel() // x.shape[-1] <= MOST_ROWS and x.dtype == layer.weight.dtype == torch.float32:
        return few_rows_product(x, layer.weight, layer.bias)
    return F.linear(x, layer.weight, layer.bias)


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Weights or biases of layers that read the same input."""
    return parts[0].detach() if len(parts) == 1 else torch.cat([part.detach() for part in parts])


def can_pack() -> bool:
    """Whether this build of torch packs weights (oneDNN on x86)."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this CPU; bfloat16 needs its instructions, and is read as it lies without."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX), so that halving the weights is a gain."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    except OSError:
        return False
    return can_pack() and bool({"avx512_bf16", "amx_bf16"} & set(flags))


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Plain linear layers on a CPU whose forward nobody replaced."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and "forward" not in vars(module)
    ]


def pack_bytes(model: nn.Module, *, bfloat16: bool = False) -> int:
    """Memory of the copies."""
    layers = linear_layers(model)
    return sum(layer.weight.numel() * (2 if bfloat16 else layer.weight.element_size()) for layer in layers)


def free_bytes() -> float:
    """Memory that can still be had, as Linux estimates it; unlimited where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def worth_packing(model: nn.Module) -> bool:
    """Whether exact copies are possible and leave most of the memory alone."""
    return can_pack() and pack_bytes(model) * PACK_SHARE <= free_bytes()


def _forward(layer: nn.Linear, packed: Packed | None, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        return F.linear(x, layer.weight, layer.bias)
    if packed is not None and (layer,) in packed.weights:
        return packed.product((layer,), x)
    return plain_product(layer, x)


@contextmanager
def quick_products(model: nn.Module, packed: Packed | None = None) -> Iterator[None]:
    """Let plain linear layers on a CPU multiply the quick way; other layers, and those patched already, stay."""
    layers: list[Any] = linear_layers(model)
    if packed is not None:
        packed.layers = layers
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, packed)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
