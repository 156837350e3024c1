"""`ServerEngine`: rollouts from one or several servers over HTTP, each completion with its own prompt and known weights."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
from posttrain.rollouts.server.client import PAUSE_TIMEOUT, VLLMClient
from posttrain.rollouts.server.plain_vllm import connect_client
from posttrain.rollouts.server.pool import Fleet, Server, Urls, default_holder, weight_version
from posttrain.rollouts.server.replies import Chunk, check_each, derived_seed, read_reply, sampling_fields
from posttrain.rollouts.server.weight_sync import Pusher
from posttrain.rollouts.workers.shared_weights import as_dtype
from posttrain.types import Request, Rollout, Sampling

__all__ = [
    "FollowingEngine",
    "ServerEngine",
    "ServerTransfer",
    "ServerVersions",
    "VLLMClient",
]

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


# Engines whose completions can be held in the middle and go on under other weights; the others are waited for.
KEEPS = ("native", "vllm")


@dataclass(frozen=True, slots=True)
class ServerVersions:
    """Which servers hold a version of the weights.

    Attributes:
        version: The trainer's.
        versions: By address, the number under which a server knows it (servers number on from what they had).
    """

    version: int = 0
    versions: dict[str, int] = field(default_factory=dict)


class ServerTransfer:
    """The trainer's end: servers are paused, given the next version, and go on; satisfies the protocol of weight transfers.

    Completions that a native engine is writing stay in the middle and go on under the new weights; other engines end what
    they write first. A server that fails is left out, and taken in again once it is healthy and has the current weights.

    Args:
        make: Makes the engine that pushes; called on the rank that sends.
    """

    def __init__(self, make: Callable[[], ServerEngine]) -> None:
        self.make, self.version = make, 0
        self.engine: ServerEngine | None = None
        self._paused: list[Server] = []
        self._told = ServerVersions()

    @property
    def _pushing(self) -> ServerEngine:
        assert self.engine is not None, "init_weight_transfer comes first"
        return self.engine

    @property
    def checkpoint_names(self) -> bool:
        """Whether the servers take weights as checkpoints name them."""
        return self.engine is not None and self.engine.capabilities.checkpoint_names

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion, of the server with the least."""
        return None if self.engine is None else self.engine.capabilities.context

    @property
    def holders(self) -> ServerVersions:
        """Who has the version that was pushed last."""
        live = self._pushing.fleet.live
        return ServerVersions(
            self.version, {s.url: s.wire for s in live if s.pushed == self.version and s.wire is not None}
        )

    def init_weight_transfer(self) -> None:
        """Meet the servers and take their leases."""
        self.engine = self.engine or self.make()

    def pause(self) -> None:
        """Hold generation where it can be held; servers that are gone are waited for by the push."""
        fleet = self._pushing.fleet
        fleet.refresh(force=True)
        chosen = [server for server in fleet.live if server.info.get("engine") in KEEPS]
        self._paused = self._each(chosen, "/pause/", {"mode": "keep"})

    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push the next version; returns when at least one server has confirmed it."""
        self._pushing.load_weights(tensors, self.version + 1)
        self.version += 1
        self._told = self.holders

    def send_again(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push the same version, with the same weights, to servers that lack it: newcomers, and those that were restarted."""
        self._pushing.load_weights(tensors, self.version)
        self._told = self.holders

    def resume(self) -> None:
        """Go on wherever `pause` held."""
        paused, self._paused = self._paused, []
        self._each(paused, "/resume/", {})

    def _each(self, servers: Sequence[Server], path: str, body: dict[str, Any]) -> list[Server]:
        """Ask all at once; those that did it. The others get no requests until they are well."""

        def ask(server: Server) -> RolloutServerError | None:
            try:
                server.client.call("POST", path, body, timeout=PAUSE_TIMEOUT)
            except RolloutServerError as error:
                return error
            return None

        if not servers:
            return []
        with ThreadPoolExecutor(max_workers=len(servers)) as pool:
            errors = list(pool.map(ask, servers))
        for server, error in zip(servers, errors, strict=True):
            if error is not None:
                self._pushing.fleet.failed(server, error)
        return [server for server, error in zip(servers, errors, strict=True) if error is None]

    def lacking(self) -> bool:
        """Whether a server that is there lacks the last version, or workers were not told that it has it.

        Each is asked, for it may have been restarted; one that is slow to answer (its machine is busy) is taken to be as it was.
        """
        fleet = self._pushing.fleet
        fleet.refresh(force=True)
        for server in fleet.live:
            try:
                info = server.client.info()
            except RolloutServerError as error:
                if not getattr(error, "timed_out", False):
                    fleet.failed(server, error)
                continue
            if weight_version(info) != server.wire or not info.get("weights_valid", True):
                server.pushed = server.wire = None
        known = self._told.versions
        return any(server.pushed != self.version or server.url not in known for server in fleet.live)

    def trouble(self) -> str:
        """What is wrong with servers that get no requests; empty where all are well."""
        fleet = self._pushing.fleet
        return "; ".join(
            f"{s.url}: {str(s.down).splitlines()[0]}" for s in fleet.servers.values() if s.down is not None
        )

    def destroy(self) -> None:
        """Leave no server paused, and give the leases back."""
        if self.engine is not None:
            self.resume()
            self.engine.close()
            self.engine = None


class FollowingEngine(ServerEngine):
    """A worker's end: asks servers that another process gives their weights, and knows which version wrote which token.

    It holds no lease and pushes nothing; `follow` tells it who may be asked. An answer whose weights this run never gave to
    that server (it was restarted, or is another trainer's by now) is refused, and asked of another server.

    Args:
        news_timeout: Seconds for news of a version that a server already has.
        options: Of `ServerEngine`.
    """

    def __init__(self, *, news_timeout: float = 60.0, **options: Any) -> None:
        self.holders, self.news_timeout = ServerVersions(), news_timeout
        self._known: dict[str, dict[int, int]] = {}  # By address: the number at the server, and the trainer's version.
        self._noted: dict[Server, ServerVersions] = {}
        self._news = threading.Condition()
        super().__init__(lambda: list(self.holders.versions), connection_timeout=None, holder=None, **options)

    def set_servers(self, holders: ServerVersions) -> None:
        """Ask these servers from now on."""
        with self._news:
            for url, wire in holders.versions.items():
                self._known.setdefault(url, {})[wire] = holders.version
            self.holders, self.version, self.pushed = holders, holders.version, True
            self._news.notify_all()
        if holders.versions.keys() - self.fleet.servers.keys():
            self.fleet.look_soon()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Weights are pushed elsewhere."""
        raise WeightSyncError("workers push no weights to servers: the trainer does.", phase="begin", version=version)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `ServerEngine.generate`; while no server holds the current weights, it is waited for one."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return super().generate(requests, sampling)
            except WeightSyncError:
                if time.monotonic() >= deadline:
                    raise
                with self._news:
                    self._news.wait(WAIT)

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        with self._news:
            for server in (known := list(self.fleet.servers.values())):
                if self._noted.get(server) is not self.holders:
                    server.wire = self.holders.versions.get(server.url)
                    server.pushed = None if server.wire is None else self.holders.version
            self._noted = dict.fromkeys(known, self.holders)
        return super()._generate(requests, sampling)

    def _check_version(self, server: Server, reply: dict[str, Any]) -> None:
        """Every completion is looked at by itself."""

    def _stamp(self, server: Server, reply: dict[str, Any], rollouts: list[Rollout]) -> None:
        end = weight_version(reply)
        found = reply.get("version_spans") or [None] * len(rollouts)
        for rollout, runs in zip(rollouts, found, strict=True):
            count = len(rollout.token_ids)
            runs = [(end, count)] if runs is None else runs
            if sum(tokens for _, tokens in runs) != count:
                raise RolloutServerError(
                    f"{server.url} says which weights wrote {sum(tokens for _, tokens in runs)} tokens of a completion of "
                    f"{count}: its answer cannot be used.", url=server.url,
                )  # fmt: skip
            spans = [(self._version_of(server, wire), tokens) for wire, tokens in runs]
            rollout.version = min((version for version, _ in spans), default=self.version)
            rollout.spans = spans if len(spans) > 1 else None

    def _version_of(self, server: Server, wire: int | None) -> int:
        """The trainer's version of the weights that a server calls so."""

        def known() -> dict[int, int]:
            return self._known.get(server.url, {})

        with self._news:
            if wire is not None and wire > max(known(), default=0):  # Pushed just now: the news is on its way.
                self._news.wait_for(lambda: wire in known(), self.news_timeout)
            if wire in known():
                return known()[wire]
        raise WeightSyncError(
            f"{server.url} sampled from weights of version {wire}, which this run never gave it (the last was "
            f"{max(known(), default=None)}). It was restarted, or another trainer pushes to it.",
            phase="reply", version=wire, url=server.url,
        )  # fmt: skip
