"""Call reward functions: select the arguments, run functions concurrently, and check the rewards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from posttrain.errors import ConfigError, MissingDependencyError, RewardError, did_you_mean, raised_at
from posttrain.metrics import Metric, mean, total
from posttrain.models.architecture import config_of, get_config_model_id
from posttrain.values import is_number, scalar

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)

RESERVED = ("prompt", "completion", "completion_ids")
# Names of arguments that contain one value per row. A reward function receives only the arguments in its signature. With
# ``**kwargs``, it receives all arguments.
ROWS = ("prompts", "completions", "completion_ids")
# Names of arguments that the trainer passes in addition to rows and dataset columns.
TRAINERS_ARGUMENTS = ("trainer_state", "prompt_suffixes", "environments", "log_extra", "log_metric")
TABLE_COLUMNS = ("step", "prompt", "completion", "advantage")
# Maximum absolute values of a reward and of a weight. The square of a larger product exceeds the range of float32.
LARGEST_REWARD, LARGEST_WEIGHT = 1e12, 1e6
# Number of seconds after the timeout of an asynchronous function. If the function is still running then, it must be blocking
# the event loop.
GRACE_SECONDS = 5.0

F = TypeVar("F", bound=Callable)


def parallel(function: F) -> F:
    """Run a synchronous reward function on its own thread, concurrently with other reward functions.

    Use this decorator for functions that mostly wait, e.g. for a judge or a sandbox.

    >>> @parallel
    ... def judged(completions, **kwargs):
    ...     return [1.0 for _ in completions]
    """
    marked: Any = function
    marked.runs_in_thread = True
    return function


def reward_name(function: Any) -> str:
    """Return the name of a reward function: the ``__name__`` of a function, the last part of a model's id, or the class name
    of another object.

    The name of a ``functools.partial`` is the name of the wrapped function.
    """
    function = _bare(function)
    if isinstance(function, torch.nn.Module):
        function = get_config_model_id(config_of(function)) or type(function).__name__
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    return getattr(function, "__name__", None) or type(function).__name__


def _bare(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def unique(names: list[str]) -> list[str]:
    """Append ``_1``, ``_2``, ... to repeated names. Otherwise their metrics would be merged."""
    result: list[str] = []
    for name in names:
        count, candidate = 0, name
        while candidate in result:
            count += 1
            candidate = f"{name}_{count}"
        result.append(candidate)
    return result


def one_each(name: str, values: object, count: int) -> list[Any]:
    """Convert ``values`` to a list with one item per reward function. None becomes a list of None items.

    Raises:
        ConfigError: The number of items is not ``count``. The message contains ``name``, the name of the argument.
    """
    entries = (
        [None] * count if values is None else list(values) if isinstance(values, list | tuple | Tensor) else [values]
    )
    if len(entries) != count:
        raise ConfigError(
            f"{name} has {len(entries)} entries for {count} reward functions. Fix: pass one entry per function."
        )
    return entries


def as_callable(function: Any, tokenizer: Tokenizer, options: dict[str, Any]) -> Callable:
    """Return a function unchanged. Wrap a model as a reward function."""
    if isinstance(function, str | torch.nn.Module):
        from posttrain.rewards.model import ModelReward

        return ModelReward(function, tokenizer, **options)
    if isinstance(function, type):
        raise ConfigError(
            f"reward_funcs contains the class {function.__name__!r}, but calling a class creates an instance and returns no "
            f"rewards. Fix: pass an instance, {function.__name__}(...), or a function."
        )
    if not callable(function):
        raise ConfigError(
            f"reward_funcs contains {function!r} ({type(function).__name__}), which is neither a function nor a model."
        )
    return function


def head(value: object, limit: int = 120) -> str:
    """Return the first ``limit`` characters of a value, quoted for an error message."""
    text = str(value)
    return repr(text if len(text) <= limit else text[:limit] + "...")


# Score one batch of completions ---------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class RewardTable:
    """Rewards of one batch of completions.

    Attributes:
        values: ``(n, K)`` float32 rewards of n completions and K functions. NaN means that a function returned None. After
            `RewardRunner.finish`, the rewards are transformed.
        names: Unique names of the K functions.
        weights: ``(K,)`` float32 weights of the functions.
        extra_columns: Columns that functions logged with ``log_extra``. Each column has one value per row.
        metrics: Metrics to log: the duration of each function, values from ``log_metric``, and the number of NaN rewards.
        seconds: Duration of each function in seconds. The key is the function's name.
        raw: Rewards ``(n, K)`` before the transforms.
        start: Index of this process's first row in ``values``.
    """

    values: Tensor
    names: list[str]
    weights: Tensor
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    raw: Tensor | None = None
    start: int = 0


@dataclass(frozen=True)
class RewardFunction:
    """Reward function with its name, signature and timeout. `reward_function` creates it.

    Attributes:
        name: Unique name for metrics and errors.
        call: Function that gets the accepted arguments as keywords. It returns the rewards, or an awaitable of the rewards.
        accepts: Names of the function's parameters. The value is True if the parameter has no default.
        takes_all: Whether the function has ``**kwargs``. It then gets all arguments.
        timeout: Maximum seconds of a call. None means no limit.
        concurrent: Whether ``call`` returns an awaitable. All concurrent functions run at the same time, after the
            synchronous functions.
    """

    name: str
    call: Callable[..., Any]
    accepts: Mapping[str, bool]
    takes_all: bool = False
    timeout: float | None = None
    concurrent: bool = False

    def reads(self) -> str:
        """Return the names of the dataset columns that the function reads. If it accepts all columns, return "any"."""
        named = [name for name in self.accepts if name not in (*ROWS, *TRAINERS_ARGUMENTS)]
        return ", ".join(named) or ("any" if self.takes_all else "no column")

    def check_columns(
        self, columns: Collection[str], others: Collection[str] = TRAINERS_ARGUMENTS, *, dataset: str = "the dataset"
    ) -> None:
        """Raise an error if a required parameter is neither a column nor an argument of the trainer.

        Args:
            columns: Names of the dataset columns for reward functions, without ``prompt``.
            others: Names of the arguments that the trainer passes in addition to `ROWS`.
            dataset: Name of the dataset in the message.
        """
        for name, required in self.accepts.items():
            if required and name not in {*ROWS, *columns, *others}:
                raise RewardError(
                    f"reward function {self.name!r} needs the column {name!r}, which {dataset} does not have"
                    f"{did_you_mean(name, columns)}. The columns of {dataset} are {sorted(columns)} (and 'prompt'). Fix: add "
                    f"the column, rename a column to {name!r}, or give the parameter a default."
                )


def reward_function(name: str, function: Callable, timeout: float | None = None) -> RewardFunction:
    """Create a `RewardFunction` from a function. Read its signature. If necessary, wrap the function to run on a thread or
    as a coroutine.

    Args:
        name: Unique name for metrics and errors.
        function: Synchronous, asynchronous or `parallel` function.
        timeout: Maximum seconds of a call. With a timeout, a synchronous function runs on a thread.
    """
    bare = _bare(function)
    on_thread = getattr(bare, "runs_in_thread", False)
    waits = on_thread or any(inspect.iscoroutinefunction(f) for f in (bare, type(bare).__call__))

    def thread(arguments: dict[str, Any]) -> concurrent.futures.Future:
        return _on_thread(functools.partial(function, **arguments))

    async def awaited(**arguments: Any) -> Any:
        result = await asyncio.wrap_future(thread(arguments)) if on_thread else function(**arguments)
        return await result if inspect.isawaitable(result) else result

    def limited(**arguments: Any) -> Any:
        return thread(arguments).result(timeout)

    call = awaited if waits else function if timeout is None else limited
    return RewardFunction(name, call, *parameters(function), timeout, waits)


def parameters(function: Callable) -> tuple[dict[str, bool], bool]:
    """Return the function's parameters as ``{name: is_required}``, and whether it accepts any keyword argument
    (``**kwargs``).

    If the signature cannot be read, the function is assumed to accept any keyword argument.
    """
    try:
        params = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}, True
    named = [p for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p.default is p.empty for p in named}, any(p.kind is p.VAR_KEYWORD for p in params)


def score(
    functions: Sequence[RewardFunction],
    weights: Tensor,
    rows: Mapping[str, list[Any]],
    always: Mapping[str, Any],
    *,
    strict: bool = False,
) -> RewardTable:
    """Call all functions on a batch of completions, and check their rewards.

    Args:
        functions: K functions. Synchronous functions run first, one after another, on the calling thread. Concurrent
            functions run afterwards, all at the same time.
        weights: Weights ``(K,)`` for the table.
        rows: ``prompts``, ``completions``, ``completion_ids`` and the dataset's columns, with n values each.
        always: Arguments without one value per row (``trainer_state``, ``environments``).
        strict: Whether a NaN reward is an error.

    Raises:
        RewardError: A column does not have n values, or a function failed. The message contains the function's name. If the
            reward of a row is invalid, the message contains the row too.
    """
    prompts = rows["prompts"]
    for name, column in rows.items():
        if len(column) != len(prompts):
            raise RewardError(
                f"{name!r} has {len(column)} values for {len(prompts)} prompts. Fix: pass one value per prompt."
            )
    logged: dict[str, list[float]] = {}
    extra: dict[str, dict[str, list[Any]]] = {function.name: {} for function in functions}
    always = {**always, "log_metric": lambda key, value: logged.setdefault(key, []).append(float(value))}
    results, seconds = _results(functions, rows, always, extra)
    columns, metrics = [], {}
    for name in extra:
        rewards = checked(name, results[name], prompts, strict)
        columns.append([math.nan if reward is None else reward for reward in rewards])
        if odd := sum(reward is not None and math.isnan(reward) for reward in rewards):
            metrics[f"rewards/{name}/nan"] = total(float(odd))
    metrics |= {f"rewards/{name}/seconds": mean(spent) for name, spent in seconds.items()}
    finite = {key: [value for value in values if math.isfinite(value)] for key, values in logged.items()}
    metrics |= {key: mean(sum(values) / len(values)) for key, values in finite.items() if values}
    values = torch.tensor(columns, dtype=torch.float32).reshape(len(columns), len(prompts)).T.contiguous()  # (n, K)
    return RewardTable(values, list(extra), weights, merged(extra), metrics, seconds)


def _results(
    functions: Sequence[RewardFunction],
    rows: Mapping[str, list[Any]],
    always: Mapping[str, Any],
    extra: Mapping[str, dict[str, list[Any]]],
) -> tuple[dict[str, Any], dict[str, float]]:
    """Call the functions. Return the unchecked result of each function, and its duration in seconds. The keys are names."""
    count = len(rows["prompts"])
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    later: dict[str, Callable[[], Awaitable]] = {}
    for function in sorted(functions, key=lambda reward: reward.concurrent):
        name = function.name
        arguments = accepted(
            function, rows, {**always, "log_extra": functools.partial(_log_extra, name, extra[name], count)}
        )
        if function.concurrent:
            later[name] = functools.partial(function.call, **arguments)
            continue
        began = time.perf_counter()
        try:
            with still_running([name], count):
                result = results[name] = function.call(**arguments)
        except (MissingDependencyError, KeyboardInterrupt):
            # The error message already contains the package to install.
            raise
        # A function may raise CancelledError, GeneratorExit or SystemExit. They are not subclasses of Exception.
        except BaseException as error:
            raise failure(function, error, rows["prompts"]) from error
        seconds[name] = time.perf_counter() - began
        if inspect.isawaitable(result):
            later[name] = lambda result=result: result
    if later:
        with still_running(list(later), count):
            outcomes = run_concurrently(later, functions[0].timeout)
        by_name = {function.name: function for function in functions}
        for name, (outcome, spent) in outcomes.items():
            if isinstance(outcome, MissingDependencyError):
                raise outcome
            if isinstance(outcome, BaseException):
                raise failure(by_name[name], outcome, rows["prompts"]) from outcome
            results[name], seconds[name] = outcome, seconds.get(name, 0.0) + spent
    return results, seconds


def accepted(function: RewardFunction, rows: Mapping[str, list[Any]], always: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a function. Rows are copied, so that changes by a function do not affect other functions."""
    function.check_columns([column for column in rows if column not in ROWS], always)
    taken = {
        name: value for name, value in {**rows, **always}.items() if function.takes_all or name in function.accepts
    }
    return {name: [_copy(item) for item in value] if name in rows else value for name, value in taken.items()}


def _log_extra(name: str, extra: dict[str, list[Any]], count: int, column: str, values: Sequence[Any]) -> None:
    if len(values) != count:
        raise RewardError(f"{name}: log_extra({column!r}, ...) got {len(values)} values for {count} rows.")
    extra[column] = list(values)


def merged(extra: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Merge the columns that functions have logged, in the order of the functions. If a column name is already in use, the
    function's name is added as a prefix.
    """
    columns: dict[str, list[Any]] = {}
    for name, logged in extra.items():
        for column, values in logged.items():
            clash = column in columns or column in TABLE_COLUMNS or column in extra
            columns[f"{name}/{column}" if clash else column] = values
    return columns


def failure(function: RewardFunction, error: BaseException, prompts: Sequence[Any]) -> RewardError:
    """Convert an exception of a reward function to a `RewardError` with the function's name, the cause and a fix."""
    name, timeout = function.name, function.timeout
    first = f"(first prompt: {head(prompts[0]) if prompts else 'none'})"
    if timeout is not None and isinstance(error, TimeoutError) and not str(error):
        return RewardError(
            f"reward function {name!r} did not return within reward_timeout={timeout} s for {len(prompts)} completions "
            f"{first}. Fix: set a shorter timeout inside the function, or increase reward_timeout."
        )
    if isinstance(error, RewardError):
        return RewardError(f"reward function {name!r}: {str(error).rstrip('.')} {first}.")
    place = raised_at(error, besides=__file__)
    place = f" at {place}" if place else ""
    # Network errors are detected by words in the names of their classes, because httpx, requests, aiohttp and openai have no
    # common base class.
    network = isinstance(error, ConnectionError) or any(word in type(error).__name__ for word in NETWORK)
    fix = (
        "check the address of its server and the network, and retry inside the function (e.g. with tenacity). Training can "
        "be resumed from the last checkpoint"
        if network
        else "return a number for every completion, or None for a completion that the function cannot score"
    )
    return RewardError(f"reward function {name!r} raised {type(error).__name__}{place}: {error} {first}. Fix: {fix}.")


def checked(name: str, result: Any, prompts: Sequence[Any], strict: bool) -> list[float | None]:
    """Check the result of a reward function. Convert it to a list with a float or None for each row.

    Raises:
        RewardError: The result is not a sequence of n values, or a value is neither a finite number nor None. NaN is an
            error only with ``strict``.
    """
    n, shape = len(prompts), tuple(getattr(result, "shape", ()))
    rewards = result.tolist() if hasattr(result, "tolist") else result
    if len(shape) > 1:
        odd, must = f"shape {shape}", f"one number per row, shape ({n},)"
    elif not isinstance(rewards, Sequence) or isinstance(rewards, str | bytes):
        odd, must = f"{rewards!r} ({type(rewards).__name__})", f"a list of {n} numbers, one per completion"
    elif len(rewards) != n:
        odd, must = f"{len(rewards)} rewards for {n} completions", "one per completion"
    else:
        return [_number(name, row, value, prompts, strict) for row, value in enumerate(rewards)]
    raise RewardError(f"reward function {name!r} returned {odd}. It must return {must}.")


def _number(name: str, row: int, value: object, prompts: Sequence[Any], strict: bool) -> float | None:
    value = scalar(value)
    if value is None:
        return None
    number = float(value) if is_number(value) else None
    if number is None:
        odd, must = f"{value!r} ({type(value).__name__})", "a number or None"
    elif abs(number) > LARGEST_REWARD or (strict and math.isnan(number)):
        odd, must = f"{number:g}", f"a number whose absolute value is at most {LARGEST_REWARD:g}, or None (not scored)"
    else:
        return number
    raise RewardError(
        f"reward function {name!r} returned {odd} for row {row}. It must return {must}. Prompt: {head(prompts[row])}"
    )


def _copy(value: object) -> Any:
    """Copy lists and dicts recursively, and keep their types. Other values, such as images, are not copied."""
    if not isinstance(value, list | Mapping):
        return value
    # copy.copy includes the attributes of a parsed message (`ParsedMessage.raw`).
    copied: Any = copy.copy(value)
    if isinstance(value, list | dict):
        for key in range(len(value)) if isinstance(value, list) else value:
            copied[key] = _copy(value[key])
    return copied


# Warnings about long calls ------------------------------------------------------------------------------------------------

SECONDS_UNTIL_LOGGED = 60.0
NETWORK = ("Connect", "Timeout", "Network", "Protocol")  # Words in the class names of network errors.


@contextlib.contextmanager
def still_running(names: Sequence[str], rows: int) -> Iterator[None]:
    """Log a warning while the ``with`` block is running: after 1, 2, 4, 8, ... minutes."""
    done = threading.Event()

    def log_wait() -> None:
        wait = total = SECONDS_UNTIL_LOGGED
        while not done.wait(wait):
            logger.warning(
                "%s has been scoring %d completions for %g s. To abort long calls, set reward_timeout to a number of seconds.",
                " and ".join(names), rows, total,
            )  # fmt: skip
            wait, total = total, 2 * total

    threading.Thread(target=log_wait, daemon=True, name="long-reward").start()
    try:
        yield
    finally:
        done.set()


# Concurrent execution -----------------------------------------------------------------------------------------------------


def _on_thread(work: Callable[[], Any]) -> concurrent.futures.Future:
    """Run ``work`` on a new daemon thread. Threads of a pool are not daemons, so they could block the exit."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        # `Future.result` raises this exception in the calling thread.
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="reward").start()
    return future


async def _contained(task: Callable[[], Awaitable]) -> Any:
    """Await a task. A SystemExit is returned, because raising it would stop the thread of the event loop."""
    try:
        return await task()
    except SystemExit as error:
        return error


def run_concurrently(
    tasks: Mapping[str, Callable[[], Awaitable]], timeout: float | None
) -> dict[str, tuple[Any, float]]:
    """Run all tasks concurrently on an event loop.

    Later calls use the same loop, so that clients keep their connections. If a task blocks the loop, later calls use a new
    loop.

    Args:
        tasks: Functions that create the awaitables. The key is a name.
        timeout: Maximum seconds per task. None means no limit.

    Returns:
        ``{name: (result or exception, seconds)}``.

    Raises:
        RewardError: A task blocks the loop. The error contains the names of the unfinished tasks.
    """
    outcomes: dict[str, tuple[Any, float]] = {}

    async def timed(name: str) -> None:
        started = time.perf_counter()
        try:
            outcome = await asyncio.wait_for(_contained(tasks[name]), timeout)
        except (Exception, asyncio.CancelledError) as error:
            outcome = error
        outcomes[name] = outcome, time.perf_counter() - started

    async def every() -> None:
        await asyncio.gather(*map(timed, tasks))

    future = asyncio.run_coroutine_threadsafe(every(), _loop())
    try:
        future.result(None if timeout is None else timeout + GRACE_SECONDS)
    except concurrent.futures.TimeoutError:
        _LOOPS.pop(os.getpid(), None)
        left = " or ".join(repr(name) for name in tasks if name not in outcomes)
        raise RewardError(
            f"reward function {left} did not return within reward_timeout={timeout} s. It blocks the event loop of all "
            "asynchronous reward functions, because it waits without `await`. Fix: use an asynchronous client and await it, or "
            "make the function synchronous and decorate it with @posttrain.rewards.parallel."
        ) from None
    return outcomes


# Event loop of each process id. A forked process needs its own loop, because fork does not copy the thread of the loop.
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}


def _loop() -> asyncio.AbstractEventLoop:
    loop = _LOOPS.get(os.getpid())
    if loop is None:
        loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True, name="async-rewards").start()
    return loop
