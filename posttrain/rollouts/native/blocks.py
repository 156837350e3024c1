"""Prompts' keys and values, and which live rows read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Block", "Group"]


@dataclass(slots=True)
class Block:
    """Keys and values of prompts that were prefilled together, right-padded to the longest.

    Attributes:
        prompts: Numbers of the prompts, in batch order.
        lengths: ``(P,)`` tokens of each.
        keys, values: Per layer ``(P, KV heads, width, head size)``.
    """

    prompts: list[int]
    lengths: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

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

    def keep(self, prompts: list[int]) -> None:
        """Free the memory of all other prompts."""
        index = torch.tensor([self.prompts.index(p) for p in prompts], device=self.lengths.device)
        self.prompts, self.lengths = prompts, self.lengths[index]
        width = int(self.lengths.max())
        for memory in (self.keys, self.values):
            for layer, tensor in memory.items():
                memory[layer] = tensor[index, :, :width]


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
