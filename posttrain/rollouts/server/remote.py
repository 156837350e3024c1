"""Asynchronous rollouts from servers: the trainer gives them their weights, and tells its workers who holds which version."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from posttrain.errors import RolloutServerError, WeightSyncError
from posttrain.rollouts.server.client import PAUSE_TIMEOUT
from posttrain.rollouts.server.engine import WAIT, ServerEngine
from posttrain.rollouts.server.pool import Server, weight_version
from posttrain.types import Request, Rollout, Sampling

__all__ = ["FollowingEngine", "ServerTransfer", "ServerVersions"]

logger = logging.getLogger(__name__)

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
