"""The native engine as a server runs it: continuous batches, weights replaced in place, scoring, sleep."""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.rollouts.hf import evaluating
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
from posttrain.rollouts.native.prefix_cache import Kept, match
from posttrain.rollouts.native.scheduler import common_beginning
from posttrain.serve.backends import Backend, failure_of
from posttrain.serve.group import ReceivingGroup
from posttrain.serve.jobs import Job, Score, Scored
from posttrain.serve.live import LiveRun, beginning_of
from posttrain.serve.scoring import score_sequences
from posttrain.serve.weights import ServedWeights, described

__all__ = ["NativeBackend"]


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
