"""The rollout servers a run uses: who is there, who holds which weights, who has the least to do; they may come and go."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from posttrain.data.formats import warn_once
from posttrain.errors import ConfigError, RolloutServerError, ServerBusy, ServerUnreachable
from posttrain.extensions.server.client import VLLMClient
from posttrain.redaction import hide_secrets

logger = logging.getLogger(__name__)

# Seconds between two looks at who has come or gone.
REFRESH_SECONDS = 5.0
# Errors of a server that may come back by itself.
AWAY = (ServerUnreachable, ServerBusy)

Urls = str | Path | Sequence[str] | Callable[[], Sequence[str]]


@dataclass(eq=False)
class Server:
    """One server as the trainer sees it.

    Attributes:
        client: Its connections.
        info: What it said of itself when it was asked last.
        holds: The version of its weights by the name they were pushed under; empty: they must be pushed anew.
        outstanding: Tokens it has been asked for and has not answered.
        asked: How often it was chosen, so that servers with nothing to do take turns.
        down: Why it gets no requests; None: it does.
        lock: Keeps other trainers of this machine from a server on this machine; None: nothing is pushed to it.
        listed: Whether it is on the list; one that is not is closed with its last answer, for a read from a connection that
            is closed meanwhile waits until its time is up.
    """

    client: VLLMClient
    info: dict[str, Any]
    holds: str = ""
    outstanding: int = 0
    asked: int = 0
    down: RolloutServerError | None = None
    lock: FileLock | None = None
    listed: bool = True

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
        self._looked = -REFRESH_SECONDS
        if timeout is not None:
            self._wait_until_ready(timeout)

    # Who is there

    def urls(self) -> list[str]:
        """Addresses as of now."""
        addresses: Any = self.source
        if isinstance(addresses, Path) or (
            isinstance(addresses, str) and "://" not in addresses and Path(addresses).is_file()
        ):
            addresses = [line.split("#")[0] for line in Path(addresses).read_text().splitlines()]
        addresses = addresses() if callable(addresses) else addresses
        listed = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        return list(dict.fromkeys(url.strip().rstrip("/") for url in listed if url.strip()))

    def _wait_until_ready(self, timeout: float) -> None:
        """Wait for all servers; go on without the late ones where some are there."""
        deadline = time.monotonic() + timeout
        while (late := self._admit_new(self.urls(), ServerUnreachable)) and time.monotonic() < deadline:
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0.0)))
        if not self.urls():
            raise ConfigError("no rollout server is named. Set vllm_server_base_url, or vllm_server_host and _port.")
        for url, error in late.items():
            if not self.servers:
                raise ServerUnreachable(
                    f"no healthy rollout server at {', '.join(late)} within {timeout:g} s. The last answer: "
                    f"{error.__cause__ or error} Fix: start one with 'posttrain serve --model MODEL', or correct "
                    "vllm_server_base_url.",
                    url=hide_secrets(url),
                ) from error
            logger.warning("%s is not there and is left out until it is: %s", hide_secrets(url), error)

    def _admit_new(self, urls: Sequence[str], left_out: type[RolloutServerError]) -> dict[str, RolloutServerError]:
        """Connect to the servers that are not known yet; the errors of those that are left out for it."""
        late: dict[str, RolloutServerError] = {}
        for url in urls:
            if url not in self.servers:
                client = None
                try:
                    client = self.connect(url)
                    server = Server(client, client.info())
                    server.holds = server.info["weight_version"]
                    self._acquire_lease(server)
                except left_out as error:
                    if client is not None:
                        client.close()
                    late[url] = error
                    continue
                self.servers[url] = server
                logger.info(
                    "rollout server %s: %s, weights of version %s.", server.url, server.info["model"], server.holds
                )
        return late

    def _acquire_lease(self, server: Server) -> None:
        """Where weights are pushed: keep other trainers of this machine away, and end a pause that the last one left.

        Raises:
            ServerBusy: Another process of this machine pushes to it.
        """
        if not self.pushes:
            return
        if server.lock is None and server.client.is_local:
            # The port alone: localhost and 127.0.0.1 are one server.
            path = Path(tempfile.gettempdir(), f"posttrain-server-{urlsplit(server.url).port or 80}.lock")
            lock = FileLock(path, thread_local=False)
            try:
                lock.acquire(timeout=0)
            except PermissionError as error:
                text = (
                    f"{path}, which says who uses {server.url}, belongs to another user of this machine. Fix: serve on another "
                    "port, or let them remove it."
                )
                raise ServerBusy(text, held=True, url=server.url) from error
            except Timeout:
                text = (
                    f"{server.url} is used by another trainer on this machine. Fix: give each trainer its own; an earlier one of "
                    "this program lets go of it with trainer.engine.close()."
                )
                raise ServerBusy(text, held=True, url=server.url) from None
            server.lock = lock
        # A vLLM without developer mode cannot be paused, and knows no such path.
        with contextlib.suppress(RolloutServerError):
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
            self._looked, wanted = time.monotonic(), self.urls()
            for url in [u for u in self.servers if u not in wanted]:
                logger.warning("rollout server %s was taken off the list.", hide_secrets(url))
                self._let_go(url)
            # Whatever is the matter with a newcomer (a key, another trainer): the run has the servers that it began with.
            for url, error in self._admit_new(wanted, RolloutServerError).items():
                if isinstance(error, ServerUnreachable):
                    logger.debug("%s is still not there: %s", hide_secrets(url), error)
                else:
                    warn_once(logger, "%s is left out until it can be used: %s", hide_secrets(url), str(error))
            for server in self.all:
                if server.down is not None:
                    self.look_at(server)
        finally:
            self._refreshing.release()

    def look_at(self, server: Server) -> None:
        """Ask a server which weights it has, for it may have been restarted; one that was down gets requests again.

        One that is slow to answer (its machine is busy) is taken to be as it was.
        """
        try:
            if server.down is not None:
                server.client.health()
                # It may have been started anew, with other options.
                server.client.facts = {}
                self._acquire_lease(server)
            server.info = server.client.info()
        except RolloutServerError as error:
            if server.down is not None or not error.timed_out:
                self.failed(server, error)
            return
        server.holds = server.info["weight_version"]
        if server.down is not None:
            server.down = None
            logger.warning("rollout server %s is back.", server.url)

    # Who does what

    @property
    def all(self) -> list[Server]:
        """Up or down; a list, for another thread's call may take one off or find a new one meanwhile."""
        return list(self.servers.values())

    @property
    def live(self) -> list[Server]:
        """Those that are up."""
        return [server for server in self.all if server.down is None]

    def acquire(self, tokens: int, version: str | None, without: Collection[Server]) -> Server | None:
        """The server with the least to do among those that hold ``version`` (None: any), with ``tokens`` added to its work."""
        with self._lock:
            ready = [s for s in self.live if s not in without and version in (None, s.holds)]
            if not ready:
                return None
            chosen = min(ready, key=lambda server: (server.outstanding, server.asked))
            chosen.outstanding += tokens
            chosen.asked += 1
            return chosen

    def release(self, server: Server, tokens: int) -> None:
        """Its work is over, one way or the other."""
        with self._lock:
            server.outstanding -= tokens
            last = not server.listed and not server.outstanding
        if last:
            server.close()

    def _let_go(self, url: str) -> None:
        """Take a server off, and close it once it has answered what it was asked."""
        with self._lock:
            server = self.servers.pop(url)
            server.listed, idle = False, not server.outstanding
        if idle:
            server.close()

    def failed(self, server: Server, error: RolloutServerError) -> None:
        """It gets no requests until it is healthy again."""
        if server.down is None:
            logger.warning("rollout server %s is left out: %s", server.url, error)
        server.down = error

    def close(self) -> None:
        """Leave all servers to others."""
        for server in self.all:
            server.close()
        self.servers = {}
