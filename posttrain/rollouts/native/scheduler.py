"""`Run`: continuous batching. It starts completions, runs decoding steps, and finishes completions until all requests are
completed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from posttrain.models.recurrent.states import States
from posttrain.rollouts.native.attention import Block, Group, Store, one_row
from posttrain.rollouts.native.layers import PACK_FROM, PACK_STEPS, PACK_TOKENS, Packed
from posttrain.rollouts.native.prefix_cache import Prefiller, PrefixCache, mark_stems, match
from posttrain.rollouts.native.sampler import Completion, Prompt, RunningRequest, TokenSampler
from posttrain.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from posttrain.rollouts.native.engine import NativeEngine

UNBOUNDED = 2**62
# Minimum length of a common prefix, in tokens. Sharing a shorter prefix would take more time than it saves.
SHARED_LEAST = 16


class Run:
    """One call of `NativeEngine.generate`, with its requests, KV cache and unfinished completions."""

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> None:
        self.engine, self.requests, self.sampling = engine, requests, sampling
        self.device = next(engine.model.parameters()).device
        # Prompts with images have no common prefix here, because placeholders of different images have the same token id.
        pictured = any(r.pictures for r in requests)
        self.shared = [] if pictured else common_beginning([list(r.prompt_ids) for r in requests])
        self.prompts: list[Prompt] = []
        self.running = self._running_requests(requests, sampling)
        self.done: list[Rollout | None] = [None] * sum(r.n for r in requests)
        self.store = Store(slots=min(engine.max_slots, max(1, len(self.done))))
        self.live: list[Completion] = []
        self.prefiller = self._prefiller()
        self.cursor = self.steps = 0
        self.packed: Packed | None = None
        self.sampler = TokenSampler(engine.tokenizer, engine.inner.get_output_embeddings().weight.shape[0])
        for settings in {id(a.sampling): a.sampling for a in self.running}.values():
            self.sampler.check(settings)
        empty = torch.empty(0, dtype=torch.long, device=self.device)
        self.tokens, self.positions, self.store.lengths = empty, empty, empty

    def _running_requests(self, requests: Sequence[Request], sampling: Sampling) -> list[RunningRequest]:
        """Create a `RunningRequest` for each request of the call. Requests with equal prompts share one `Prompt` object."""
        running, number = [], 0
        seed = self.engine.new_seed() if sampling.seed is None else sampling.seed
        prompts: dict[Any, Prompt] = {}
        for index, request in enumerate(requests):
            own = request.sampling if request.sampling is not None else sampling
            ids = list(request.prompt_ids)[len(self.shared) :]
            pictures = list(request.pictures)
            key = tuple(ids), tuple(image.picture for image in pictures)
            offset = sum(image.offset for image in pictures)
            prompt = prompts.setdefault(key, Prompt(len(prompts), ids, pictures=pictures, offset=offset))
            prompt.waiting += request.n
            seeded = own.seed if request.sampling is not None else None
            counted = (seed, number, number) if seeded is None else (seeded, number, 0)
            running.append(RunningRequest(index, request, prompt, own, request.n, *counted))
            number += request.n
        self.prompts = list(prompts.values())
        return running

    def _prefiller(self) -> Prefiller:
        """Create the prefiller. It uses the engine's prefix cache if this cache is enabled. Otherwise, it uses a cache for
        this call only.
        """
        cache = self.engine.kept
        if len(self.prompts) > 1:
            mark_stems(self.prompts)
        within = PrefixCache(UNBOUNDED, stateful=self.engine.recurrent) if cache is None else cache
        return Prefiller(self.engine, self.store, self.prompts, self.shared, within, keeping=cache is not None)

    def to_the_end(self) -> list[Rollout]:
        self.prefiller.begin()
        while not self.engine.interrupted.is_set() and self._admit():
            self._step()
        return self.so_far()

    def counts(self) -> dict[str, int]:
        """Return three numbers: computed prompt tokens including padding, cached prompt tokens, and decoding steps."""
        prefiller = self.prefiller
        return {"prefilled": prefiller.computed, "reused": prefiller.reused, "steps": self.steps}

    def so_far(self) -> list[Rollout]:
        """Return the completions of all requests in order. Unfinished completions get the finish reason ``abort``."""
        for completion in self.live:
            self.done[completion.number] = self._rollout(completion, "abort")
        owners = itertools.chain.from_iterable([request] * request.n for request in self.requests)
        empty = (Rollout(list(request.prompt_ids), [], [], "abort", self.engine.version) for request in owners)
        return [rollout or nothing for rollout, nothing in zip(self.done, empty, strict=True)]

    # Admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Start completions in free rows. Run at most one prefill pass while other completions are generating, so that long
        prompts do not delay these completions.
        """
        busy, passes, started = bool(self.live), 0, False
        if not self.live:
            self.store.clear()
        while len(self.live) < self.store.slots and (running := self._next()) is not None:
            free = self.store.slots - len(self.live)
            if self.prefiller.ready(running.prompt):
                self._start(running, min(running.waiting, free))
                started = True
                continue
            if busy and passes:
                break
            passes += 1
            self.prefiller.step(running.prompt, free)
        # Update the groups once for all new rows. The groups are not used before the next decoding step.
        if started:
            self._regroup()
        return bool(self.live)

    def _next(self) -> RunningRequest | None:
        """Return the first request with completions that have not started, or None."""
        while self.cursor < len(self.running) and self.running[self.cursor].waiting == 0:
            self.cursor += 1
        return self.running[self.cursor] if self.cursor < len(self.running) else None

    def _start(self, running: RunningRequest, count: int) -> None:
        """Start ``count`` completions of a request. Sample their first tokens, and assign rows to them."""
        prompt = running.prompt
        assert prompt.logits is not None
        begun = running.request.n - running.waiting
        completions = [self.sampler.begin(running, begun + i) for i in range(count)]
        running.waiting -= count
        prompt.waiting -= count
        self.sampler.draw(prompt.logits.repeat(count, 1), completions)
        if prompt.waiting == 0:
            prompt.logits = None
        first = len(self.live)
        assert prompt.block is not None
        self.store.begin_rows(slice(first, first + count), prompt.block, prompt.index)
        for completion in completions:
            self._enter(completion)
        self._finish(first)

    def _enter(self, completion: Completion) -> None:
        """Assign the next free row to a completion. Its last token becomes the input of the next step."""
        prompt, written = completion.running.prompt, len(completion.tokens) - 1
        prompt.live += 1
        self.live.append(completion)
        position = len(self.shared) + len(prompt.ids) + prompt.offset + written
        add = [completion.tokens[-1], position, written]
        new = torch.tensor(add).to(self.device, non_blocking=True)
        self.tokens = torch.cat([self.tokens, new[:1]])
        self.positions = torch.cat([self.positions, new[1:2]])
        self.store.lengths = torch.cat([self.store.lengths, new[2:]])

    # Steps -------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Sample one token for every live completion."""
        self.steps += 1
        if self.steps == PACK_FROM and self.packed is not None and not self.packed.weights:
            self._pack()
        self.store.begin_step(max(len(c.tokens) for c in self.live) - 1)
        self.store.begin_pass(self.positions[:, None])
        states = {"recurrent_states": States(self.store.states)} if self.engine.recurrent else {}
        hidden = self.engine.trunk(
            input_ids=self.tokens[:, None], position_ids=self.store.positions, use_cache=False, **states
        ).last_hidden_state[:, 0]
        self.tokens = self.sampler.draw(self.engine.logits(hidden), self.live)
        self.positions = self.positions + 1
        self.store.lengths = self.store.lengths + 1
        self._finish()

    def read_from(self, packed: Packed) -> None:
        """Use packed copies of the weights. They are used from the start if many tokens are requested, otherwise after some
        decoding steps.
        """
        self.packed = packed
        tokens = sum(len(prompt.ids) for prompt in self.prompts)
        tokens += sum(each.request.n * each.sampling.max_new_tokens for each in self.running)
        steps = max((each.sampling.max_new_tokens for each in self.running), default=0)
        if not packed.weights and (packed.bfloat16 or tokens >= PACK_TOKENS or steps >= PACK_STEPS):
            self._pack()

    def _pack(self) -> None:
        assert self.packed is not None
        self.packed.pack(self.engine.inner.get_output_embeddings())

    # Ends --------------------------------------------------------------------------------------------------------

    def _finish(self, first: int = 0) -> None:
        """Finish completions that have stopped or reached their maximum length, in rows from ``first`` on. Assign their rows
        to other completions.
        """
        ended = []
        for row, completion in enumerate(self.live[first:], first):
            stopped = self.sampler.stopped(completion)
            if stopped or len(completion.tokens) >= completion.running.sampling.max_new_tokens:
                self.done[completion.number] = self._rollout(completion, "stop" if stopped else "length")
                ended.append(row)
                if self.prefiller.keeping and not completion.running.prompt.pictures:
                    self._keep(completion, row)
        if ended:
            self._remove(ended)

    def _keep(self, completion: Completion, row: int) -> None:
        """Add a finished completion to the prefix cache, for the next turn of its episode. The last token is excluded,
        because its keys and values were not computed.
        """
        written = completion.tokens[:-1]
        if written:
            tokens = self.shared + completion.running.prompt.ids + written
            suffix = self.store.suffix(row, len(written))
            layers = [*self.prefiller.layers_of(completion.running.prompt), suffix]
            self.prefiller.kept.add(tokens, layers, one_row(self.store.states, row))

    def _rollout(self, completion: Completion, reason: Any) -> Rollout:
        return Rollout(
            list(completion.running.request.prompt_ids),
            completion.tokens,
            completion.logps,
            reason,
            self.engine.version,
            processed_logp=completion.processed or None,
            top_logps=completion.top or None,
            pictures=completion.running.request.pictures,
        )

    def _remove(self, rows: list[int]) -> None:
        """Remove completions from the given rows. Completions of the last rows move into the free rows."""
        order = list(range(len(self.live)))
        for row in reversed(rows):
            prompt = self.live[row].running.prompt
            prompt.live -= 1
            last = len(self.live) - 1
            if row != last:
                self.store.move(last, row, len(self.live[last].tokens))
                self.live[row], order[row] = self.live[last], order[last]
            self.live.pop()
            order.pop()
            if prompt.live == 0 and prompt.waiting == 0:
                prompt.block = None  # No completion needs the prompt any longer. Free its block.
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self.tokens, self.positions = self.tokens[index], self.positions[index]
        self.store.lengths = self.store.lengths[index]
        self._regroup()

    def _regroup(self) -> None:
        """Update the groups of generating rows. Free prompts that no completion needs any longer."""
        rows: dict[int, list[int]] = {}
        blocks: dict[int, Block] = {}
        for row, completion in enumerate(self.live):
            rows.setdefault(completion.running.prompt.index, []).append(row)
            assert completion.running.prompt.block is not None
            blocks[id(completion.running.prompt.block)] = completion.running.prompt.block
        self.store.groups = [self._group(block, rows) for block in blocks.values()]
        lengths = [len(c.running.prompt.ids) for c in self.live]
        self.store.prefix = torch.tensor(lengths, dtype=torch.long).to(self.device, non_blocking=True)

    def _group(self, block: Block, rows: dict[int, list[int]]) -> Group:
        needed = [p for p in block.prompts if self.prompts[p].block is block]
        if len(needed) < len(block.prompts):
            block.keep(needed)
        members = [rows.get(p, []) for p in block.prompts]
        g = max(map(len, members))
        stand = sorted((row, i * g + j) for i, member in enumerate(members) for j, row in enumerate(member))
        flat, place = zip(*stand, strict=True)
        grid = [member + [flat[0]] * (g - len(member)) for member in members]
        tensors = (torch.tensor(x).to(self.device, non_blocking=True) for x in (flat, grid, place))
        return Group(block, *tensors, alone=len(flat) == len(self.live))


def common_beginning(prompts: list[list[int]]) -> list[int]:
    """Return the common prefix of all prompts, without the last token of any prompt. Return an empty list if the prefix is
    too short.
    """
    if len(prompts) < 2:
        return []
    first, last = min(prompts), max(prompts)
    size = min(match(first, last), min(map(len, prompts)) - 1)
    return first[:size] if size >= SHARED_LEAST else []
