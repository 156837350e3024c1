"""Fused decoder layers of the Llama type on a CPU, packed copies of weights, and the compilation of `layer.c`."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posttrain.integrations.machine import usable_processors
from posttrain.models.architecture import sliding_window
from posttrain.models.lean_layers import plain
from posttrain.models.logprob import HAS_ONEDNN
from posttrain.rollouts.native.attention import Block, Group, Rule, Store, current_store

logger = logging.getLogger(__name__)


SOURCE = Path(__file__).with_name("layer.c")
# The compiler may reorder sums only where the source code allows it (`omp simd reduction`). -ffast-math is not used, because
# it would not handle NaN correctly.
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
LIMIT = 60  # Maximum number of seconds of a compiler run, which usually takes one second.
LONG, FLOAT, ADDRESS, INT = ctypes.c_long, ctypes.c_float, ctypes.c_void_p, ctypes.c_int


class Step(ctypes.Structure):
    """``struct step`` of `layer.c`: data of a decoding step that is equal for all layers."""

    _fields_ = [
        *((name, LONG) for name in ("heads", "kv", "common", "longest", "window", "chunks")),
        *((name, ADDRESS) for name in ("begins", "order", "prompt", "lengths", "places", "scratch")),
        ("scale", FLOAT),
        ("threads", INT),
    ]


class Memory(ctypes.Structure):
    """``struct memory`` of `layer.c`: keys and values of one layer."""

    _fields_ = [
        *((name, ADDRESS) for name in ("common_keys", "common_values", "blocks", "keys", "values")),
        ("capacity", LONG),
    ]


SIGNATURES = {
    "normalise": [*[ADDRESS] * 4, LONG, LONG, FLOAT, INT],
    "gated": [ADDRESS, ADDRESS, LONG, LONG, INT],
    "rotate": [*[ADDRESS] * 5, LONG, LONG, LONG, FLOAT, INT],
    "attend": [ctypes.POINTER(Step), ctypes.POINTER(Memory), ADDRESS, ADDRESS, LONG],
}


@functools.cache
def compiled(size: int) -> ctypes.CDLL | None:
    """Return the compiled library for head size ``size``, or None if the compilation fails. The library is compiled at its
    first use and then cached.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    command = [compiler, *FLAGS, f"-DSIZE={size}"]
    try:
        path = folder() / f"layer-{fingerprint(command)}.so"
        if not path.exists():
            build(command, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.info(
            "Decoding uses torch's operations, because %s could not compile %s (%s).", compiler, SOURCE.name, detail
        )
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def build(command: list[str], path: Path) -> None:
    """Compile into a temporary folder, then move the library to ``path`` atomically. Other processes may compile it at the
    same time.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        library = Path(beside) / path.name
        whole = [*command, "-o", str(library), str(SOURCE), "-lm"]
        subprocess.run(whole, check=True, capture_output=True, text=True, timeout=LIMIT)
        library.replace(path)


def folder() -> Path:
    """Return this user's cache folder for compiled libraries."""
    # Without a home directory, use a folder named "~", as huggingface_hub does. `Path.home` would raise an error.
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "posttrain", "compiled")
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    return base


def fingerprint(command: list[str]) -> str:
    """Return a hash of all inputs of the compilation: the source code, the command, and the CPU."""
    try:
        machine = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat"))
        )
    except (OSError, StopIteration):
        machine = platform.processor()
    parts = (SOURCE.read_text(), " ".join(command), platform.machine(), machine)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


Products = Literal["exact", "bfloat16"]

# Maximum number of rows for which weight @ rows.T is computed instead of F.linear. This product reads the larger operand
# once and repacks only the smaller one. Measured in float32 with 2 threads, for all 210 weights of SmolLM2-135M: with 16
# rows, F.linear takes 62.7 ms and weight @ rows.T takes 44 ms. With 32 rows, they take 91 ms and 61 ms. With 64 rows or
# more, both take the same time.
MOST_ROWS = 64
# Number of input rows for which oneDNN optimizes the layout of a packed weight. A packed weight supports any number of input
# rows.
ROWS_HINT = 16
# Times of products with 1, 16, 64 and 1024 rows, in milliseconds with one thread, for 88M parameters. F.linear: 41, 70, 161
# and 2365. Packed float32: 28, 39, 118 and 1734. Packed bfloat16: 18, 26, 63 and 899. Packing takes 207 ms, or 114 ms if
# weights are rounded to bfloat16. With 2 threads, a decoding step of 8 rows takes 61 ms without packed weights and 37 ms
# with packed weights.
# Index of the decoding step at which weights are packed if they were not packed at the start of the call.
PACK_FROM = 8
# Minimum number of requested decoding steps for packing the weights at the start of a call.
PACK_STEPS = 16
# Minimum number of requested tokens, including prompts, for packing the weights at the start of a call.
PACK_TOKENS = 1024
PACK_SHARE = 4  # Packed copies of the weights may use up to 1 / PACK_SHARE of the free memory.


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` as ``(weight @ x.T).T``, which is faster for few rows.

    Args:
        x: Input ``(..., K)`` with few rows.
        weight: Weight ``(N, K)``.
        bias: Bias ``(N,)``, or None.

    Returns:
        A contiguous tensor ``(..., N)``.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.mm(weight, rows.t()).t().contiguous().view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class Packed:
    """Copies of linear layers' weights in oneDNN's blocked layout, which makes products with few rows faster.

    The weights themselves are not changed. `pack` creates the copies, which exist as long as this object. Call `pack` again
    after a change of the weights.

    Args:
        bfloat16: Whether copies and inputs are rounded to bfloat16. Sums are computed in float32. The output layer is not
            rounded, because rounding would directly change the log-probs.

    Attributes:
        layers: Layers whose weights are packed.
        together: Groups of layers with the same input. The weights of a group are packed as a single matrix.
        weights: Packed copies of weights. The key is the group of layers.
    """

    def __init__(self, *, bfloat16: bool = False) -> None:
        self.bfloat16 = bfloat16
        self.layers: list[nn.Linear] = []
        self.together: list[tuple[nn.Linear, ...]] = []
        self.weights: dict[tuple[nn.Linear, ...], Tensor] = {}
        self.biases: dict[tuple[nn.Linear, ...], Tensor] = {}

    def pack(self, head: nn.Module | None = None) -> None:
        """Create packed copies of the current weights of ``layers``. The weight of ``head`` is never rounded."""
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
        """Compute the concatenated outputs of a group of layers for ``x (n, K)``. If the group has no packed copy, use its
        original weights.
        """
        weight, bias = self.weights.get(group), self.biases.get(group)
        if weight is None:
            parts = [plain_product(layer, x) for layer in group]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        out = torch.ops.mkldnn._linear_pointwise.default(x.to(weight.dtype), weight, None, "none", [], "").to(x.dtype)
        return out if bias is None else out.add_(bias)


def plain_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute ``layer(x)`` with the unpacked weight. Select the product that is faster for this number of rows."""
    if 1 < x.numel() // x.shape[-1] <= MOST_ROWS and x.dtype == layer.weight.dtype == torch.float32:
        return few_rows_product(x, layer.weight, layer.bias)
    return F.linear(x, layer.weight, layer.bias)


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Concatenate weights or biases of layers that have the same input."""
    return parts[0].detach() if len(parts) == 1 else torch.cat([part.detach() for part in parts])


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports packed weights of this dtype on this CPU."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the plain linear layers on a CPU, without layers whose forward method was replaced."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and "forward" not in vars(module)
    ]


def pack_bytes(model: nn.Module) -> int:
    """Return the number of bytes of exact packed copies of the weights."""
    return sum(layer.weight.nbytes for layer in linear_layers(model))


def worth_packing(model: nn.Module) -> bool:
    """Return whether exact packed copies are supported and fit into the allowed fraction of the free memory."""
    return HAS_ONEDNN and pack_bytes(model) * PACK_SHARE <= psutil.virtual_memory().available


def _forward(layer: nn.Linear, packed: Packed | None, x: Tensor) -> Tensor:
    # Do not use a packed copy here. With ``target_parameters``, peft replaces a layer's weight and changes its class during
    # the forward pass. The packed copy does not contain the adapter.
    if torch.is_autocast_enabled("cpu") or type(layer) is not nn.Linear:
        return F.linear(x, layer.weight, layer.bias)
    if packed is not None and (layer,) in packed.weights:
        return packed.product((layer,), x)
    return plain_product(layer, x)


@contextmanager
def quick_products(model: nn.Module, packed: Packed | None = None) -> Iterator[None]:
    """Use faster products in plain linear layers on a CPU inside the context. All other layers are unchanged."""
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


# Decoder layers that consist of RMS norm, rotary embedding, attention, RMS norm and SwiGLU, with two residual connections.
# Qwen3 also normalizes queries and keys.
KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
# Maximum number of rows per chunk. One thread processes a chunk, and reads the keys of the chunk's prompt only once.
CHUNK = 8
# Minimum number of chunks per thread. The chunk size is halved until there are enough chunks.
ITEMS = 2


@dataclass(slots=True)
class Plan:
    """Assignment of rows to prompts and chunks. The plan is valid until a row is added or removed.

    Attributes:
        groups: Groups for which the plan was created.
        seen: First tensor of each group's cache. If a group has another tensor object later, its cache was reallocated.
        order: Row indices ``(n,)``, sorted by prompt. All rows of a chunk have the same prompt.
        begins: ``(chunks + 1,)`` indices in ``order`` at which chunks start.
        most: Number of rows of the longest chunk.
        place: ``(n, 3)`` location of each row's prompt. It consists of the block that contains the prompt, the prompt's
            offset in this block, and the stride between heads.
        blocks: Memory addresses of the groups' keys and values. The key is the layer.
        scratch: Temporary memory of all threads, for scores and queries.
        step: Data of the current decoding step, created by the first layer.
        lengths: Suffix lengths for which ``step`` was created.
    """

    groups: list[Group]
    seen: list[Tensor]
    order: Tensor
    begins: Tensor
    most: int
    place: Tensor
    blocks: dict[int, Any] = field(default_factory=dict)
    scratch: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    step: Step | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(cls, groups: list[Group], kv: int, threads: int) -> Plan:
        """Create a plan: group the rows by prompt, and split each group into chunks."""
        by_prompt = [rows for group in groups for rows in rows_by_prompt(group)]
        size = CHUNK
        while size > 1 and kv * sum(-(-len(rows) // size) for rows in by_prompt) < ITEMS * threads:
            size //= 2
        chunks = [rows[i : i + size] for rows in by_prompt for i in range(0, len(rows), size)]
        begins = torch.tensor([0, *map(len, chunks)]).cumsum(0)
        order = torch.tensor([row for chunk in chunks for row in chunk])
        seen = [first_of(group) for group in groups]
        return cls(groups, seen, order, begins, max(map(len, chunks)), places(groups, len(order)))

    def holds(self, groups: list[Group]) -> bool:
        """Return whether the plan was created for these groups and their caches have not been reallocated since then."""
        return self.groups is groups and all(first_of(g) is seen for g, seen in zip(groups, self.seen, strict=True))

    def blocks_of(self, layer: int) -> Any:
        """Return the address of an array with the memory addresses of a layer's keys and values in each block."""
        if layer not in self.blocks:
            pairs = [in_order(group.block, layer) for group in self.groups]
            addresses = [memory.data_ptr() for pair in pairs for memory in pair]
            self.blocks[layer] = (ctypes.c_void_p * len(addresses))(*addresses)
        return ctypes.addressof(self.blocks[layer])


def first_of(group: Group) -> Tensor:
    """Return the keys of the first layer in a group's block."""
    return next(iter(group.block.keys.values()))


def places(groups: list[Group], n: int) -> Tensor:
    """Compute the field ``place`` of `Plan`. It is equal for all layers, because their caches have the same shape."""
    table = torch.empty(n, 3, dtype=torch.long)
    for number, group in enumerate(groups):
        _, heads, width, size = first_of(group).shape
        table[group.rows, 0] = number
        table[group.rows, 1] = group.place // group.grid.shape[1] * heads * width * size
        table[group.rows, 2] = width * size
    return table


def rows_by_prompt(group: Group) -> list[list[int]]:
    """Return the generating rows of a group, as one list per prompt."""
    by_prompt: dict[int, list[int]] = {}
    for row, place in zip(group.rows.tolist(), group.place.tolist(), strict=True):
        by_prompt.setdefault(place // group.grid.shape[1], []).append(row)
    return list(by_prompt.values())


def in_order(block: Block, layer: int) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values as contiguous tensors, and store them in the block."""
    for memory in (block.keys, block.values):
        memory[layer] = memory[layer].contiguous()
    return block.keys[layer], block.values[layer]


class Layer:
    """Decoder layer that is computed by a few functions of the compiled library.

    Args:
        layer: Decoder layer of one of the classes in `KINDS`.
        packed: Packed copies of the weights. Layers with the same input are packed as one matrix.
    """

    def __init__(self, layer: nn.Module, packed: Packed) -> None:
        self.layer, self.packed = layer, packed
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.size, self.scale = attention.layer_idx, attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.size
        self.kv = attention.k_proj.out_features // self.size
        # Llama's attention does not use a sliding window, even if the config has one.
        config = None if type(layer).__name__ == "LlamaDecoderLayer" else attention.config
        self.window = getattr(attention, "sliding_window", sliding_window(config))
        self.norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.gates = (mlp.gate_proj, mlp.up_proj)
        functions = compiled(self.size)
        assert functions is not None
        self.functions = functions

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Tensor:
        """Compute the layer. Input and output have the shape ``(B, t, H)``."""
        layer, threads = self.layer, torch.get_num_threads()
        residual = hidden_states.reshape(-1, hidden_states.shape[-1])
        qkv = self.packed.product(self.inputs, self.normalised(residual, None, layer.input_layernorm, threads))
        self.rotate(qkv, position_embeddings, hidden_states.shape[:2], threads)
        store = current_store()
        decoding = store.filling is None
        attended = self.attended(qkv, store, threads) if decoding else self.filled(qkv, store, hidden_states.shape[1])
        x = self.packed.product((layer.self_attn.o_proj,), attended)
        # This call also adds the residual to x, in place.
        normal = self.normalised(x, residual, layer.post_attention_layernorm, threads)
        both = self.packed.product(self.gates, normal)
        gated = both.new_empty(len(both), both.shape[1] // 2)
        self.functions.gated(both.data_ptr(), gated.data_ptr(), *gated.shape, threads)
        return self.packed.product((layer.mlp.down_proj,), gated).add_(x).view(hidden_states.shape)

    def normalised(self, x: Tensor, added: Tensor | None, norm: Any, threads: int) -> Tensor:
        """Compute the norm of ``x + added``. The tensor x is overwritten with the sum."""
        out = torch.empty_like(x)
        more = None if added is None else added.data_ptr()
        pointers = x.data_ptr(), more, norm.weight.data_ptr(), out.data_ptr()
        self.functions.normalise(*pointers, *x.shape, norm.variance_epsilon, threads)
        return out

    def rotate(self, qkv: Tensor, angles: tuple[Tensor, Tensor], shape: torch.Size, threads: int) -> None:
        """Apply the rotary embedding to queries and keys, in place."""
        cosine, sine = (a.expand(*shape, self.size).contiguous() for a in angles)
        norms = (None if norm is None else norm.weight.data_ptr() for norm in self.norms)
        epsilon = 0.0 if self.norms[0] is None else self.norms[0].variance_epsilon
        pointers = qkv.data_ptr(), cosine.data_ptr(), sine.data_ptr(), *norms
        self.functions.rotate(*pointers, len(qkv), self.heads, self.kv, epsilon, threads)

    def filled(self, qkv: Tensor, store: Store, width: int) -> Tensor:
        """Compute the attention of a prefill pass with torch's functions."""
        parts = qkv.view(-1, width, self.heads + 2 * self.kv, self.size).transpose(1, 2)
        query, key, value = parts.split([self.heads, self.kv, self.kv], 1)
        rule = Rule(self.scale, window=self.window)
        return store.attend(self.index, query, key, value, rule).reshape(len(qkv), -1)

    def attended(self, qkv: Tensor, store: Store, threads: int) -> Tensor:
        """Compute the attention of a decoding step with the compiled function, which stores the new keys and values too."""
        n = len(qkv)
        sample = qkv.view(n, -1, 1, self.size)[:, : self.kv]
        store.make_room(self.index, sample, sample, blank=False)
        plan = store.plan
        if plan is None or not plan.holds(store.groups):
            plan = store.plan = Plan.of(store.groups, self.kv, threads)
        keys, values = store.keys[self.index], store.values[self.index]
        common = [None, None]
        if store.common is not None:
            common = [memory[0].data_ptr() for memory in in_order(store.common, self.index)]
        memory = Memory(*common, plan.blocks_of(self.index), keys.data_ptr(), values.data_ptr(), keys.shape[2])
        step, each = self.step(plan, store, threads)
        out = qkv.new_empty(n, self.heads * self.size)
        self.functions.attend(ctypes.byref(step), ctypes.byref(memory), qkv.data_ptr(), out.data_ptr(), each)
        return out

    def step(self, plan: Plan, store: Store, threads: int) -> tuple[Step, int]:
        """Return the data of this decoding step, and the number of temporary elements that each thread needs."""
        longest = store.shared + store.width + store.longest + 1
        each = plan.most * self.heads // self.kv * (longest + 2 * self.size)
        if plan.lengths is not store.lengths or plan.step is None:
            if plan.scratch.numel() < threads * each:
                plan.scratch = torch.empty(2 * threads * each, dtype=torch.float32)
            plan.lengths = store.lengths
            tensors = (plan.begins, plan.order, store.prefix, store.lengths, plan.place, plan.scratch)
            sizes = (self.heads, self.kv, store.shared, longest, 0, len(plan.begins) - 1)
            plan.step = Step(*sizes, *(t.data_ptr() for t in tensors), self.scale, threads)
        plan.step.window = self.window or 0
        return plan.step, each


def fusable(layer: nn.Module) -> bool:
    """Return whether `Layer` supports a decoder layer. The layer must have one of the known classes, be unmodified, and be
    in float32 on a CPU.
    """
    kind = type(layer)
    if kind.__name__ not in KINDS or not kind.__module__.startswith("transformers.models."):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linear = (*(getattr(attention, f"{x}_proj") for x in "qkvo"), mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    exact = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in layer.parameters())
    untouched = all(type(x) is nn.Linear for x in linear) and all(map(plain, layer.modules()))
    norms = [module for name, module in layer.named_modules() if name.endswith("norm")]
    untouched = untouched and all(type(norm).__module__.startswith("transformers.") for norm in norms)
    silu = type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return exact and untouched and silu and attention.head_dim % 4 == 0 and compiled(attention.head_dim) is not None


@contextmanager
def fused_layers(model: nn.Module, packed: Packed) -> Iterator[None]:
    """Compute decoder layers that are `fusable` with `Layer` inside the context. Under autocast, no layer is changed."""
    exact = not torch.is_autocast_enabled("cpu")
    layers = [module for module in model.modules() if fusable(module)] if exact else []
    fused = [Layer(layer, packed) for layer in layers]
    packed.together = [group for fused_layer in fused for group in (fused_layer.inputs, fused_layer.gates)]
    for layer, fused_layer in zip(layers, fused, strict=True):
        layer.forward = fused_layer
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


# File of cgroup v2 (Linux) with the CPU quota. It contains "quota period" in microseconds, or "max period" without a quota.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def processors(quota: Path = QUOTA) -> int:
    """Return the number of processors that the CPU affinity and the container's quota allow this process to use."""
    allowed = usable_processors()
    try:
        most, period = quota.read_text().split()
        return max(1, min(allowed, math.ceil(int(most) / int(period))))
    except (OSError, ValueError):
        return allowed


@contextmanager
def bound_threads() -> Iterator[None]:
    """Limit the number of torch's threads to the number of processors inside the context. Restore the number on exit."""
    before = torch.get_num_threads()
    wanted = min(before, processors())
    if wanted != before:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
