"""Reward functions that wait: run at once on one lasting event loop of a daemon thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from posttrain.rewards.call import RewardCall

__all__ = ["awaited", "close", "is_concurrent", "itself", "parallel", "run_all", "share_out"]

F = TypeVar("F", bound=Callable)
GRACE = 5.0  # Seconds after its limit in which a task must have noticed it, or it has the loop to itself.
# Which of the things that are waited for a task works for: itself, or the task that began it.
_OWNERS: weakref.WeakKeyDictionary[asyncio.Task, int] = weakref.WeakKeyDictionary()


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
        return await _on_thread(lambda: call.run(name, function))
    return await call.run(name, function)


async def _on_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns on a daemon thread of its own: one of a pool that hangs would keep the process from ending."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(outcome: Any, error: BaseException | None) -> None:
        if future.done():
            return  # Nobody waits any more.
        if error is None:
            future.set_result(outcome)
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            result = work(), None
        except BaseException as error:  # Carried over to the waiting task.
            result = None, error
        loop.call_soon_threadsafe(settle, *result)

    threading.Thread(target=run, daemon=True, name="reward").start()
    return await future


async def itself(awaitable: Awaitable) -> Any:
    """What a plain function returned without awaiting it."""
    return await awaitable


def run_all(tasks: list[Callable[[], Awaitable]], timeout: float | None) -> list[tuple[Any, float]]:
    """Pairs (result or exception, seconds) of each, all running at once on one lasting loop of a daemon thread.

    One loop works in a notebook, and clients keep their connections. A task that never gives it back is left behind with
    it and has timed out; later calls get another loop.

    Args:
        tasks: Make what is awaited.
        timeout: Seconds each may take; None waits for ever.
    """
    found: dict[int, tuple[Any, float]] = {}
    begin = time.perf_counter()

    async def timed(index: int) -> None:
        started = time.perf_counter()
        try:
            task = asyncio.ensure_future(tasks[index]())
            if isinstance(task, asyncio.Task):
                _OWNERS[task] = index
            outcome = await asyncio.wait_for(task, timeout)
        except (Exception, asyncio.CancelledError) as error:
            outcome = error
        found[index] = outcome, time.perf_counter() - started

    async def every() -> None:
        await asyncio.gather(*map(timed, range(len(tasks))))

    loop = _loop()
    future = asyncio.run_coroutine_threadsafe(every(), loop)
    try:
        future.result(None if timeout is None else timeout + GRACE)
    except concurrent.futures.TimeoutError:
        busy = asyncio.current_task(loop)
        guilty = None if busy is None else _OWNERS.get(busy)
        _LOOPS.pop(os.getpid(), None)
        late = time.perf_counter() - begin
        for index in set(range(len(tasks))) - set(found):
            found[index] = (TimeoutError() if guilty in (None, index) else None), late
    return [found[index] for index in range(len(tasks))]


def close(coroutines: list[Coroutine]) -> None:
    """Drop coroutines that will never run, without Python's warning about them."""
    for coroutine in coroutines:
        coroutine.close()


_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}  # By process: a forked child has no thread to run its parent's.


def _loop() -> asyncio.AbstractEventLoop:
    loop = _LOOPS.get(os.getpid())
    if loop is None:
        loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
        loop.set_task_factory(_owned_task)
        threading.Thread(target=loop.run_forever, daemon=True, name="async-rewards").start()
    return loop


def _owned_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine, **kwargs: Any) -> asyncio.Task:
    """A task that works for whom the task that begins it works."""
    task, parent = asyncio.Task(coroutine, loop=loop, **kwargs), asyncio.current_task(loop)
    if parent in _OWNERS:
        _OWNERS[task] = _OWNERS[parent]
    return task


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
