"""`PrefixCache`: keys and values of prompts, reused for common prefixes. `Prefiller`: prefill passes over prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain import plugins
from posttrain.models.heads import PassInputs
from posttrain.models.recurrent.states import States
from posttrain.rollouts.native.attention import Block, Fill, Store, one_row
from posttrain.rollouts.native.sampler import Prompt

if TYPE_CHECKING:
    from posttrain.rollouts.native.engine import NativeEngine

Layers = dict[int, tuple[Tensor, Tensor]]
# Type of a cached prefix. It consists of the number of tokens, the keys and values of these tokens, and the recurrent states
# after the last token.
Known = tuple[int, list[Layers], list[Tensor]]


@dataclass(slots=True, eq=False)
class Node:
    """Node of the radix tree. A node contains the tokens that follow the tokens of its parent node, with their keys and
    values.

    Attributes:
        tokens: Token ids of this node. Only the root has no tokens.
        layers: Keys and values by layer, each with the shape ``(1, KV heads, len(tokens), head size)``.
        states: States ``(1, ...)`` of recurrent layers after the last token. Empty: the states at this position are not
            cached.
        children: Child nodes by their first token.
        used: Number of the call in which the node was used last.
    """

    tokens: list[int]
    layers: Layers
    parent: Node | None = None
    states: list[Tensor] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict)
    used: int = 0

    @property
    def bytes(self) -> int:
        return _bytes([x for pair in self.layers.values() for x in pair]) + _bytes(self.states)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class PrefixCache:
    """Radix tree of cached sequences, with a maximum size in bytes. The least recently used nodes are removed first.

    A sequence is found by its first tokens. For example, the second turn of an episode begins with the whole first turn, and
    all prompts of a task may begin with the same system prompt. Reuse is exact as long as the weights do not change: equal
    tokens at equal positions then have equal keys and values. After a change of the weights, the caller must call `clear`.

    Args:
        most_bytes: Maximum memory in bytes.
        stateful: Whether the model has recurrent layers. If so, a sequence can only be continued from positions with cached
            recurrent states.
    """

    def __init__(self, most_bytes: int, *, stateful: bool = False) -> None:
        self.most_bytes, self.stateful = most_bytes, stateful
        self.clear()

    def clear(self) -> None:
        """Remove all cached sequences. Call this method after a change of the weights."""
        self.root = Node([], {})
        self.bytes = 0
        self.clock = 0

    def find(self, tokens: Sequence[int], most: int) -> tuple[int, list[Layers], list[Tensor]]:
        """Return the longest cached prefix of ``tokens``, up to ``most`` tokens.

        Returns:
            The length of the prefix, a list with the keys and values of its consecutive ranges of tokens, and the states of
            recurrent layers after the prefix. The tensors are views of the cache. Copy a tensor before you change it.
        """
        self.clock += 1
        layers: list[Layers] = []
        length, match = 0, (0, 0, [])
        for node, matched in self._walk(tokens[:most]):
            node.used = self.clock
            layers.append(_cut(node.layers, 0, matched))
            length += matched
            if not self.stateful or (node.states and matched == len(node.tokens)):
                match = length, len(layers), node.states
        return match[0], layers[: match[1]], match[2]

    def add(self, tokens: Sequence[int], layers: Sequence[Layers], states: list[Tensor]) -> None:
        """Cache the part of a sequence that is not cached yet.

        Args:
            tokens: All tokens of the sequence.
            layers: Keys and values of consecutive ranges of tokens, with ``len(tokens)`` positions in total. The tensors are
                copied.
            states: States of recurrent layers after the last token. These tensors are not copied. Empty: the model has no
                recurrent layers.
        """
        self.clock += 1
        node, length = self.root, 0
        for child, matched in self._walk(tokens):
            child.used = self.clock
            node, length = child, length + matched
            if matched < len(child.tokens):
                if length < len(tokens) or states:
                    node = self._split(child, matched)
                break
        if length < len(tokens):
            new = Node(list(tokens[length:]), _joined(layers, length), node, states, used=self.clock)
            if new.bytes > self.most_bytes:
                return
            node.children[new.tokens[0]] = new
            self.bytes += new.bytes
        elif states and not node.states:
            node.states = states
            self.bytes += _bytes(states)
        self._shrink()

    def _walk(self, tokens: Sequence[int]) -> Iterator[tuple[Node, int]]:
        """Yield the nodes along ``tokens``, each with its number of matching tokens. Only the last node may match partially."""
        node, at = self.root, 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            matched = match(child.tokens, tokens[at : at + len(child.tokens)])
            yield child, matched
            if matched < len(child.tokens):
                return
            node, at = child, at + matched

    def _split(self, node: Node, at: int) -> Node:
        """Split a node into two nodes, and return the first of the two. The tensors are copied, so that the memory of each
        node can be freed separately.
        """
        assert node.parent is not None
        head = Node(node.tokens[:at], _copied(_cut(node.layers, 0, at)), node.parent, used=node.used)
        node.parent.children[head.tokens[0]] = head
        node.layers = _copied(_cut(node.layers, at, len(node.tokens)))
        node.tokens, node.parent = node.tokens[at:], head
        head.children[node.tokens[0]] = node
        return head

    def _shrink(self) -> None:
        while self.bytes > self.most_bytes:
            leaves = sorted((n for n in self._nodes() if not n.children), key=lambda n: n.used)
            for leaf in leaves:
                if self.bytes <= self.most_bytes:
                    return
                assert leaf.parent is not None
                del leaf.parent.children[leaf.tokens[0]]
                self.bytes -= leaf.bytes

    def _nodes(self) -> Iterator[Node]:
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()


def match(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences.

    >>> match([1, 2, 3], [1, 2, 4, 5])
    2
    """
    size = min(len(a), len(b))
    if list(a[:size]) == list(b[:size]):
        return size
    return next(i for i in range(size) if a[i] != b[i])


def _cut(layers: Layers, start: int, stop: int) -> Layers:
    return {layer: (k[:, :, start:stop], v[:, :, start:stop]) for layer, (k, v) in layers.items()}


def _copied(layers: Layers) -> Layers:
    return {layer: (k.clone(), v.clone()) for layer, (k, v) in layers.items()}


def without(pieces: Sequence[Layers], skip: int) -> list[Layers]:
    """Return views of the keys and values without their first ``skip`` positions."""
    rest: list[Layers] = []
    for piece in pieces:
        length = next(iter(piece.values()))[0].shape[2]
        if skip < length:
            rest.append(_cut(piece, skip, length))
        skip = max(0, skip - length)
    return rest


def _joined(pieces: Sequence[Layers], skip: int) -> Layers:
    """Concatenate keys and values of consecutive ranges without the first ``skip`` positions, as a copy."""
    rest = without(pieces, skip)
    if len(rest) == 1:
        return _copied(rest[0])
    return {layer: tuple(torch.cat([piece[layer][i] for piece in rest], 2) for i in (0, 1)) for layer in rest[0]}  # type: ignore[misc]


# Minimum length of a common prefix, in tokens, for a separate prefill pass. A pass reads all weights. Reading takes about as
# long as computing this number of tokens.
STEM_LEAST = 32
# Index of a `Prompt` object that is a common prefix of several prompts, and not a prompt of the call.
STEM = -1


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """Prompts that are prefilled together into one block, possibly in several passes.

    Attributes:
        prompts: Prompts in batch order, or one common prefix with the index `STEM`.
        ids: Tokens ``(P, width)`` whose keys and values are computed, right-padded.
        block: Block that stores the keys and values.
        known: ``(P,)`` number of cached tokens of each prompt. The common prefix of all prompts is not counted.
        room: Number of columns of the block for cached tokens.
        uneven: Whether the prompts have different numbers of cached tokens.
        new: Number of tokens of each prompt that are computed.
        done: Number of columns of ``ids`` that have been computed.
    """

    prompts: list[Prompt]
    ids: Tensor
    block: Block
    known: Tensor
    room: int
    uneven: bool
    new: list[int]
    done: int = 0


class Prefiller:
    """Computes the keys and values of the prompts of one call.

    Args:
        engine: Engine with the model.
        store: KV cache of the call.
        prompts: Distinct prompts of the call. Their tokens do not include the common prefix of all prompts.
        shared: Common prefix of all prompts.
        kept: Cache that is searched for prefixes of the prompts.
        keeping: Whether computed keys and values are added to ``kept``.
    """

    def __init__(
        self,
        engine: NativeEngine,
        store: Store,
        prompts: list[Prompt],
        shared: list[int],
        kept: PrefixCache,
        *,
        keeping: bool,
    ) -> None:
        self.engine, self.store, self.prompts, self.shared = engine, store, prompts, shared
        self.kept, self.keeping = kept, keeping
        self.device = next(engine.model.parameters()).device
        self.work: PrefillBatch | None = None
        self.computed = self.reused = 0

    def begin(self) -> None:
        """Compute the keys and values of the common prefix of all prompts."""
        if not self.shared:
            return
        block = Block([0], torch.tensor([len(self.shared)], device=self.device))
        cached, layers, states = self.kept.find(self.shared, len(self.shared))
        if cached:
            _fill_rows(block, [layers], cached)
            block.states = one_row(states, 0)
        self.reused += cached
        ids = torch.tensor([self.shared], device=self.device)
        for start in range(cached, ids.shape[1], self.engine.prefill_tokens):
            piece = ids[:, start : start + self.engine.prefill_tokens]
            past = [_of(block)] if block.keys else []
            fill = self.forward(piece, past, torch.tensor([start], device=self.device), block.states, [piece.shape[1]])
            block.append(fill.keys, fill.values)
        self.store.common = block
        if self.keeping:
            self.kept.add(self.shared, [_of(block)], block.states_of(0))

    def ready(self, prompt: Prompt) -> bool:
        """Return whether a prompt has been computed completely, so that its completions can start."""
        return prompt.block is not None and (self.work is None or prompt not in self.work.prompts)

    def step(self, wanted: Prompt, free: int) -> None:
        """Run one prefill pass for the prompt ``wanted``. Further prompts are included if they fit into the pass, and if
        their completions fit into ``free`` rows.
        """
        if self.work is None:
            self.work = self._stem(wanted) or self._gather(wanted, free)
        work = self.work
        seen = self._seen(work)
        width = max(1, self.engine.prefill_tokens // len(work.prompts)) if seen is None else work.ids.shape[1]
        piece = work.ids[:, work.done : work.done + width]
        past = [] if self.store.common is None else [_of(self.store.common)]
        past += [_of(work.block)] if work.block.keys else []
        begin = work.known + work.done + len(self.shared)
        cached = work.known if work.uneven else None
        lengths = [min(max(n - work.done, 0), piece.shape[1]) for n in work.new]
        fill = self.forward(piece, past, begin, work.block.states, lengths, known=cached, room=work.room, seen=seen)
        work.block.append(fill.keys, fill.values)
        work.done += piece.shape[1]
        if work.done == work.ids.shape[1]:
            self.work = None
            self._finish(work, fill.states, work.done - piece.shape[1])

    def _seen(self, work: PrefillBatch) -> PassInputs | None:
        """Return the image inputs of the pass. Either all prompts of a pass have images, or no prompt has images."""
        if not work.prompts[0].pictures:
            return None
        lengths, pictures = work.block.lengths.tolist(), [prompt.pictures for prompt in work.prompts]
        return plugins.module("extensions.images.encoder").prompt_view(self.engine.model, work.ids, lengths, pictures)

    def _finish(self, work: PrefillBatch, hidden: Tensor, before: int) -> None:
        """Finish a prefill: remove gaps in the block, compute the logits of the first sampled tokens, and add prefixes to
        the cache.
        """
        if work.uneven:
            work.block.close_gaps(work.known, work.room)
        if work.prompts[0].index == STEM:
            self._keep_stem(work.prompts[0], work.block)
            return
        last = work.block.lengths - work.known - 1 - before
        logits = self.engine.logits(hidden[torch.arange(len(work.prompts), device=self.device), last])
        for prompt, row in zip(work.prompts, logits, strict=True):
            prompt.logits = row
            if self.keeping and not prompt.pictures:
                self.kept.add(self.shared + prompt.ids, self.layers_of(prompt), work.block.states_of(prompt.index))

    def layers_of(self, prompt: Prompt) -> list[Layers]:
        """Return the keys and values of a whole prompt, as a list with one item per consecutive range of tokens."""
        assert prompt.block is not None
        own = prompt.block.row(prompt.index, len(prompt.ids))
        return [own] if self.store.common is None else [_of(self.store.common), own]

    def forward(
        self,
        ids: Tensor,
        past: list[Layers],
        begin: Tensor,
        states: list[Tensor],
        lengths: list[int],
        *,
        known: Tensor | None = None,
        room: int = 0,
        seen: PassInputs | None = None,
    ) -> Fill:
        """Run one forward pass over ``ids (P, width)``. The first token of row p has position ``begin[p]``.

        Recurrent layers start from ``states``, process ``lengths[p]`` tokens of row p, and update the states in place.
        ``known (P,)`` is the number of valid columns among the first ``room`` columns. None: all of these columns are valid.
        """
        positions = begin[:, None] + torch.arange(ids.shape[1], device=self.device)
        inputs: dict[str, Any] = {}
        if seen is not None:
            positions = seen.position_ids
            inputs = seen.inputs(self.engine.inner) if seen.inputs is not None else {}
        if self.engine.recurrent:
            inputs["recurrent_states"] = States(states, lengths)
        shared = len(self.shared) if self.store.common is not None else 0
        self.store.begin_pass(positions)
        self.store.filling = fill = Fill(past, shared=shared, known=known, room=room)
        fill.span = None if seen is None else seen.span
        try:
            output = self.engine.trunk(input_ids=ids, position_ids=positions, use_cache=False, **inputs)
            fill.states = output.last_hidden_state
        finally:
            self.store.filling = None
        self.computed += ids.numel()
        return fill

    # Cached prefixes -------------------------------------------------------------------------------------------------

    def _known(self, prompt: Prompt) -> Known:
        """Return the cached part of a prompt after the common prefix of all prompts. At least one token is left to be
        computed.
        """
        common = [] if self.store.common is None else self.store.common.states
        if not self.kept.bytes or prompt.pictures:
            return 0, [], common
        first = len(self.shared)
        cached, layers, states = self.kept.find(self.shared + prompt.ids, first + len(prompt.ids) - 1)
        return (cached - first, without(layers, first), states) if cached > first else (0, [], common)

    def _stem(self, wanted: Prompt) -> PrefillBatch | None:
        """Create a prefill of the prefix that a prompt shares with another prompt. Return None if the prefix is too short
        for a separate pass.
        """
        shares, wanted.shares = wanted.shares, 0
        if shares < STEM_LEAST:
            return None
        stem = Prompt(STEM, wanted.ids[:shares])
        prefix = self._known(stem)
        return self._prefill_batch([stem], [prefix]) if shares - prefix[0] >= STEM_LEAST else None

    def _keep_stem(self, stem: Prompt, block: Block) -> None:
        stem.block = block
        tokens = self.shared + stem.ids
        self.kept.add(tokens, self.layers_of(stem), block.states_of(STEM))
        # The cache is full, so the prefix was not added. Each prompt then computes the prefix itself.
        if self.kept.find(tokens, len(tokens))[0] < len(tokens):
            for prompt in self.prompts:
                prompt.shares = 0

    def _gather(self, wanted: Prompt, free: int) -> PrefillBatch:
        """Select the prompt ``wanted``, and as many of the following prompts as fit into the same pass."""
        chosen, prefixes = [wanted], [self._known(wanted)]
        width, rows = len(wanted.ids) - prefixes[0][0], wanted.waiting
        for prompt in itertools.islice(self.prompts, wanted.index + 1, None):
            if prompt.waiting == 0:
                continue
            if rows >= free or prompt.block is not None or prompt.shares >= STEM_LEAST:
                break
            if bool(prompt.pictures) != bool(wanted.pictures):
                break
            prefix = self._known(prompt)
            wider = max(width, len(prompt.ids) - prefix[0])
            if wider * (len(chosen) + 1) > self.engine.prefill_tokens:
                break
            chosen.append(prompt)
            prefixes.append(prefix)
            width, rows = wider, rows + prompt.waiting
        return self._prefill_batch(chosen, prefixes)

    def _prefill_batch(self, prompts: list[Prompt], prefixes: list[Known]) -> PrefillBatch:
        new = [p.ids[cached:] for p, (cached, *_) in zip(prompts, prefixes, strict=True)]
        width, room = max(map(len, new)), max(cached for cached, *_ in prefixes)
        pad = self.engine.pad_token_id
        ids = torch.tensor([line + [pad] * (width - len(line)) for line in new], device=self.device)
        block = Block([p.index for p in prompts], torch.tensor([len(p.ids) for p in prompts], device=self.device))
        if room:
            _fill_rows(block, [layers for _, layers, _ in prefixes], room)
        block.states = _joined_states([states for *_, states in prefixes])
        for prompt in prompts:
            prompt.block = block
        counts = [cached for cached, *_ in prefixes]
        self.reused += sum(counts)
        cached = torch.tensor(counts, device=self.device)
        return PrefillBatch(prompts, ids, block, cached, room, uneven=min(counts) < room, new=list(map(len, new)))


def _joined_states(rows: list[list[Tensor]]) -> list[Tensor]:
    """Concatenate the states of several rows as a copy. The states of a row without cached states are zero."""
    sample = next(filter(None, rows), [])
    return [torch.cat([row[i] if row else torch.zeros_like(state) for row in rows]) for i, state in enumerate(sample)]


def _of(block: Block) -> Layers:
    return {layer: (block.keys[layer], block.values[layer]) for layer in block.keys}


def _fill_rows(block: Block, rows: list[list[Layers]], room: int) -> None:
    """Copy the cached tokens of each prompt into a new block, right-padded to ``room`` columns."""
    sample = next(piece for row in rows for piece in row)
    for layer, (key, value) in sample.items():
        for memory, of, source in ((block.keys, 0, key), (block.values, 1, value)):
            memory[layer] = new = source.new_zeros(len(rows), source.shape[1], room, source.shape[3])
            for i, row in enumerate(rows):
                if row:
                    cached = torch.cat([piece[layer][of] for piece in row], 2)
                    new[i, :, : cached.shape[2]] = cached[0]


def mark_stems(prompts: list[Prompt]) -> None:
    """Store in each prompt the length of the longest prefix that it shares with another prompt."""
    order = sorted((p for p in prompts if not p.pictures), key=lambda p: p.ids)
    for a, b in itertools.pairwise(order):
        shared = min(match(a.ids, b.ids), len(a.ids) - 1, len(b.ids) - 1)
        a.shares, b.shares = max(a.shares, shared), max(b.shares, shared)
