"""The worker processes as the HTTP process sees them: calls with deadlines, and deaths that are noticed at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from multiprocessing.connection import wait
from typing import Any

from posttrain.errors import RolloutServerError
from posttrain.serve.awake import awake
from posttrain.serve.config import ServeConfig
from posttrain.serve.jobs import Answer, Beat, Command, Failure
from posttrain.serve.worker import worker_main

__all__ = ["Rank", "Ranks", "WorkerFailure", "gathered"]

logger = logging.getLogger(__name__)

JOIN_S = 10.0  # A worker that was asked to end gets so long; then it is ended.
STUCK_S = 60.0


class WorkerFailure(RolloutServerError):
    """What a worker answered instead of a result.

    Attributes:
        failure: Its type, message and HTTP status.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


async def gathered(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """All answers, or the first failure once every call has ended."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return found


class Rank:
    """One worker process.

    Args:
        name: Of the engine.
        config: For the engine.
        rank: Its number.
        died: Called in the event loop when the process has ended by itself.
    """

    def __init__(self, name: str, config: ServeConfig, rank: int, died: Callable[[Rank], None]) -> None:
        self.name, self.config, self.rank, self.died = name, config, rank, died
        self.info: dict[str, Any] = {}
        self.ready: asyncio.Future[dict[str, Any]] | None = None
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.beat = Beat()
        self.seen = awake()
        self.tokens = 0
        self.dead: str | None = None
        self.closing = False
        self._numbers = itertools.count(1)
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the process; call it in the event loop."""
        self.loop = asyncio.get_running_loop()
        self.ready = self.loop.create_future()
        self.connection, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = self.launch(theirs)
        threading.Thread(target=self._read, name=f"read-{self.rank}", daemon=True).start()
        threading.Thread(target=self._write, name=f"write-{self.rank}", daemon=True).start()

    def launch(self, connection: Any) -> Any:
        """The process, started, with its end of the pipe."""
        args = (connection, self.name, self.config, self.rank)
        # spawn: a forked child of a process with threads and CUDA hangs sooner or later.
        process = multiprocessing.get_context("spawn").Process(
            target=worker_main, args=args, name=f"rollout-{self.rank}", daemon=True
        )
        process.start()
        connection.close()
        return process

    # Threads: nothing here touches the loop's objects but through call_soon_threadsafe ----------------------------------

    def _read(self) -> None:
        try:
            while True:
                # The sentinel too: a killed process may leave its end of the pipe open in a grandchild.
                if self.connection in wait([self.connection, self.process.sentinel]):
                    self._post(self._received, self.connection.recv())
                else:
                    break
        except (EOFError, OSError):
            pass
        self.process.join(1.0)
        self._post(self._ended)

    def _write(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self.connection.send(command)
            except (OSError, ValueError):
                return  # `_read` sees the end of the process.

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self.loop.call_soon_threadsafe(function, *args)

    # In the loop -------------------------------------------------------------------------------------------------------

    def _received(self, message: Answer | Beat) -> None:
        self.seen = awake()
        if isinstance(message, Beat):
            self.beat = message
            self.tokens += message.tokens
            return
        future = self.ready if message.id == 0 else self.pending.pop(message.id, None)
        if future is None or future.done():
            return
        if message.failure is not None:
            future.set_exception(WorkerFailure(message.failure))
        else:
            future.set_result(message.result)

    def _ended(self) -> None:
        if self.dead is not None:
            return
        code = self.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        self.dead = f"worker {self.rank} has ended ({how})"
        self._outbox.put(None)
        extra = {"rank": self.rank, "dead_rank": self.rank}
        for future in (self.ready, *self.pending.values()):
            if future is not None and not future.done():
                future.set_exception(WorkerFailure(Failure("ServerDied", f"{self.dead}.", 503, extra)))
        self.pending = {}
        if not self.closing:
            logger.error("%s.", self.dead)
            self.died(self)

    def send(self, method: str, **args: Any) -> tuple[int, asyncio.Future[Any]]:
        """Send a command; its number, and what will hold the answer."""
        number, future = next(self._numbers), self.loop.create_future()
        if self.dead is not None:
            extra = {"rank": self.rank, "dead_rank": self.rank}
            future.set_exception(WorkerFailure(Failure("ServerDied", f"{self.dead}.", 503, extra)))
            return number, future
        if not self.pending:
            self.seen = awake()
        self.pending[number] = future
        self._outbox.put(Command(number, method, args))
        return number, future

    async def call(self, method: str, timeout: float, **args: Any) -> Any:
        """A command and its answer.

        Raises:
            TimeoutError: None within ``timeout`` seconds.
            WorkerFailure: The worker refused, failed, or ended.
        """
        _, future = self.send(method, **args)
        return await asyncio.wait_for(asyncio.shield(future), timeout)

    def stuck(self) -> str | None:
        """Why it seems to hang, or None."""
        limit = STUCK_S if self.info.get("beats", True) else max(STUCK_S, self.config.request_timeout)
        silent = awake() - self.seen
        if self.pending and silent > limit:
            return f"worker {self.rank} has work and has been silent for {silent:.0f} s"
        return None

    def close(self) -> None:
        """End the process: politely, then not."""
        self.closing = True
        if self.dead is None:
            self._outbox.put(Command(0, "shutdown"))
            self._outbox.put(None)
            self.process.join(JOIN_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(JOIN_S)
        with contextlib.suppress(OSError):
            self.connection.close()


class Ranks:
    """All workers of a server."""

    def __init__(
        self, name: str, config: ServeConfig, died: Callable[[Rank], None], *, kind: type[Rank] = Rank
    ) -> None:
        self.name, self.config, self.kind = name, config, kind
        self.all = [kind(name, config, number, died) for number in range(config.data_parallel_size)]

    async def start(self) -> None:
        """Start all and wait until each is ready.

        Raises:
            WorkerFailure: One could not load its engine.
        """
        for rank in self.all:
            rank.start()
        await asyncio.gather(*(self._ready(rank) for rank in self.all))

    async def _ready(self, rank: Rank) -> None:
        assert rank.ready is not None
        rank.info = await rank.ready

    async def restart(self, rank: Rank) -> Rank:
        """A new process in the place of a dead one, ready."""
        fresh = self.kind(self.name, self.config, rank.rank, rank.died)
        self.all[rank.rank] = fresh
        fresh.start()
        await self._ready(fresh)
        return fresh

    async def each(self, method: str, timeout: float, **args: Any) -> list[Any]:
        """A command to all ranks; every answer is awaited before the first failure is raised."""
        return await gathered(rank.call(method, timeout, **args) for rank in self.all)

    def trouble(self) -> str | None:
        """Why they cannot serve, or None."""
        return next((reason for rank in self.all for reason in (rank.dead, rank.stuck()) if reason), None)

    def close(self) -> None:
        """End all processes."""
        for rank in self.all:
            rank.close()
