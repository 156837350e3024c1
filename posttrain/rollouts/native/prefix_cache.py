"""Prompts are computed once: prefill, and the keys and values that rollouts of equal prompts share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from posttrain.models.recurrent.states import States
from posttrain.models.vision import VisionView, prompt_view
from posttrain.rollouts.native.attention import Block, Fill, Store, one_row
from posttrain.rollouts.native.sampler import Prompt

if TYPE_CHECKING:
    from posttrain.rollouts.native.engine import NativeEngine

Layers = dict[int, tuple[Tensor, Tensor]]
# Number of tokens that are known of a prompt, their keys and values, and the states of recurrent layers after them.
Known = tuple[int, list[Layers], list[Tensor]]
SAMPLES = 64  # Numbers of each parameter that tell whether someone wrote it behind autograd's back.


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow those of the parent, with their keys and values.

    Attributes:
        tokens: At least one, except at the root.
        layers: Per layer keys and values ``(1, KV heads, len(tokens), head size)``.
        states: ``(1, ...)`` states of recurrent layers after the last token; empty if they are not known there.
        children: By first token.
        used: When it was last read or written, in calls.
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


class Kept:
    """A radix tree over token ids, bounded in bytes; what was not used for the longest time goes first.

    A sequence is found by its beginning, however long: turn two of an episode begins with all of turn one, prompts of one
    task with its system prompt. Nothing is approximate: equal tokens at equal positions under equal weights have equal
    keys and values, and whoever changes the weights calls `clear`.

    Args:
        most_bytes: Held at most.
        stateful: The model has recurrent layers, so a sequence can only continue where their states are known.
    """

    def __init__(self, most_bytes: int, *, stateful: bool = False) -> None:
        self.most_bytes, self.stateful = most_bytes, stateful
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights are others now."""
        self.root = Node([], {})
        self.bytes = 0
        self.clock = 0

    def find(self, tokens: Sequence[int], most: int) -> tuple[int, list[Layers], list[Tensor]]:
        """The longest known beginning of ``tokens``, at most ``most`` of them.

        Returns:
            Its length, keys and values whose lengths add up to it, in order, and the states of recurrent layers after it (views:
            copy what is to be changed).
        """
        self.clock += 1
        layers: list[Layers] = []
        length, found = 0, (0, 0, [])
        for node, matched in self._walk(tokens[:most]):
            node.used = self.clock
            layers.append(_cut(node.layers, 0, matched))
            length += matched
            if not self.stateful or (node.states and matched == len(node.tokens)):
                found = length, len(layers), node.states
        return found[0], layers[: found[1]], found[2]

    def add(self, tokens: Sequence[int], layers: Sequence[Layers], states: list[Tensor]) -> None:
        """Keep what is not known yet of a sequence.

        Args:
            tokens: From the first position on.
            layers: Keys and values whose lengths add up to ``len(tokens)``, in order; copied.
            states: States of recurrent layers after the last token, not copied; empty for models without.
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
        """Nodes along ``tokens`` and how many of their tokens agree; only the last may agree in part."""
        node, at = self.root, 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            matched = match(child.tokens, tokens[at : at + len(child.tokens)])
            yield child, matched
            if matched < len(child.tokens):
                return
            node, at = child, at + matched

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two and return the first half; both own their memory, so that either can go alone."""
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
    """How many tokens two sequences begin with in common.

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
    """The pieces without their first ``skip`` positions, views of them."""
    rest: list[Layers] = []
    for piece in pieces:
        length = next(iter(piece.values()))[0].shape[2]
        if skip < length:
            rest.append(_cut(piece, skip, length))
        skip = max(0, skip - length)
    return rest


def _joined(pieces: Sequence[Layers], skip: int) -> Layers:
    """One piece of many, without the first ``skip`` positions, in memory of its own."""
    rest = without(pieces, skip)
    if len(rest) == 1:
        return _copied(rest[0])
    return {layer: tuple(torch.cat([piece[layer][i] for piece in rest], 2) for i in (0, 1)) for layer in rest[0]}  # type: ignore[misc]


def fingerprint(model: nn.Module) -> tuple:
    """Changes whenever the weights do, or the adapters that apply: optimiser steps, loaded values, swapped tensors.

    Autograd counts writes to each tensor, but not those through ``.data`` or by foreign kernels: some numbers of each
    parameter are compared too.
    """
    written, samples = [], []
    for parameter in model.parameters():
        written.append((parameter.data_ptr(), parameter._version))
        numbers = parameter.detach().flatten()
        samples.append(numbers[:: max(1, numbers.numel() // SAMPLES)].double().sum())
    adapters = [
        (str(m.active_adapters), m.disable_adapters, str(m.merged_adapters))
        for m in model.modules()
        if isinstance(m, BaseTunerLayer)
    ]
    return (tuple(written), tuple(torch.stack(samples).tolist()) if samples else (), tuple(adapters))


STEM_LEAST = 32  # A pass of its own costs about as much as this many tokens on top of another: it reads all weights.
STEM = -1  # Index of what several prompts begin with, itself no prompt of the call.


@dataclass(slots=True, eq=False)
class Filling:
    """Prompts on their way into a block, in pieces.

    Attributes:
        prompts: In batch order; a single one of index `STEM` for what several prompts begin with.
        ids: ``(P, width)`` tokens to compute, right-padded.
        block: Where their keys and values go.
        known: ``(P,)`` tokens of each that are in the block already, behind those that all prompts begin with.
        room: Columns they take.
        uneven: Whether fewer of one prompt are known than of another.
        new: Number of tokens to compute of each prompt.
        done: Columns of ``ids`` computed so far.
    """

    prompts: list[Prompt]
    ids: Tensor
    block: Block
    known: Tensor
    room: int
    uneven: bool
    new: list[int]
    done: int = 0


class Filler:
    """Fills the blocks of one call.

    Args:
        engine: Whose model computes.
        store: The call's memory.
        prompts: Different prompts of the call, without what all begin with.
        shared: What all begin with.
        kept: Where known beginnings are found.
        keeping: Whether what is computed goes there.
    """

    def __init__(
        self, engine: NativeEngine, store: Store, prompts: list[Prompt], shared: list[int], kept: Kept, *, keeping: bool
    ) -> None:
        self.engine, self.store, self.prompts, self.shared = engine, store, prompts, shared
        self.kept, self.keeping = kept, keeping
        self.device = next(engine.model.parameters()).device
        self.work: Filling | None = None
        self.computed = self.reused = 0

    def begin(self) -> None:
        """Compute what all prompts begin with."""
        if not self.shared:
            return
        block = Block([0], torch.tensor([len(self.shared)], device=self.device))
        known, layers, states = self.kept.find(self.shared, len(self.shared))
        if known:
            _fill_rows(block, [layers], known)
            block.states = one_row(states, 0)
        self.reused += known
        ids = torch.tensor([self.shared], device=self.device)
        for start in range(known, ids.shape[1], self.engine.prefill_tokens):
            piece = ids[:, start : start + self.engine.prefill_tokens]
            past = [_of(block)] if block.keys else []
            fill = self.forward(piece, past, torch.tensor([start], device=self.device), block.states, [piece.shape[1]])
            block.append(fill.keys, fill.values)
        self.store.common = block
        if self.keeping:
            self.kept.add(self.shared, [_of(block)], block.states_of(0))

    def ready(self, prompt: Prompt) -> bool:
        """Whether completions of this prompt can begin."""
        return prompt.block is not None and (self.work is None or prompt not in self.work.prompts)

    def step(self, wanted: Prompt, free: int) -> None:
        """Compute a piece of this prompt, with as many after it as fit one pass and ``free`` completions."""
        if self.work is None:
            self.work = self._stem(wanted) or self._gather(wanted, free)
        work = self.work
        seen = self._seen(work)
        width = max(1, self.engine.prefill_tokens // len(work.prompts)) if seen is None else work.ids.shape[1]
        piece = work.ids[:, work.done : work.done + width]
        past = [] if self.store.common is None else [_of(self.store.common)]
        past += [_of(work.block)] if work.block.keys else []
        begin = work.known + work.done + len(self.shared)
        known = work.known if work.uneven else None
        lengths = [min(max(n - work.done, 0), piece.shape[1]) for n in work.new]
        fill = self.forward(piece, past, begin, work.block.states, lengths, known=known, room=work.room, seen=seen)
        work.block.append(fill.keys, fill.values)
        work.done += piece.shape[1]
        if work.done == work.ids.shape[1]:
            self.work = None
            self._finish(work, fill.states, work.done - piece.shape[1])

    def _seen(self, work: Filling) -> VisionView | None:
        """What pictures change in the pass; all prompts of a work have some, or none has."""
        if not work.prompts[0].pictures:
            return None
        return prompt_view(self.engine.model, work.ids, work.block.lengths.tolist(), [p.pictures for p in work.prompts])

    def _finish(self, work: Filling, hidden: Tensor, before: int) -> None:
        """All of it is computed: close the gaps, note the logits of first tokens, keep what others may begin with."""
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
        """Keys and values of a whole prompt, in pieces."""
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
        seen: VisionView | None = None,
    ) -> Fill:
        """One pass over ``ids (P, width)``, of which row p stands at ``begin[p]`` and what follows.

        Recurrent layers continue from ``states`` with ``lengths[p]`` tokens of row p, and change the states in place.

        ``known (P,)`` says of how many of the first ``room`` columns each row has something; None: of all of them.
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

    # What is known already ---------------------------------------------------------------------------------------

    def _known(self, prompt: Prompt) -> Known:
        """Tokens behind the common ones whose keys and values are at hand; at least one is left to compute."""
        common = [] if self.store.common is None else self.store.common.states
        if not self.kept.bytes or prompt.pictures:
            return 0, [], common
        first = len(self.shared)
        known, layers, states = self.kept.find(self.shared + prompt.ids, first + len(prompt.ids) - 1)
        return (known - first, without(layers, first), states) if known > first else (0, [], common)

    def _stem(self, wanted: Prompt) -> Filling | None:
        """What this prompt and another begin with, where it is worth a pass of its own."""
        shares, wanted.shares = wanted.shares, 0
        if shares < STEM_LEAST:
            return None
        stem = Prompt(STEM, wanted.ids[:shares])
        known = self._known(stem)
        return self._filling([stem], [known]) if shares - known[0] >= STEM_LEAST else None

    def _keep_stem(self, stem: Prompt, block: Block) -> None:
        stem.block = block
        tokens = self.shared + stem.ids
        self.kept.add(tokens, self.layers_of(stem), block.states_of(STEM))
        if self.kept.find(tokens, len(tokens))[0] < len(tokens):  # No room: the others compute it themselves.
            for prompt in self.prompts:
                prompt.shares = 0

    def _gather(self, wanted: Prompt, free: int) -> Filling:
        """Take this prompt and those after it that fit one pass."""
        chosen, prefixes = [wanted], [self._known(wanted)]
        width, rows = len(wanted.ids) - prefixes[0][0], wanted.waiting
        for prompt in itertools.islice(self.prompts, wanted.index + 1, None):
            if prompt.waiting == 0:
                continue
            if rows >= free or prompt.block is not None or prompt.shares >= STEM_LEAST:
                break
            if bool(prompt.pictures) != bool(wanted.pictures):
                break
            known = self._known(prompt)
            wider = max(width, len(prompt.ids) - known[0])
            if wider * (len(chosen) + 1) > self.engine.prefill_tokens:
                break
            chosen.append(prompt)
            prefixes.append(known)
            width, rows = wider, rows + prompt.waiting
        return self._filling(chosen, prefixes)

    def _filling(self, prompts: list[Prompt], prefixes: list[Known]) -> Filling:
        new = [p.ids[known:] for p, (known, *_) in zip(prompts, prefixes, strict=True)]
        width, room = max(map(len, new)), max(known for known, *_ in prefixes)
        pad = self.engine.pad_token_id
        ids = torch.tensor([line + [pad] * (width - len(line)) for line in new], device=self.device)
        block = Block([p.index for p in prompts], torch.tensor([len(p.ids) for p in prompts], device=self.device))
        if room:
            _fill_rows(block, [layers for _, layers, _ in prefixes], room)
        block.states = _joined_states([states for *_, states in prefixes])
        for prompt in prompts:
            prompt.block = block
        counts = [known for known, *_ in prefixes]
        self.reused += sum(counts)
        known = torch.tensor(counts, device=self.device)
        return Filling(prompts, ids, block, known, room, uneven=min(counts) < room, new=list(map(len, new)))


def _joined_states(rows: list[list[Tensor]]) -> list[Tensor]:
    """Return states of several rows in memory of their own; an empty row has zeros."""
    sample = next(filter(None, rows), [])
    return [torch.cat([row[i] if row else torch.zeros_like(one) for row in rows]) for i, one in enumerate(sample)]


def _of(block: Block) -> Layers:
    return {layer: (block.keys[layer], block.values[layer]) for layer in block.keys}


def _fill_rows(block: Block, rows: list[list[Layers]], room: int) -> None:
    """Begin a block with what is known of each prompt, right-padded to ``room`` columns."""
    sample = next(piece for row in rows for piece in row)
    for layer, (key, value) in sample.items():
        for memory, of, one in ((block.keys, 0, key), (block.values, 1, value)):
            memory[layer] = new = one.new_zeros(len(rows), one.shape[1], room, one.shape[3])
            for i, row in enumerate(rows):
                if row:
                    known = torch.cat([piece[layer][of] for piece in row], 2)
                    new[i, :, : known.shape[2]] = known[0]


def mark_stems(prompts: list[Prompt]) -> None:
    """Note of each prompt how much of it the one most like it begins with too."""
    order = sorted((p for p in prompts if not p.pictures), key=lambda p: p.ids)
    for a, b in itertools.pairwise(order):
        shared = min(match(a.ids, b.ids), len(a.ids) - 1, len(b.ids) - 1)
        a.shares, b.shares = max(a.shares, shared), max(b.shares, shared)
