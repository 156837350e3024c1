"""Keys and values that outlive the sequence they were computed for, found again by the tokens they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Kept", "Layers", "fingerprint", "match", "without"]

Layers = dict[int, tuple[Tensor, Tensor]]
SAMPLES = 64  # Numbers of each parameter that tell whether someone wrote it behind autograd's back.


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow those of the parent, with their keys and values.

    Attributes:
        tokens: At least one, except at the root.
        layers: Per layer keys and values ``(1, KV heads, len(tokens), head size)``.
        children: By first token.
        used: When it was last read or written, in calls.
    """

    tokens: list[int]
    layers: Layers
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    used: int = 0

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for pair in self.layers.values() for x in pair)


class Kept:
    """A radix tree over token ids, bounded in bytes; what was not used for the longest time goes first.

    A sequence is found by its beginning, however long: turn two of an episode begins with all of turn one, prompts of one
    task with its system prompt. Nothing is approximate: equal tokens at equal positions under equal weights have equal
    keys and values, and whoever changes the weights calls `clear`.

    Args:
        most_bytes: Held at most.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights are others now."""
        self.root = Node([], {})
        self.bytes = 0
        self.clock = 0

    def find(self, tokens: Sequence[int], most: int) -> tuple[int, list[Layers]]:
        """The longest known beginning of ``tokens``, at most ``most`` of them.

        Returns:
            Its length, and keys and values whose lengths add up to it, in order (views: copy what is to be changed).
        """
        self.clock += 1
        found: list[Layers] = []
        length = 0
        for node, matched in self._walk(tokens[:most]):
            node.used = self.clock
            found.append(_cut(node.layers, 0, matched))
            length += matched
        return length, found

    def add(self, tokens: Sequence[int], layers: Sequence[Layers]) -> None:
        """Keep what is not known yet of a sequence.

        Args:
            tokens: From the first position on.
            layers: Keys and values whose lengths add up to ``len(tokens)``, in order; copied.
        """
        self.clock += 1
        node, length = self.root, 0
        for child, matched in self._walk(tokens):
            child.used = self.clock
            node, length = child, length + matched
            if matched < len(child.tokens):
                if length < len(tokens):
                    node = self._split(child, matched)
                break
        if length == len(tokens):
            return
        new = Node(list(tokens[length:]), _joined(layers, length), node, used=self.clock)
        if new.bytes > self.most_bytes:
            return
        node.children[new.tokens[0]] = new
        self.bytes += new.bytes
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
        (str(m.active_adapters), bool(getattr(m, "disable_adapters", False)), str(getattr(m, "merged_adapters", "")))
        for m in model.modules()
        if hasattr(m, "base_layer") and hasattr(m, "active_adapters")
    ]
    return (tuple(written), tuple(torch.stack(samples).tolist()) if samples else (), tuple(adapters))
