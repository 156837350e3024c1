"""`ServerPool`: the rollout servers of a run, with the weight version, load and availability of each server."""

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

# Interval in seconds at which the list of servers is checked for new and removed servers.
REFRESH_SECONDS = 5.0
# If a request fails with one of these errors, the server may become available again.
AWAY = (ServerUnreachable, ServerBusy)

Urls = str | Path | Sequence[str] | Callable[[], Sequence[str]]


@dataclass(eq=False)
class Server:
    """State of one server.

    Attributes:
        client: Client with the connections to the server.
        info: Properties that the server last reported.
        holds: Name of the server's weight version. Empty: the version is unknown, so weights must be pushed again.
        outstanding: Number of tokens that were requested and for which no response has arrived yet.
        selected: Number of requests for which the server was selected. Among idle servers, the server with the fewest
            requests is selected.
        down: Last error of an unavailable server. The server receives no requests. None: the server is available.
        lock: File lock that excludes other trainers on this machine. None: this process pushes no weights to the server.
        listed: Whether the server is in the list of addresses. A removed server is closed after its last response, because
            reading from a closed connection would block until the timeout.
    """

    client: VLLMClient
    info: dict[str, Any]
    holds: str = ""
    outstanding: int = 0
    selected: int = 0
    down: RolloutServerError | None = None
    lock: FileLock | None = None
    listed: bool = True

    @property
    def url(self) -> str:
        """Address of the server."""
        return self.client.base_url

    def close(self) -> None:
        """Close the connections and release the lock."""
        if self.lock is not None:
            self.lock.release()
        self.client.close()


class ServerPool:
    """The rollout servers of a run, with the state of each server. Servers can join and leave during a run.

    Args:
        urls: One address, several addresses (a list, or text separated by commas), a file with one address per line, or a
            function that returns addresses. Files and functions are evaluated repeatedly, so that servers can join and
            leave during a run.
        connect: Function that creates a client for an address.
        timeout: Maximum number of seconds until the first servers are available. None: do not wait.
        pushes: Whether this process pushes weights. If True, the servers are locked for other trainers on this machine.

    Raises:
        ServerUnreachable: No server is healthy within ``timeout`` seconds.
        ServerBusy: Another trainer on this machine uses a server.
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

    # Methods that check which servers are available.

    def urls(self) -> list[str]:
        """Return the addresses of the servers that are configured at the moment."""
        addresses: Any = self.source
        if isinstance(addresses, Path) or (
            isinstance(addresses, str) and "://" not in addresses and Path(addresses).is_file()
        ):
            addresses = [line.split("#")[0] for line in Path(addresses).read_text().splitlines()]
        addresses = addresses() if callable(addresses) else addresses
        listed = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        return list(dict.fromkeys(url.strip().rstrip("/") for url in listed if url.strip()))

    def _wait_until_ready(self, timeout: float) -> None:
        """Wait until all servers are available. After the timeout, continue with the servers that are available."""
        deadline = time.monotonic() + timeout
        while (late := self._admit_new(self.urls(), ServerUnreachable)) and time.monotonic() < deadline:
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0.0)))
        if not self.urls():
            raise ConfigError(
                "no rollout server is configured. Fix: set vllm_server_base_url, or vllm_server_host and vllm_server_port."
            )
        for url, error in late.items():
            if not self.servers:
                raise ServerUnreachable(
                    f"no healthy rollout server at {', '.join(late)} within {timeout:g} s. Last response: "
                    f"{error.__cause__ or error} Fix: start one with 'posttrain serve --model MODEL', or correct "
                    "vllm_server_base_url.",
                    url=hide_secrets(url),
                ) from error
            logger.warning("server %s is not available yet and is used once it answers: %s", hide_secrets(url), error)

    def _admit_new(self, urls: Sequence[str], left_out: type[RolloutServerError]) -> dict[str, RolloutServerError]:
        """Connect to servers that were added to the list. Return the error of each new server that is not available."""
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
        """Lock a server so that other trainers on this machine cannot use it. Resume generation if an earlier trainer
        left it paused.

        Raises:
            ServerBusy: Another process on this machine pushes weights to the server.
        """
        if not self.pushes:
            return
        if server.lock is None and server.client.is_local:
            # The name of the lock file contains only the port, because localhost and 127.0.0.1 are the same machine.
            path = Path(tempfile.gettempdir(), f"posttrain-server-{urlsplit(server.url).port or 80}.lock")
            lock = FileLock(path, thread_local=False)
            try:
                lock.acquire(timeout=0)
            except PermissionError as error:
                text = (
                    f"the lock file {path} of {server.url} belongs to another user of this machine. Fix: serve on another "
                    "port, or ask this user to remove the file."
                )
                raise ServerBusy(text, held=True, url=server.url) from error
            except Timeout:
                text = (
                    f"{server.url} is used by another trainer on this machine. Fix: use a separate server for each trainer. "
                    "A trainer in the same program releases its server with trainer.engine.close()."
                )
                raise ServerBusy(text, held=True, url=server.url) from None
            server.lock = lock
        # Ignore errors of this request, because vLLM has the endpoint only in developer mode.
        with contextlib.suppress(RolloutServerError):
            server.client.resume()

    def refresh(self, force: bool = False) -> None:
        """Add new servers, release removed servers, and check whether unavailable servers are available again.

        Only one thread at a time updates the list. Other threads return immediately and use the current list, unless
        ``force`` is set.
        """
        if not force and time.monotonic() - self._looked < REFRESH_SECONDS:
            return
        if not self._refreshing.acquire(blocking=force):
            return
        try:
            self._looked, wanted = time.monotonic(), self.urls()
            for url in [u for u in self.servers if u not in wanted]:
                logger.warning("rollout server %s was removed from the list.", hide_secrets(url))
                self._let_go(url)
            # If a new server returns an error, e.g. because of a wrong token, continue without this server.
            for url, error in self._admit_new(wanted, RolloutServerError).items():
                if isinstance(error, ServerUnreachable):
                    logger.debug("%s is still not available: %s", hide_secrets(url), error)
                else:
                    warn_once(logger, "%s is not used until this error is fixed: %s", hide_secrets(url), str(error))
            for server in self.all:
                if server.down is not None:
                    self.look_at(server)
        finally:
            self._refreshing.release()

    def look_at(self, server: Server) -> None:
        """Update the state of a server, including its weight version, because the server may have been restarted.

        If an unavailable server responds, it receives requests again. If a server responds slowly, its weight version is
        assumed to be unchanged.
        """
        try:
            if server.down is not None:
                server.client.health()
                # Request the server's properties again, because the server may have been restarted with different options.
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
            logger.warning("rollout server %s is available again.", server.url)

    # Methods that select servers.

    @property
    def all(self) -> list[Server]:
        """All servers as a list. It is a copy, because other threads may change the dict ``servers``."""
        return list(self.servers.values())

    @property
    def live(self) -> list[Server]:
        """Available servers."""
        return [server for server in self.all if server.down is None]

    def acquire(self, tokens: int, version: str | None, without: Collection[Server]) -> Server | None:
        """Select a server with weight version ``version`` (None: any version) that is not in ``without``. The server with
        the fewest outstanding tokens is selected, and ``tokens`` is added to this number.
        """
        with self._lock:
            ready = [s for s in self.live if s not in without and version in (None, s.holds)]
            if not ready:
                return None
            chosen = min(ready, key=lambda server: (server.outstanding, server.selected))
            chosen.outstanding += tokens
            chosen.selected += 1
            return chosen

    def release(self, server: Server, tokens: int) -> None:
        """Subtract the tokens of a finished request from the server's outstanding tokens."""
        with self._lock:
            server.outstanding -= tokens
            last = not server.listed and not server.outstanding
        if last:
            server.close()

    def _let_go(self, url: str) -> None:
        """Remove a server from the list. Close its connections immediately if it is idle, otherwise after its last response."""
        with self._lock:
            server = self.servers.pop(url)
            server.listed, idle = False, not server.outstanding
        if idle:
            server.close()

    def failed(self, server: Server, error: RolloutServerError) -> None:
        """Record the error of a server. The server receives no requests until it is healthy again."""
        if server.down is None:
            logger.warning("rollout server %s is not used until it is healthy: %s", server.url, error)
        server.down = error

    def close(self) -> None:
        """Release all servers and close their connections."""
        for server in self.all:
            server.close()
        self.servers = {}
