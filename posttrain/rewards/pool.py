"""Work in processes with a time limit for each call: a call that takes too long has its process killed and replaced.

A thread would not do: Python runs one at a time, and nothing can stop one. A signal works on the main thread only, and not
inside native code. A killed process is always gone.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from posttrain.errors import ConfigError, RewardError
from posttrain.integrations import require

__all__ = ["BoundedProcesses", "PooledReward", "WithoutMain", "pooled"]


class BoundedProcesses:
    """Processes of pebble, started at the first call and again after a fork, a crash or `close`.

    Args:
        workers: How many.
        start: Called in each process before the clock of its first call runs.
        arguments: Of ``start``.
        context: How processes are started. None spawns them: a fork would copy the locks of threads and the GPU's context.
    """

    def __init__(
        self, workers: int, start: Callable, arguments: tuple = (), context: SpawnContext | None = None
    ) -> None:
        self.workers, self.start, self.arguments = workers, start, arguments
        self.context = context or multiprocessing.get_context("spawn")
        self.pool: Any = None
        self._owner = os.getpid()
        self._starting = threading.Lock()

    def submit(self, function: Callable, calls: Iterable[tuple], seconds: float) -> list[Any]:
        """Futures of ``function(*call)``, one a call, in order.

        A result raises TimeoutError after ``seconds``, ``pebble.ProcessExpired`` where the process died, and
        `BrokenProcessPool` where no process could be started.
        """
        with self._starting:
            if self.pool is None or self._owner != os.getpid() or not self.pool.active:
                pebble: Any = require("pebble", "work in processes with a time limit")
                self.pool = pebble.ProcessPool(
                    self.workers, initializer=self.start, initargs=self.arguments, context=self.context
                )
                self._owner = os.getpid()
            return [self.pool.schedule(function, args=call, timeout=seconds) for call in calls]

    def close(self) -> None:
        """Kill all processes; the next call starts new ones."""
        if self.pool is not None and self._owner == os.getpid():
            self.pool.stop()
            self.pool.join()
        self.pool = None


class _WithoutMain(SpawnProcess):
    def start(self) -> None:
        main: Any = sys.modules["__main__"]
        with _spawning:
            spec, main.__spec__ = main.__spec__, ModuleSpec("__main__", None)
            try:
                super().start()
            finally:
                main.__spec__ = spec


_spawning = threading.Lock()


class WithoutMain(SpawnContext):
    """Spawns processes that do not run the script of the main process again, which may have no main guard."""

    Process = _WithoutMain


def pooled(
    function: Callable | None = None,
    *,
    timeout: float = 10.0,
    workers: int | None = None,
    on_timeout: float | None = None,
    memory_mb: int | None = None,
) -> Any:
    """Run a reward function that computes for long in processes of their own, one row at a time, each with a time limit.

    The function keeps its signature (lists in, a list out) and must stand at the top level of a module; it is called
    with lists of one row. Columns must be picklable; ``environments`` are not passed.

    Args:
        function: The function; None gives a decorator.
        timeout: Seconds for one row; the process that exceeds them is killed and replaced.
        workers: Processes; None is one a processor, at most 8.
        on_timeout: The row's reward then: None (does not apply), or a number.
        memory_mb: MiB of address space of each process; None is no limit. A row that needs more is an error.

    Raises:
        ConfigError: A limit that is not positive, or an asynchronous function.
        MissingDependencyError: pebble is not installed.

    >>> @pooled(timeout=2.0, on_timeout=0.0)  # doctest: +SKIP
    ... def proved(completions, theorem, **kwargs):
    ...     return [float(check(text, goal)) for text, goal in zip(completions, theorem)]
    """
    if timeout <= 0 or (workers is not None and workers < 1) or (memory_mb is not None and memory_mb < 1):
        raise ConfigError(
            f"pooled(timeout={timeout}, workers={workers}, memory_mb={memory_mb}): each must be above 0, or None."
        )
    settings = {"timeout": timeout, "workers": workers, "on_timeout": on_timeout, "memory_mb": memory_mb}
    return functools.partial(PooledReward, **settings) if function is None else PooledReward(function, **settings)


class PooledReward:
    """A reward function in processes with a time limit; see `pooled`."""

    # It waits; other functions go on meanwhile.
    runs_in_thread = True

    def __init__(self, function: Callable, **settings: Any) -> None:
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"pooled is for functions that compute; {function.__name__!r} is asynchronous and waits.")
        self._pebble: Any = require("pebble", "a pooled reward")
        functools.update_wrapper(self, function)
        self.function, self.settings = function, settings
        # The function's parameters, and those that `__call__` needs itself.
        found = dict(inspect.signature(function).parameters)
        for name in ("completions", "log_extra", "log_metric"):
            found.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
        self.__signature__ = inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))
        self._processes: BoundedProcesses | None = None

    def __reduce__(self) -> Any:
        return _rebuild, (_address(self.function), self.settings)

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
        # Live objects stay in the process that made them.
        columns.pop("environments", None)
        n = len(next(columns[name] for name in ("completions", "completion_ids", "prompts") if name in columns))
        rows = [{k: [v[i]] if isinstance(v, list | tuple) and len(v) == n else v for k, v in columns.items()}
                for i in range(n)]  # fmt: skip
        if self._processes is None:
            workers = self.settings["workers"] or max(1, min(8, os.cpu_count() or 1))
            start = (_address(self.function), self.settings["memory_mb"])
            self._processes = BoundedProcesses(workers, _start, start)
        futures = self._processes.submit(_score_row, [(row,) for row in rows], self.settings["timeout"])
        try:
            replies = [self._reply(future, row) for row, future in enumerate(futures)]
        finally:
            for future in futures:
                future.cancel()
        extra = [reply[1] if reply else {} for reply in replies]
        for name in dict.fromkeys(name for row in extra for name in row) if log_extra is not None else ():
            log_extra(name, [row.get(name) for row in extra])
        if log_metric is not None:
            log_metric(f"rewards/{self.__name__}/timed_out", replies.count(None) / max(n, 1))
            for key, value in (pair for reply in replies if reply for pair in reply[2]):
                log_metric(key, value)
        return [reply[0] if reply else self.settings["on_timeout"] for reply in replies]

    def _reply(self, future: Any, row: int) -> tuple[Any, dict[str, Any], list[tuple[str, float]]] | None:
        """Reward, logged columns and logged metrics of one row; None where it took too long."""
        try:
            return future.result()
        except TimeoutError:
            return None
        except BrokenProcessPool as error:
            raise RewardError(
                f"pooled reward {self.__name__!r}: its processes ended before they called the function. Fix: put the function "
                "at the top level of a module, and the code that trains under `if __name__ == '__main__':`, so that importing "
                "the file starts nothing."
            ) from error
        except self._pebble.ProcessExpired as error:
            why = f"its process died (exit status {error.exitcode}): out of memory, or a crash in native code"
            raise RewardError(f"{self.__name__}, row {row}: {why}.") from error
        except Exception as error:
            raise RewardError(f"{self.__name__}, row {row}: {type(error).__name__}: {error}.") from error

    def close(self) -> None:
        """Kill all processes; the next call starts new ones."""
        if self._processes is not None:
            self._processes.close()


def _address(function: Callable) -> str:
    """``module:name`` of a function; it is not pickled, as its name now means the `PooledReward` around it."""
    address = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    try:
        if _find(address) is function:
            return address
    except (ImportError, AttributeError, ValueError):
        pass
    raise ConfigError(
        f"pooled reward {address.partition(':')[2] or function!r} cannot be sent to another process. Define it at the top level "
        "of a module (not in a notebook cell, a lambda or inside a function)."
    )


def _find(address: str) -> Callable:
    """The function at an address."""
    found: Any = pkgutil.resolve_name(address)
    return found.function if isinstance(found, PooledReward) else found


def _rebuild(address: str, settings: dict[str, Any]) -> PooledReward:
    return PooledReward(_find(address), **settings)


# In a worker process: the function that it runs.
_functions: list[Callable] = []


def _start(address: str, memory_mb: int | None) -> None:
    """In each process, before the clock of its first row runs."""
    _functions.append(_find(address))
    if memory_mb is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))


def _score_row(row: dict[str, Any]) -> tuple[Any, dict[str, Any], list[tuple[str, float]]]:
    """One row's reward, and the columns and metrics that the function logged."""
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
    # Raised by the function itself: not the time limit of the pool.
    except TimeoutError as error:
        raise RewardError(f"TimeoutError: {error}") from error
    result = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(result, list | tuple) or len(result) != 1:
        raise RewardError(
            f"a pooled function is called with one row at a time and must return a list of one reward; not {result!r:.200}"
        )
    return result[0], extra, metrics
