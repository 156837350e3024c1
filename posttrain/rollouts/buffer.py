"""The queue between workers and trainer, bounded in samples and in tokens."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque

from posttrain.rollouts.samples import Conversation

__all__ = ["RolloutBuffer"]


class RolloutBuffer:
    """First in, first out; what does not fit is not refused but asked for later: whoever fills it looks at `room` first.

    Args:
        max_samples: Conversations it is meant to hold.
        max_tokens: Tokens it is meant to hold.
    """

    def __init__(self, max_samples: int, max_tokens: int | None = None) -> None:
        self.max_samples, self.max_tokens = max_samples, max_tokens
        self._items: deque[Conversation] = deque()
        self._changed = threading.Condition()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def room(self, samples: int = 0, tokens: int = 0) -> bool:
        """Whether so many more would fit."""
        with self._changed:
            fits = len(self._items) + samples <= self.max_samples
            return fits and (self.max_tokens is None or self.tokens + tokens <= self.max_tokens)

    def put(self, item: Conversation) -> None:
        """Append; never waits."""
        with self._changed:
            self._items.append(item)
            self.tokens += item.tokens
            self._changed.notify()

    def get(self, timeout: float | None = None) -> Conversation:
        """The oldest.

        Raises:
            queue.Empty: Nothing came within ``timeout`` seconds.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._items:
                left = None if limit is None else limit - time.monotonic()
                if left is not None and left <= 0:
                    raise queue.Empty
                self._changed.wait(left)
            item = self._items.popleft()
            self.tokens -= item.tokens
            return item

    def qsize(self) -> int:
        """Conversations that wait."""
        return len(self._items)

    def groups(self) -> set[int]:
        """Ids of the groups that wait."""
        with self._changed:
            return {item.group_id for item in self._items}

    def drain(self) -> list[Conversation]:
        """Take everything."""
        with self._changed:
            items, self.tokens = list(self._items), 0
            self._items.clear()
            return items
