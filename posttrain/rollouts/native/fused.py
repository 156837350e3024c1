"""Decoder layers of the Llama kind in as few calls as they can be: four products, and four functions of `layer.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.lean import plain
from posttrain.rollouts.native.attention import Store, current_store
from posttrain.rollouts.native.blocks import Block, Group
from posttrain.rollouts.native.compiled import Memory, Step, compiled
from posttrain.rollouts.native.products import Packed

__all__ = ["Plan", "fused_layers"]

# RMS norm, rotated halves, attention, RMS norm, SwiGLU, each added to its input; Qwen3 normalises queries and keys too.
KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
CHUNK = 8  # Rows that read a prompt together: it is read once for all of them, and a thread has all of that to do.
ITEMS = 2  # A thread's share of the work is in at least this many pieces, else chunks are halved.


@dataclass(slots=True)
class Plan:
    """Which rows read what, until a row comes or goes.

    Attributes:
        groups: The groups it was made of.
        seen: Of each group's memory the first tensor, by which a newer one is noticed.
        order: ``(n,)`` rows by prompt; those of a chunk read the same one.
        begins: ``(chunks + 1,)`` where each chunk begins there.
        most: Rows of the longest chunk.
        place: ``(n, 3)``: the block of each row's prompt, where in it the prompt begins, and elements from a head to the next.
        blocks: Per layer addresses of the groups' keys and values.
        scratch: Of every thread, for scores and queries.
        step: What the running step reads, made by its first layer for all of them.
        lengths: Of the step that it is of.
    """

    groups: list[Group]
    seen: list[Tensor]
    order: Tensor
    begins: Tensor
    most: int
    place: Tensor
    blocks: dict[int, Any] = field(default_factory=dict)
    scratch: Tensor = field(default_factory=lambda: torch.empty(0))
    step: Step | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(cls, groups: list[Group], kv: int, threads: int) -> Plan:
        """Rows by prompt, cut into chunks."""
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
        """Whether it is of these groups, and their memory is where it was."""
        return self.groups is groups and all(first_of(g) is seen for g, seen in zip(groups, self.seen, strict=True))

    def blocks_of(self, layer: int) -> Any:
        """Addresses of a layer's keys and values in each block."""
        if layer not in self.blocks:
            pairs = [in_order(group.block, layer) for group in self.groups]
            addresses = [memory.data_ptr() for pair in pairs for memory in pair]
            self.blocks[layer] = (ctypes.c_void_p * len(addresses))(*addresses)
        return ctypes.addressof(self.blocks[layer])


def first_of(group: Group) -> Tensor:
    """Keys of a block in the first of its layers."""
    return next(iter(group.block.keys.values()))


def places(groups: list[Group], n: int) -> Tensor:
    """See ``place`` of `Plan`; the same in all layers, as their memories have one shape."""
    table = torch.empty(n, 3, dtype=torch.long)
    for number, group in enumerate(groups):
        _, heads, width, size = first_of(group).shape
        table[group.rows, 0] = number
        table[group.rows, 1] = group.place // group.grid.shape[1] * heads * width * size
        table[group.rows, 2] = width * size
    return table


def rows_by_prompt(group: Group) -> list[list[int]]:
    """The live rows of each prompt of a block."""
    found: dict[int, list[int]] = {}
    for row, place in zip(group.rows.tolist(), group.place.tolist(), strict=True):
        found.setdefault(place // group.grid.shape[1], []).append(row)
    return list(found.values())


def in_order(block: Block, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values, contiguous."""
    for memory in (block.keys, block.values):
        memory[layer] = memory[layer].contiguous()
    return block.keys[layer], block.values[layer]


class Layer:
    """One decoder layer of a model, computed in few calls.

    Args:
        layer: Of one of `KINDS`.
        packed: Copies of its weights, those that read the same input side by side; empty until they are made.
    """

    def __init__(self, layer: Any, packed: Packed) -> None:
        self.layer, self.packed = layer, packed
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.size, self.scale = attention.layer_idx, attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.size
        self.kv = attention.k_proj.out_features // self.size
        # Llama's attention has no window, whatever its config says.
        config = None if type(layer).__name__ == "LlamaDecoderLayer" else attention.config
        self.window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        self.norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.gates = (mlp.gate_proj, mlp.up_proj)
        functions = compiled(self.size)
        assert functions is not None
        self.functions = functions

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Tensor:
        """``(B, t, H)`` in and out."""
        layer, threads = self.layer, torch.get_num_threads()
        residual = hidden_states.reshape(-1, hidden_states.shape[-1])
        qkv = self.packed.product(self.inputs, self.normalised(residual, None, layer.input_layernorm, threads))
        self.rotate(qkv, position_embeddings, hidden_states.shape[:2], threads)
        store = current_store()
        decoding = store.filling is None
        attended = self.attended(qkv, store, threads) if decoding else self.filled(qkv, store, hidden_states.shape[1])
        x = self.packed.product((layer.self_attn.o_proj,), attended)
        normal = self.normalised(x, residual, layer.post_attention_layernorm, threads)  # Adds the residual to x.
        both = self.packed.product(self.gates, normal)
        gated = both.new_empty(len(both), both.shape[1] // 2)
        self.functions.gated(both.data_ptr(), gated.data_ptr(), *gated.shape, threads)
        return self.packed.product((layer.mlp.down_proj,), gated).add_(x).view(hidden_states.shape)

    def normalised(self, x: Tensor, added: Tensor | None, norm: Any, threads: int) -> Tensor:
        """The norm of ``x + added``; the sum replaces x."""
        out = torch.empty_like(x)
        more = None if added is None else added.data_ptr()
        pointers = x.data_ptr(), more, norm.weight.data_ptr(), out.data_ptr()
        self.functions.normalise(*pointers, *x.shape, norm.variance_epsilon, threads)
        return out

    def rotate(self, qkv: Tensor, angles: tuple[Tensor, Tensor], shape: torch.Size, threads: int) -> None:
        """Turn queries and keys by the angles of their positions, in place."""
        cosine, sine = (a.expand(*shape, self.size).contiguous() for a in angles)
        norms = (None if norm is None else norm.weight.data_ptr() for norm in self.norms)
        epsilon = 0.0 if self.norms[0] is None else self.norms[0].variance_epsilon
        pointers = qkv.data_ptr(), cosine.data_ptr(), sine.data_ptr(), *norms
        self.functions.rotate(*pointers, len(qkv), self.heads, self.kv, epsilon, threads)

    def filled(self, qkv: Tensor, store: Store, width: int) -> Tensor:
        """Attention of a prefill pass, by torch."""
        parts = qkv.view(-1, width, self.heads + 2 * self.kv, self.size).transpose(1, 2)
        query, key, value = parts.split([self.heads, self.kv, self.kv], 1)
        return store.attend(self.index, query, key, value, self.scale, None, self.window).reshape(len(qkv), -1)

    def attended(self, qkv: Tensor, store: Store, threads: int) -> Tensor:
        """Attention of a decoding step; writes the new keys and values."""
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
        """What this step's rows read, and the elements of a thread's scratch."""
        longest = store.shared + store.width + store.longest + 1
        each = plan.most * self.heads // self.kv * (longest + 2 * self.size)
        if plan.lengths is not store.lengths or plan.step is None:
            if plan.scratch.numel() < threads * each:
                plan.scratch = torch.empty(2 * threads * each)
            plan.lengths = store.lengths
            tensors = (plan.begins, plan.order, store.prefix, store.lengths, plan.place, plan.scratch)
            sizes = (self.heads, self.kv, store.shared, longest, 0, len(plan.begins) - 1)
            plan.step = Step(*sizes, *(t.data_ptr() for t in tensors), self.scale, threads)
        plan.step.window = self.window or 0
        return plan.step, each


def fusable(layer: Any) -> bool:
    """Whether `Layer` computes what this layer does: known classes, untouched, float32 on a CPU."""
    kind = type(layer)
    if kind.__name__ not in KINDS or not kind.__module__.startswith("transformers.models."):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linear = (*(getattr(attention, f"{x}_proj") for x in "qkvo"), mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    exact = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in layer.parameters())
    untouched = all(type(x) is nn.Linear for x in linear) and all(map(plain, layer.modules()))
    silu = type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return exact and untouched and silu and attention.head_dim % 4 == 0 and compiled(attention.head_dim) is not None


@contextmanager
def fused_layers(model: Any, packed: Packed | None) -> Iterator[None]:
    """Let decoder layers that are `fusable` run as `Layer`; others, and all under autocast or without ``packed``, stay."""
    exact = not torch.is_autocast_enabled("cpu")
    layers = [module for module in model.modules() if fusable(module)] if packed is not None and exact else []
    if packed is not None:
        made = [Layer(layer, packed) for layer in layers]
        packed.together = [group for one in made for group in (one.inputs, one.gates)]
        for layer, one in zip(layers, made, strict=True):
            layer.forward = one
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
