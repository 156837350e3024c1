"""The native engine as a server runs it: continuous batches, weights replaced in place, scoring, sleep."""

from __future__ import annotations

import bisect
import contextlib
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posttrain.errors import ModelError
from posttrain.rollouts.base import evaluating
from posttrain.rollouts.native.attention import Block, plugged_in
from posttrain.rollouts.native.engine import KEEP_BYTES, NativeEngine
from posttrain.rollouts.native.layers import (
    PACK_TOKENS,
    Packed,
    bound_threads,
    fused_layers,
    quick_products,
    worth_packing,
)
from posttrain.rollouts.native.prefix_cache import STEM_LEAST, Kept, match
from posttrain.rollouts.native.sampler import Asked, Completion, Prompt
from posttrain.rollouts.native.scheduler import SHARED_LEAST, Run, common_beginning
from posttrain.serve.backends import Backend, failure_of
from posttrain.serve.jobs import Job, Score, Scored
from posttrain.serve.scoring import score_sequences
from posttrain.serve.weights import ReceivingGroup, ServedWeights, described
from posttrain.types import Request, Rollout, Sampling

__all__ = [
    "LiveRun",
    "NativeBackend",
]


MOST_REQUESTS = 8192  # Of one run, which remembers them all; then it ends and the next one begins.
SHARE_AGAIN = 32  # Requests after which prompts are looked at for what they begin with, where no run ends for long.
MOST_BLOCKS = 4  # Each costs some products of its own in every layer of every step; more of them are put together.
SMALL_BLOCK = 2048  # Tokens up to which a block is copied for it.


class LiveRun(Run):
    """A `Run` without a fixed list of requests.

    Args:
        engine: Whose model writes.
        finished: Called with a job, the prompt's place and the completion's, and the rollout.
        shared: Tokens that prompts probably begin with; one that does not makes them fewer.
        common: Their keys and values, where they are known.
    """

    def __init__(
        self,
        engine: NativeEngine,
        finished: Callable[[Job, int, int, Rollout], None],
        shared: Sequence[int] = (),
        common: Block | None = None,
    ) -> None:
        super().__init__(engine, [], Sampling(max_new_tokens=1))
        self.finished = finished
        self.shared = self.filler.shared = list(shared)
        self.store.common = common
        self._added = 0
        # What prompts have in common is remembered for the whole run, which may be long.
        self.filler.kept.most_bytes = min(self.filler.kept.most_bytes, engine.keep_bytes)
        # As if so many had been asked for: rows are laid out for what may still come.
        self.done = [None] * engine.max_slots
        self.number = engine.max_slots
        self.owners: list[tuple[Job, int]] = []
        self.spans: dict[int, list[tuple[int, int]]] = {}
        self.version = engine.version
        self._known: dict[tuple[int, ...], Prompt] = {}
        self._ordered: list[tuple[int, ...]] = []
        self._stems: list[tuple[int, ...]] = []
        self._samplings: dict[Sampling, Sampling] = {}

    @property
    def room(self) -> int:
        """Completions that could begin now, beyond those that wait."""
        waiting = sum(asked.waiting for asked in self.asked[self.cursor :])
        return max(0, self.engine.max_slots - len(self.live) - len(self.paused) - waiting)

    @property
    def full(self) -> bool:
        """Whether it takes no more requests, so that it comes to an end."""
        return len(self.asked) >= MOST_REQUESTS

    @property
    def busy(self) -> bool:
        """Whether anything is left to write."""
        return bool(self.live or self.paused or self._next())

    def add(self, job: Job, place: int) -> None:
        """Take in one prompt of a job; refuses, before anything changed, a sampling that cannot be served."""
        ask = job.asks[place]
        own = replace(ask.sampling, seed=None)
        own = self._samplings.setdefault(own, own)  # Equal settings are drawn together.
        self.chooser.check(own)
        self._share_less(ask.prompt_ids)
        prompt = self._prompt(tuple(ask.prompt_ids))
        prompt.waiting += ask.n
        seed = self.engine.new_seed() if ask.sampling.seed is None else ask.sampling.seed
        request = Request(list(ask.prompt_ids), ask.n, own)
        self.asked.append(Asked(len(self.asked), request, prompt, own, ask.n, seed, self.number, ask.draws))
        self.owners.append((job, place))
        self._added += 1
        self.done.extend([None] * ask.n)
        self.number += ask.n

    def _prompt(self, ids: tuple[int, ...]) -> Prompt:
        """The prompt of these tokens that others wait for too, or a new one."""
        prompt = self._known.get(ids)
        if prompt is not None and prompt.waiting:
            return prompt
        known = prompt is not None
        # One that nobody waits for has lost its logits, and perhaps its keys and values.
        first = len(self.shared)
        prompt = self._known[ids] = Prompt(len(self.prompts), list(ids[first:]))
        self.prompts.append(prompt)
        self.longest = max(self.longest, len(prompt.ids))
        if not known:
            at = bisect.bisect_left(self._ordered, ids)
            beside = self._ordered[max(at - 1, 0) : at + 1]
            self._ordered.insert(at, ids)
            shares = max((min(match(ids, x), len(ids) - 1) for x in beside), default=0)
            # Once for all that begin so: prompts that wait for a stem of their own are not computed together.
            if shares - first >= STEM_LEAST and all(match(ids, stem) - first < STEM_LEAST for stem in self._stems):
                prompt.shares = shares - first
                self._stems.append(ids[:shares])
        return prompt

    def _share_less(self, ids: Sequence[int]) -> None:
        """Where a prompt does not begin as the others do, the rest of their common beginning moves into their own parts."""
        size = min(match(self.shared, ids), len(ids) - 1)
        if size >= len(self.shared):
            return
        size = size if size >= SHARED_LEAST else 0
        while self.filler.work is not None:  # What is half computed ends where it was begun.
            self.filler.step(self.filler.work.prompts[0], 0)
        rest = self.shared[size:]
        if self.store.common is not None:
            for block in {id(p.block): p.block for p in self.prompts if p.block is not None}.values():
                _put_before(block, self.store.common, size)
            self.store.common = beginning_of(self.store.common, size)
        for prompt in self.prompts:
            prompt.ids = rest + prompt.ids
            prompt.shares += len(rest) if prompt.shares else 0
        self.longest += len(rest)
        self.shared = self.filler.shared = self.shared[:size]
        self._regroup()

    def _share_more(self) -> None:
        """What all prompts that are served begin with by now moves out of their own parts."""
        served = {id(p): p for p in self.prompts if p.waiting or p.live}
        served |= {id(c.asked.prompt): c.asked.prompt for c in self.paused}
        more = common_beginning([p.ids for p in served.values()])
        if not more:
            return
        computed = [p for p in served.values() if p.block is not None]
        if self.store.common is not None or not self.shared:
            self.store.common = _with_more(self.store.common, computed, len(more))
        for block in {id(p.block): p.block for p in computed if p.block is not None}.values():
            for memory in (block.keys, block.values):
                for layer, x in memory.items():
                    memory[layer] = x[:, :, len(more) :].contiguous()
            block.lengths = block.lengths - len(more)
        for prompt in served.values():
            prompt.ids = prompt.ids[len(more) :]
            prompt.shares = max(0, prompt.shares - len(more))
        self.shared = self.filler.shared = self.shared + more
        self._regroup()

    def drop(self, job: Job, reason: str | None = None) -> None:
        """Forget a job, so that its rows are free at once; with a reason, what was written is handed over."""
        for completion in [c for c in self.paused if self._job(c) is job]:
            self.paused.remove(completion)
            if reason:
                self._rollout(completion, reason)
        rows = [row for row, completion in enumerate(self.live) if self._job(completion) is job]
        if reason:
            for row in rows:
                self._rollout(self.live[row], reason)
        if rows:
            self._remove(rows)
        for asked in self.asked[self.cursor :]:
            if self._owner(asked) is job and asked.waiting:
                asked.prompt.waiting -= asked.waiting
                asked.waiting = 0
        for prompt in {id(a.prompt): a.prompt for a in self.asked if self._owner(a) is job}.values():
            self._free(prompt)

    def advance(self) -> None:
        """One token for every completion that is being written, after filling free rows."""
        if self._added >= SHARE_AGAIN and self.filler.work is None:
            self._added = 0
            self._share_more()
        if self.store.common is None:
            self.filler.begin()
        if self._admit():
            self._merge()
            self._step()

    def _merge(self) -> None:
        """Put small blocks of prompts together: prompts that came one after the other have one each."""
        small = [g.block for g in self.store.groups if _tokens(g.block) <= SMALL_BLOCK]
        if len(small) <= MOST_BLOCKS:
            return
        merged = _merged(small)
        for block in small:
            for prompt in (self.prompts[number] for number in block.prompts):
                prompt.block = merged if prompt.block is block else prompt.block
        self._regroup()

    def rebuild(self) -> None:
        """Forget all keys and values because the weights changed; they are computed again.

        Completions keep what they have written, and remember under which version.
        """
        for completion in (*self.live, *self.paused):
            self._note_span(completion)
        written = list(self.live)
        if written:
            self._remove(list(range(len(written))))
        self.paused.extendleft(reversed(written))
        self.filler.work = None
        self.filler.kept.clear()
        self._stems.clear()
        self.store.common = None
        for prompt in self.prompts:
            prompt.block = prompt.logits = None
        self.version = self.engine.version

    def _owner(self, asked: Asked) -> Job:
        return self.owners[asked.index][0]

    def _job(self, completion: Completion) -> Job:
        return self._owner(completion.asked)

    def _free(self, prompt: Prompt) -> None:
        """Let go of a prompt that nobody reads, unless it is being computed with others."""
        if prompt.waiting == 0 and prompt.live == 0 and self.filler.work is None:
            prompt.block = prompt.logits = None

    def _note_span(self, completion: Completion) -> None:
        spans = self.spans.setdefault(completion.number, [])
        written = len(completion.tokens) - sum(count for _, count in spans)
        if written:
            spans.append((self.version, written))

    def _rollout(self, completion: Completion, reason: Any) -> Rollout:
        """Also hands it over."""
        rollout = super()._rollout(completion, reason)
        job, place = self.owners[completion.asked.index]
        index = completion.number - completion.asked.number
        self._note_span(completion)
        job.spans[place, index] = self.spans.pop(completion.number)
        self.finished(job, place, index, rollout)
        return rollout


def beginning_of(common: Block, size: int) -> Block | None:
    """The first ``size`` positions of what all prompts begin with; None for none of them."""
    if size == 0:
        return None
    keys, values = ({n: x[:, :, :size] for n, x in memory.items()} for memory in (common.keys, common.values))
    return Block([0], torch.tensor([size], device=common.lengths.device), keys, values)


def _with_more(common: Block | None, computed: list[Prompt], size: int) -> Block | None:
    """What all prompts begin with, and ``size`` positions more as they stand in one of them; None: nobody knows them."""
    if not computed:
        return None
    block = computed[0].block
    assert block is not None
    more = block.row(computed[0].index, size)
    known = {} if common is None else {n: (common.keys[n], common.values[n]) for n in common.keys}
    whole = {
        n: [torch.cat(pair, 2) for pair in zip(known[n], new, strict=True)] if known else new for n, new in more.items()
    }
    first = 0 if common is None else int(common.lengths)
    lengths = torch.tensor([first + size], device=block.lengths.device)
    return Block(
        [0], lengths, {n: kv[0].clone() for n, kv in whole.items()}, {n: kv[1].clone() for n, kv in whole.items()}
    )


def _put_before(block: Block, common: Block, size: int) -> None:
    """Begin every prompt of a block with what follows the first ``size`` positions of ``common``."""
    for memory, first in ((block.keys, common.keys), (block.values, common.values)):
        for layer, x in memory.items():
            memory[layer] = torch.cat([first[layer][:, :, size:].expand(x.shape[0], -1, -1, -1), x], 2)
    block.lengths = block.lengths + (int(common.lengths) - size)


def _tokens(block: Block) -> int:
    return len(block.prompts) * next(iter(block.keys.values())).shape[2]


def _merged(blocks: list[Block]) -> Block:
    """One block of the prompts of several."""
    width = max(next(iter(block.keys.values())).shape[2] for block in blocks)

    def together(memories: list[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        return {n: torch.cat([F.pad(m[n], (0, 0, 0, width - m[n].shape[2])) for m in memories]) for n in memories[0]}

    return Block(
        [prompt for block in blocks for prompt in block.prompts],
        torch.cat([block.lengths for block in blocks]),
        together([block.keys for block in blocks]),
        together([block.values for block in blocks]),
    )


class NativeBackend(Backend):
    """`NativeEngine` behind the server.

    Args:
        model: In the dtype that is served; owned from now on.
        tokenizer: For stop strings and guides.
        pad_token_id: Written to padding.
        max_slots: Completions written at once; None: the engine's default.
        max_lora_rank: Of adapters that are pushed alone.
        keep: Whether keys and values of requests are kept for those that begin alike.
    """

    name = "native"
    accepts_lora = True
    scores = True
    sleeps = True

    def __init__(
        self, model: nn.Module, *, tokenizer: Any = None, pad_token_id: int = 0, max_slots: int | None = None,
        max_lora_rank: int = 64, keep: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(tokenizer)
        self.weights = ServedWeights(model)
        self.max_lora_rank = max_lora_rank
        self.options: dict[str, Any] = {"pad_token_id": pad_token_id, "max_slots": max_slots, "tokenizer": tokenizer}
        self.kept = Kept(KEEP_BYTES) if keep else None
        self.engine = self._engine(model)
        self.device = next(model.parameters()).device
        self.base_valid = True
        self.group: ReceivingGroup | None = None
        self.run: LiveRun | None = None
        self._stack: contextlib.ExitStack | None = None
        self._packed = Packed()
        self._renewed()
        self._last: list[int] = []  # The prompt that came last: the next ones probably begin like it.
        self._shapes: dict[nn.Parameter, torch.Size] = {}  # While asleep.

    def _engine(self, model: nn.Module) -> NativeEngine:
        engine = NativeEngine(model, **self.options)
        engine.kept = self.kept
        return engine

    # Generation ------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """See `Backend`."""
        return bool(self.waiting) or (self.run is not None and self.run.busy)

    @property
    def running(self) -> int:
        """See `Backend`."""
        return 0 if self.run is None else len(self.run.live) + len(self.run.paused)

    def advance(self) -> None:
        """One step of the run, which takes in what waits as rows become free."""
        if self.run is None:
            self.run = self._begin()
        run = self.run
        self._enter(run)
        self._feed(run)
        try:
            if run.busy:
                self._pack()
                run.advance()
        except Exception as error:  # NaN logits, or no memory: what was being written is lost, what waits is not.
            self._lost(run, error)
            return
        if not run.busy and (run.full or not self.waiting):
            self._known = (run.shared, run.store.common)
            self._leave()
            self.run = None

    def _begin(self) -> LiveRun:
        """A run for prompts that begin as those that wait and the last one did, or as those that wait."""
        prompts = [list(job.asks[place].prompt_ids) for _, _, job, place in self.waiting]
        known, block = self._known
        shared = common_beginning([*prompts, self._last] if self._last else prompts) or common_beginning(prompts)
        shared = shared[: self.engine.prefill_tokens]
        if block is None or match(known, shared) < min(len(known), len(shared)):
            return LiveRun(self.engine, self.deliver, shared)
        shared = shared[: len(known)]
        return LiveRun(self.engine, self.deliver, shared, beginning_of(block, len(shared)))

    def _feed(self, run: LiveRun) -> None:
        while self.waiting and run.room > 0 and not run.full:
            _, _, job, place = heapq.heappop(self.waiting)
            ask = job.asks[place]
            self._last = ask.prompt_ids
            self._asked += len(ask.prompt_ids) + ask.n * ask.sampling.max_new_tokens
            try:
                run.add(job, place)
            except Exception as error:  # A guide that does not compile, say.
                self.fail(job, failure_of(error, 400))

    def _lost(self, run: LiveRun, error: Exception) -> None:
        self._leave()
        self.run = None
        waiting = {id(job) for _, _, job, _ in self.waiting}
        begun = {id(job): job for job, _ in run.owners if job.id in self.jobs}
        for job in begun.values():
            self.fail(job, failure_of(error, 500, begun=id(job) not in waiting))
        if isinstance(error, torch.cuda.OutOfMemoryError):
            torch.cuda.empty_cache()

    def drop(self, job: Job) -> None:
        """See `Backend`."""
        if self.run is not None:
            self.run.drop(job)

    def cut(self, job: Job) -> None:
        """See `Backend`."""
        if self.run is not None:
            self.run.drop(job, "abort")

    def rest(self) -> None:
        """See `Backend`."""
        self._leave()

    def _renewed(self) -> None:
        """Forget what was computed of the weights: they change, or are gone."""
        self._leave()
        self._known: tuple[list[int], Block | None] = ([], None)  # What the prompts of the last run began with.
        self._stale: Packed | None = self._packed  # Freed when it is next written: nobody waits for that in a push.
        self._packed = Packed()
        self._asked: float = 0  # Tokens since then, prompts included.

    def _pack(self) -> None:
        """Let products read copies of the weights, once enough was asked for under these."""
        if self._asked < PACK_TOKENS:
            return
        self._asked = -math.inf  # Once for these weights, whatever comes of it.
        if self.device.type == "cpu" and worth_packing(self.engine.inner):
            self._packed.pack()

    def _enter(self, run: LiveRun) -> None:
        if self._stack is None:
            self._stale = None
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(evaluating(self.engine.model))
            self._stack.enter_context(plugged_in(self.engine.inner, run.store))
            self._stack.enter_context(fused_layers(self.engine.inner, self._packed))
            self._stack.enter_context(quick_products(self.engine.inner, self._packed))
            self._stack.enter_context(bound_threads(None))

    def _leave(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    # Weights ---------------------------------------------------------------------------------------------------------

    def begin_update(self, adapter: dict[str, Any] | None) -> None:
        """See `Backend`."""
        if adapter is not None and adapter["r"] > self.max_lora_rank:
            raise ModelError(
                f"an adapter of rank {adapter['r']} came, and --max_lora_rank is {self.max_lora_rank}: raise it, or push merged."
            )
        if adapter is not None and not self.base_valid:
            raise ModelError("the base weights are not whole; push all weights before an adapter.")
        self._renewed()
        self.base_valid = adapter is not None
        version = self.engine.version
        self.weights.begin(adapter)
        if self.weights.model is not self.engine.model:
            self.engine = self._engine(self.weights.model)
            self.engine.version = version
            if self.run is not None:
                self.run.engine = self.engine

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, list[str]]:
        """See `Backend`."""
        return self.weights.load(tensors)

    def end_update(self, version: int) -> list[str]:
        """See `Backend`; completions that are being written go on under the new weights, with new keys and values."""
        self.engine.load_weights((), version)  # Also forgets what was kept.
        self.base_valid = True
        if self.run is not None:
            self.run.rebuild()
        return self.weights.missing()

    def join(self, *, host: str, port: int, world_size: int, rank: int) -> None:
        """See `Backend`; NCCL on a GPU, gloo on a CPU."""
        self.group = ReceivingGroup(host, port, world_size, rank, self.device)

    def receive(self, parts: list[dict[str, Any]], *, packed: bool) -> list[tuple[str, Tensor]]:
        """See `Backend`."""
        return super().receive(parts, packed=packed) if self.group is None else self.group.receive(parts, packed=packed)

    def leave(self) -> None:
        """See `Backend`."""
        self.group = None

    # Other -----------------------------------------------------------------------------------------------------------

    def score(self, items: list[Score], top: int, temperature: float) -> list[Scored]:
        """See `Backend`."""
        return score_sequences(self.engine, items, top, temperature)

    def reset_cache(self) -> bool:
        """See `Backend`."""
        if self.kept is not None:
            self.kept.clear()
        self._known = ([], None)
        return True

    def sleep(self, level: int) -> None:
        """Keys and values go; level 1 moves a GPU's weights to the host, level 2 gives their memory up everywhere."""
        self._renewed()
        self.run = self._stale = None
        self.base_valid = self.base_valid and level == 1
        for parameter in self.weights.model.parameters():  # Buffers stay: nobody pushes them.
            self._shapes[parameter] = parameter.shape
            parameter.data = parameter.data.cpu() if level == 1 else parameter.data.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, tags: list[str] | None) -> None:
        """Weights come back, after level 2 without content."""
        for parameter, shape in self._shapes.items():
            lost = parameter.shape != shape
            data = parameter.data.new_empty(shape, device=self.device) if lost else parameter.data.to(self.device)
            parameter.data = data
        self._shapes = {}

    def info(self) -> dict[str, Any]:
        """See `Backend`."""
        device = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        own = {
            "device_uuids": [str(device.uuid)] if device is not None else [],
            "max_num_seqs": self.engine.max_slots,
            "max_lora_rank": self.max_lora_rank,
            "parameters": sum(p.numel() for p in self.engine.inner.parameters()),
        }
        return super().info() | described(self.engine.inner) | own
