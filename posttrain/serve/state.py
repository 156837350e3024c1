"""What a server may do at the moment: who runs, who waits, who holds the lease, which weights it has."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from posttrain.rollouts.server.replies import LEASE_TTL_S, LONGEST_LEASE_S
from posttrain.rollouts.workers.worker import AwakeClock

__all__ = [
    "Lease",
    "Refusal",
    "State",
    "Update",
    "awake",
]

logger = logging.getLogger(__name__)


GAP_S = 5.0  # The service looks four times a second: a longer gap is a job that was suspended, or a machine that stood still.

awake = AwakeClock(GAP_S).look


class Refusal(Exception):
    """An answer other than 200: ``status``, what to say, and fields beside it."""

    def __init__(
        self, status: int, kind: str, message: str, /, *, retry_after: float | None = None, **extra: Any
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_after, self.extra = status, kind, retry_after, extra


@dataclass(slots=True)
class Lease:
    """The one trainer that may change this server."""

    id: str
    holder: str
    ttl_s: float
    since: float
    until: float


@dataclass(slots=True)
class Update:
    """Weights on their way.

    Attributes:
        expected: Names that must arrive; None: none were announced.
        received: Names that came and were taken.
        failed: Why it cannot end well any more.
        last: When its last part came.
        was_valid: Whether the weights were whole before.
        implicit: It began with a broadcast, and ends with the reset of the prefix cache.
    """

    version: int
    expected: list[str] | None
    adapter: dict[str, Any] | None
    received: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    failed: str | None = None
    last: float = field(default_factory=awake)
    was_valid: bool = True
    implicit: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def names_missing(self) -> list[str]:
        """Announced names that neither came nor were refused as unknown."""
        seen = self.received | set(self.unexpected)
        return [name for name in self.expected or [] if name not in seen]


class State:
    """One object, used in the event loop alone, so that no step of it is ever half done.

    Args:
        max_queue: Requests that may wait or run.
    """

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.weight_version = 0
        self.weights_valid = True
        self.paused: str | None = None
        self.asleep = 0
        self.awake_tags: set[str] = set()
        self.draining = False
        self.lease: Lease | None = None
        self.update: Update | None = None
        self.admitted = 0
        self.running = 0
        self.changed = asyncio.Condition()
        self.started = time.time()

    async def tell(self) -> None:
        """Wake whoever waits for a change."""
        async with self.changed:
            self.changed.notify_all()

    # Generation --------------------------------------------------------------------------------------------------------

    def check_can_generate(self) -> None:
        """Refuse what waiting would not help.

        Raises:
            Refusal: 503 shutting down; 409 asleep, or weights that are not whole.
        """
        if self.draining:
            raise Refusal(503, "Draining", "the server is shutting down.", retry_after=5.0)
        if self.asleep:
            raise Refusal(
                409, "Asleep", f"the server sleeps at level {self.asleep}; call /wake_up/.", asleep=self.asleep
            )
        if not self.weights_valid and self.update is None:
            raise Refusal(
                409, "WeightsInvalid", "the weights are not whole: an update failed, a worker was restarted, or it slept at "
                "level 2. Push all weights.", weights_valid=False, version=self.weight_version,
            )  # fmt: skip

    @asynccontextmanager
    async def turn(self):
        """A place among the running requests: waits while the server is paused or takes new weights.

        Raises:
            Refusal: 429 where too many wait already; see `check_can_generate`.
        """
        if self.admitted >= self.max_queue:
            raise Refusal(
                429,
                "Full",
                f"{self.admitted} requests wait or run, and --max_queue is {self.max_queue}.",
                retry_after=1.0,
            )
        self.admitted += 1
        try:
            self.check_can_generate()
            while self.paused is not None or self.update is not None:
                async with self.changed:
                    await self.changed.wait()
                self.check_can_generate()
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
        finally:
            self.admitted -= 1
            await self.tell()

    async def drained(self, timeout: float) -> bool:
        """Wait until nothing runs; false after ``timeout`` seconds."""

        async def empty() -> None:
            while self.running:
                async with self.changed:
                    await self.changed.wait()

        try:
            await asyncio.wait_for(empty(), timeout)
        except TimeoutError:
            return self.running == 0
        return True

    # Lease -------------------------------------------------------------------------------------------------------------

    def acquire(self, holder: str, ttl_s: float = LEASE_TTL_S) -> Lease:
        """The lease for ``holder``, who may ask again.

        Raises:
            Refusal: 423, somebody else has it.
        """
        now = awake()
        if self.lease is not None and now < self.lease.until and self.lease.holder != holder:
            raise self._locked(self.lease)
        if self.lease is None or self.lease.holder != holder:
            self.lease = Lease(secrets.token_hex(16), holder, ttl_s, time.time(), 0.0)
        self.lease.ttl_s = min(ttl_s, LONGEST_LEASE_S)
        self.lease.until = now + self.lease.ttl_s
        return self.lease

    def renew(self, lease_id: str) -> Lease:
        """Keep a lease.

        Raises:
            Refusal: 404 unknown or lapsed; 423 somebody else has taken over.
        """
        if self.lease is None:
            raise Refusal(404, "NoLease", "no lease of that id: it lapsed or was given back. Take a new one.")
        if not secrets.compare_digest(self.lease.id, lease_id):
            raise self._locked(self.lease)
        self.lease.until = awake() + self.lease.ttl_s
        return self.lease

    def release(self, lease_id: str) -> bool:
        """Give a lease back; false where it was not held."""
        if self.lease is None or not secrets.compare_digest(self.lease.id, lease_id):
            return False
        self.lease = None
        return True

    def check_lease(self, lease_id: str | None) -> None:
        """Refuse to change the server for anybody but the holder of its lease.

        Raises:
            Refusal: 423.
        """
        if self.lease is None:
            return
        if lease_id is None or not secrets.compare_digest(self.lease.id, lease_id):
            raise self._locked(self.lease)
        self.lease.until = max(self.lease.until, awake() + self.lease.ttl_s)  # Work is a sign of life too.

    def _locked(self, lease: Lease) -> Refusal:
        return Refusal(
            423, "Locked", f"this server is leased to {lease.holder!r}; send its X-Lease header, or wait until it lapses.",
            holder=lease.holder, since=lease.since,
        )  # fmt: skip

    def lapsed(self) -> Lease | None:
        """The lease that has run out, taken away; None where none has."""
        lease = self.lease
        if lease is None or awake() < lease.until:
            return None
        self.lease = None
        return lease
