"""Reward functions that wait: run at once on one lasting event loop of a daemon thread."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from posttrain.rewards.call import RewardCall

__all__ = ["awaited", "close", "gather", "is_concurrent", "itself", "parallel", "run_async", "share_out"]

F = TypeVar("F", bound=Callable)


def parallel(function: F) -> F:
    """Mark a plain function that waits (for a judge, a sandbox): it runs on a thread beside the asynchronous ones.

    >>> @parallel
    ... def judged(completions, **kwargs):
    ...     return [1.0 for _ in completions]
    """
    function.runs_in_thread = True  # type: ignore[attr-defined]
    return function


def is_concurrent(function: Any) -> bool:
    """Whether a function is asynchronous (or its ``__call__`` is), or marked to run on a thread."""
    bare = function
    while isinstance(bare, functools.partial):
        bare = bare.func
    called = getattr(type(bare), "__call__", None)  # noqa: B004
    return getattr(bare, "runs_in_thread", False) or any(inspect.iscoroutinefunction(f) for f in (bare, called))


async def awaited(call: RewardCall, name: str, function: Callable) -> Any:
    """The result of one concurrent function."""
    bare = function.func if isinstance(function, functools.partial) else function
    if getattr(bare, "runs_in_thread", False):
        return await asyncio.to_thread(call.run, name, function)
    return await call.run(name, function)


async def itself(awaitable: Awaitable) -> Any:
    """What a plain function returned without awaiting it."""
    return await awaitable


async def gather(tasks: list[Callable[[], Awaitable]], timeout: float | None) -> list[tuple[Any, float]]:
    """Pairs (result or exception, seconds) of each, all running at once."""

    async def timed(task: Callable[[], Awaitable]) -> tuple[Any, float]:
        started = time.perf_counter()
        try:
            outcome = await asyncio.wait_for(task(), timeout)
        except (Exception, asyncio.CancelledError) as error:
            outcome = error
        return outcome, time.perf_counter() - started

    return await asyncio.gather(*(timed(task) for task in tasks))


def close(coroutines: list[Coroutine]) -> None:
    """Drop coroutines that will never run, without Python's warning about them."""
    for coroutine in coroutines:
        coroutine.close()


_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}  # By process: a forked child has no thread to run its parent's.


def run_async(coroutine: Coroutine) -> Any:
    """Run on one lasting loop of a daemon thread: works in a notebook, and clients keep their connections."""
    loop = _LOOPS.get(os.getpid())
    if loop is None:
        loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True, name="async-rewards").start()
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


W = TypeVar("W")


def share_out(workers: Sequence[W], count: int, do: Callable[[W, int], None]) -> None:
    """Call ``do(worker, index)`` for every index below ``count``, each worker on a thread of its own.

    Raises:
        BaseException: The first that any of them raised; the others stop after what they are doing.
    """
    todo = iter(range(count))  # Drawing from it is one step of the interpreter: no two threads get one index.
    errors: list[BaseException] = []

    def serve(worker: W) -> None:
        try:
            for index in todo:
                if errors:
                    return
                do(worker, index)
        except BaseException as error:  # Carried over to the caller's thread.
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers[:count]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
