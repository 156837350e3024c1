"""Attention in which rows share the keys and values of their prompts. This attention function is registered by name in
transformers.

Only the model's attention function is replaced. Its decoder code is not changed. The common prefix of all prompts of a call
is computed and stored once. The rest of each prompt is also stored once, in blocks of several prompts. In a decoding step,
one product multiplies all queries with the common prefix. Another product multiplies all queries of a prompt with the
prompt, without repeating key-value heads. In addition, each query is multiplied with the suffix of its row. One softmax is
computed over the scores of all three products.
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
    """Parameters of the attention weights of a layer.

    Attributes:
        scale: Factor by which products of queries and keys are multiplied.
        softcap: Bound of the scaled scores, which are changed to ``softcap * tanh(scores / softcap)``. None: no bound.
        window: Size of the sliding window: number of positions to which a token attends, including its own position. None: a
            token attends to all earlier positions.
        chunk: Size of chunks of positions (Llama 4). A token attends only to positions in its own chunk. None: no chunks.
        sinks: Additional logit ``(heads,)`` per head, with a value vector of zero. None: no additional logits.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the attention weights are a softmax of scaled scores without further changes. If so, torch's own attention
        function can be used.
        """
        return self.softcap is None and self.sinks is None

    def weights(self, scores: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the softmax of scores from `capped`, in float32. ``sinks`` must be expandable to the shape of the scores."""
        if sinks is None:
            return scores.softmax(-1)
        sinks = sinks.to(scores).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

    def capped(self, scores: Tensor) -> Tensor:
        """Apply the soft cap to scaled scores. Without a soft cap, return the scores unchanged."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


Sight = tuple[int | None, int | None]  # Sliding window and chunk size of a layer. None: no window or no chunks.


@dataclass(slots=True)
class Block:
    """KV cache of several prompts that were prefilled together, right-padded to the longest prompt.

    Attributes:
        prompts: Indices of the prompts, in batch order.
        lengths: ``(P,)`` number of tokens of each prompt.
        keys, values: Tensor ``(P, KV heads, width, head size)`` of each layer.
        states: States ``(P, ...)`` of recurrent layers at the end of each prompt; see `posttrain.models.recurrent.states`.
    """

    prompts: list[int]
    lengths: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)

    def append(self, keys: dict[int, Tensor], values: dict[int, Tensor]) -> None:
        """Append keys and values of the next positions, for all prompts."""
        for memory, new in ((self.keys, keys), (self.values, values)):
            for layer, tensor in new.items():
                memory[layer] = torch.cat([memory[layer], tensor], 2) if layer in memory else tensor

    def close_gaps(self, known: Tensor, room: int) -> None:
        """Remove the gaps between cached and new positions. New positions were stored from column ``room`` on. They are
        moved directly behind the ``known (P,)`` cached positions of each prompt.
        """
        width = int(self.lengths.max())
        columns = torch.arange(width, device=known.device).expand(len(known), -1)
        source = torch.where(columns < known[:, None], columns, columns - known[:, None] + room)
        for memory in (self.keys, self.values):
            for layer, tensor in memory.items():
                # Limit the index to the last column. Columns after the end of a short prompt are never read.
                last = tensor.shape[2] - 1
                index = source.clamp_max(last)[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
                memory[layer] = tensor.gather(2, index)

    def row(self, prompt: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the keys and values of one prompt by layer, with the shape ``(1, KV heads, length, head size)``."""
        i = self.prompts.index(prompt)
        return {n: (self.keys[n][i : i + 1, :, :length], self.values[n][i : i + 1, :, :length]) for n in self.keys}

    def states_of(self, prompt: int) -> list[Tensor]:
        """Return copies of the recurrent states ``(1, ...)`` of one prompt."""
        return one_row(self.states, self.prompts.index(prompt))

    def keep(self, prompts: list[int]) -> None:
        """Keep only the listed prompts, and free the memory of all other prompts."""
        index = torch.tensor([self.prompts.index(p) for p in prompts], device=self.lengths.device)
        self.prompts, self.lengths = prompts, self.lengths[index]
        self.states = [state[index] for state in self.states]
        width = int(self.lengths.max())
        for memory in (self.keys, self.values):
            for layer, tensor in memory.items():
                memory[layer] = tensor[index, :, :width]


def one_row(states: list[Tensor], row: int) -> list[Tensor]:
    """Return copies of the recurrent states ``(1, ...)`` of one row."""
    return [state[row : row + 1].clone() for state in states]


@dataclass(slots=True)
class Group:
    """Rows of one block that are still generating. A row belongs to one completion.

    Attributes:
        rows: Row indices ``(m,)`` in ascending order.
        grid: The same row indices as ``(P, g)``, with one line per prompt. g is the maximum number of rows per prompt. In
            lines with fewer rows, a row index is repeated.
        place: Index ``(m,)`` of each row in the flattened grid.
        alone: Whether this group contains all generating rows.
    """

    block: Block
    rows: Tensor
    grid: Tensor
    place: Tensor
    alone: bool
    orders: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def order(self, kv: int) -> tuple[Tensor, Tensor]:
        """Return indices that gather ``(P, kv, g)`` from ``(n, kv)``, and indices that gather ``(m, kv)`` from the result."""
        if kv not in self.orders:
            heads, g = torch.arange(kv, device=self.grid.device), self.grid.shape[1]
            take = self.grid[:, None, :] * kv + heads[:, None]
            prompt, column = self.place // g, self.place % g
            give = (prompt[:, None] * kv + heads) * g + column[:, None]
            self.orders[kv] = take.flatten(), give.flatten()
        return self.orders[kv]

    def by_prompt(self, x: Tensor) -> Tensor:
        """Rearrange ``(n, kv, r, c)`` to ``(P, kv, g r, c)``. One product can then multiply all queries of a prompt with its
        keys.
        """
        n, kv, r, c = x.shape
        lines = x.reshape(n * kv, r, c).index_select(0, self.order(kv)[0])
        return lines.view(self.grid.shape[0], kv, -1, c)

    def by_row(self, x: Tensor, r: int) -> Tensor:
        """Rearrange ``(P, kv, g r, c)`` to ``(m, kv, r, c)``, in the order of `rows`."""
        kv, c = x.shape[1], x.shape[3]
        return x.reshape(-1, r * c).index_select(0, self.order(kv)[1]).view(-1, kv, r, c)


NAME = "posttrain_native"
# Number of suffix positions that are allocated first. When all positions are used, their number is doubled.
FIRST_BLOCK = 64


@dataclass(slots=True)
class Fill:
    """Prefill pass: earlier keys and values to which its tokens attend, and the new keys and values that it computes.

    Attributes:
        past: Earlier keys and values by layer, as tensors ``(1 or P, KV heads, length, head size)`` in the order of
            positions.
        keys, values: New keys and values by layer, as tensors ``(P, KV heads, width, head size)``. The attention function
            stores them during the pass.
        shared: Number of tokens of the common prefix of all prompts. The keys and values of the common prefix are first in
            ``past``.
        known: ``(P,)`` number of cached tokens of each prompt. These tokens follow the common prefix in ``past``. None: all
            prompts have the same number of cached tokens.
        room: Number of columns for cached tokens, which is the maximum of ``known``.
        span: Index ``(P, width)`` of the block (an image) in which a token attends in both directions. -1: the token is in
            no block. None: there are no blocks.
        hidden: Attention masks by window and chunk size. Each mask is computed once for all layers.
        states: Final hidden states ``(P, width, H)``, which are set after the pass.
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
        """Return a mask ``(width, whole)``, which is True if the query does not attend to the key. If rows need different
        masks, the mask has an additional row dimension.

        ``width`` is the number of new positions, and ``whole`` is the number of all positions.
        """
        if sight not in self.hidden:
            window, chunk = sight
            places, blank = torch.arange(whole, device=device), None
            if self.known is not None:
                begin, cached = self.shared + self.room, self.known[:, None]
                blank = (places >= self.shared + cached) & (places < begin)
                places = torch.where(places < begin, places, places - self.room + cached)[:, None]  # (P, 1, whole)
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
        """Store the new keys and values of a layer. Return the earlier keys and values with the new keys and values
        appended.
        """
        self.keys[layer], self.values[layer] = key.contiguous(), value.contiguous()
        if not self.past:
            return key, value
        parts = [[x.expand(key.shape[0], -1, -1, -1) for x in past[layer]] for past in self.past]
        keys, values = zip(*parts, (key, value), strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)


@dataclass(slots=True)
class Store:
    """KV cache of an engine call, and state of the current forward pass.

    Attributes:
        slots: Maximum number of sequences that generate at the same time.
        filling: Current prefill pass. None: the current pass is a decoding step.
        positions: Positions ``(n, t)`` of the tokens in the current pass.
        common: Block with the common prefix of all prompts, as a batch of one. None: there is no common prefix.
        groups: Generating rows by block, in a decoding step. Each row is in exactly one group.
        prefix: ``(n,)`` number of prompt tokens of each generating row, without the common prefix.
        lengths: ``(n,)`` number of stored suffix tokens of each generating row, without the current token.
        longest: Maximum of ``lengths`` as a Python number. Reading it requires no copy from the device.
        keys, values: Keys and values of suffixes by layer, as tensors ``(slots, KV heads, capacity, head size)``.
        states: States ``(slots, ...)`` of recurrent layers; see `posttrain.models.recurrent.states`.
        repeats: Number of calls in the current pass of attention layers that are used at several depths.
        unseen: Attention masks of this step by window and chunk size. Each mask is computed once for all layers.
        places: Indices of this step's keys in a layer's cache, by number of key-value heads and capacity. They are computed
            once for all layers.
        plan: Plan of the groups for compiled layers (`posttrain.rollouts.native.layers`).
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
        """Set the positions ``(n, t)`` of the tokens of the next forward pass."""
        self.positions, self.repeats = positions, 0

    def layer_of(self, module: Any) -> int:
        """Return the key of a layer's cache. Zamba 2 uses the same attention layers at several depths, all with layer index
        -1. Each call of such a layer therefore has a separate key.
        """
        if module.layer_idx >= 0:
            return module.layer_idx
        self.repeats += 1
        return -self.repeats

    def begin_rows(self, rows: slice, block: Block, prompt: int) -> None:
        """Set the recurrent states of new rows to the states at the end of their prompt."""
        if not self.states:
            self.states = [state.new_empty(self.slots, *state.shape[1:]) for state in block.states]
        index = block.prompts.index(prompt)
        for memory, state in zip(self.states, block.states, strict=True):
            memory[rows] = state[index]

    def begin_step(self, longest: int) -> None:
        """Begin a decoding step with one new position per row. ``longest`` is the maximum number of stored suffix tokens."""
        self.longest, self.unseen, self.places = longest, {}, {}

    @property
    def shared(self) -> int:
        """Number of tokens in the common prefix of all prompts."""
        return 0 if self.common is None else next(iter(self.common.keys.values())).shape[2]

    @property
    def width(self) -> int:
        """Number of columns of the widest block in use. The common prefix is not counted."""
        return max(next(iter(group.block.keys.values())).shape[2] for group in self.groups)

    @property
    def capacity(self) -> int:
        """Number of suffix positions that are allocated for each slot."""
        return next(iter(self.keys.values())).shape[2] if self.keys else 0

    def bias(self, sight: Sight, columns: int) -> Tensor:
        """Return the attention bias ``(n, 1, 1, shared + width + columns)``. It is 0 for keys to which a row attends, and
        minus infinity for other keys.
        """
        if sight not in self.unseen:
            window, chunk = sight
            device = self.lengths.device
            first, prompt, own = (torch.arange(n, device=device)[None] for n in (self.shared, self.width, columns))
            prefix, lengths = self.prefix[:, None], self.lengths[:, None]
            hidden = [(first < 0).expand(len(lengths), -1), prompt >= prefix, own > lengths]
            now = self.shared + prefix + lengths  # Position of the query.
            places = (first, self.shared + prompt, self.shared + prefix + own)
            if window is not None:
                hidden = [h | (now - place >= window) for h, place in zip(hidden, places, strict=True)]
            if chunk is not None:
                hidden = [h | (now // chunk != place // chunk) for h, place in zip(hidden, places, strict=True)]
            whole = torch.cat(hidden, 1)
            self.unseen[sight] = torch.zeros(whole.shape, dtype=torch.float32, device=device).masked_fill_(
                whole, -torch.inf
            )[:, None, None]
        return self.unseen[sight]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one new position per row. Return the used part of the layer's cache."""
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
        """Ensure that the cache has space for one more position of every row.

        Args:
            layer: Key of the layer's cache.
            key: Sample tensor ``(n, KV heads, 1, size)`` with the size and dtype of the layer's keys.
            value: Sample tensor with the size and dtype of the layer's values.
            blank: Whether to set unused positions to zero. Matrix products over all columns need this, because NaN in an
                unused column would change their result.
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
        """Compute the attention of one layer. The inputs have the shape ``(n, heads, t, size)``, and the output has the
        shape ``(n, t, heads, size)``.
        """
        if self.filling is not None:
            key, value = self.filling.whole(layer, key, value)
            return _prefill(self.filling, query, key, value, rule).transpose(1, 2)
        keys, values = self.write(layer, key, value)
        return _decode(self, layer, query, keys, values, rule)

    def suffix(self, row: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the keys and values of one row's suffix by layer, with the shape ``(1, KV heads, length, head size)``."""
        return {
            n: (self.keys[n][row : row + 1, :, :length], self.values[n][row : row + 1, :, :length]) for n in self.keys
        }

    def clear(self) -> None:
        """Free the memory of all suffixes."""
        self.keys, self.values, self.states = {}, {}, []

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the suffix and the recurrent states of row ``source`` to row ``target``, whose sequence has ended."""
        for memory in (self.keys, self.values):
            for tensor in memory.values():
                tensor[target, :, :length] = tensor[source, :, :length]
        for state in self.states:
            state[target] = state[source]


class _Running(threading.local):
    """Cache of the running call, per thread. Calls on different models can therefore run concurrently in one process."""

    store: Store | None = None


_running = _Running()


def current_store() -> Store:
    """Return the cache of the innermost engine call in this thread."""
    assert _running.store is not None, "native attention runs only inside plugged_in()"
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
    """Compute attention for transformers. The inputs have the shape ``(n, heads, t, size)``, and the output has the shape
    ``(n, t, heads, size)``.

    ``sliding_window=None`` means full attention, even if the module has an attribute ``sliding_window``, as every layer of
    EXAONE 4 has. The attribute is used only if the argument is not passed.
    """
    store = current_store()
    if sliding_window is ...:
        sliding_window = getattr(module, "sliding_window", None)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    chunk = None
    if module.config.model_type == llama4.MODEL_TYPE:
        query, chunk = llama4.placed(module, query, store.positions)
    rule = Rule(scale, softcap, sliding_window, chunk, s_aux)
    # Under autocast, the rotary embedding returns queries and keys in float32, but values are in half precision. Convert
    # queries and keys to the dtype of the values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return store.attend(store.layer_of(module), query, key, value, rule), None


def _prefill(fill: Fill, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Compute causal attention of the last positions. Padding is on the right, so no real token attends to padding."""
    width, whole = query.shape[2], key.shape[2]
    limit = min(rule.window or whole, rule.chunk or whole)
    if rule.plain and fill.span is None and width == whole <= limit:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=rule.scale, enable_gqa=True)
    hidden = fill.unseen((rule.window, rule.chunk), width, whole, query.device)
    if rule.plain and query.device.type == "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=rule.scale, enable_gqa=True)
    # Repeat keys and values for all query heads. CUDA has no kernel for a mask with shared key-value heads, and would store
    # all scores.
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    if rule.plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=rule.scale)
    scores = rule.capped(query @ key.transpose(2, 3) * rule.scale).float().masked_fill(hidden, -torch.inf)
    sinks = None if rule.sinks is None else rule.sinks[:, None, None]
    return rule.weights(scores, sinks).to(value.dtype) @ value


def _decode(store: Store, layer: int, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
    """Compute attention of one new query per row to the common prefix, the row's prompt, and the row's suffix. Return a
    tensor ``(n, 1, heads, size)``.
    """
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
    """Compute the scores ``(n, kv, r, width)`` between the queries of each row and the keys of the row's prompt."""
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
    """Rearrange ``(n, kv, r, c)`` to ``(kv, n r, c)``. Each head then has the queries of all rows in one matrix."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3])


def _by_all(x: Tensor, n: int) -> Tensor:
    """Rearrange ``(kv, n r, c)`` to ``(n, kv, r, c)``. This is the inverse of `_of_all`."""
    return x.view(x.shape[0], n, -1, x.shape[2]).transpose(0, 1)


@contextmanager
def plugged_in(model: nn.Module, store: Store) -> Iterator[None]:
    """Use `native_attention` with ``store`` in the text layers of ``model`` inside the context. On exit, restore the
    previous attention function.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, native_attention)
    previous, _running.store = _running.store, store
    try:
        with attention_renamed(model, lambda _: NAME):
            yield
    finally:
        _running.store = previous
