"""`ServerEngine`: rollouts from one or several servers over HTTP, each completion with its own prompt and known weights."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from posttrain.errors import (
    BadRequest,
    RolloutServerError,
    ServerBusy,
    ServerDied,
    ServerUnreachable,
    WeightSyncError,
)
from posttrain.rollouts.base import Capabilities, RolloutEngine
from posttrain.rollouts.server.client import VLLMClient
from posttrain.rollouts.server.plain_vllm import connect_client
from posttrain.rollouts.server.pool import Fleet, Server, Urls, default_holder, weight_version
from posttrain.rollouts.server.replies import Chunk, check_each, derived_seed, read_reply, sampling_fields
from posttrain.rollouts.server.weight_sync import Pusher
from posttrain.rollouts.workers.shared_weights import as_dtype
from posttrain.types import Request, Rollout, Sampling

__all__ = ["ServerEngine", "VLLMClient"]

logger = logging.getLogger(__name__)

RETRIES = 3
WAIT = 2.0  # Seconds between two looks for a server that is gone.
AWAY = (ServerUnreachable, ServerBusy, ServerDied)  # Errors of a server that may come back by itself.
Found = TypeVar("Found")


class ServerEngine(RolloutEngine):
    """Rollouts from servers that hold a copy of the policy's weights.

    Requests are spread by outstanding tokens. What a server that dies was asked for goes to the others, under the same
    request id; servers may join and leave, and a newcomer is used once it has the current weights. Every reply must say
    the version it was sampled from; rollouts of another version never reach the trainer.

    Args:
        urls: See `Fleet`.
        connection_timeout: Seconds in which a first server must be healthy; None: they may come later.
        request_timeout: Seconds of one request; see `VLLMClient`.
        sync_timeout: Seconds of one call of a weight update.
        bucket_mb: MiB of one bucket of weights.
        holder: The name on the lease that keeps other trainers from these servers; None takes none.
        api_key: Bearer token of the servers.
        shared_memory: Whether weights go to servers on this machine through shared memory; None: where there is any.
        chunks_per_server: Requests into which a server's share of a call is cut.
        patience: Seconds to wait for a server to come back when none is left, before a call fails.

    Raises:
        ServerUnreachable: No server in time.
        ServerBusy: Another trainer holds a server.

    >>> engine = ServerEngine("http://127.0.0.1:8000")  # doctest: +SKIP
    >>> engine.load_weights(Weights(model), version=1)  # doctest: +SKIP
    """

    name = "server"

    def __init__(
        self,
        urls: Urls,
        *,
        connection_timeout: float | None = 240.0,
        request_timeout: float | None = None,
        sync_timeout: float = 720.0,
        bucket_mb: int = 512,
        holder: str | None = "",
        api_key: str | None = None,
        shared_memory: bool | None = None,
        chunks_per_server: int = 1,
        patience: float = 0.0,
    ) -> None:
        def connect(url: str) -> VLLMClient:
            return connect_client(url, request_timeout=request_timeout, sync_timeout=sync_timeout, api_key=api_key)

        holder = default_holder() if holder == "" else holder
        self.chunks_per_server, self.patience = chunks_per_server, patience
        self.pushed = False
        self.pusher = Pusher(bucket_mb * 2**20, sync_timeout, shared_memory)
        self.fleet = Fleet(urls, connect, timeout=connection_timeout, holder=holder)
        self._ending = weakref.finalize(self, _end, self.fleet, self.pusher)  # Also when the process ends.

    # What it is --------------------------------------------------------------------------------------------------------

    def _least(self, name: str) -> int | None:
        values = [int(s.info[name]) for s in self.fleet.servers.values() if s.info.get(name)]
        return min(values, default=None)

    @property
    def _members(self) -> list[Server]:
        """The servers that are up; where none is, all of them as they were: they are what will come back."""
        return self.fleet.live or list(self.fleet.servers.values())

    @property
    def capabilities(self) -> Capabilities:
        """What all servers that are up can do together: the smallest context and rank, one dtype or None."""
        infos = [server.info for server in self._members]
        dtypes = {as_dtype(info.get("dtype")) for info in infos}
        ranks = [int(info.get("max_lora_rank") or 2**16) if info.get("accepts_lora") else 0 for info in infos]
        return Capabilities(
            needs_weight_sync=True,
            main_process_only=True,
            scores_sequences=all(info.get("scores", True) for info in infos),
            checkpoint_names=any(str(info.get("engine", "")).startswith("vllm") for info in infos),
            max_lora_rank=min(ranks, default=0),
            context=self._least("max_model_len"),
            dtype=dtypes.pop() if len(dtypes) == 1 else None,
        )

    @property
    def has_initial_weights(self) -> bool:
        """Whether every server still has the weights it loaded when it started."""
        return all(weight_version(server.info) == 0 for server in self._members)

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, list[list[float]]]:
        """Log-probs of given tokens behind their prompts, by every server that has weights: one list a sequence.

        Raises:
            ServerUnreachable: None is left that could answer (also `ServerBusy`, `ServerDied`).
        """
        found: dict[str, list[list[float]]] = {}
        for server in self.fleet.live:
            try:
                reply = server.client.get_sequence_logprobs(sequences, prompt_lengths, top_logprobs=1)
            except AWAY as error:
                self.fleet.failed(server, error)
                continue
            lines = reply.get("actual_logprobs") or reply["logprobs"]
            found[server.url] = [[math.nan if at[0] is None else float(at[0]) for at in line] for line in lines]
        if not found:
            raise self._nobody({})
        return found

    def mark_stale(self) -> None:
        """See `RolloutEngine.mark_stale`."""
        for server in self.fleet.servers.values():
            server.pushed = None

    def needs_weights(self) -> bool:
        """Whether a server that could work lacks the version that was pushed last."""
        self.fleet.refresh()
        return not self.pushed or any(server.pushed != self.version for server in self.fleet.live)

    # Generation --------------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `posttrain.rollouts.base.RolloutEngine.generate`.

        Raises:
            BadRequest: A request that no server will serve.
            WeightSyncError: The servers hold other weights than were pushed.
            RolloutServerError: No server is left that could answer; its cause is the last one's error.
        """
        check_each(requests, sampling, self._least("max_model_len"), self._least("vocab_size"))
        return self.patiently(lambda: self._generate(requests, sampling))

    def patiently(self, ask: Callable[[], Found]) -> Found:
        """Ask, and where no server is there to be asked, look for one for `patience` seconds.

        Raises:
            ServerUnreachable: None has come back in time (also `ServerBusy`, `ServerDied`).
        """
        deadline = time.monotonic() + self.patience
        while True:
            self.fleet.refresh()
            try:
                return ask()
            except AWAY as error:
                if getattr(error, "held", False) or time.monotonic() >= deadline:
                    raise
                logger.warning("%s Waiting for a server to come back.", str(error).splitlines()[0])
                time.sleep(WAIT)

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        chunks = self._chunks(requests, sampling)
        if not chunks:
            return []
        with ThreadPoolExecutor(max_workers=len(chunks)) as pool:
            answers = list(pool.map(self._served, chunks))
        found: list[list[Rollout]] = [[] for _ in requests]
        for chunk, rollouts in zip(chunks, answers, strict=True):
            for place, index in enumerate(chunk.indices):
                found[index] = rollouts[place * chunk.n : (place + 1) * chunk.n]
        return [rollout for rollouts in found for rollout in rollouts]

    def _chunks(self, requests: Sequence[Request], sampling: Sampling) -> list[Chunk]:
        """Requests of one kind, cut into as many pieces as there are servers."""
        kinds: dict[tuple[int, Sampling, bool], list[tuple[int, Request]]] = {}
        for index, request in enumerate(requests):
            own = request.sampling or sampling
            kinds.setdefault((request.n, replace(own, seed=None), own.seed is None), []).append((index, request))
        pieces = max(len(self.fleet.live) * self.chunks_per_server, 1)
        chunks = []
        for (n, own, _), members in kinds.items():
            count = min(pieces, len(members))
            for number in range(count):
                part = members[len(members) * number // count : len(members) * (number + 1) // count]
                seeds = [derived_seed(sampling.seed, i) if r.sampling is None else r.sampling.seed for i, r in part]
                chunks.append(Chunk([i for i, _ in part], [list(r.prompt_ids) for _, r in part], n, own, seeds))
        return chunks

    def _served(self, chunk: Chunk) -> list[Rollout]:
        """A chunk's rollouts, from the first server that manages it."""
        failed: dict[Server, RolloutServerError] = {}
        wanted = self.version if self.pushed else None
        while (server := self.fleet.pick(chunk.tokens, wanted, failed)) is not None:
            try:
                return self._ask(server, chunk, alone=len(self.fleet.live) == 1)
            except BadRequest:
                raise
            except RolloutServerError as error:
                failed[server] = error
                if isinstance(error, WeightSyncError):
                    server.pushed = None  # It must be given its weights again before it is used.
                else:
                    self.fleet.failed(server, error)
            finally:
                self.fleet.done(server, chunk.tokens)
        raise self._nobody(failed)

    def _nobody(self, failed: dict[Server, RolloutServerError]) -> RolloutServerError:
        """Why no server is left."""
        # Also those that another chunk of the same call has found dead.
        down = {s: s.down for s in self.fleet.servers.values() if s.down is not None}
        errors = [*(down | failed).values()]
        stale = next((e for e in errors if isinstance(e, WeightSyncError)), None)
        if stale is not None:
            return stale
        if any(server.lost_lease for server in self.fleet.servers.values()):
            return ServerBusy("another trainer took over the rollout servers.", held=True)
        if len(errors) == 1:
            return errors[0]
        if not errors and self.fleet.live:
            return WeightSyncError(
                f"no rollout server holds version {self.version} of the weights. Push it (load_weights) before generating.",
                phase="generate", version=self.version,
            )  # fmt: skip
        said = "; ".join(f"{e.url}: {str(e).splitlines()[0]}" for e in errors)
        return ServerUnreachable(f"no rollout server is left of {len(self.fleet.servers)}. {said}")

    def _ask(self, server: Server, chunk: Chunk, alone: bool) -> list[Rollout]:
        reply = server.client.generate(
            chunk.prompts,
            n=chunk.n,
            max_tokens=chunk.sampling.max_new_tokens,
            request_id=chunk.id,
            retries=RETRIES if alone else 1,
            seed=None if chunk.seeds[0] is None else chunk.seeds,
            raw_logprobs=True,
            **sampling_fields(chunk.sampling),
        )
        self._check_version(server, reply)
        rollouts = read_reply(reply, chunk, url=server.url, vocabulary=server.info.get("vocab_size"))
        server.served += len(rollouts)
        self._stamp(server, reply, rollouts)
        return rollouts

    def _stamp(self, server: Server, reply: dict[str, Any], rollouts: list[Rollout]) -> None:
        """Note the version of the weights on what they wrote."""
        for rollout in rollouts:
            rollout.version = self.version if self.pushed else (weight_version(reply) or 0)

    def _check_version(self, server: Server, reply: dict[str, Any]) -> None:
        told = weight_version(reply)
        if not self.pushed or told == server.wire:
            return
        raise WeightSyncError(
            f"{server.url} sampled from weights of version {told}, and version {server.wire} was pushed last. It was restarted, "
            "or another trainer pushes to it.",
            phase="reply", version=told, url=server.url,
        )  # fmt: skip

    # Weights -----------------------------------------------------------------------------------------------------------

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push a version to every server that lacks it; those that fail are left out while others do not.

        Where no server is there, one is waited for, before the first tensor is read.

        Args:
            named_tensors: `posttrain.rollouts.workers.shared_weights.Weights`, or pairs; read to the end in any case.
            version: The trainer's; servers number on from what they have.

        Raises:
            ServerUnreachable: None has come back in time.
            WeightSyncError: No server took it; or a server knows other names, which no other server would cure.
        """
        try:
            lacking = self.patiently(lambda: self._lacking(version))
        except RolloutServerError:
            for _ in named_tensors:  # Reading may be a collective that other ranks wait in.
                pass
            raise
        wires = {s.client: max(version, (weight_version(s.info) or 0) + 1, 1) for s in lacking}
        for server in lacking:
            server.pushed = server.wire = None
        dtype, names = self.capabilities.dtype, getattr(named_tensors, "names", None)
        pairs = ((n, t.to(dtype) if dtype is not None and t.is_floating_point() else t) for n, t in named_tensors)
        answers = self.pusher.push(
            pairs, wires, names=names, adapter=getattr(named_tensors, "adapter", None), partial=names is None
        )
        for server in lacking:
            answer = answers[server.client]
            if isinstance(answer, RolloutServerError):
                self.fleet.failed(server, answer)
            else:
                server.pushed, server.wire = version, wires[server.client]
        if not any(s.pushed == version for s in self.fleet.live):
            errors = [e for e in answers.values() if isinstance(e, RolloutServerError)]
            raise errors[0] if errors else self._nobody({})
        self.version, self.pushed = version, True

    def _lacking(self, version: int) -> list[Server]:
        """The servers that are there and must be given a version; each says anew what it has, for it may have been restarted."""
        self.fleet.refresh(force=True)
        for server in self.fleet.live:
            try:
                info = server.client.info()
            except RolloutServerError as error:
                if not getattr(error, "timed_out", False):  # Its machine is busy: the update will tell.
                    self.fleet.failed(server, error)
                continue
            if weight_version(info) != server.wire:
                server.pushed = server.wire = None
            server.info = info
        if not self.fleet.live:
            raise self._nobody({})
        return [s for s in self.fleet.live if not (self.pushed and s.pushed == version == self.version)]

    def close(self) -> None:
        """Give the servers back and remove what lies in shared memory."""
        self._ending()


def _end(fleet: Fleet, pusher: Pusher) -> None:
    fleet.close()
    pusher.close()
