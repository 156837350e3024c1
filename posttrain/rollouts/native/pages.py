"""Keys and values in pages at fixed addresses, and what a forward call over them sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["PAGE", "PagedStore", "Pages", "PieceView", "Rule", "StepView", "masked_attention"]

# Tokens of a page: half a page is lost behind each prompt and each completion, and FlexAttention wants blocks of at least 64.
PAGE = 64


@dataclass(frozen=True, slots=True)
class Rule:
    """What one layer's attention is, besides its operands.

    Attributes:
        scale: Multiplies the products of queries and keys.
        softcap: Scores are squeezed to this range; None is off.
        window: Positions that a token may look back, itself included; None is all.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None


class Pages:
    """Page 0 is scratch: rows that nobody reads write there.

    Args:
        count: Pages, the scratch page included.
        size: Tokens of a page.
    """

    def __init__(self, count: int, size: int = PAGE) -> None:
        self.count, self.size = count, size
        self.keys: dict[int, Tensor] = {}  # By layer, (KV heads, count x size, head size).
        self.values: dict[int, Tensor] = {}
        self.allocations = 0  # Addresses are the same while this number is.
        self.free: list[int] = []
        self.users: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Nobody uses any page."""
        self.free = list(range(self.count - 1, 0, -1))
        self.users = [0] * self.count

    def erase(self) -> None:
        """Forget what is written: a NaN in a page that is masked out would still spoil a product with it."""
        for memory in (*self.keys.values(), *self.values.values()):
            memory.zero_()

    def take(self, count: int) -> list[int]:
        """As many pages, each with one user; the caller knows that they are free."""
        taken = [self.free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, pages: list[int]) -> None:
        """One more user of each."""
        for page in pages:
            self.users[page] += 1

    def give_back(self, pages: list[int]) -> list[int]:
        """One user less of each; returns those that nobody uses any more."""
        freed = []
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                freed.append(page)
        self.free.extend(freed)
        return freed

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``(T, KV heads, size)`` keys and values at ``places (T,)``; returns the layer's whole memory."""
        for memory, new in ((self.keys, key), (self.values, value)):
            if layer not in memory or memory[layer].dtype != new.dtype:
                memory[layer] = new.new_zeros(new.shape[1], self.count * self.size, new.shape[2])
                self.allocations += 1
            memory[layer].index_copy_(1, places, new.transpose(0, 1))
        return self.keys[layer], self.values[layer]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, rule: Rule) -> Tensor:
    """Attention with the softmax in float32, key-value heads not repeated.

    Args:
        query: ``(n, heads, t, size)``.
        key: ``(n, KV heads, c, size)``.
        value: The same of values.
        hidden: ``(n, t, c)`` true where a query may not look.
        rule: Of the layer.

    Returns:
        ``(n, t, heads, size)``.
    """
    n, heads, t, size = query.shape
    kv = key.shape[1]
    q = (query * rule.scale).reshape(n, kv, heads // kv * t, size)
    scores = (q @ key.transpose(2, 3)).float().view(n, kv, heads // kv, t, -1)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1).to(value.dtype)
    out = weights.reshape(n, kv, heads // kv * t, -1) @ value
    return out.view(n, heads, t, -1).transpose(1, 2).to(query.dtype)


@dataclass(slots=True)
class StepView:
    """One decoding step: every row adds a token to its suffix and looks at its prompt and its suffix.

    Attributes:
        places: ``(b,)`` int64 where the new keys and values are written.
        prompt_pages: ``(b, P)`` int64 pages of each row's prompt, in order; void entries are 0.
        prompt: ``(b,)`` int32 tokens of the prompt.
        suffix_pages: ``(b, Q)`` int64 pages of each row's suffix.
        suffix: ``(b,)`` int32 tokens of the suffix, the new one included.
        tiles: ``(b, R)`` int32 rows that read the same prompt, -1 where there is none.
        size: Tokens of a page.
        attention: The product over all this, one of `ATTENTIONS`.
        made: What the product computes once for all layers.
    """

    places: Tensor
    prompt_pages: Tensor
    prompt: Tensor
    suffix_pages: Tensor
    suffix: Tensor
    tiles: Tensor
    size: int
    attention: Callable[..., Tensor]
    made: dict[Any, Any] = field(default_factory=dict)

    def columns(self, window: int | None) -> tuple[Tensor, Tensor]:
        """``(b, c)`` places of all keys that some row may see, and where it may not; c from the tables' widths."""
        if "columns" not in self.made:
            offsets = torch.arange(self.size, device=self.places.device)
            both = torch.cat([self.prompt_pages, self.suffix_pages], 1)
            self.made["columns"] = (both[:, :, None] * self.size + offsets).flatten(1)
        if window not in self.made:
            device, size = self.places.device, self.size
            index = torch.arange(self.prompt_pages.shape[1] * size, device=device)[None]
            own = torch.arange(self.suffix_pages.shape[1] * size, device=device)[None]
            prompt, suffix = self.prompt[:, None], self.suffix[:, None]
            hidden = torch.cat([index >= prompt, own >= suffix], 1)
            if window is not None:
                place = torch.cat([index.expand(len(prompt), -1), prompt + own], 1)
                hidden = hidden | (prompt + suffix - 1 - place >= window)
            self.made[window] = hidden
        return self.made["columns"], self.made[window]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        return self.attention(query[:, :, 0], keys, values, self, rule)[:, None]


@dataclass(slots=True)
class PieceView:
    """A piece of some prompts, or of a suffix that is computed again.

    Attributes:
        places: ``(n t,)`` int64 where the new keys and values are written; 0 for padding.
        positions: ``(n, t)`` int64 of the new tokens.
        columns: ``(n, c)`` int64 places of everything they may see, themselves included.
        seen_at: ``(n, c)`` int64 positions of the columns; a huge one where there is nothing.
        fresh: The new tokens see themselves only.
        hidden: By sliding window, where a token may not look; computed once for all layers.
    """

    places: Tensor
    positions: Tensor
    columns: Tensor
    seen_at: Tensor
    fresh: bool
    hidden: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """``(n, heads, t, size)`` queries against the pages; ``key`` and ``value`` are the new ones."""
        if self.fresh and rule.softcap is None and (rule.window is None or query.shape[2] <= rule.window):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=rule.scale, enable_gqa=True)
            return out.transpose(1, 2)
        if rule.window not in self.hidden:
            distance = self.positions[:, :, None] - self.seen_at[:, None, :]
            hidden = distance < 0
            self.hidden[rule.window] = hidden if rule.window is None else hidden | (distance >= rule.window)
        hidden = self.hidden[rule.window]
        past, worth = keys[:, self.columns].transpose(0, 1), values[:, self.columns].transpose(0, 1)
        if rule.softcap is not None:
            return masked_attention(query, past, worth, hidden, rule)
        out = F.scaled_dot_product_attention(
            query, past, worth, attn_mask=~hidden[:, None], scale=rule.scale, enable_gqa=True
        )
        return out.transpose(1, 2)


class PagedStore:
    """The memory behind `posttrain.rollouts.native.attention.native_attention` on the graph path.

    Attributes:
        pages: The memory.
        view: What the running forward call is about.
        rules: Of the layers that were called.
        heads: Of their queries.
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.rules: dict[int, Rule] = {}
        self.heads = 0
        self.view: StepView | PieceView | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        """Attention of one layer, ``(n, heads, t, size)`` in and ``(n, t, heads, size)`` out."""
        view = self.view
        assert view is not None
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        keys, values = self.pages.write(layer, view.places, *flat)
        rule = self.rules[layer] = Rule(scale, softcap, window)
        self.heads = query.shape[1]
        if isinstance(view, PieceView):
            return view.attend(query, key, value, keys, values, rule)
        return view.attend(query, keys, values, rule)
