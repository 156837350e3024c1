"""Reward functions that compute: run row by row in processes of their own, which are killed when a row takes too long.

A thread would not do: Python runs one at a time, and nothing can stop one. A signal works on the main thread only, and
not inside native code. A killed process is always gone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from posttrain.errors import ConfigError, RewardError
from posttrain.integrations import require

__all__ = ["PooledReward", "pooled"]

# Live objects stay in the process that made them.
NOT_SENT = ("environments",)
GUARD = (
    "its processes ended before they called the function. Fix: put the function at the top level of a module, and the code that "
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
        MissingDependencyError: pebble is not installed.

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
        self._pebble: Any = require("pebble", "a pooled reward")
        self._count = workers or max(1, min(8, os.cpu_count() or 1))
        self._pool: Any = None
        self._owner = os.getpid()

    def __reduce__(self) -> Any:
        settings = {"on_timeout": self.on_timeout, "memory_mb": self.memory_mb}
        return _rebuild, (_sendable(self.function), self.timeout, self._count, settings)

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
        pool = self._started()
        futures = [pool.schedule(_answer, args=(row,), timeout=self.timeout) for row in rows]
        try:
            replies = [self._reply(future, row) for row, future in enumerate(futures)]
        finally:
            for future in futures:
                future.cancel()
        late = sum(reply is None for reply in replies)
        self.timed_out += late
        if log_metric is not None:
            log_metric(f"rewards/{self.__name__}/timed_out", late / max(n, 1))
        self._log(replies, log_extra, log_metric)
        return [self.on_timeout if reply is None else reply["result"] for reply in replies]

    def _started(self) -> Any:
        """The pool; a new one where the last was closed or broke, and in a forked child, which has none of its parent's."""
        if self._pool is None or self._owner != os.getpid() or not self._pool.active:
            # A fork would copy threads' locks and the GPU's context.
            context, given = multiprocessing.get_context("spawn"), (_sendable(self.function), self.memory_mb)
            self._pool = self._pebble.ProcessPool(self._count, initializer=_start, initargs=given, context=context)
            self._owner = os.getpid()
        return self._pool

    def _reply(self, future: Any, row: int) -> dict[str, Any] | None:
        """What came of one row; None where it took too long."""
        try:
            reply = future.result()
        except TimeoutError:
            return None
        except BrokenProcessPool as error:
            raise RewardError(f"pooled reward {self.__name__!r}: {GUARD}.") from error
        except self._pebble.ProcessExpired as error:
            why = f"its process died (exit status {error.exitcode}): out of memory, or a crash in native code"
            raise RewardError(f"{self.__name__}, row {row}: {why}.") from error
        except Exception as error:
            raise RewardError(f"{self.__name__}, row {row}: {type(error).__name__}: {error}.") from error
        result = reply["result"]
        if not isinstance(result, list | tuple) or len(result) != 1:
            raise RewardError(
                f"{self.__name__}, row {row}: a pooled function is called with one row at a time and must return a list of "
                f"one reward; it returned {result!r:.200}."
            )
        return reply | {"result": result[0]}

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
        if self._pool is not None and self._owner == os.getpid():
            self._pool.stop()
            self._pool.join()
        self._pool = None


def _signature(function: Callable) -> inspect.Signature:
    """What the function names, with what its pool needs besides."""
    parameters = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
    for name in ("completions", "log_extra", "log_metric"):
        parameters.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    rest = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
    ordered = sorted([*parameters.values(), *rest], key=lambda p: p.kind)
    return inspect.Signature(ordered)


def _sendable(function: Callable) -> Any:
    """Module and name of a function, as its name now means the `PooledReward` around it; a callable object as it is."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    with contextlib.suppress(Exception):
        if _find((module, name)) is function:
            return module, name
    with contextlib.suppress(Exception):
        pickle.dumps(function)
        return function
    raise ConfigError(
        f"pooled reward {name or function!r} cannot be sent to another process. Define it at the top level of a module (not in "
        "a notebook cell, a lambda or inside a function)."
    )


def _find(sent: Any) -> Callable:
    """Undo `_sendable`."""
    if not isinstance(sent, tuple):
        return sent
    found: Any = importlib.import_module(sent[0])
    for part in sent[1].split("."):
        found = getattr(found, part)
    return found.function if isinstance(found, PooledReward) else found


def _rebuild(sent: Any, timeout: float, workers: int, settings: dict[str, Any]) -> PooledReward:
    return PooledReward(_find(sent), timeout, workers, **settings)


def _per_row(value: Any, n: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == n


# In a pool's process: the function that it runs.
_functions: list[Callable] = []


def _start(sent: Any, memory_mb: int | None) -> None:
    """In each process, before its first row's clock runs."""
    _functions.append(_find(sent))
    if memory_mb is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    """One row's result, and what the function logged."""
    function = _functions[-1]
    extra: dict[str, Any] = {}
    metrics: list[tuple[str, float]] = []
    row["log_extra"] = lambda name, values: extra.__setitem__(name, values[0])
    row["log_metric"] = lambda name, value: metrics.append((name, float(value)))
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        row = {p.name: row[p.name] for p in parameters if p.name in row}
    try:
        result = function(**row)
    except TimeoutError as error:  # Its own, which is not that of the pool.
        raise RewardError(f"TimeoutError: {error}") from error
    if hasattr(result, "tolist"):
        result = result.tolist()
    return {"result": result, "extra": extra, "metrics": metrics}
