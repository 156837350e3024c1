"""Call the reward functions: the arguments of each function, the checks of its result, and concurrent execution."""

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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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
# Arguments that the trainer passes, besides prompts, completions and dataset columns.
TRAINERS_ARGUMENTS = ("trainer_state", "prompt_suffixes", "environments", "log_extra", "log_metric")
TABLE_COLUMNS = ("step", "prompt", "completion", "advantage")
LARGEST_REWARD = torch.finfo(torch.float32).max
# Seconds after the timeout in which an asynchronous function must have ended. Otherwise it blocks the event loop.
GRACE_SECONDS = 5.0

F = TypeVar("F", bound=Callable)


def parallel(function: F) -> F:
    """Mark a synchronous function that waits (for a judge, a sandbox), so that it runs on a thread, concurrently with others.

    >>> @parallel
    ... def judged(completions, **kwargs):
    ...     return [1.0 for _ in completions]
    """
    marked: Any = function
    marked.runs_in_thread = True
    return function


def reward_name(function: Any) -> str:
    """Return ``__name__`` (through partials), the last part of a model's id, or the class name of an instance."""
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
    """Append ``_1``, ``_2``, ... to repeated names, so that their metrics are not merged."""
    result: list[str] = []
    for name in names:
        count, candidate = 0, name
        while candidate in result:
            count += 1
            candidate = f"{name}_{count}"
        result.append(candidate)
    return result


def one_each(name: str, values: object, count: int) -> list[Any]:
    """Return a list with one entry per function; None gives a list of None."""
    entries = (
        [None] * count if values is None else list(values) if isinstance(values, list | tuple | Tensor) else [values]
    )
    if len(entries) != count:
        raise ConfigError(
            f"{name} has {len(entries)} entries for {count} reward functions. Fix: pass one entry per function."
        )
    return entries


def as_callable(function: Any, tokenizer: Tokenizer, options: dict[str, Any]) -> Callable:
    """Return the function itself, or a model wrapped as a reward function."""
    if isinstance(function, str | torch.nn.Module):
        from posttrain.rewards.model import ModelReward

        return ModelReward(function, tokenizer, **options)
    if isinstance(function, type):
        raise ConfigError(
            f"reward_funcs contains the class {function.__name__!r}: calling it creates an instance, not rewards. Fix: pass "
            f"an instance, {function.__name__}(...), or a function."
        )
    if not callable(function):
        raise ConfigError(
            f"reward_funcs contains {function!r} ({type(function).__name__}), which is neither callable nor a model."
        )
    return function


def head(value: object, limit: int = 120) -> str:
    """Return the beginning of a prompt, for a message."""
    text = str(value)
    return repr(text if len(text) <= limit else text[:limit] + "...")


# One call -------------------------------------------------------------------------------------------------------------


@dataclass
class RewardCall:
    """Inputs and logged values of one call of the reward functions on one batch.

    Attributes:
        prompts: n strings or lists of messages.
        completions: n strings or lists of messages.
        completion_ids: n lists of token ids, unpadded.
        columns: Dataset columns, n values each.
        always: Arguments that every function gets besides the rows (``trainer_state``, ``environments``).
        strict: Whether NaN is an error too.
        extra: Columns logged with ``log_extra``, by function and column.
        logged: Values logged with ``log_metric``, by key.
        metrics: Durations and counts measured by the runner.
    """

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    always: dict[str, Any]
    strict: bool = False
    extra: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def check_inputs(self) -> None:
        """Raise if a column does not have one value per row, or has the name of an argument that every function gets."""
        n = len(self.prompts)
        rows = {"completions": self.completions, "completion_ids": self.completion_ids, **self.columns}
        for name, values in rows.items():
            if len(values) != n:
                raise RewardError(
                    f"{name!r} has {len(values)} values for {n} prompts. There must be one value per row."
                )
            if name in self.columns and name in ("prompts", "completions"):
                raise RewardError(
                    f"the dataset column {name!r} has the same name as an argument that every reward function gets. Fix: "
                    "rename the column."
                )

    def run(self, name: str, function: Callable, timeout: float | None = None) -> Any:
        """Call one function. The result may be an awaitable."""
        call = functools.partial(function, **self._accepted(name, function, self._arguments(name)))
        try:
            return call() if timeout is None else _on_thread(call).result(timeout)
        except (MissingDependencyError, KeyboardInterrupt):
            # The message of a missing dependency already says what to install.
            raise
        # CancelledError, GeneratorExit and SystemExit are not subclasses of Exception; they must end only this call.
        except BaseException as error:
            raise self.failure(name, error, timeout) from error

    def _arguments(self, name: str) -> dict[str, Any]:
        """Copy the arguments for one function, so that its edits do not reach the next function."""

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(self.prompts):
                raise RewardError(
                    f"{name} logged {len(values)} values for column {column!r} and {len(self.prompts)} rows."
                )
            self.extra.setdefault(name, {})[column] = list(values)

        return {
            "prompts": [_copy(prompt) for prompt in self.prompts],
            "completions": [_copy(completion) for completion in self.completions],
            "completion_ids": [list(ids) for ids in self.completion_ids],
            **{key: [_copy(value) for value in values] for key, values in self.columns.items()},
            **self.always,
            "log_extra": log_extra,
            "log_metric": lambda key, value: self.logged.setdefault(key, []).append(float(value)),
        }

    def _accepted(self, name: str, function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that ``function`` names (all of them if it has ``**kwargs``)."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return arguments
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise RewardError(
                f"reward function {name!r} has positional-only parameters, but it is called with keywords. Fix: remove the '/'."
            )
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for parameter in named:
            if parameter.default is parameter.empty and parameter.name not in arguments:
                raise RewardError(
                    f"reward function {name!r} needs the column {parameter.name!r}, which the dataset does not have"
                    f"{did_you_mean(parameter.name, self.columns)}. Its columns are {sorted(self.columns)} (and "
                    "'prompt')."
                )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return arguments
        return {p.name: arguments[p.name] for p in named if p.name in arguments}

    def failure(self, name: str, error: BaseException, timeout: float | None = None) -> RewardError:
        """Return an error that names the function and the reason of the failure."""
        first = f"(first prompt: {head(self.prompts[0]) if self.prompts else 'none'})"
        if timeout is not None and isinstance(error, TimeoutError) and not str(error):
            return RewardError(
                f"reward function {name!r} did not answer within reward_timeout={timeout} s for {len(self.prompts)} "
                f"completions {first}. Fix: limit the waits inside the function, or raise reward_timeout."
            )
        if isinstance(error, RewardError):
            return RewardError(f"reward function {name!r}: {str(error).rstrip('.')} {first}.")
        place = raised_at(error, besides=__file__)
        place = f" at {place}" if place else ""
        # httpx, requests, aiohttp and openai have no common error class, but their class names share words.
        network = isinstance(error, ConnectionError) or any(word in type(error).__name__ for word in NETWORK)
        fix = (
            "its server did not answer. Check the address and the network, and retry inside the function (e.g. with tenacity). "
            "The training state is saved in the checkpoints"
            if network
            else "return a number, or None for 'does not apply', for every completion the model may write"
        )
        return RewardError(
            f"reward function {name!r} raised {type(error).__name__}{place}: {error} {first}. Fix: {fix}."
        )

    def check(self, name: str, result: Any) -> list[float]:
        """Convert a result to one number per row, with NaN for None.

        Raises:
            RewardError: The result is not a sequence of n real finite numbers or Nones.
        """
        n = len(self.prompts)
        if hasattr(result, "tolist"):
            shape = tuple(getattr(result, "shape", ()))
            if len(shape) > 1:
                raise RewardError(
                    f"reward function {name!r} returned shape {shape}. It must return one number per row, shape ({n},)."
                )
            result = result.tolist()
        if not isinstance(result, Sequence) or isinstance(result, str | bytes):
            raise RewardError(
                f"reward function {name!r} returned {result!r} ({type(result).__name__}). It must return a list of {n} "
                "numbers, one per completion."
            )
        if len(result) != n:
            raise RewardError(
                f"reward function {name!r} returned {len(result)} rewards for {n} completions. It must return one per completion."
            )
        numbers = [self._number(name, row, value) for row, value in enumerate(result)]
        odd = sum(value is not None and math.isnan(number) for value, number in zip(result, numbers, strict=True))
        if odd:
            self.metrics[f"rewards/{name}/nan"] = total(float(odd))
        return numbers

    def _number(self, name: str, row: int, value: object) -> float:
        value = scalar(value)
        if value is None:
            return math.nan
        if not is_number(value):
            raise RewardError(
                f"reward function {name!r} returned {value!r} ({type(value).__name__}) for row {row}. It must return a "
                f"number or None. Prompt: {head(self.prompts[row])}"
            )
        number = float(value)
        if abs(number) > LARGEST_REWARD or (self.strict and math.isnan(number)):
            raise RewardError(
                f"reward function {name!r} returned {number} for row {row}. It must return a finite number, or None "
                f"for 'does not apply'. Prompt: {head(self.prompts[row])}"
            )
        return number

    def extra_columns(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return the logged columns in the order of the functions. A name that is taken is prefixed with the function's name."""
        merged: dict[str, list[Any]] = {}
        for name in names:
            for column, values in self.extra.get(name, {}).items():
                clash = column in merged or column in TABLE_COLUMNS or column in names
                merged[f"{name}/{column}" if clash else column] = values
        return merged

    def all_metrics(self) -> dict[str, Metric]:
        """Return the runner's metrics and, for each metric that functions logged, its mean over the calls."""
        finite = {key: [value for value in values if math.isfinite(value)] for key, values in self.logged.items()}
        return self.metrics | {key: mean(sum(values) / len(values)) for key, values in finite.items() if values}


def _copy(value: object) -> Any:
    """Copy lists and dicts recursively, keeping their types. Other values, such as images, are not copied."""
    if not isinstance(value, list | Mapping):
        return value
    copied: Any = copy.copy(value)  # copy.copy keeps the attributes of a parsed message (`ParsedMessage.raw`).
    if isinstance(value, list | dict):
        for key in range(len(value)) if isinstance(value, list) else value:
            copied[key] = _copy(value[key])
    return copied


def columns_read(function: Callable) -> str:
    """Return the dataset columns that a function names, or "any" if it takes all of them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "any"
    supplied = ("prompts", "completions", "completion_ids", *TRAINERS_ARGUMENTS)
    named = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in supplied
    ]
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and not named:
        return "any"
    return ", ".join(named) or "no column"


# How long a call takes ----------------------------------------------------------------------------------------------------

SECONDS_UNTIL_TOLD = 60.0
NETWORK = ("Connect", "Timeout", "Network", "Protocol")  # Words in the names of network errors.


@contextlib.contextmanager
def told_of(names: Sequence[str], rows: int) -> Iterator[None]:
    """Warn while functions are still running: after 1 minute, then after 2, 4, 8, ... minutes."""
    done = threading.Event()

    def tell() -> None:
        wait = total = SECONDS_UNTIL_TOLD
        while not done.wait(wait):
            logger.warning(
                "%s has been scoring %d completions for %g s. Set reward_timeout=SECONDS to end such calls.",
                " and ".join(names), rows, total,
            )  # fmt: skip
            wait, total = total, 2 * total

    threading.Thread(target=tell, daemon=True, name="long-reward").start()
    try:
        yield
    finally:
        done.set()


# Functions that run at the same time ------------------------------------------------------------------------------------


def _on_thread(work: Callable[[], Any]) -> concurrent.futures.Future:
    """Run ``work`` on a new daemon thread. A hanging thread of a pool would keep the process from exiting."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        # Re-raised in the waiting thread.
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="reward").start()
    return future


def is_concurrent(function: Any) -> bool:
    """Return whether a function is asynchronous (or its ``__call__`` is), or marked to run on a thread."""
    bare = _bare(function)
    asynchronous = any(inspect.iscoroutinefunction(f) for f in (bare, type(bare).__call__))
    return asynchronous or getattr(bare, "runs_in_thread", False)


async def awaited(call: RewardCall, name: str, function: Callable) -> Any:
    """Return the result of one concurrent function."""
    if getattr(_bare(function), "runs_in_thread", False):
        return await asyncio.wrap_future(_on_thread(lambda: call.run(name, function)))
    return await without_exit(call, name, call.run(name, function))


async def without_exit(call: RewardCall, name: str, awaitable: Awaitable) -> Any:
    """Await ``awaitable`` and convert SystemExit to an error. It would end the event loop's thread and hang the caller."""
    try:
        return await awaitable
    except SystemExit as error:
        raise call.failure(name, error) from error


def run_concurrently(
    tasks: Mapping[str, Callable[[], Awaitable]], timeout: float | None
) -> dict[str, tuple[Any, float]]:
    """Run all tasks concurrently on one event loop; return the result (or exception) and the duration in seconds of each.

    The loop persists between calls, so that clients keep their connections. A task that blocks the loop is abandoned together
    with it, and later calls get a new loop.

    Args:
        tasks: Functions that create the awaitables, by name.
        timeout: Maximum seconds per task; None waits without limit.

    Raises:
        RewardError: A task blocks the loop. The error names the tasks that had not ended.
    """
    outcomes: dict[str, tuple[Any, float]] = {}

    async def timed(name: str) -> None:
        started = time.perf_counter()
        try:
            outcome = await asyncio.wait_for(tasks[name](), timeout)
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
            f"reward function {left} did not answer within reward_timeout={timeout} s and blocks the event loop of all "
            "asynchronous reward functions, because it waits without `await`. Fix: await an asynchronous client, or make it a "
            "synchronous function marked with posttrain.rewards.parallel."
        ) from None
    return outcomes


# Keyed by process id: a forked child has no thread that runs its parent's loop.
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}


def _loop() -> asyncio.AbstractEventLoop:
    loop = _LOOPS.get(os.getpid())
    if loop is None:
        loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True, name="async-rewards").start()
    return loop
