"""Reward functions that compute: run row by row in processes of their own, which are killed when a row takes too long.

A thread would not do: Python runs one at a time, and nothing can stop one. A signal works on the main thread only, and
not inside native code. A killed process is always gone.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from posttrain.errors import ConfigError, RewardError
from posttrain.rewards.call import share_out

__all__ = ["PooledReward", "pooled"]

START_SECONDS = 120.0  # For a process to import the module of the function on a busy machine.
NOT_SENT = ("environments",)  # Live objects stay in the process that made them.
GUARD = (
    "its process ended while it imported the function. Put the function at the top level of a module, and the code that "
    "trains under `if __name__ == '__main__':`, so that importing the file starts nothing"
)


def pooled(
    function: Callable | None = None,
    *,
    timeout: float = 10.0,
    workers: int | None = None,
    on_timeout: float | None = None,
    memory_mb: int | None = None,
) -> Any:
    """Run a reward function that computes for long in processes beside the trainer, one row at a time, each bounded.

    The function keeps its signature (lists in, a list out) and must stand at the top level of a module; it is called
    with lists of one row. Columns must be picklable; ``environments`` are not passed.

    Args:
        function: The function; None gives a decorator.
        timeout: Seconds for one row; the process that exceeds them is killed and replaced.
        workers: Processes; None is one a processor, at most 8.
        on_timeout: The row's reward then: None (does not apply), or a number.
        memory_mb: MiB of address space of each process; None is no bound. A row that needs more is an error.

    Raises:
        ConfigError: A bound that is not positive.

    >>> @pooled(timeout=2.0, on_timeout=0.0)  # doctest: +SKIP
    ... def proved(completions, theorem, **kwargs):
    ...     return [float(check(text, goal)) for text, goal in zip(completions, theorem)]
    """
    if timeout <= 0 or (workers is not None and workers < 1) or (memory_mb is not None and memory_mb < 1):
        raise ConfigError(
            f"pooled(timeout={timeout}, workers={workers}, memory_mb={memory_mb}): each must be above 0, or None."
        )

    def wrap(inner: Callable) -> PooledReward:
        return PooledReward(inner, timeout, workers, on_timeout=on_timeout, memory_mb=memory_mb)

    return wrap if function is None else wrap(function)


class PooledReward:
    """A reward function in a pool of processes; see `pooled`."""

    runs_in_thread = True  # It waits; other functions go on meanwhile.

    def __init__(
        self,
        function: Callable,
        timeout: float,
        workers: int | None,
        *,
        on_timeout: float | None,
        memory_mb: int | None,
    ) -> None:
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"pooled is for functions that compute; {function.__name__!r} is asynchronous and waits.")
        self.function, self.timeout, self.on_timeout, self.memory_mb = function, timeout, on_timeout, memory_mb
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.__signature__ = _signature(function)
        self.timed_out = 0
        self._count = workers or max(1, min(8, os.cpu_count() or 1))
        self._workers: list[_Worker] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        settings = {"on_timeout": self.on_timeout, "memory_mb": self.memory_mb}
        return _rebuild, (_Reference(self.function), self.timeout, self._count, settings)

    def __call__(
        self,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[Any]:
        """One reward a row; a row that takes too long gets ``on_timeout``.

        Raises:
            RewardError: The function raised, or its process died (memory, a crash).
        """
        columns = {k: v for k, v in columns.items() if k not in NOT_SENT}
        n = len(next(columns[name] for name in ("completions", "completion_ids", "prompts") if name in columns))
        rows = [{k: [v[i]] if _per_row(v, n) else v for k, v in columns.items()} for i in range(n)]
        with self._lock:
            replies = self._run(rows)
        late = sum(reply is None for reply in replies)
        self.timed_out += late
        if log_metric is not None:
            log_metric(f"rewards/{self.__name__}/timed_out", late / max(n, 1))
        self._log(replies, log_extra, log_metric)
        return [self.on_timeout if reply is None else reply["result"] for reply in replies]

    def _run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        if self._owner != os.getpid():  # A forked child has no processes of its parent's.
            self._workers, self._owner = [], os.getpid()
        if not self._workers:
            self._workers = [_Worker(self) for _ in range(self._count)]
            atexit.register(self.close)
        replies: list[dict[str, Any] | None] = [None] * len(rows)

        def judge(worker: _Worker, index: int) -> None:
            replies[index] = self._judged(worker.ask(rows[index], self.timeout), index)

        share_out(self._workers, len(rows), judge)
        return replies

    def _judged(self, reply: dict[str, Any] | None, row: int) -> dict[str, Any] | None:
        if reply is not None and "error" in reply:
            raise RewardError(f"{self.__name__}, row {row}: {reply['error']}.")
        if reply is not None:
            result = reply["result"]
            if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 1:
                raise RewardError(
                    f"{self.__name__}, row {row}: a pooled function is called with one row at a time and "
                    f"must return a list of one reward; it returned {result!r:.200}."
                )
            reply["result"] = result[0]
        return reply

    def _log(self, replies: list[dict[str, Any] | None], log_extra: Any, log_metric: Any) -> None:
        """What the function logged in its process, row by row."""
        names = dict.fromkeys(name for reply in replies if reply for name in reply["extra"])
        for name in names if log_extra is not None else ():
            log_extra(name, [(reply or {"extra": {}})["extra"].get(name) for reply in replies])
        for reply in replies if log_metric is not None else ():
            for key, value in reply["metrics"] if reply else ():
                log_metric(key, value)

    def close(self) -> None:
        """Kill all processes; the next call starts new ones."""
        if self._owner == os.getpid():
            for worker in self._workers:
                worker.kill()
        self._workers = []


def _signature(function: Callable) -> inspect.Signature:
    """What the function names, with what its pool needs besides."""
    parameters = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
    for name in ("completions", "log_extra", "log_metric"):
        parameters.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    rest = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
    ordered = sorted([*parameters.values(), *rest], key=lambda p: p.kind)
    return inspect.Signature(ordered)


class _Reference:
    """A function, picklable also where its name now means the `PooledReward` around it."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        module, name = getattr(self.function, "__module__", ""), getattr(self.function, "__qualname__", "")
        with contextlib.suppress(Exception):
            found = _find(module, name)
            if found is self.function:
                return _find_inner, (module, name)
        with contextlib.suppress(Exception):
            pickle.dumps(self.function)
            return _same, (self.function,)
        raise ConfigError(
            f"pooled reward {name or self.function!r} cannot be sent to another process. Define it at the top level of a "
            "module (not in a notebook cell, a lambda or inside a function)."
        )


def _same(function: Callable) -> Callable:
    return function


def _find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found.function if isinstance(found, PooledReward) else found


def _find_inner(module: str, name: str) -> _Reference:
    return _Reference(_find(module, name))


def _rebuild(inner: Any, timeout: float, workers: int, settings: dict[str, Any]) -> PooledReward:
    return PooledReward(getattr(inner, "function", inner), timeout, workers, **settings)


def _per_row(value: Any, n: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == n


class _Worker:
    """One process; started when first asked, and again after it was killed."""

    def __init__(self, reward: PooledReward) -> None:
        self.reward = reward
        self.process: Any = None
        self.pipe: Connection | None = None

    def ask(self, row: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        """The reply; None when it did not come in time."""
        if self.process is None or not self.process.is_alive():
            self.start()
        pipe = self.pipe
        assert pipe is not None
        try:
            pipe.send(row)
            if pipe.poll(timeout):
                return pipe.recv()
        except (EOFError, OSError):
            process = self.process
            process.join(5)
            code = process.exitcode
            self.kill()
            return {"error": f"its process died (exit status {code}): out of memory, or a crash in native code"}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return {"error": f"a column cannot be sent to another process: {error}"}
        self.kill()
        return None

    def start(self) -> None:
        """Start the process and wait until it has the function."""
        context = multiprocessing.get_context("spawn")  # A fork would copy threads' locks and the GPU's context.
        ours, theirs = context.Pipe()
        arguments = (theirs, _Reference(self.reward.function), self.reward.memory_mb)
        process = context.Process(target=_serve, args=arguments, daemon=True, name="reward")
        process.start()
        theirs.close()
        self.process, self.pipe = process, ours
        deadline = time.monotonic() + START_SECONDS
        ready = False
        with contextlib.suppress(EOFError, OSError):
            ready = self.pipe.poll(max(deadline - time.monotonic(), 0.0)) and bool(self.pipe.recv())
        if not ready:
            self.kill()
            raise RewardError(f"pooled reward {self.reward.__name__!r}: {GUARD}.")

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.process.join(5)
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = None


def _serve(pipe: Connection, inner: Any, memory_mb: int | None) -> None:
    """The process: one row in, one reply out, until the other side closes."""
    function = getattr(inner, "function", inner)
    if memory_mb is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))
    pipe.send(True)
    while True:
        try:
            row = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            reply = _answer(function, row)
        except BaseException as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        try:
            pipe.send(reply)
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            pipe.send({"error": f"its result cannot be sent back: {error}"})


def _answer(function: Callable, row: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    metrics: list[tuple[str, float]] = []
    row["log_extra"] = lambda name, values: extra.__setitem__(name, values[0])
    row["log_metric"] = lambda name, value: metrics.append((name, float(value)))
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        row = {p.name: row[p.name] for p in parameters if p.name in row}
    result = function(**row)
    if hasattr(result, "tolist"):
        result = result.tolist()
    return {"result": list(result), "extra": extra, "metrics": metrics}
