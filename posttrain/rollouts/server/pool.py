"""The rollout servers a run uses: who is there, who holds which weights, who has the least to do; they may come and go."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from posttrain.errors import ConfigError, RolloutServerError, ServerBusy, ServerUnreachable
from posttrain.rollouts.server.client import VLLMClient

__all__ = ["Server", "ServerPool", "Urls"]

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 5.0  # Between two looks at who has come or gone.

Urls = str | Path | Sequence[str] | Callable[[], Sequence[str]]


@dataclass(eq=False)
class Server:
    """One server as the trainer sees it.

    Attributes:
        client: Its connections.
        info: What it said of itself when it was admitted.
        pushed: The trainer's version that it was given; None: none, or lost.
        server_version: The number under which it knows that version, which rises even where trainers begin anew.
        outstanding: Tokens it has been asked for and has not answered.
        down: Why it gets no requests; None: it does.
        lock: Keeps other trainers of this machine from a server on this machine; None: nothing is pushed to it.
    """

    client: VLLMClient
    info: dict[str, Any]
    pushed: int | None = None
    server_version: int | None = None
    outstanding: int = 0
    down: RolloutServerError | None = None
    lock: FileLock | None = None
    served: int = 0

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.base_url

    def close(self) -> None:
        """Leave it to others."""
        if self.lock is not None:
            self.lock.release()
        self.client.close()


class ServerPool:
    """Keeps the list of servers and what they hold.

    Args:
        urls: An address, several (in a list, or in one text with commas), a file with one a line, or a function that returns
            them. Files and functions are asked again, so that servers may join and leave.
        connect: Makes a client of an address.
        timeout: Seconds in which the first servers must be there; None: they may come later, or there be none yet.
        pushes: Whether this process pushes weights: then it alone, of all on this machine, may use a server.

    Raises:
        ServerUnreachable: None of them is healthy in time.
        ServerBusy: Another trainer of this machine uses one of them.
    """

    def __init__(
        self,
        urls: Urls,
        connect: Callable[[str], VLLMClient],
        *,
        timeout: float | None = 240.0,
        pushes: bool = True,
    ) -> None:
        self.source, self.connect, self.pushes = urls, connect, pushes
        self.servers: dict[str, Server] = {}
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._looked = 0.0
        if timeout is not None:
            self._wait_until_ready(timeout)

    # Who is there ----------------------------------------------------------------------------------------------------

    def urls(self) -> list[str]:
        """Addresses as of now."""
        found: Any = self.source
        if isinstance(found, Path) or (isinstance(found, str) and "://" not in found and Path(found).is_file()):
            found = [line.split("#")[0] for line in Path(found).read_text().splitlines()]
        found = found() if callable(found) else found
        listed = found.split(",") if isinstance(found, str) else list(found)
        return list(dict.fromkeys(url.strip().rstrip("/") for url in listed if url.strip()))

    def _wait_until_ready(self, timeout: float) -> None:
        """Wait for all servers; go on without the late ones where some are there."""
        deadline = time.monotonic() + timeout
        while True:
            waiting = self._admit_new()
            if not waiting or time.monotonic() >= deadline:
                break
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0.0)))
        if not self.urls():
            raise ConfigError("no rollout server is named. Set vllm_server_base_url, or vllm_server_host and _port.")
        if not self.servers:
            url, error = next(iter(waiting.items()))
            raise ServerUnreachable(
                f"no healthy rollout server at {', '.join(waiting)} within {timeout:g} s. The last answer: "
                f"{error.__cause__ or error} Fix: start one with 'posttrain serve --model MODEL', or correct "
                "vllm_server_base_url.",
                url=url,
            )
        for url, error in waiting.items():
            logger.warning("%s is not there and is left out until it is: %s", url, error)

    def _admit_new(self) -> dict[str, RolloutServerError]:
        """Connect to the servers that are not known yet; the errors of those that cannot be reached."""
        waiting: dict[str, RolloutServerError] = {}
        for url in self.urls():
            if url not in self.servers:
                try:
                    self.servers[url] = self._admit(url)
                except ServerUnreachable as error:
                    waiting[url] = error
        return waiting

    def _admit(self, url: str) -> Server:
        client = self.connect(url)
        server = Server(client, client.info())
        if self.pushes:
            self._acquire_lease(server)
        logger.info(
            "rollout server %s: %s, weights of version %s.", url, server.info["model"], server.info["weight_version"]
        )
        return server

    def _acquire_lease(self, server: Server) -> None:
        """Keep other trainers of this machine away, and end a pause that the server's last trainer left.

        Raises:
            ServerBusy: Another process of this machine pushes to it.
        """
        if server.lock is None and server.client.is_local:
            name = hashlib.blake2b(server.url.encode(), digest_size=8).hexdigest()
            lock = FileLock(Path(tempfile.gettempdir(), f"posttrain-server-{name}.lock"), thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                text = f"{server.url} is used by another trainer on this machine. Fix: give each trainer its own."
                raise ServerBusy(text, held=True, url=server.url) from None
            server.lock = lock
        if server.client.is_paused():
            server.client.resume()

    def refresh(self, force: bool = False) -> None:
        """Take in who has come, let go who was taken off the list, and look again at who was down.

        While one thread does it the others go on with what is known, unless they insist.
        """
        if not force and time.monotonic() - self._looked < REFRESH_SECONDS:
            return
        if not self._refreshing.acquire(blocking=force):
            return
        try:
            self._looked = time.monotonic()
            self._refresh()
        finally:
            self._refreshing.release()

    def force_refresh(self) -> None:
        """Let the next `refresh` look, however short ago the last one was."""
        self._looked = -REFRESH_SECONDS

    def _refresh(self) -> None:
        wanted = self.urls()
        for url in [u for u in self.servers if u not in wanted]:
            logger.warning("rollout server %s was taken off the list.", url)
            self.servers.pop(url).close()
        if callable(self.source) or len(wanted) > len(self.servers):
            for url, error in self._admit_new().items():
                logger.debug("%s is still not there: %s", url, error)
        for server in list(self.servers.values()):
            if server.down is not None:
                self._look_again(server)

    def _look_again(self, server: Server) -> None:
        """A server that is back gets requests again; its weights must be pushed unless they are still those it had."""
        try:
            server.client.health()
            server.client.facts = {}  # It may have been started anew, with other options.
            info = server.client.info()
            if self.pushes:
                self._acquire_lease(server)
        except RolloutServerError as error:
            server.down = error
            return
        if info["weight_version"] != server.server_version:
            server.pushed = server.server_version = None
        server.info, server.down = info, None
        logger.warning("rollout server %s is back.", server.url)

    def look_at(self, server: Server) -> None:
        """Ask a server which weights it has, for it may have been restarted; one that is slow to answer is taken as it was."""
        try:
            info = server.client.info()
        except RolloutServerError as error:
            if not getattr(error, "timed_out", False):
                self.failed(server, error)
            return
        if info["weight_version"] != server.server_version:
            server.pushed = server.server_version = None
        server.info = info

    # Who does what ---------------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Server]:
        """Those that are up."""
        return [server for server in list(self.servers.values()) if server.down is None]

    def acquire(self, tokens: int, version: int | None, without: Collection[Server]) -> Server | None:
        """The server with the least to do among those that hold ``version`` (None: any), with ``tokens`` added to its work."""
        with self._lock:
            ready = [s for s in self.live if s not in without and (version is None or s.pushed == version)]
            if not ready:
                return None
            chosen = min(ready, key=lambda server: server.outstanding)
            chosen.outstanding += tokens
            return chosen

    def release(self, server: Server, tokens: int) -> None:
        """Its work is over, one way or the other."""
        with self._lock:
            server.outstanding -= tokens

    def failed(self, server: Server, error: RolloutServerError) -> None:
        """It gets no requests until it is healthy again."""
        server.down = error
        logger.warning("rollout server %s is left out: %s", server.url, error)

    def close(self) -> None:
        """Leave all servers to others."""
        for server in self.servers.values():
            server.close()
        self.servers = {}
