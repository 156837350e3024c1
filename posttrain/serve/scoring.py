"""Log-probs of given sequences under a model: what a teacher or a parity probe asks a server for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.rollouts.base import evaluating
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.serve.jobs import Score, Scored
from posttrain.serve.worker import gathered

if TYPE_CHECKING:
    from posttrain.serve.service import RolloutService

__all__ = [
    "ScoreMerger",
    "score_sequences",
]


PASS_TOKENS = 2048  # Of one forward pass.
CHUNK = 256  # Positions whose logits exist at once.


def score_sequences(engine: NativeEngine, items: Sequence[Score], top: int, temperature: float) -> list[Scored]:
    """For every position from ``begin`` on: the token's log-prob, and the ``top`` most likely tokens.

    Args:
        engine: Whose model scores.
        items: Sequences of at least one token.
        top: k; 0 leaves only the token's own.
        temperature: Divides the logits.
    """
    order = sorted(range(len(items)), key=lambda i: len(items[i].ids))
    found: list[Scored | None] = [None] * len(items)
    with evaluating(engine.model):
        for group in _passes([len(items[i].ids) for i in order]):
            chosen = [order[i] for i in group]
            for i, scored in zip(chosen, _one_pass(engine, [items[i] for i in chosen], top, temperature), strict=True):
                found[i] = scored
    return [scored for scored in found if scored is not None]


def _passes(lengths: list[int]) -> list[list[int]]:
    """Neighbours that share a pass, by their padded size."""
    groups: list[list[int]] = []
    for i, length in enumerate(lengths):
        if groups and length * (len(groups[-1]) + 1) <= PASS_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _one_pass(engine: NativeEngine, items: list[Score], top: int, temperature: float) -> list[Scored]:
    width = max(len(item.ids) for item in items)
    device = next(engine.model.parameters()).device
    # Right padding comes after every real token, which causal attention never looks at.
    ids = torch.tensor([item.ids + [engine.pad_token_id] * (width - len(item.ids)) for item in items], device=device)
    hidden = engine.trunk(input_ids=ids, use_cache=False).last_hidden_state
    result = []
    for row, item in enumerate(items):
        begin = max(item.begin, 1)  # Nothing predicts the first token.
        scored = _scored(
            engine, hidden[row, begin - 1 : len(item.ids) - 1], ids[row, begin : len(item.ids)], top, temperature
        )
        if item.begin == 0 and item.ids:
            nan = float("nan")
            scored.actual.insert(0, nan)
            scored.ids.insert(0, [item.ids[0]] * top)
            scored.logps.insert(0, [nan] * top)
        result.append(scored)
    return result


def _scored(engine: Any, hidden: Tensor, tokens: Tensor, top: int, temperature: float) -> Scored:
    """``(n, H)`` states and the ``(n,)`` tokens they predict."""
    scored = Scored([], [], [])
    for part, wanted in zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True):
        logp = torch.log_softmax(engine.logits(part) / temperature, -1)
        scored.actual += logp.gather(1, wanted[:, None]).squeeze(1).tolist()
        best = logp.topk(min(top, logp.shape[-1]), dim=-1)
        scored.ids += best.indices.tolist()
        scored.logps += best.values.tolist()
    return scored


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
