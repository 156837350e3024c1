"""Worker processes. They start without access to the trainer's device, send heartbeats to the trainer, and end with the
trainer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn, Protocol

from posttrain.errors import ArgumentTypeError, RolloutError


class ActiveClock:
    """Clock that does not count time during which this process was suspended. Between two reads, at most ``most`` seconds
    are counted.

    With a wall clock, a suspension would look as if no worker had made progress for this time.

    Args:
        most: Maximum number of seconds that are counted between two reads. Set it to several polling intervals.

    >>> clock = ActiveClock(0.01)
    >>> time.sleep(0.1); clock.look() < 0.02
    True
    """

    def __init__(self, most: float) -> None:
        self.most, self.now = most, 0.0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def look(self) -> float:
        """Return the number of seconds that the clock has counted so far."""
        with self._lock:
            real = time.monotonic()
            self.now += min(real - self._last, self.most)
            self._last = real
            return self.now


BEAT_S = 1.0
# If more than this number of seconds passes between two reads of the clock, this process was probably suspended.
GAP_S = 3.0
TAIL_LINES, TAIL_BYTES = 30, 16_384
JOIN_S = 15.0  # Maximum number of seconds for a worker to stop.

# Environment variables that a worker must not inherit. A worker with these variables would join the trainer's process group
# or overwrite the trainer's logs.
DISTRIBUTED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "NCCL_DEBUG_FILE", "NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_starting = threading.Lock()


class WorkerJob(Protocol):
    """Picklable job of a worker process. It runs in the new process until the trainer stops it."""

    def run(self, link: Link) -> None:
        """Initialize the worker, call ``link.ready()``, then work until ``link.stopping`` is set."""
        ...


def check_picklable(parts: Mapping[str, Any]) -> None:
    """Check that objects for worker processes are picklable, before anything is loaded.

    Args:
        parts: Mapping from argument names to objects. Lists, tuples and dicts are checked recursively.

    Raises:
        ArgumentTypeError: An object cannot be pickled. The message lists all such objects.

    >>> check_picklable({"reward_funcs": [len, "a-model"]})
    """
    bad = [text for name, value in parts.items() for text in _unpicklable(name, value)]
    if bad:
        raise ArgumentTypeError(
            "rollout workers are separate processes, and these objects cannot be sent to them: "
            + "; ".join(bad)
            + ". Define "
            "functions and classes at the top level of a module, not inside a function and not as a lambda."
        )


def _unpicklable(name: str, value: object) -> list[str]:
    inside: list[tuple[str, Any]] = []
    if isinstance(value, list | tuple):
        inside = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, dict):
        inside = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    if inside:
        return [text for label, item in inside for text in _unpicklable(label, item)]
    try:
        ForkingPickler.dumps(value)
    except Exception as error:
        label = getattr(value, "__qualname__", None) or type(value).__qualname__
        return [f"{name} ({label}): {type(error).__name__}: {error}"]
    return []


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """Change the environment variables inside the context, for starting a worker. The worker then sees no accelerator and
    no variables of the trainer's process group.
    """
    saved = dict(os.environ)
    with _starting:
        try:
            for name in list(os.environ):
                if name in DISTRIBUTED or name.startswith(PREFIXES):
                    del os.environ[name]
            os.environ |= dict.fromkeys(DEVICES, "")
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            yield
        finally:
            os.environ.clear()
            os.environ.update(saved)


class Link:
    """The worker's end of the pipe to the trainer. One thread reads commands, and another thread sends heartbeats.

    Attributes:
        index: Index of the worker.
        tasks: Tasks that the worker has not started.
        cancelled: Keys of canceled tasks.
        version: Newest announced version of the weights.
        holders: Servers that have the newest announced version, if there are servers.
        stopping: Event that is set when the worker must stop.
        on_news: Function that the reading thread calls when a version is announced, tasks are canceled, or the worker must
            stop.
        on_orphaned: Function that removes the trainer's temporary files. It is called before this process ends because the
            trainer was killed.
        importing: Lock that a thread holds while it imports packages. Without this lock, concurrent unpickling would use
            partly initialized modules.
    """

    def __init__(self, connection: Connection, index: int) -> None:
        self.connection, self.index = connection, index
        self.tasks: deque[Any] = deque()
        self.cancelled: set[Any] = set()
        self.version = 0
        self.holders: Any = None
        self.stopping = threading.Event()
        self.on_news: Callable[[], None] = lambda: None
        self.on_orphaned: Callable[[], None] = lambda: None
        self._news, self._sending, self._ending = threading.Event(), threading.Lock(), threading.Lock()
        self.importing = threading.Lock()
        self._clock = ActiveClock(GAP_S)
        self._alive = self._clock.look()
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True, name=f"link{work.__name__}").start()

    def send(self, kind: str, **content: Any) -> None:
        """Send a message to the trainer. If the trainer has ended, this process ends."""
        data = ForkingPickler.dumps((kind, content))
        try:
            with self._sending:
                self.connection.send_bytes(data)
        except OSError:
            self._orphaned()

    def ready(self) -> None:
        """Report that initialization is done."""
        self.send("ready", pid=os.getpid())

    def progress(self) -> None:
        """Record that the working thread is alive. The next heartbeat contains the time since this call."""
        self._alive = self._clock.look()

    def wait(self, seconds: float) -> None:
        """Wait for at most ``seconds`` until a message from the trainer arrives."""
        self._news.wait(seconds)
        self._news.clear()

    def _read(self) -> None:
        try:
            while True:
                self._take(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._orphaned()
        # End the process after an error in this thread. Otherwise, the worker would receive no more commands and run forever.
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _orphaned(self) -> NoReturn:
        """End this process, because the trainer's process has ended."""
        # Acquire the lock and never release it, so that no other thread ends the process at the same time.
        self._ending.acquire()
        try:
            self.on_orphaned()
        finally:
            os._exit(0)

    def _take(self, data: bytes) -> None:
        with self.importing:
            kind, content = ForkingPickler.loads(data)
        if kind == "task":
            self.tasks.append(content)
        elif kind == "weights":
            version, self.holders = content
            self.version = max(self.version, version)
        elif kind == "cancel":
            self.cancelled.update(content)
        elif kind == "stop":
            self.stopping.set()
        self._news.set()
        if kind != "task":
            self.on_news()

    def _beat(self) -> None:
        while True:
            self.send("beat", idle=self._clock.look() - self._alive)
            time.sleep(BEAT_S)


def worker_main(payload: bytes, connection: Connection, log: str, index: int) -> None:
    """Run a worker's job in the new process. The worker's standard error is written to ``log``."""
    # Ignore SIGINT and SIGTERM. The trainer handles these signals, and needs its workers to finish the current step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # This process must end with the trainer, like a daemon. Unlike a daemon, this process may start child processes, for
    # example for reward functions that run code.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    file = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - as long as the process.
    os.dup2(file.fileno(), 2)
    sys.stderr = file
    faulthandler.enable(file)
    link = Link(connection, index)
    try:
        with link.importing:
            job: WorkerJob = pickle.loads(payload)
        job.run(link)
    except Exception as error:
        traceback.print_exc()
        file.flush()
        link.send("failed", error=f"{type(error).__name__}: {error}")
        os._exit(1)  # Exit without waiting for other threads, because threads that run tools may hang.
    file.flush()
    os._exit(0)


class WorkerProcess:
    """The trainer's handle of a worker: the spawned process, the pipe to it, its log, and the time of its last message.

    Args:
        index: Index of the worker.
        payload: Pickled `WorkerJob`.
        folder: Folder of the worker's log file, ``worker-<index>.log``.
        clock: Clock that measures the worker's time limits.
    """

    def __init__(
        self,
        index: int,
        payload: bytes,
        folder: str | Path,
        *,
        clock: ActiveClock | None = None,
    ) -> None:
        self.index, self.payload = index, payload
        self.clock = ActiveClock(GAP_S) if clock is None else clock
        self.log = Path(folder, f"worker-{index}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.is_ready = False
        self.began = self.heard = self.ready_at = self.clock.now
        self.idle = 0.0
        self.failure: str | None = None

    def start(self) -> None:
        """Spawn the process. The process sends the message ``ready`` after its initialization."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=worker_main,
            args=(self.payload, theirs, str(self.log), self.index),
            name=f"rollouts-{self.index}",
            daemon=True,
        )
        self._offset = self.log.stat().st_size if self.log.exists() else 0
        with without_device():
            self.process.start()
        theirs.close()
        self.began = self.heard = self.clock.look()

    def send(self, kind: str, content: Any = None) -> None:
        """Send a command. Ignore the error if the process is dead, because `problem` detects dead processes."""
        with contextlib.suppress(OSError):
            self.connection.send((kind, content))

    def receive(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages that were received since the last call, except heartbeats."""
        try:
            while self.connection.poll():
                kind, content = self.connection.recv()
                self.heard = self.clock.look()
                if kind == "beat":
                    self.idle = content["idle"]
                    continue
                if kind == "ready":
                    self.is_ready, self.ready_at = True, self.clock.now
                if kind == "failed":
                    self.failure = content["error"]
                yield kind, content
        except (EOFError, OSError, pickle.UnpicklingError):
            return

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def problem(self, stale_after_s: float, ready_within_s: float) -> str | None:
        """Return a description of the worker's problem, or None. Problems are: the worker has ended, did not start in time,
        or makes no progress.
        """
        now = self.clock.look()
        if not self.alive:
            code = self.process.exitcode
            name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
            return f"ended with exit code {code}{name}{f': {self.failure}' if self.failure else ''}"
        if not self.is_ready:
            return f"was not ready within {ready_within_s:g} s" if now - self.began > ready_within_s else None
        silent = max(now - self.heard, self.idle)
        return f"made no progress for {silent:.0f} s" if silent > stale_after_s else None

    def tail(self) -> str:
        """Return the last lines of the worker's log that this process wrote."""
        with contextlib.suppress(OSError):
            with open(self.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._offset, size - TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").strip().splitlines()
            return "\n".join(lines[-TAIL_LINES:])
        return ""

    def describe(self, what: str) -> RolloutError:
        """Return an error with the problem ``what`` and the last lines of the worker's log."""
        tail = self.tail()
        output = f" The last lines of {self.log}:\n{tail}" if tail else f" It wrote nothing to {self.log}."
        return RolloutError(f"rollout worker {self.index} (process {self.process.pid}) {what}.{output}")

    def stop(self, join_s: float = JOIN_S) -> None:
        """Stop the process. If the process is still running after ``join_s`` seconds, kill it."""
        self.send("stop")
        self.process.join(join_s)
        self.kill()

    def kill(self) -> None:
        """Kill the process."""
        if self.alive:
            self.process.kill()
            self.process.join()
        self.connection.close()
