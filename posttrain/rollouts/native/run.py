"""Continuous batching: admit, step, finish, until every request is done."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import RolloutError
from posttrain.rollouts.native.attention import Block, Fill, Group, Store, grown
from posttrain.rollouts.native.choosing import Asked, Chooser, Completion, Filling, Prompt
from posttrain.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from posttrain.rollouts.native.engine import NativeEngine

__all__ = ["Run"]

SHARED_LEAST = 16  # A shorter common beginning costs more bookkeeping than it saves.


class Run:
    """One call of `NativeEngine.generate`."""

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> None:
        self.engine = engine
        self.device = next(engine.model.parameters()).device
        self.shared = _common_beginning([list(r.prompt_ids) for r in requests])
        self.prompts: list[Prompt] = []
        self.asked = self._asked(requests, sampling)
        self.longest = max((len(p.ids) for p in self.prompts), default=0)
        self.done: list[Rollout | None] = [None] * sum(r.n for r in requests)
        self.store = Store(slots=self._slots(0))
        self.live: list[Completion] = []
        self.paused: deque[Completion] = deque()
        self.filling: Filling | None = None
        self.cursor = 0
        self.chooser = Chooser(engine.tokenizer, engine.inner.get_output_embeddings().weight.shape[0])
        for one in {id(a.sampling): a.sampling for a in self.asked}.values():
            self.chooser.check(one)
        empty = torch.empty(0, dtype=torch.long, device=self.device)
        self.tokens, self.positions, self.store.lengths = empty, empty, empty

    def _asked(self, requests: Sequence[Request], sampling: Sampling) -> list[Asked]:
        """The requests; those with equal prompts share one."""
        made, number = [], 0
        seed = self.engine.new_seed() if sampling.seed is None else sampling.seed
        known: dict[tuple[int, ...], Prompt] = {}
        for index, request in enumerate(requests):
            own = request.sampling if request.sampling is not None else sampling
            ids = list(request.prompt_ids)[len(self.shared) :]
            prompt = known.setdefault(tuple(ids), Prompt(len(known), ids))
            prompt.waiting += request.n
            seeded = own.seed if request.sampling is not None else None
            counted = (seed, number, number) if seeded is None else (seeded, number, 0)
            made.append(Asked(index, request, prompt, own, request.n, *counted))
            number += request.n
        self.prompts = list(known.values())
        return made

    def to_the_end(self) -> list[Rollout]:
        if self.shared:
            self.store.common = self._block([0], torch.tensor([self.shared], device=self.device))
        while not self.engine.interrupted.is_set() and self._admit():
            self._step()
        return self.so_far()

    def so_far(self) -> list[Rollout]:
        """Every completion of every request, in order; what is not finished says ``abort``."""
        for completion in (*self.live, *self.paused):
            self.done[completion.number] = self._rollout(completion, "abort")
        owners = itertools.chain.from_iterable([asked.request] * asked.request.n for asked in self.asked)
        empty = (Rollout(list(request.prompt_ids), [], [], "abort", self.engine.version) for request in owners)
        return [rollout or nothing for rollout, nothing in zip(self.done, empty, strict=True)]

    # Memory ------------------------------------------------------------------------------------------------------

    def _slots(self, capacity: int) -> int:
        """Completions that may be live while each has room for ``capacity`` tokens (0: the first block).

        Raises:
            RolloutError: The budget holds not even one completion of the longest request.
        """
        engine, budget = self.engine, self.engine.kv_tokens
        most = min(engine.max_slots, max(1, len(self.done)))
        if budget is None or not self.prompts:
            return most
        room = 0
        while room < max(asked.sampling.max_new_tokens for asked in self.asked):
            room = grown(room)
        needed = len(self.shared) + self.longest + room
        if budget < needed:
            size = _bytes_per_token(engine.inner)
            raise RolloutError(
                f"kv_tokens={budget} ({budget * size / 1e6:.1f} MB) cannot hold one completion: the longest prompt and "
                f"max_new_tokens need {needed} tokens, {needed * size / 1e6:.1f} MB. Raise kv_tokens, or shorten the prompt or "
                "max_new_tokens."
            )
        # As if every completion had a prompt of its own: then no admission can exceed the budget.
        return min(most, (budget - len(self.shared)) // (max(capacity, grown(0)) + self.longest))

    def _make_room(self, positions: int) -> None:
        """Before the suffixes grow: set aside completions that the budget has no room for, the shortest first."""
        capacity = self.store.capacity
        if positions <= capacity or self.engine.kv_tokens is None:
            return
        self.store.slots = max(1, self._slots(grown(capacity)))
        surplus = len(self.live) - self.store.slots
        if surplus > 0:
            rows = sorted(range(len(self.live)), key=lambda row: len(self.live[row].tokens))[:surplus]
            self.paused.extend(self.live[row] for row in sorted(rows))
            self._remove(sorted(rows))

    # Admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Fill free rows; while others are being written only one prefill pass, so that no prompt stalls them."""
        busy, passes = bool(self.live), 0
        if not self.live:
            self.store.clear(self._slots(0) if not self.paused else self._slots(self._longest_paused()))
        while len(self.live) < self.store.slots:
            asked = self.paused[0].asked if self.paused else self._next()
            if asked is None:
                break
            wanted = asked.prompt
            ready = wanted.block is not None and self._is_filled(wanted)
            if not ready or self.paused:
                if busy and passes:
                    break
                passes += 1
            if not ready:
                self._prefill(wanted)
            elif self.paused:
                self._resume(self.paused.popleft())
            else:
                self._start(asked, min(asked.waiting, self.store.slots - len(self.live)))
        return bool(self.live)

    def _longest_paused(self) -> int:
        room = 0
        while room < max(len(c.tokens) for c in self.paused):
            room = grown(room)
        return room

    def _next(self) -> Asked | None:
        """The first request with completions that nobody writes yet."""
        while self.cursor < len(self.asked) and self.asked[self.cursor].waiting == 0:
            self.cursor += 1
        return self.asked[self.cursor] if self.cursor < len(self.asked) else None

    def _is_filled(self, prompt: Prompt) -> bool:
        return self.filling is None or prompt not in self.filling.prompts

    def _prefill(self, wanted: Prompt) -> None:
        """Compute a piece of this prompt, together with as many after it as fit one pass and the free rows."""
        if self.filling is None:
            self.filling = self._gather(wanted)
        work = self.filling
        width = max(1, self.engine.prefill_tokens // len(work.prompts))
        piece = work.ids[:, work.done : work.done + width]
        hidden = self._pass(piece, work.block, self._past(work.block), offset=work.done)
        work.done += piece.shape[1]
        if work.done < work.ids.shape[1]:
            return
        last = work.block.lengths - 1 - (work.done - piece.shape[1])
        logits = self.engine.logits(hidden[torch.arange(len(work.prompts), device=self.device), last])
        for prompt, row in zip(work.prompts, logits, strict=True):
            prompt.logits = row
        self.filling = None

    def _gather(self, wanted: Prompt) -> Filling:
        chosen, width, rows = [wanted], len(wanted.ids), wanted.waiting
        for prompt in self.prompts[wanted.index + 1 :]:
            if prompt.waiting == 0:
                continue
            wider = max(width, len(prompt.ids))
            full = len(self.live) + rows >= self.store.slots
            if full or prompt.block is not None or wider * (len(chosen) + 1) > self.engine.prefill_tokens:
                break
            chosen.append(prompt)
            width, rows = wider, rows + prompt.waiting
        pad = self.engine.pad_token_id
        ids = torch.tensor([p.ids + [pad] * (width - len(p.ids)) for p in chosen], device=self.device)
        block = Block([p.index for p in chosen], torch.tensor([len(p.ids) for p in chosen], device=self.device))
        for prompt in chosen:
            prompt.block = block
        return Filling(chosen, ids, block)

    def _block(self, prompts: list[int], ids: Tensor) -> Block:
        """A block of these tokens that sees nothing before itself."""
        block = Block(prompts, torch.tensor([ids.shape[1]] * len(ids), device=self.device))
        for start in range(0, ids.shape[1], self.engine.prefill_tokens):
            piece = ids[:, start : start + self.engine.prefill_tokens]
            self._pass(piece, block, [_of(block)] if start else [], offset=start)
        return block

    def _past(self, block: Block | None) -> list[dict[int, tuple[Tensor, Tensor]]]:
        """What the next tokens of a block see: the common beginning and what the block already holds."""
        found = [] if self.store.common is None else [_of(self.store.common)]
        return found + ([_of(block)] if block is not None and block.keys else [])

    def _pass(self, ids: Tensor, into: Block | None, past: list[Any], *, offset: int) -> Tensor:
        """Hidden states of ``ids (P, width)``, which begin ``offset`` positions behind the common beginning."""
        begin = offset + (self.store.shared if into is None or into is not self.store.common else 0)
        positions = torch.arange(begin, begin + ids.shape[1], device=self.device).expand(len(ids), -1)
        self.store.filling = fill = Fill(past)
        try:
            hidden = self.engine.inner.base_model(
                input_ids=ids, position_ids=positions, use_cache=False
            ).last_hidden_state
        finally:
            self.store.filling = None
        if into is not None:
            into.append(fill.keys, fill.values)
        else:
            self.store.put(len(self.live), fill.keys, fill.values)
        return hidden

    def _start(self, asked: Asked, count: int) -> None:
        """Draw the first token of ``count`` completions of a request."""
        prompt = asked.prompt
        assert prompt.logits is not None
        begun = asked.request.n - asked.waiting
        completions = [self.chooser.begin(asked, begun + i) for i in range(count)]
        asked.waiting -= count
        prompt.waiting -= count
        self.chooser.draw(prompt.logits.repeat(count, 1), completions)
        if prompt.waiting == 0:
            prompt.logits = None
        for completion in completions:
            self._enter(completion)
        self._finish(started=True)

    def _resume(self, completion: Completion) -> None:
        """Compute the suffix of a completion that was set aside, all but its last token, into a free row."""
        prompt, written = completion.asked.prompt, completion.tokens[:-1]
        assert prompt.block is not None
        if written:
            row = prompt.block.prompts.index(prompt.index)
            own = {
                layer: (prompt.block.keys[layer][row : row + 1, :, : len(prompt.ids)],
                        prompt.block.values[layer][row : row + 1, :, : len(prompt.ids)])
                for layer in prompt.block.keys
            }  # fmt: skip
            ids = torch.tensor([written], device=self.device)
            self._pass(ids, None, [*self._past(None), own], offset=len(prompt.ids))
        self._enter(completion)
        self._finish(started=True)

    def _enter(self, completion: Completion) -> None:
        """The completion takes the next row; its last token is the next to be read."""
        prompt, written = completion.asked.prompt, len(completion.tokens) - 1
        prompt.live += 1
        self.live.append(completion)
        add = [completion.tokens[-1], len(self.shared) + len(prompt.ids) + written, written]
        new = torch.tensor(add, device=self.device)
        self.tokens = torch.cat([self.tokens, new[:1]])
        self.positions = torch.cat([self.positions, new[1:2]])
        self.store.lengths = torch.cat([self.store.lengths, new[2:]])

    # Steps -------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token for every live completion."""
        self._make_room(max(len(c.tokens) for c in self.live))
        self.store.longest = max(len(c.tokens) for c in self.live) - 1
        self.store.hidden = {}
        hidden = self.engine.inner.base_model(
            input_ids=self.tokens[:, None], position_ids=self.positions[:, None], use_cache=False
        ).last_hidden_state[:, 0]
        self.tokens = self.chooser.draw(self.engine.logits(hidden), self.live)
        self.positions = self.positions + 1
        self.store.lengths = self.store.lengths + 1
        self._finish()

    # Ends --------------------------------------------------------------------------------------------------------

    def _finish(self, *, started: bool = False) -> None:
        """Hand over completions that stopped or are full, and close the gaps they leave."""
        ended = []
        for row, completion in enumerate(self.live):
            stopped = self.chooser.stopped(completion)
            if stopped or len(completion.tokens) >= completion.asked.sampling.max_new_tokens:
                self.done[completion.number] = self._rollout(completion, "stop" if stopped else "length")
                ended.append(row)
        if ended:
            self._remove(ended)
        elif started:
            self._regroup()

    def _rollout(self, completion: Completion, reason: Any) -> Rollout:
        return Rollout(
            list(completion.asked.request.prompt_ids),
            completion.tokens,
            completion.logps,
            reason,
            self.engine.version,
            processed_logp=completion.processed or None,
            top_logps=completion.top or None,
        )

    def _remove(self, rows: list[int]) -> None:
        """Take completions out of their rows; the last ones move into the gaps."""
        order = list(range(len(self.live)))
        for row in reversed(rows):
            prompt = self.live[row].asked.prompt
            prompt.live -= 1
            last = len(self.live) - 1
            if row != last:
                self.store.move(last, row, len(self.live[last].tokens))
                self.live[row], order[row] = self.live[last], order[last]
            self.live.pop()
            order.pop()
            if prompt.live == 0 and prompt.waiting == 0:
                prompt.block = None  # Nobody reads this prompt any more.
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self.tokens, self.positions = self.tokens[index], self.positions[index]
        self.store.lengths = self.store.lengths[index]
        self._regroup()

    def _regroup(self) -> None:
        """Tell the attention which live rows read which prompt; forget prompts that nobody reads."""
        rows: dict[int, list[int]] = {}
        blocks: dict[int, Block] = {}
        for row, completion in enumerate(self.live):
            rows.setdefault(completion.asked.prompt.index, []).append(row)
            assert completion.asked.prompt.block is not None
            blocks[id(completion.asked.prompt.block)] = completion.asked.prompt.block
        self.store.groups = [self._group(block, rows) for block in blocks.values()]
        lengths = [len(c.asked.prompt.ids) for c in self.live]
        self.store.prefix = torch.tensor(lengths, dtype=torch.long, device=self.device)

    def _group(self, block: Block, rows: dict[int, list[int]]) -> Group:
        needed = [p for p in block.prompts if self.prompts[p].block is block]
        if len(needed) < len(block.prompts):
            block.keep(needed)
        members = [rows.get(p, []) for p in block.prompts]
        flat = [row for member in members for row in member]
        g = max(map(len, members))
        grid = [member + flat[:1] * (g - len(member)) for member in members]
        place = [i * g + j for i, member in enumerate(members) for j in range(len(member))]
        return Group(block, *(torch.tensor(x, device=self.device) for x in (flat, grid, place)))


def _of(block: Block) -> dict[int, tuple[Tensor, Tensor]]:
    return {layer: (block.keys[layer], block.values[layer]) for layer in block.keys}


def _common_beginning(prompts: list[list[int]]) -> list[int]:
    """Tokens that all prompts begin with, where there are enough of them; every prompt keeps at least one of its own."""
    if len(prompts) < 2:
        return []
    first, last = min(prompts), max(prompts)
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    size = min(size, min(map(len, prompts)) - 1)
    return first[:size] if size >= SHARED_LEAST else []


def _bytes_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * next(model.parameters()).element_size()
