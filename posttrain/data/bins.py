"""Best-fit-decreasing placement of documents into rows, a whole queue of equal bins at a step."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

import numpy as np

__all__ = ["best_fit_decreasing", "shuffle_bins", "split_lengths"]


def best_fit_decreasing(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Place documents into as few bins as the best-fit-decreasing rule gives.

    Longest first, ties in order; each goes into the open bin with the least room that is enough; among equals, the one
    that came to have that room first; if none is open, into a new one.

    Documents of one length are placed together: a bin with room r takes ``r // length`` of them in a row, since after
    each it is still the tightest. So a step handles a whole queue of bins, and costs a bisection over distinct rooms.

    Args:
        lengths: ``(n,)`` integers in ``1..size``.
        size: Tokens of a bin.

    Returns:
        ``order (n,)``, indices of the documents bin by bin, in order of insertion, bins in order of creation; and
        ``counts (bins,)``, documents of each bin.

    >>> order, counts = best_fit_decreasing(np.array([3, 3, 2, 2, 1, 1]), 5)
    >>> order.tolist(), counts.tolist()
    ([0, 2, 1, 3, 4, 5], [2, 2, 2])
    """
    by_length = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    bins = _Bins(size)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        bins.place(length, count)
    bin_of = np.array(bins.placed, dtype=np.int64)
    return by_length[np.argsort(bin_of, kind="stable")], np.bincount(bin_of, minlength=bins.created)


class _Bins:
    """Open bins by the room they have left; ``placed`` is the bin of each document, in order of placement."""

    def __init__(self, size: int) -> None:
        self.size, self.created = size, 0
        self.placed: list[int] = []
        self.queues: dict[int, deque[int]] = {}
        self.rooms: list[int] = []  # Ascending, those with a queue that is not empty.

    def place(self, length: int, count: int) -> None:
        while count:
            at = bisect_left(self.rooms, length)
            if at == len(self.rooms):
                self._open(length, count)
                return
            room = self.rooms[at]
            queue, each = self.queues[room], room // length
            while queue and count:
                taken = min(each, count)
                self._fill(queue.popleft(), room, length, taken)
                count -= taken
            if not queue:
                self.rooms.pop(bisect_left(self.rooms, room))

    def _open(self, length: int, count: int) -> None:
        each = self.size // length
        while count:
            taken = min(each, count)
            self._fill(self.created, self.size, length, taken)
            self.created += 1
            count -= taken

    def _fill(self, index: int, room: int, length: int, taken: int) -> None:
        if taken == 1:
            self.placed.append(index)
        else:
            self.placed.extend([index] * taken)
        left = room - taken * length
        if left:
            queue = self.queues.setdefault(left, deque())
            if not queue:
                insort(self.rooms, left)
            queue.append(index)


def split_lengths(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of at most ``size``: the document each is of, the items before it in its document, and its length."""
    number = -(-lengths // size)
    source = np.repeat(np.arange(len(lengths)), number)
    rank = np.arange(len(source)) - np.repeat(np.cumsum(number) - number, number)
    skip = rank * size
    return source, skip, np.minimum(lengths[source] - skip, size)


def shuffle_bins(order: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The same bins in a random order: indices bin by bin, and the count of each."""
    permutation = rng.permutation(len(counts))
    starts = (np.cumsum(counts) - counts)[permutation]
    counts = counts[permutation]
    index = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(len(order))
    return order[index], counts
