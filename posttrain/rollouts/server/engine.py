"""`ServerEngine`: rollouts from one or several servers over HTTP, each completion with its own prompt and known weights."""

from __future__ import annotations

import logging
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
    ServerUnreachable,
    WeightSyncError,
)
from posttrain.rollouts.base import Capabilities, RolloutEngine, check_followed
from posttrain.rollouts.server.client import VLLMClient
from posttrain.rollouts.server.pool import Server, ServerPool, Urls
from posttrain.rollouts.server.replies import check_each, derived_seed, read_choice, sampling_body
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
AWAY = (ServerUnreachable, ServerBusy)  # Errors of a server that may come back by itself.
UNKNOWN = ("no_repeat_ngram",)  # Fields of `Sampling` that servers have no rule for.
Found = TypeVar("Found")
Spans = list[tuple[int, int]]


@dataclass(eq=False)
class Chunk:
    """Requests that go to one server together: one number of completions, one sampling.

    Attributes:
        indices: Of the requests in the call.
        seeds: One a request; None: the server draws them.
    """

    indices: list[int]
    prompts: list[list[int]]
    n: int
    sampling: Sampling
    seeds: list[int | None]

    @property
    def tokens(self) -> int:
        """That may have to be computed."""
        return sum(map(len, self.prompts)) + len(self.prompts) * self.n * self.sampling.max_new_tokens


class ServerEngine(RolloutEngine):
    """Rollouts from servers that hold a copy of the policy's weights.

    Requests are spread by outstanding tokens. What a server that dies was asked for goes to the others, with the same seeds;
    servers may join and leave, and a newcomer is used once it has the current weights. Every reply must say
    the version it was sampled from; rollouts of another version never reach the trainer.

    Args:
        urls: See `ServerPool`.
        connection_timeout: Seconds in which a first server must be healthy; None: they may come later.
        request_timeout: Seconds of one request; see `VLLMClient`.
        sync_timeout: Seconds of one call of a weight update.
        bucket_mb: MiB of one bucket of weights.
        pushes: Whether weights are pushed from here: then this process alone, of all on its machine, may use the servers.
        api_key: Bearer token of the servers.
        shared_memory: Whether weights go to servers on this machine through shared memory; None: where there is any.
        patience: Seconds to wait for a server to come back when none is left, before a call fails.

    Raises:
        ServerUnreachable: No server in time.
        ServerBusy: Another trainer of this machine uses a server.

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
        pushes: bool = True,
        api_key: str | None = None,
        shared_memory: bool | None = None,
        patience: float = 0.0,
    ) -> None:
        def connect(url: str) -> VLLMClient:
            return VLLMClient(url, request_timeout=request_timeout, sync_timeout=sync_timeout, api_key=api_key)

        self.patience = patience
        self.pushed = False
        self.pusher = Pusher(bucket_mb * 2**20, sync_timeout, shared_memory)
        self.fleet = ServerPool(urls, connect, timeout=connection_timeout, pushes=pushes)
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
        """What all servers that are up can do together: the smallest context, one dtype or None."""
        infos = [server.info for server in self._members]
        dtypes = {as_dtype(info.get("dtype")) for info in infos}
        return Capabilities(
            needs_weight_sync=True,
            main_process_only=True,
            scores_sequences=True,
            checkpoint_names=any(info.get("checkpoint_names") for info in infos),
            unsupported=UNKNOWN,
            context=self._least("max_model_len"),
            dtype=dtypes.pop() if len(dtypes) == 1 else None,
        )

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, list[list[float]]]:
        """Log-probs of given tokens behind their prompts, by every server that has weights: one list a sequence.

        Raises:
            ServerUnreachable: None is left that could answer (also `ServerBusy`).
        """
        found: dict[str, list[list[float]]] = {}
        for server in self.fleet.live:
            try:
                found[server.url] = [one.logps for one in server.client.score(sequences, prompt_lengths)]
            except AWAY as error:
                self.fleet.failed(server, error)
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
        own = [name for name in Sampling.__dataclass_fields__ if name not in UNKNOWN]
        check_followed(requests, sampling, "a rollout server", UNKNOWN, own)
        check_each(requests, sampling, self._least("max_model_len"), self._least("vocab_size"))
        return self.patiently(lambda: self._generate(requests, sampling))

    def patiently(self, ask: Callable[[], Found]) -> Found:
        """Ask, and where no server is there to be asked, look for one for `patience` seconds.

        Raises:
            ServerUnreachable: None has come back in time (also `ServerBusy`).
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
        pieces = max(len(self.fleet.live), 1)
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
        while (server := self.fleet.acquire(chunk.tokens, wanted, failed)) is not None:
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
                self.fleet.release(server, chunk.tokens)
        raise self._nobody(failed)

    def _nobody(self, failed: dict[Server, RolloutServerError]) -> RolloutServerError:
        """Why no server is left."""
        # Also those that another chunk of the same call has found dead.
        down = {s: s.down for s in self.fleet.servers.values() if s.down is not None}
        errors = [*(down | failed).values()]
        stale = next((e for e in errors if isinstance(e, WeightSyncError)), None)
        if stale is not None:
            return stale
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
        choices = server.client.complete(
            chunk.prompts,
            n=chunk.n,
            seeds=chunk.seeds,
            retries=RETRIES if alone else 1,
            **sampling_body(chunk.sampling),
        )
        owners = [prompt for prompt in chunk.prompts for _ in range(chunk.n)]
        rollouts = [read_choice(*pair, chunk.sampling) for pair in zip(choices, owners, strict=True)]
        for rollout, choice in zip(rollouts, choices, strict=True):
            self._stamp(server, rollout, self._spans(server, choice))
        server.served += len(rollouts)
        return rollouts

    def _spans(self, server: Server, choice: dict[str, Any]) -> Spans:
        """Runs of (version as the server calls it, tokens) of a completion."""
        runs = [(_server_version(run["version"]), run["end"] - run["start"]) for run in choice["weight_versions"]]
        if sum(tokens for _, tokens in runs) != len(choice["token_ids"]):
            raise RolloutServerError(
                f"{server.url} says which weights wrote {sum(tokens for _, tokens in runs)} tokens of a completion of "
                f"{len(choice['token_ids'])}: its answer cannot be used.", url=server.url,
            )  # fmt: skip
        return runs

    def _stamp(self, server: Server, rollout: Rollout, spans: Spans) -> None:
        """Note on a rollout which weights wrote it.

        Raises:
            WeightSyncError: Others than were pushed.
        """
        versions = {version for version, _ in spans}
        if self.pushed and versions - {server.server_version}:
            raise WeightSyncError(
                f"{server.url} sampled from weights of version {', '.join(map(str, sorted(versions)))}, and version "
                f"{server.server_version} was pushed last. It was restarted, or another trainer pushes to it.",
                phase="reply", version=max(versions), url=server.url,
            )  # fmt: skip
        rollout.version = self.version if self.pushed else max(versions, default=0)

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
            outdated = self.patiently(lambda: self._outdated(version))
        except RolloutServerError:
            for _ in named_tensors:  # Reading may be a collective that other ranks wait in.
                pass
            raise
        server_versions = {
            s.client: max(version, (s.info["weight_version"] or 0) + 1, (s.server_version or 0) + 1) for s in outdated
        }
        for server in outdated:
            server.pushed = server.server_version = None
        dtype = self.capabilities.dtype
        pairs = ((n, t.to(dtype) if dtype is not None and t.is_floating_point() else t) for n, t in named_tensors)
        answers = self.pusher.push(pairs, server_versions, partial=not hasattr(named_tensors, "names"))
        for server in outdated:
            error = answers[server.client]
            if error is not None:
                self.fleet.failed(server, error)
            else:
                server.pushed, server.server_version = version, server_versions[server.client]
        if not any(s.pushed == version for s in self.fleet.live):
            errors = [error for error in answers.values() if error is not None]
            raise errors[0] if errors else self._nobody({})
        self.version, self.pushed = version, True

    def _outdated(self, version: int) -> list[Server]:
        """The servers that are there and must be given a version; each says anew what it has."""
        self.fleet.refresh(force=True)
        for server in self.fleet.live:
            self.fleet.look_at(server)
        if not self.fleet.live:
            raise self._nobody({})
        return [s for s in self.fleet.live if not (self.pushed and s.pushed == version == self.version)]

    def close(self) -> None:
        """Leave the servers to others, and remove files in shared memory."""
        self._ending()


def _end(fleet: ServerPool, pusher: Pusher) -> None:
    fleet.close()
    pusher.close()


def _server_version(version: str) -> int:
    """A version as numbers; what a checkpoint's weights are called by is 0, and -1 what is no version of anybody's."""
    return int(version) if version.isdigit() else 0 if version == "default" else -1


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
    """The trainer's end: servers are given the next version, and go on; satisfies the protocol of weight transfers.

    Each server is paused inside its update: completions that can be held stay in the middle and go on under the new weights,
    the others end first. A server that fails is left out, and taken in again once it is healthy and has the weights.

    Args:
        make: Makes the engine that pushes; called on the rank that sends.
    """

    def __init__(self, make: Callable[[], ServerEngine]) -> None:
        self.make, self.version = make, 0
        self.engine: ServerEngine | None = None
        self._announced = ServerVersions()

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
            self.version,
            {s.url: s.server_version for s in live if s.pushed == self.version and s.server_version is not None},
        )

    def init_weight_transfer(self) -> None:
        """Meet the servers."""
        self.engine = self.engine or self.make()

    def pause(self) -> None:
        """Nothing: the update of each server pauses it."""

    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push the next version; returns when at least one server has confirmed it."""
        self._pushing.load_weights(tensors, self.version + 1)
        self.version += 1
        self._announced = self.holders

    def send_again(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push the same version, with the same weights, to servers that lack it: newcomers, and those that were restarted."""
        self._pushing.load_weights(tensors, self.version)
        self._announced = self.holders

    def resume(self) -> None:
        """Nothing: the update of each server ends its pause."""

    def missing_weights(self) -> bool:
        """Whether a server that is there lacks the last version, or workers were not told that it has it.

        Each is asked, for it may have been restarted; one that is slow to answer (its machine is busy) is taken to be as it was.
        """
        fleet = self._pushing.fleet
        fleet.refresh(force=True)
        for server in fleet.live:
            fleet.look_at(server)
        known = self._announced.versions
        return any(server.pushed != self.version or server.url not in known for server in fleet.live)

    def failure_reason(self) -> str:
        """What is wrong with servers that get no requests; empty where all are well."""
        fleet = self._pushing.fleet
        return "; ".join(
            f"{s.url}: {str(s.down).splitlines()[0]}" for s in fleet.servers.values() if s.down is not None
        )

    def destroy(self) -> None:
        """Leave the servers to others."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class FollowingEngine(ServerEngine):
    """A worker's end: asks servers that another process gives their weights, and knows which version wrote which token.

    It pushes nothing; `set_servers` names the servers that may be asked. An answer whose weights this run never gave to
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
        super().__init__(lambda: list(self.holders.versions), connection_timeout=None, pushes=False, **options)

    def set_servers(self, holders: ServerVersions) -> None:
        """Ask these servers from now on."""
        with self._news:
            for url, server_version in holders.versions.items():
                self._known.setdefault(url, {})[server_version] = holders.version
            self.holders, self.version, self.pushed = holders, holders.version, True
            self._news.notify_all()
        if holders.versions.keys() - self.fleet.servers.keys():
            self.fleet.force_refresh()

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
                    server.server_version = self.holders.versions.get(server.url)
                    server.pushed = None if server.server_version is None else self.holders.version
            self._noted = dict.fromkeys(known, self.holders)
        return super()._generate(requests, sampling)

    def _stamp(self, server: Server, rollout: Rollout, spans: Spans) -> None:
        """See `ServerEngine._stamp`; a completion may have been written under several versions."""
        found = [(self._version_of(server, server_version), tokens) for server_version, tokens in spans]
        rollout.version = min((version for version, _ in found), default=self.version)
        rollout.spans = found if len(found) > 1 else None

    def _version_of(self, server: Server, server_version: int | None) -> int:
        """The trainer's version of the weights that a server calls so."""

        def known() -> dict[int, int]:
            return self._known.get(server.url, {})

        with self._news:
            if server_version is not None and server_version > max(
                known(), default=0
            ):  # Pushed just now: the news is on its way.
                self._news.wait_for(lambda: server_version in known(), self.news_timeout)
            if server_version in known():
                return known()[server_version]
        raise WeightSyncError(
            f"{server.url} sampled from weights of version {server_version}, which this run never gave it (the last was "
            f"{max(known(), default=None)}). It was restarted, or another trainer pushes to it.",
            phase="reply", version=server_version, url=server.url,
        )  # fmt: skip
