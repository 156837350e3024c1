"""Engines of the thin host: jobs that wait, batches that jobs join, weights that are replaced in place, scores."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posttrain.errors import ModelError, RolloutError
from posttrain.models.heads import LogitRule, causal_lm, trunk
from posttrain.rollouts.base import evaluating
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.attention import Block, plugged_in
from posttrain.rollouts.native.engine import KEEP_BYTES, NativeEngine
from posttrain.rollouts.native.layers import Packed, bound_threads, fused_layers, quick_products, worth_packing
from posttrain.rollouts.native.prefix_cache import Kept
from posttrain.rollouts.native.sampler import Asked, Completion, Prompt
from posttrain.rollouts.native.scheduler import Run
from posttrain.rollouts.server.replies import shape_of
from posttrain.types import Request, Rollout, Sampling

__all__ = ["BatchServed", "Job", "LiveRun", "NativeServed", "score_sequence"]

MOST_REQUESTS = 8192  # Of one run, which remembers them all; then it ends and the next one begins.
MOST_BLOCKS = 4  # Each costs some products of its own in every layer of every step; more of them are put together.
SMALL_BLOCK = 2048  # Tokens up to which a block is copied for it.
MOST_TOGETHER = 256  # Completions of one call of an engine whose calls cannot be joined.
CHUNK = 256  # Positions whose logits exist at once while a sequence is scored.
Spans = list[tuple[str, int]]


@dataclass(eq=False)
class Job:
    """One prompt that is completed ``n`` times.

    Attributes:
        ended: Called once, in the engine's thread, when all completions are there or ``error`` is set.
        rollouts: By completion; None: not written yet.
        spans: By completion, runs of (version of the weights, tokens).
    """

    prompt_ids: list[int]
    n: int
    sampling: Sampling
    ended: Callable[[Job], None]
    rollouts: list[Rollout | None] = field(init=False)
    spans: list[Spans] = field(init=False)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.rollouts, self.spans = [None] * self.n, [[] for _ in range(self.n)]


class BatchServed:
    """An engine that is served: transformers' ``generate``, where what waits and samples alike is one call.

    All methods run in one thread, between two calls of `advance`.

    Args:
        model: Whose parameters new weights are copied into.
        pad_token_id: Written to padding.
        tokenizer: For stop strings.

    Attributes:
        version: Of the weights, as the trainer calls them; ``default``: those of the checkpoint.
        keeps: Whether completions can be held in the middle and go on under other weights.
        waiting: Jobs that are not begun.
        jobs: All that have not ended.
    """

    name = "hf"
    keeps = False

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0, tokenizer: Any = None) -> None:
        self.model, self.version = model, "default"
        self.engine: Any = self.make_engine(model, pad_token_id=pad_token_id, tokenizer=tokenizer)
        self.waiting: deque[Job] = deque()
        self.jobs: set[Job] = set()
        self._known: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
        self._known |= dict(model.named_parameters(remove_duplicate=False))
        self._loaded: set[int] = set()
        self._unexpected: list[str] = []

    def make_engine(self, model: nn.Module, **options: Any) -> Any:
        """What generates."""
        return HFEngine(model, **options)

    # Generation ------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self.waiting)

    @property
    def running(self) -> int:
        """Completions that are being written."""
        return 0

    def advance(self) -> None:
        """Do a piece of the work and return: here one call of the engine with what waits."""
        first, count, taken = self.waiting[0], 0, []
        for job in list(self.waiting):
            if job.sampling == first.sampling and (not taken or count + job.n <= MOST_TOGETHER):
                taken.append(job)
                count += job.n
                self.waiting.remove(job)
        try:
            rollouts = self.engine.generate([Request(job.prompt_ids, job.n) for job in taken], first.sampling)
            if len(rollouts) != count:
                raise RolloutError(f"the engine gave {len(rollouts)} completions where {count} were asked for.")
        except Exception as error:
            for job in taken:
                self.fail(job, error)
            return
        stream = iter(rollouts)
        for job in taken:
            for index in range(job.n):
                rollout = next(stream)
                self.deliver(job, index, rollout, [(self.version, len(rollout.token_ids))])

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self.jobs.add(job)
        self.waiting.append(job)

    def deliver(self, job: Job, index: int, rollout: Rollout, spans: Spans) -> None:
        """Take a completion in; the last one ends its job."""
        job.rollouts[index], job.spans[index] = rollout, spans
        if job in self.jobs and all(one is not None for one in job.rollouts):
            self.jobs.discard(job)
            job.ended(job)

    def fail(self, job: Job, error: Exception) -> None:
        """End a job without a result."""
        if job in self.jobs:
            self.drop(job)
            job.error = error
            job.ended(job)

    def drop(self, job: Job) -> None:
        """Forget a job, whose client went away."""
        self.jobs.discard(job)
        if job in self.waiting:
            self.waiting.remove(job)

    def cut(self, job: Job) -> None:
        """End a job with what is written of it; completions that were not begun are empty."""
        if job in self.waiting:
            self.waiting.remove(job)
        for index, rollout in enumerate(job.rollouts):
            if rollout is None:
                self.deliver(job, index, Rollout(job.prompt_ids, [], [], "abort"), [])

    # Weights ---------------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """New weights are on their way."""
        self._loaded, self._unexpected = set(), []

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Copy tensors into the parameters of their names; how many were taken.

        Raises:
            ModelError: A tensor of another shape.
        """
        count = len(self._loaded)
        for name, tensor in tensors:
            target = self._known.get(name)
            if target is None:
                self._unexpected.append(name)
                continue
            if target.shape != tensor.shape:
                raise ModelError(
                    f"{name}: the server's is {tuple(target.shape)}, what came is {tuple(tensor.shape)}. Fix: serve the model "
                    "that is trained."
                )
            target.copy_(tensor)
            self._loaded.add(id(target))
        return len(self._loaded) - count

    def complete_update(self, partial: bool) -> None:
        """All tensors came.

        Args:
            partial: Whether parameters that nothing came for may keep their values.

        Raises:
            ModelError: Parameters that nothing came for, or names that the model does not have.
        """
        names: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)  # Tied weights are one parameter with two names.
        missing = [] if partial else [name for key, name in names.items() if key not in self._loaded]
        for what, found in (("still has old values of", missing), ("does not know", self._unexpected)):
            if found:
                raise ModelError(
                    f"the server {what} {len(found)} weights: {', '.join(found[:5])}. Fix: serve the model that is trained "
                    "(same architecture, same names), and push all of its weights."
                )

    def renewed(self, version: str) -> None:
        """The weights are whole, and of this version from now on."""
        self.version = version

    def reset_cache(self) -> None:
        """Forget keys and values that outlive a request."""

    # Other -----------------------------------------------------------------------------------------------------------

    def score(self, ids: list[int], top: int) -> list[dict[int, tuple[float, int]] | None]:
        """See `score_sequence`."""
        with evaluating(self.model):
            return score_sequence(self.model, ids, top)

    def facts(self) -> dict[str, Any]:
        """What a trainer compares with its own model."""
        text = causal_lm(self.model).config.get_text_config()
        device = next(self.model.parameters()).device
        properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        return {
            "engine": self.name,
            "architectures": [type(self.model).__name__],
            **shape_of(text),
            "vocab_size": text.vocab_size,
            "dtype": str(next(self.model.parameters()).dtype),
            "device": device.type,
            "device_uuids": [] if properties is None else [str(properties.uuid)],
            "transfer": "shared memory",
            "keeps": self.keeps,
            "tells_versions": True,
            "takes_bytes": True,
            "checkpoint_names": False,
        }


def score_sequence(model: nn.Module, ids: list[int], top: int) -> list[dict[int, tuple[float, int]] | None]:
    """For each position the log-probs and ranks of its ``top`` most likely tokens and of the token that stands there.

    Args:
        model: In eval mode.
        ids: T token ids.
        top: k; 0 leaves only the token's own.

    Returns:
        T entries as vLLM's ``prompt_logprobs`` has them; the first is None, because nothing predicts the first token.
    """
    inner: Any = causal_lm(model)
    rule, tokens = LogitRule.of(inner.config), torch.tensor(ids, device=next(model.parameters()).device)
    hidden = trunk(inner)(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]  # (T - 1, H)
    found: list[dict[int, tuple[float, int]] | None] = [None]
    for part, own in zip(hidden.split(CHUNK), tokens[1:].split(CHUNK), strict=True):
        logits = rule.logits(inner.get_output_embeddings()(part))  # (c, V)
        for line, token in zip(logits.log_softmax(-1), own.tolist(), strict=True):
            best = line.topk(min(top, len(line)))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            entry = {i: (value, rank) for rank, (i, value) in enumerate(pairs, 1)}
            mine = (float(line[token]), int((line > line[token]).sum()) + 1)
            found.append(entry | {token: entry.get(token, mine)})
    return found[: len(ids)]


class LiveRun(Run):
    """A `Run` that jobs join while it goes on.

    Args:
        served: Whose engine writes, and who takes completions.
    """

    def __init__(self, served: NativeServed) -> None:
        super().__init__(served.engine, [], Sampling(max_new_tokens=1))
        self.served, self.version = served, served.version
        # As if so many had been asked for: rows are laid out for what may still come.
        self.done = [None] * self.engine.max_slots
        self.number = self.engine.max_slots
        self.owners: list[Job] = []
        self.spans: dict[int, Spans] = {}
        self._known: dict[tuple[int, ...], Prompt] = {}
        self._samplings: dict[Sampling, Sampling] = {}

    @property
    def room(self) -> int:
        """Completions that could begin now, beyond those that wait."""
        waiting = sum(asked.waiting for asked in self.asked[self.cursor :])
        return max(0, self.engine.max_slots - len(self.live) - len(self.paused) - waiting)

    @property
    def full(self) -> bool:
        """Whether it takes no more jobs, so that it comes to an end."""
        return len(self.asked) >= MOST_REQUESTS

    @property
    def busy(self) -> bool:
        """Whether anything is left to write."""
        return bool(self.live or self.paused or self._next())

    def add(self, job: Job) -> None:
        """Take in a job; refuses, before anything changed, a sampling that cannot be served."""
        own = replace(job.sampling, seed=None)
        own = self._samplings.setdefault(own, own)  # Equal settings are drawn together.
        self.chooser.check(own)
        ids = tuple(job.prompt_ids)
        prompt = self._known.get(ids)
        if prompt is None or not prompt.waiting:  # One that nobody waits for has lost its keys and values.
            prompt = self._known[ids] = Prompt(len(self.prompts), list(ids))
            self.prompts.append(prompt)
            self.longest = max(self.longest, len(ids))
        prompt.waiting += job.n
        seed = self.engine.new_seed() if job.sampling.seed is None else job.sampling.seed
        request = Request(list(ids), job.n, own)
        self.asked.append(Asked(len(self.asked), request, prompt, own, job.n, seed, self.number, 0))
        self.owners.append(job)
        self.done.extend([None] * job.n)
        self.number += job.n

    def drop(self, job: Job, reason: str | None = None) -> None:
        """Forget a job, so that its rows are free at once; with a reason, what was written is handed over."""
        rows = [row for row, completion in enumerate(self.live) if self._job(completion) is job]
        paused = [completion for completion in self.paused if self._job(completion) is job]
        for completion in [*paused, *(self.live[row] for row in rows)]:
            if reason:
                self._rollout(completion, reason)
        for completion in paused:
            self.paused.remove(completion)
        if rows:
            self._remove(rows)
        for asked in (a for a in self.asked if self.owners[a.index] is job):
            asked.prompt.waiting -= asked.waiting
            asked.waiting = 0
            prompt = asked.prompt
            if prompt.waiting == 0 and prompt.live == 0 and self.filler.work is None:
                prompt.block = prompt.logits = None

    def advance(self) -> None:
        """One token for every completion that is being written, after filling free rows."""
        if self._admit():
            self._merge()
            self._step()

    def _merge(self) -> None:
        """Put small blocks of prompts together: prompts that came one after the other have one each."""
        small = [group.block for group in self.store.groups if _tokens(group.block) <= SMALL_BLOCK]
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
        for prompt in self.prompts:
            prompt.block = prompt.logits = None
        self.version = self.served.version

    def _job(self, completion: Completion) -> Job:
        return self.owners[completion.asked.index]

    def _note_span(self, completion: Completion) -> None:
        spans = self.spans.setdefault(completion.number, [])
        written = len(completion.tokens) - sum(count for _, count in spans)
        if written:
            spans.append((self.version, written))

    def _rollout(self, completion: Completion, reason: Any) -> Rollout:
        """Also hands it over."""
        rollout = super()._rollout(completion, reason)
        self._note_span(completion)
        index = completion.number - completion.asked.number
        self.served.deliver(self._job(completion), index, rollout, self.spans.pop(completion.number))
        return rollout


def _tokens(block: Block) -> int:
    return len(block.prompts) * next(iter(block.keys.values())).shape[2]


def _merged(blocks: list[Block]) -> Block:
    """One block of the prompts of several."""
    width = max(next(iter(block.keys.values())).shape[2] for block in blocks)

    def together(memories: list[dict[int, Tensor]]) -> dict[int, Tensor]:
        # (P, KV heads, width, head size)
        return {n: torch.cat([F.pad(m[n], (0, 0, 0, width - m[n].shape[2])) for m in memories]) for n in memories[0]}

    return Block(
        [prompt for block in blocks for prompt in block.prompts],
        torch.cat([block.lengths for block in blocks]),
        together([block.keys for block in blocks]),
        together([block.values for block in blocks]),
    )


class NativeServed(BatchServed):
    """The native engine: jobs join a run between two steps.

    Args:
        model: In the dtype that is served; owned from now on.
        max_slots: Completions written at once; None: the engine's default.
        keep: Whether keys and values of requests are kept for those that begin alike.
        options: ``pad_token_id`` and ``tokenizer``.
    """

    name = "native"
    keeps = True

    def __init__(self, model: nn.Module, *, max_slots: int | None = None, keep: bool = False, **options: Any) -> None:
        self.max_slots = max_slots
        super().__init__(model, **options)
        self.engine.kept = Kept(KEEP_BYTES) if keep else None
        self.run: LiveRun | None = None
        self._stack: contextlib.ExitStack | None = None
        self._packed = Packed()

    def make_engine(self, model: nn.Module, **options: Any) -> NativeEngine:
        """See `BatchServed`."""
        return NativeEngine(model, max_slots=self.max_slots, **options)

    @property
    def busy(self) -> bool:
        """See `BatchServed`."""
        return bool(self.waiting) or (self.run is not None and self.run.busy)

    @property
    def running(self) -> int:
        """See `BatchServed`."""
        return 0 if self.run is None else len(self.run.live) + len(self.run.paused)

    def advance(self) -> None:
        """One step of the run, which takes in what waits as rows become free."""
        run = self.run = self.run or LiveRun(self)
        self._enter(run)
        while self.waiting and run.room > 0 and not run.full:
            job = self.waiting.popleft()
            try:
                run.add(job)
            except Exception as error:  # A guide that does not compile, say.
                self.fail(job, error)
        try:
            if run.busy:
                run.advance()
        except Exception as error:  # NaN logits, or no memory: what was being written is lost, what waits is not.
            self._leave()
            self.run = None
            for job in {id(job): job for job in run.owners if job in self.jobs}.values():
                self.fail(job, error)
            return
        if not run.busy and (run.full or not self.waiting):
            self._leave()
            self.run = None

    def drop(self, job: Job) -> None:
        """See `BatchServed`."""
        super().drop(job)
        if self.run is not None:
            self.run.drop(job)

    def cut(self, job: Job) -> None:
        """See `BatchServed`."""
        if self.run is not None:
            self.run.drop(job, "abort")
        super().cut(job)

    def score(self, ids: list[int], top: int) -> list[dict[int, tuple[float, int]] | None]:
        """See `score_sequence`."""
        self._leave()
        return super().score(ids, top)

    def begin_update(self) -> None:
        """See `BatchServed`."""
        self._leave()
        self._packed = Packed()
        super().begin_update()

    def renewed(self, version: str) -> None:
        """See `BatchServed`; completions that are being written go on under the new weights, with new keys and values."""
        super().renewed(version)
        self.reset_cache()
        if self.run is not None:
            self.run.rebuild()

    def reset_cache(self) -> None:
        """See `BatchServed`."""
        if self.engine.kept is not None:
            self.engine.kept.clear()

    def _enter(self, run: LiveRun) -> None:
        """Plug the run into the model's layers; after some steps products read copies of the weights, where that pays."""
        if self._stack is not None:
            return
        inner, stack = self.engine.inner, contextlib.ExitStack()
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        run.packed, run.steps = self._packed if on_cpu and worth_packing(inner) else None, 0
        stack.enter_context(evaluating(self.engine.model))
        stack.enter_context(plugged_in(inner, run.store))
        stack.enter_context(fused_layers(inner, self._packed))
        stack.enter_context(quick_products(inner, self._packed))
        stack.enter_context(bound_threads(None))
        self._stack = stack

    def _leave(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def facts(self) -> dict[str, Any]:
        """See `BatchServed`."""
        return super().facts() | {"max_num_seqs": self.engine.max_slots}
