"""The rollout servers a run uses: who is there, who holds which weights, who has the least to do; they may come and go."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, RolloutServerError, ServerBusy, ServerUnreachable
from posttrain.rollouts.server.client import VLLMClient
from posttrain.rollouts.server.replies import LEASE_TTL_S

__all__ = ["Fleet", "Server", "Urls", "default_holder"]

logger = logging.getLogger(__name__)

RENEW_SECONDS = LEASE_TTL_S / 3
REFRESH_SECONDS = 5.0  # Between two looks at who has come or gone.

Urls = str | Path | Sequence[str] | Callable[[], Sequence[str]]


def default_holder() -> str:
    """How this process calls itself to a server."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(eq=False)
class Server:
    """One server as the trainer sees it.

    Attributes:
        client: Its connections.
        info: What it said of itself when it was admitted.
        pushed: The trainer's version that it was given; None: none, or lost.
        wire: The number under which it knows that version, which rises even where trainers begin anew.
        outstanding: Tokens it has been asked for and has not answered.
        down: Why it gets no requests; None: it does.
    """

    client: VLLMClient
    info: dict[str, Any]
    pushed: int | None = None
    wire: int | None = None
    outstanding: int = 0
    down: RolloutServerError | None = None
    lost_lease: bool = False
    served: int = field(default=0)

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.base_url


class Fleet:
    """Keeps the list of servers, their leases and what they hold.

    Args:
        urls: An address, several (in a list, or in one text with commas), a file with one a line, or a function that returns
            them. Files and functions are asked again, so that servers may join and leave.
        connect: Makes a client of an address.
        timeout: Seconds in which the first servers must be there; None: they may come later, or there be none yet.
        holder: The name on the lease; None takes none.

    Raises:
        ServerUnreachable: None of them is healthy in time.
        ServerBusy: Another trainer holds one of them.
    """

    def __init__(
        self,
        urls: Urls,
        connect: Callable[[str], VLLMClient],
        *,
        timeout: float | None = 240.0,
        holder: str | None = None,
    ) -> None:
        self.source, self.connect, self.holder = urls, connect, holder
        self.servers: dict[str, Server] = {}
        self.joined: Callable[[Server], None] = lambda server: None  # Called with each server that is admitted.
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._looked = 0.0
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None
        if timeout is not None:
            self._meet(timeout)
        if holder is not None:
            self._renewer = threading.Thread(target=self._renew, name="rollout-lease", daemon=True)
            self._renewer.start()

    # Who is there ----------------------------------------------------------------------------------------------------

    def urls(self) -> list[str]:
        """Addresses as of now."""
        found: Any = self.source
        if isinstance(found, Path) or (isinstance(found, str) and "://" not in found and Path(found).is_file()):
            found = [line.split("#")[0] for line in Path(found).read_text().splitlines()]
        found = found() if callable(found) else found
        listed = found.split(",") if isinstance(found, str) else list(found)
        return list(dict.fromkeys(url.strip().rstrip("/") for url in listed if url.strip()))

    def _meet(self, timeout: float) -> None:
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
                f"{error.__cause__ or error} Start one with 'posttrain serve --model MODEL', or correct vllm_server_base_url.",
                url=url,
            )
        for url, error in waiting.items():
            logger.warning("%s is not there and is left out until it is: %s", url, error)

    def _admit_new(self) -> dict[str, RolloutServerError]:
        """Connect to the servers that are not known yet; the errors of those that cannot be reached."""
        waiting: dict[str, RolloutServerError] = {}
        for url in self.urls():
            if url in self.servers:
                continue
            try:
                self.servers[url] = self._admit(url)
            except ServerUnreachable as error:
                waiting[url] = error
        return waiting

    def _admit(self, url: str) -> Server:
        client = self.connect(url)
        server = Server(client, self._taken(client))
        self.joined(server)
        logger.info(
            "rollout server %s: %s, weights of version %s.", url, server.info.get("model"), weight_version(server.info)
        )
        return server

    def _taken(self, client: VLLMClient) -> dict[str, Any]:
        """Take a server's lease, where we take any, and end a pause that its last holder left; what it says of itself."""
        if self.holder is not None:
            client.lease_id = None
            client.lease(self.holder, LEASE_TTL_S)
        info = client.info()
        if self.holder is not None and info.get("paused"):
            client.resume()
        return info

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

    def look_soon(self) -> None:
        """Let the next `refresh` look, however short ago the last one was."""
        self._looked = -REFRESH_SECONDS

    def _refresh(self) -> None:
        wanted = self.urls()
        for url in [u for u in self.servers if u not in wanted]:
            logger.warning("rollout server %s was taken off the list.", url)
            self.servers.pop(url).client.close()
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
            info = self._taken(server.client)
        except RolloutServerError as error:
            server.down = error
            return
        if weight_version(info) != server.wire or info.get("start_time") != server.info.get("start_time"):
            server.pushed = server.wire = None
        server.info, server.down = info, None
        self.joined(server)
        logger.warning("rollout server %s is back.", server.url)

    # Who does what ---------------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Server]:
        """Those that are up."""
        return [server for server in list(self.servers.values()) if server.down is None]

    def pick(self, tokens: int, version: int | None, without: Collection[Server]) -> Server | None:
        """The server with the least to do among those that hold ``version`` (None: any), with ``tokens`` added to its work."""
        with self._lock:
            ready = [s for s in self.live if s not in without and (version is None or s.pushed == version)]
            if not ready:
                return None
            chosen = min(ready, key=lambda server: server.outstanding)
            chosen.outstanding += tokens
            return chosen

    def done(self, server: Server, tokens: int) -> None:
        """Its work is over, one way or the other."""
        with self._lock:
            server.outstanding -= tokens

    def failed(self, server: Server, error: RolloutServerError) -> None:
        """It gets no requests until it is healthy again."""
        server.down = error
        logger.warning("rollout server %s is left out: %s", server.url, error)

    # The lease -------------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            for server in self.live:
                self._renew_one(server)

    def _renew_one(self, server: Server) -> None:
        """Renew, or take it again where it lapsed; where another trainer has it by now, the server is lost."""
        try:
            server.client.renew()
        except ServerUnreachable:
            return  # The next request will tell.
        except RolloutServerError:
            server.client.lease_id = None
            try:
                server.client.lease(str(self.holder), LEASE_TTL_S)
            except ServerBusy as error:
                server.lost_lease = True
                self.failed(server, error)
            except RolloutServerError as error:
                logger.warning("the lease on %s could not be renewed: %s", server.url, error)

    def close(self) -> None:
        """Give all leases back."""
        self._stop.set()
        if self._renewer is not None:
            self._renewer.join(timeout=1.0)
        for server in self.servers.values():
            server.client.close()
        self.servers = {}


def weight_version(info: dict[str, Any]) -> int | None:
    """The version of the weights that a server says it has."""
    value = info.get("weight_version")
    return None if value is None else int(value)
