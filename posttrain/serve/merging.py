"""Scoring requests that come together are computed together."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from posttrain.serve.jobs import Score, Scored
from posttrain.serve.ranks import gathered

if TYPE_CHECKING:
    from posttrain.serve.service import RolloutService

__all__ = ["ScoreMerger"]

WAIT_S = 0.005
TOKENS = 8192  # Of one batch, where the context is not known.


@dataclass(eq=False)
class _Waiting:
    items: list[Score]
    key: tuple[int, float]
    future: asyncio.Future[list[Scored]]
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = sum(len(item.ids) for item in self.items)


class ScoreMerger:
    """Takes what came within 5 ms, as much as the budget allows, oldest first.

    A request that does not fit the batch any more opens the next one: it is never put behind later ones.
    """

    def __init__(self, service: RolloutService) -> None:
        self.service = service
        self.queue: deque[_Waiting] = deque()
        self.task: asyncio.Task[None] | None = None

    async def submit(self, items: list[Score], top: int, temperature: float) -> list[Scored]:
        """Log-probs of these sequences, in order."""
        future: asyncio.Future[list[Scored]] = asyncio.get_running_loop().create_future()
        self.queue.append(_Waiting(items, (top, temperature), future))
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self.queue:
            await asyncio.sleep(WAIT_S)
            batch = self._take()
            try:
                found = await self._score([item for entry in batch for item in entry.items], batch[0].key)
            except Exception as error:
                for entry in batch:
                    if not entry.future.done():
                        entry.future.set_exception(error)
                continue
            begin = 0
            for entry in batch:
                if not entry.future.done():
                    entry.future.set_result(found[begin : begin + len(entry.items)])
                begin += len(entry.items)

    def _take(self) -> list[_Waiting]:
        """The oldest request and those of its kind behind it, up to the first that exceeds the budget."""
        ranks = len(self.service.ranks.all)
        most, budget = max(4 * ranks, 16), (self.service.limits.context or TOKENS) * ranks
        batch, others, tokens = [self.queue.popleft()], [], 0
        tokens = batch[0].tokens
        while self.queue and len(batch) < most:
            entry = self.queue.popleft()
            if entry.key != batch[0].key:
                others.append(entry)
                continue
            if tokens + entry.tokens > budget:
                others.append(entry)
                break
            batch.append(entry)
            tokens += entry.tokens
        self.queue.extendleft(reversed(others))
        return batch

    async def _score(self, items: list[Score], key: tuple[int, float]) -> list[Scored]:
        from posttrain.serve.service import split_evenly

        ranks = self.service.ranks.all
        parts = [part for part in split_evenly(len(items), len(ranks)) if part]
        timeout = self.service.config.request_timeout
        found = await gathered(
            rank.call("score", timeout, items=[items[i] for i in part], top=key[0], temperature=key[1])
            for rank, part in zip(ranks, parts, strict=False)
        )
        return [scored for part in found for scored in part]
