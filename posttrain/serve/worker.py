"""A worker process: one engine, commands from a pipe, an answer to every one of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from multiprocessing.connection import wait
from typing import Any

from posttrain.errors import ConfigError, ModelError, RolloutServerError
from posttrain.rollouts.server.weight_sync import MappedFile
from posttrain.serve.backends import Backend, failure_of
from posttrain.serve.config import ServeConfig
from posttrain.serve.jobs import Answer, Ask, Beat, Command, Failure, Job, Score
from posttrain.serve.state import awake

__all__ = [
    "Rank",
    "Ranks",
    "Worker",
    "WorkerFailure",
    "gathered",
    "worker_main",
]

logger = logging.getLogger(__name__)


# Requests that come together begin together, and share passes: a silence of so long ends the waiting, or its sum.
GATHER_S, GATHER_MOST_S = 0.005, 0.05
BEAT_S = 0.5
IDLE_S = 5.0


class Worker:
    """The loop: take what came, do a piece of work, tell what is done.

    Args:
        connection: To the HTTP process.
        backend: The engine.
        rank: Of this worker.
        leave: Called when nobody is there any more and the engine does not come back from a call.
    """

    def __init__(self, connection: Any, backend: Backend, rank: int, leave: Callable[[int], Any] = os._exit) -> None:
        self.connection, self.backend, self.rank, self.leave = connection, backend, rank, leave
        self.inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.frozen = False
        self.stopping = False
        self._beat = 0.0
        self._told = (0, 0)
        self._files: dict[str, MappedFile] = {}

    def loop(self) -> None:
        """Until the pipe closes or a ``shutdown`` comes."""
        threading.Thread(target=self._read, daemon=True).start()
        while not self.stopping:
            idle = not self.backend.busy or self.frozen
            self._take(timeout=IDLE_S if idle else 0.0)
            if self.stopping:
                return
            if self.backend.busy and not self.frozen:
                if idle:
                    self._gather()
                if self.backend.busy and not self.frozen:
                    self.backend.advance()
            self._tell()

    def _read(self) -> None:
        """The pipe is emptied whatever the engine does, so that the other side never waits to write."""
        try:
            while True:
                self.inbox.put(self.connection.recv())
        except (EOFError, OSError):
            self.inbox.put(None)
            time.sleep(10.0)
            self.leave(0)

    def _gather(self) -> None:
        until, count = time.monotonic() + GATHER_MOST_S, -1
        while count != len(self.backend.jobs) and time.monotonic() < until:
            count = len(self.backend.jobs)
            self._take(timeout=GATHER_S)

    def _take(self, *, timeout: float) -> None:
        """Carry out the commands that came, or the first that comes in time."""
        while True:
            try:
                command = self.inbox.get(timeout=timeout) if timeout else self.inbox.get_nowait()
            except queue.Empty:
                return
            timeout = 0.0
            if command is None:
                self.stopping = True
                return
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        try:
            result = getattr(self, f"do_{command.method}")(command.id, **command.args)
        except Exception as error:
            if not isinstance(error, ConfigError | ModelError):
                logger.exception("worker %d: %s failed", self.rank, command.method)
            extra = {} if not isinstance(error, _Mismatch) else error.extra
            status = error.status if isinstance(error, _Mismatch) else 409 if isinstance(error, ModelError) else None
            self._send(Answer(command.id, failure=failure_of(error, status, **extra)))
            return
        if result is not LATER:
            self._send(Answer(command.id, result))

    def _tell(self) -> None:
        finished, self.backend.finished = self.backend.finished, []
        for job, failure in finished:
            self._send(Answer(job.id, (job.rollouts, job.spans) if failure is None else None, failure))
        now, state = time.monotonic(), (self.backend.running, sum(j.left for j in self.backend.jobs.values()))
        if now - self._beat >= BEAT_S or (state != self._told and not any(state)):
            tokens, self.backend.tokens = self.backend.tokens, 0
            self._beat, self._told = now, state
            self._send(Beat(state[0], max(0, state[1] - state[0]), tokens))

    def _send(self, message: Answer | Beat) -> None:
        with contextlib.suppress(OSError):  # The other side is gone; `_read` sees it too.
            self.connection.send(message)

    # Commands ----------------------------------------------------------------------------------------------------------

    def do_generate(self, number: int, asks: list[Ask], priority: int) -> Any:
        """Answered when all completions are there."""
        self.backend.submit(Job(number, asks, priority))
        return LATER

    def do_abort(self, number: int, job: int) -> bool:
        """The job is answered too, as aborted."""
        if not self.backend.abort(job):
            return False
        self._send(Answer(job, failure=Failure("Aborted", "the request was given up.", 503)))
        return True

    def do_freeze(self, number: int, on: bool) -> int:
        """Nothing is written while frozen; returns how many completions are held."""
        self.frozen = on
        return self.backend.running

    def do_abort_all(self, number: int) -> int:
        """End everything that is written or waits; what is written is kept."""
        return sum(self.backend.finish_early(job) for job in list(self.backend.jobs))

    def do_begin_update(self, number: int, adapter: dict[str, Any] | None) -> None:
        self.backend.rest()
        self._files.clear()
        self.backend.begin_update(adapter)

    def do_bucket(self, number: int, path: str, size: int | None, checksum: str, again: bool) -> dict[str, Any]:
        """Load the tensors of a file that the HTTP process wrote or has looked at; ``again``: it will be written again."""
        self.backend.rest()
        file = self._mapped(path, size, again)
        got = file.checksum(size)
        if got != checksum.lower():
            raise _Mismatch(
                f"the bucket's checksum is {got}, and {checksum} was announced: its bytes changed on the way. Push again.",
                409, phase="bucket", expected=checksum, got=got,
            )  # fmt: skip
        try:
            tensors = file.tensors(size)
        except ModelError as error:
            raise _Mismatch(f"the bucket cannot be read: {error}", 400, phase="bucket") from error
        loaded, unexpected = self.backend.load(tensors)
        return {"loaded": loaded, "unexpected": unexpected, "names": [name for name, _ in tensors]}

    def _mapped(self, path: str, size: int | None, again: bool) -> MappedFile:
        """The file as memory; within an update its pages are mapped once however often it is written."""
        file = self._files.get(path)
        if file is None or size is None or size > len(file.data):
            try:
                file = MappedFile(path)
            except (OSError, ValueError) as error:
                raise _Mismatch(f"the bucket cannot be read: {error}", 400, phase="bucket") from error
        if again:
            self._files[path] = file
        return file

    def do_end_update(self, number: int, version: int) -> list[str]:
        self.backend.rest()
        self._files.clear()
        missing = self.backend.end_update(version)
        if not self.backend.reset_cache():
            raise ModelError("the engine refused to forget keys and values of the earlier weights.")
        return missing

    def do_join(self, number: int, **spec: Any) -> None:
        self.backend.rest()
        self.backend.join(**spec)

    def do_receive(self, number: int, parts: list[dict[str, Any]], packed: bool) -> dict[str, Any]:
        self.backend.rest()
        tensors = self.backend.receive(parts, packed=packed)
        loaded, unexpected = self.backend.load(tensors)
        return {"loaded": loaded, "unexpected": unexpected, "names": [name for name, _ in tensors]}

    def do_leave(self, number: int) -> None:
        self.backend.leave()

    def do_score(self, number: int, items: list[Score], top: int, temperature: float) -> Any:
        self.backend.rest()
        return self.backend.score(items, top, temperature)

    def do_reset_cache(self, number: int) -> bool:
        return self.backend.reset_cache()

    def do_sleep(self, number: int, level: int) -> None:
        self.backend.rest()
        self.backend.sleep(level)

    def do_wake(self, number: int, tags: list[str] | None) -> None:
        self.backend.wake(tags)

    def do_ping(self, number: int) -> int:
        return os.getpid()

    def do_shutdown(self, number: int) -> None:
        self.stopping = True


class _Later:
    """The answer comes when the job is done."""


LATER = _Later()


class _Mismatch(ModelError):
    def __init__(self, message: str, status: int, **extra: Any) -> None:
        super().__init__(message)
        self.status, self.extra = status, extra


def _scoring_heeds_temperature(backend: Backend) -> bool:
    """Whether log-probs of given sequences change with the temperature, as they must."""
    if not backend.scores:
        return True
    probe = [Score([1, 2, 3], 1)]
    one, two = (backend.score(probe, 1, temperature)[0].actual for temperature in (1.0, 2.0))
    return one != two


def worker_main(connection: Any, name: str, config: ServeConfig, rank: int) -> None:
    """Load the engine, say so, and serve until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The HTTP process decides when to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format=f"%(levelname)s worker {rank}: %(message)s", level=logging.INFO)
    try:
        from posttrain.serve.engines import create_backend

        backend = create_backend(name, config, rank)
        info = backend.info() | {"pid": os.getpid(), "beats": backend.beats, "sleeps": backend.sleeps}
        info["scoring_heeds_temperature"] = _scoring_heeds_temperature(backend)
    except BaseException as error:
        failure = failure_of(error, 500, log_tail="".join(traceback.format_exception(error)[-6:]))
        with contextlib.suppress(OSError):
            connection.send(Answer(0, failure=failure))
        raise SystemExit(1) from error
    connection.send(Answer(0, info))
    try:
        Worker(connection, backend, rank).loop()
    finally:
        backend.close()


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
