"""Attention over shared prefixes and an own suffix, plugged into transformers' models by name.

The model's own decoder code runs unchanged; only the attention product is ours. What all prompts of a call begin with is
computed once and kept once; so is the rest of each prompt, in blocks of prompts. Decoding multiplies all live queries with
the common beginning in one product, all queries of a prompt with it in another, without repeating key-value heads, and each
query with its own suffix; one softmax spans the three.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.models import llama4
from posttrain.models.heads import attention_renamed


class Rule(NamedTuple):
    """How the scores of one layer become weights.

    Attributes:
        scale: Factor of the products of queries and keys.
        softcap: Bound of the scaled scores (``softcap * tanh(scores / softcap)``), or None.
        window: Number of positions that a token sees, its own included, or None for all.
        chunk: Size of the chunks of positions that see only themselves (Llama 4), or None.
        sinks: ``(heads,)`` one more logit per head, whose value is zero, or None.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the weights are a softmax of scaled scores, so that torch's attention computes them."""
        return self.softcap is None and self.sinks is None

    def weights(self, scores: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the softmax in float32 of scores that `capped` returned; ``sinks`` has a shape that expands to them."""
        if sinks is None:
            return scores.softmax(-1)
        sinks = sinks.to(scores).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

    def capped(self, scores: Tensor) -> Tensor:
        """Return scaled scores within the bound."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


Sight = tuple[int | None, int | None]  # Window and chunk of a layer.


@dataclass(slots=True)
class Block:
    """Keys and values of prompts that were prefilled together, right-padded to the longest.

    Attributes:
        prompts: Numbers of the prompts, in batch order.
        lengths: ``(P,)`` tokens of each.
        keys, values: Per layer ``(P, KV heads, width, head size)``.
        states: ``(P, ...)`` states of recurrent layers at the end of each prompt, see `posttrain.models.recurrent.states`.
    """

    prompts: list[int]
    lengths: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)

    def append(self, keys: dict[int, Tensor], values: dict[int, Tensor]) -> None:
        """Add the next positions of all prompts."""
        for memory, new in ((self.keys, keys), (self.values, values)):
            for layer, tensor in new.items():
                memory[layer] = torch.cat([memory[layer], tensor], 2) if layer in memory else tensor

    def close_gaps(self, known: Tensor, room: int) -> None:
        """Move what was computed, from column ``room`` on, behind each prompt's ``known (P,)`` first positions."""
        width = int(self.lengths.max())
        columns = torch.arange(width, device=known.device).expand(len(known), -1)
        source = torch.where(columns < known[:, None], columns, columns - known[:, None] + room)
        for memory in (self.keys, self.values):
            for layer, tensor in memory.items():
                last = tensor.shape[2] - 1  # Columns behind a short prompt's end are never looked at.
                index = source.clamp_max(last)[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
                memory[layer] = tensor.gather(2, index)

    def row(self, prompt: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Per layer keys and values ``(1, KV heads, length, head size)`` of one prompt."""
        i = self.prompts.index(prompt)
        return {n: (self.keys[n][i : i + 1, :, :length], self.values[n][i : i + 1, :, :length]) for n in self.keys}

    def states_of(self, prompt: int) -> list[Tensor]:
        """Return copies ``(1, ...)`` of the states of one prompt."""
        return one_row(self.states, self.prompts.index(prompt))

    def keep(self, prompts: list[int]) -> None:
        """Free the memory of all other prompts."""
        index = torch.tensor([self.prompts.index(p) for p in prompts], device=self.lengths.device)
        self.prompts, self.lengths = prompts, self.lengths[index]
        self.states = [state[index] for state in self.states]
        width = int(self.lengths.max())
        for memory in (self.keys, self.values):
            for layer, tensor in memory.items():
                memory[layer] = tensor[index, :, :width]


def one_row(states: list[Tensor], row: int) -> list[Tensor]:
    """Return copies ``(1, ...)`` of the states of one row."""
    return [state[row : row + 1].clone() for state in states]


@dataclass(slots=True)
class Group:
    """The live rows of one block.

    Attributes:
        rows: ``(m,)`` live rows, ascending.
        grid: ``(P, g)`` the same rows by prompt, g the most that one prompt has, gaps filled with a repeated row.
        place: ``(m,)`` where each of ``rows`` stands in the flattened grid.
        alone: Whether these are all live rows.
    """

    block: Block
    rows: Tensor
    grid: Tensor
    place: Tensor
    alone: bool
    orders: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def order(self, kv: int) -> tuple[Tensor, Tensor]:
        """Where ``(P, kv, g)`` finds its lines among ``(n, kv)``, and where ``(m, kv)`` finds its own among those."""
        if kv not in self.orders:
            heads, g = torch.arange(kv, device=self.grid.device), self.grid.shape[1]
            take = self.grid[:, None, :] * kv + heads[:, None]
            prompt, column = self.place // g, self.place % g
            give = (prompt[:, None] * kv + heads) * g + column[:, None]
            self.orders[kv] = take.flatten(), give.flatten()
        return self.orders[kv]

    def by_prompt(self, x: Tensor) -> Tensor:
        """``(n, kv, r, c)`` to ``(P, kv, g r, c)``: all queries of a prompt side by side, for one product with it."""
        n, kv, r, c = x.shape
        lines = x.reshape(n * kv, r, c).index_select(0, self.order(kv)[0])
        return lines.view(self.grid.shape[0], kv, -1, c)

    def by_row(self, x: Tensor, r: int) -> Tensor:
        """``(P, kv, g r, c)`` back to ``(m, kv, r, c)`` in the order of ``rows``."""
        kv, c = x.shape[1], x.shape[3]
        return x.reshape(-1, r * c).index_select(0, self.order(kv)[1]).view(-1, kv, r, c)


NAME = "posttrain_native"
FIRST_BLOCK = 64  # Suffix positions allocated at first; doubled when they are used up.


@dataclass(slots=True)
class Fill:
    """A prefill pass: what its tokens may see before themselves, and the keys and values they leave.

    Attributes:
        past: Per layer earlier keys and values, ``(1 or P, KV heads, length, head size)``, in the order of positions.
        keys, values: Per layer ``(P, KV heads, width, head size)``, filled by the pass.
        shared: Tokens that all prompts begin with, first in ``past``.
        known: ``(P,)`` tokens of each prompt that were known before, next in ``past``; None where all have as many.
        room: Columns they take, the most of ``known``.
        span: ``(P, width)`` number of the block (an image) that a token sees both ways, -1 outside; None: no blocks.
        hidden: By window and chunk, what each token may not see; computed once for all layers.
        states: ``(P, width, H)`` final hidden states, once the pass is over.
    """

    past: list[dict[int, tuple[Tensor, Tensor]]] = field(default_factory=list)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    shared: int = 0
    known: Tensor | None = None
    room: int = 0
    span: Tensor | None = None
    hidden: dict[Sight, Tensor] = field(default_factory=dict)
    states: Tensor = field(default_factory=lambda: torch.empty(0))

    def unseen(self, sight: Sight, width: int, whole: int, device: torch.device) -> Tensor:
        """True where one of the last ``width`` of ``whole`` positions may not look, ``(width, whole)`` or with rows before."""
        if sight not in self.hidden:
            window, chunk = sight
            places, blank = torch.arange(whole, device=device), None
            if self.known is not None:
                begin, known = self.shared + self.room, self.known[:, None]
                blank = (places >= self.shared + known) & (places < begin)
                places = torch.where(places < begin, places, places - self.room + known)[:, None]  # (P, 1, whole)
            now = places[..., whole - width :, None]
            before = places[..., None, :]
            hidden = now < before
            if self.span is not None:
                hidden = hidden & ~((self.span[:, :, None] == self.span[:, None]) & (self.span >= 0)[:, None])[:, None]
            if window is not None:
                hidden = hidden | (now - before >= window)
            if chunk is not None:
                hidden = hidden | (now // chunk != before // chunk)
            self.hidden[sight] = hidden if blank is None else hidden | blank[:, None, None]
        return self.hidden[sight]

    def whole(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Note this layer's new keys and values, and return them behind the earlier ones."""
        self.keys[layer], self.values[layer] = key.contiguous(), value.contiguous()
        if not self.past:
            return key, value
        parts = [[x.expand(key.shape[0], -1, -1, -1) for x in past[layer]] for past in self.past]
        keys, values = zip(*parts, (key, value), strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)


@dataclass(slots=True)
class Store:
    """The engine's key-value memory, and what the current forward call is about.

    Attributes:
        slots: Sequences that can be live at once.
        filling: The prefill pass that is running; None while decoding.
        positions: ``(n, t)`` positions of the tokens of the running pass.
        common: What all prompts begin with, a block of one; None when they share nothing.
        groups: While decoding: the live rows by block; each live row is in exactly one.
        prefix: ``(n,)`` prompt tokens of each live row, without the common ones.
        lengths: ``(n,)`` suffix tokens stored so far by each live row, the current one not included.
        longest: The largest of them, on the host.
        keys, values: Per layer ``(slots, KV heads, capacity, head size)``.
        states: ``(slots, ...)`` states of recurrent layers, see `posttrain.models.recurrent.states`.
        repeats: Calls so far in the running pass of attention layers that stand in several places.
        unseen: By window and chunk, what each row may not see in this step; computed once for all layers.
        places: By key-value heads and capacity, where this step's keys go in a layer's memory; computed once too.
        plan: What compiled layers know of the groups (`posttrain.rollouts.native.layers`).
    """

    slots: int
    filling: Fill | None = None
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    common: Block | None = None
    groups: list[Group] = field(default_factory=list)
    prefix: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    lengths: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    longest: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)
    repeats: int = 0
    unseen: dict[Sight, Tensor] = field(default_factory=dict)
    places: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    plan: Any = None

    def begin_pass(self, positions: Tensor) -> None:
        """Note the positions ``(n, t)`` of the tokens of the next pass."""
        self.positions, self.repeats = positions, 0

    def layer_of(self, module: Any) -> int:
        """Return the key of a layer's memory. Zamba 2 has the same attention layers in several places, all with index -1."""
        if module.layer_idx >= 0:
            return module.layer_idx
        self.repeats += 1
        return -self.repeats

    def begin_rows(self, rows: slice, block: Block, prompt: int) -> None:
        """Give rows the states at the end of their prompt."""
        if not self.states:
            self.states = [state.new_empty(self.slots, *state.shape[1:]) for state in block.states]
        index = block.prompts.index(prompt)
        for memory, state in zip(self.states, block.states, strict=True):
            memory[rows] = state[index]

    def begin_step(self, longest: int) -> None:
        """One position more for every live row; ``longest`` of them are the most that one has so far."""
        self.longest, self.unseen, self.places = longest, {}, {}

    @property
    def shared(self) -> int:
        """Tokens that all prompts begin with."""
        return 0 if self.common is None else next(iter(self.common.keys.values())).shape[2]

    @property
    def width(self) -> int:
        """Columns that hold the prompts behind the common tokens: the widest live block."""
        return max(next(iter(group.block.keys.values())).shape[2] for group in self.groups)

    @property
    def capacity(self) -> int:
        """Suffix positions allocated for each slot."""
        return next(iter(self.keys.values())).shape[2] if self.keys else 0

    def bias(self, sight: Sight, columns: int) -> Tensor:
        """``(n, 1, 1, shared + width + columns)``, minus infinity where a row may not look and 0 elsewhere."""
        if sight not in self.unseen:
            window, chunk = sight
            device = self.lengths.device
            first, prompt, own = (torch.arange(n, device=device)[None] for n in (self.shared, self.width, columns))
            prefix, lengths = self.prefix[:, None], self.lengths[:, None]
            hidden = [(first < 0).expand(len(lengths), -1), prompt >= prefix, own > lengths]
            now = self.shared + prefix + lengths  # The position of the token that looks.
            places = (first, self.shared + prompt, self.shared + prefix + own)
            if window is not None:
                hidden = [h | (now - place >= window) for h, place in zip(hidden, places, strict=True)]
            if chunk is not None:
                hidden = [h | (now // chunk != place // chunk) for h, place in zip(hidden, places, strict=True)]
            whole = torch.cat(hidden, 1)
            self.unseen[sight] = torch.zeros(whole.shape, device=device).masked_fill_(whole, -torch.inf)[:, None, None]
        return self.unseen[sight]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append one position to each live row; returns the used part of this layer's memory."""
        n, kv, _, size = key.shape
        used = self.longest + 1
        self.make_room(layer, key, value)
        keys, values = self.keys[layer], self.values[layer]
        capacity = keys.shape[2]
        if (kv, capacity) not in self.places:
            lines = torch.arange(n * kv, device=key.device).view(n, kv) * capacity
            self.places[kv, capacity] = (lines + self.lengths[:, None]).flatten()
        places = self.places[kv, capacity]
        keys.view(-1, size).index_copy_(0, places, key.reshape(-1, size))
        values.view(-1, value.shape[3]).index_copy_(0, places, value.reshape(-1, value.shape[3]))
        return keys[:n, :, :used], values[:n, :, :used]

    def make_room(self, layer: int, key: Tensor, value: Tensor, *, blank: bool = True) -> None:
        """See that every row has room for one position more.

        Args:
            layer: Whose memory.
            key: A sample ``(n, KV heads, 1, size)``.
            value: A sample too.
            blank: Write zeros to what is unused, for products that reach over all columns: a NaN would spoil them.
        """
        if layer not in self.keys or self.keys[layer].shape[2] <= self.longest:
            self._grow(layer, key, value, blank=blank)

    def _grow(self, layer: int, key: Tensor, value: Tensor, *, blank: bool = True) -> None:
        for memory, sample in ((self.keys, key), (self.values, value)):
            old = memory.get(layer)
            capacity = FIRST_BLOCK if old is None else 2 * old.shape[2]
            new = sample.new_empty(self.slots, sample.shape[1], capacity, sample.shape[3])
            if blank:
                new.zero_()
            if old is not None:
                rows = min(self.slots, old.shape[0])
                new[:rows, :, : old.shape[2]] = old[:rows]
            memory[layer] = new

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Attention of one layer, ``(n, heads, t, size)`` in and ``(n, t, heads, size)`` out."""
        if self.filling is not None:
            key, value = self.filling.whole(layer, key, value)
            return _prefill(self.filling, query, key, value, rule).transpose(1, 2)
        keys, values = self.write(layer, key, value)
        return _decode(self, layer, query, keys, values, rule)

    def suffix(self, row: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Per layer keys and values ``(1, KV heads, length, head size)`` of one row's suffix."""
        return {
            n: (self.keys[n][row : row + 1, :, :length], self.values[n][row : row + 1, :, :length]) for n in self.keys
        }

    def clear(self) -> None:
        """Free all suffixes."""
        self.keys, self.values, self.states = {}, {}, []

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row's suffix and states to another row, to close the gap a finished sequence leaves."""
        for memory in (self.keys, self.values):
            for tensor in memory.values():
                tensor[target, :, :length] = tensor[source, :, :length]
        for state in self.states:
            state[target] = state[source]


class _Running(threading.local):
    """Calls that run at the same time in threads of one process, on models of their own, each have their memory."""

    store: Store | None = None


_running = _Running()


def current_store() -> Store:
    """The memory of the innermost call that is running in this thread."""
    assert _running.store is not None, "native attention runs inside plugged_in() only"
    return _running.store


def native_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | EllipsisType | None = ...,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer: ``(n, heads, t, size)`` in, ``(n, t, heads, size)`` out.

    ``sliding_window=None`` is full attention, whatever the module has as an attribute: EXAONE 4 has it in every layer. Where
    a layer says nothing, the attribute is all there is.
    """
    store = current_store()
    if sliding_window is ...:
        sliding_window = getattr(module, "sliding_window", None)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    chunk = None
    if module.config.model_type == llama4.MODEL_TYPE:
        query, chunk = llama4.placed(module, query, store.positions)
    rule = Rule(scale, softcap, sliding_window, chunk, s_aux)
    # Under autocast the rotary embedding leaves queries and keys in float32 beside half-precision values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return store.attend(store.layer_of(module), query, key, value, rule), None


def _prefill(fill: Fill, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Causal attention of the last positions; right padding comes after every real token and so is never seen."""
    width, whole = query.shape[2], key.shape[2]
    limit = min(rule.window or whole, rule.chunk or whole)
    if rule.plain and fill.span is None and width == whole <= limit:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=rule.scale, enable_gqa=True)
    hidden = fill.unseen((rule.window, rule.chunk), width, whole, query.device)
    if rule.plain and query.device.type == "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=rule.scale, enable_gqa=True)
    # CUDA has no kernel for a mask and shared heads at once: it would write out all scores.
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    if rule.plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=rule.scale)
    scores = rule.capped(query @ key.transpose(2, 3) * rule.scale).float().masked_fill(hidden, -torch.inf)
    sinks = None if rule.sinks is None else rule.sinks[:, None, None]
    return rule.weights(scores, sinks).to(value.dtype) @ value


def _decode(store: Store, layer: int, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
    """One new query a row against the common beginning, its prompt and its own suffix, ``(n, 1, heads, size)``."""
    n, heads, _, size = query.shape
    kv, used, first, width = keys.shape[1], keys.shape[2], store.shared, store.width
    q = query.view(n, kv, heads // kv, size) * rule.scale
    parts = [_prompt_scores(store.groups, layer, q, width), q @ keys.transpose(2, 3)]
    if store.common is not None:
        parts.insert(0, _by_all(_of_all(q) @ store.common.keys[layer][0].transpose(1, 2), n))
    scores = rule.capped(torch.cat(parts, -1).float()).add_(store.bias((rule.window, rule.chunk), used))
    sinks = None if rule.sinks is None else rule.sinks.view(kv, -1, 1)
    weights = rule.weights(scores, sinks).to(values.dtype)
    out = weights[..., first + width :] @ values
    if store.common is not None:
        out += _by_all(_of_all(weights[..., :first]) @ store.common.values[layer][0], n)
    for group in store.groups:
        block = group.block.values[layer]
        part = group.by_row(group.by_prompt(weights[..., first : first + block.shape[2]]) @ block, q.shape[2])
        out = out.add_(part) if group.alone else out.index_add_(0, group.rows, part)
    return out.to(query.dtype).reshape(n, 1, heads, values.shape[3])


def _prompt_scores(groups: list[Group], layer: int, q: Tensor, width: int) -> Tensor:
    """``(n, kv, r, width)``: every row's queries with the keys of its prompt."""
    scores = q.new_zeros(0)
    for group in groups:
        block = group.block.keys[layer]
        part = group.by_row(group.by_prompt(q) @ block.transpose(2, 3), q.shape[2])
        if group.alone:
            return part
        scores = scores if len(scores) else q.new_zeros(*q.shape[:3], width)
        scores[..., : block.shape[2]].index_copy_(0, group.rows, part)
    return scores


def _of_all(x: Tensor) -> Tensor:
    """``(n, kv, r, c)`` to ``(kv, n r, c)``: the queries of all rows side by side."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3])


def _by_all(x: Tensor, n: int) -> Tensor:
    """``(kv, n r, c)`` back to ``(n, kv, r, c)``."""
    return x.view(x.shape[0], n, -1, x.shape[2]).transpose(0, 1)


@contextmanager
def plugged_in(model: nn.Module, store: Store) -> Iterator[None]:
    """Route attention of the text layers of ``model`` to `native_attention` with ``store``; the former backend is restored."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, native_attention)
    previous, _running.store = _running.store, store
    try:
        with attention_renamed(model, lambda _: NAME):
            yield
    finally:
        _running.store = previous
