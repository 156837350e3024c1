"""Tools for the model: their schemas, and `ToolRunner`, which runs them with time limits and catches their errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers.utils import get_json_schema

from posttrain.data.formats import PICTURE_BLOCKS, is_image
from posttrain.errors import ConfigError, did_you_mean
from posttrain.values import BadValue

T = TypeVar("T")
Observe = Callable[[Any, str], list[dict[str, Any]]]
# Maximum number of characters of a tool result. A longer result would take long to tokenize, and would not fit into the
# context of any model.
LONGEST = 1_000_000
# Number of seconds after a timeout in which the event loop must report the timeout. If it does not report the timeout, a
# function is blocking the event loop.
GRACE = 1.0


class TooSlow(Exception):
    """Error for a call that did not return within the time limit."""


class UnknownTool(Exception):
    """Error for a call of a tool that does not exist."""


class WrongValue(Exception):
    """Error for an argument or a result that does not have the declared type."""


class Cancelled(Exception):
    """Error for a call that raised ``CancelledError`` or ``SystemExit``. Only this call fails."""


@dataclass(slots=True)
class ToolResult:
    """Result of one tool call. It consists of text for the model, an error flag, and content blocks if the result contains
    images.
    """

    text: str
    failed: bool = False
    blocks: list[dict[str, Any]] | None = None


def tool_schema(tool: Any) -> dict[str, Any]:
    """Return the JSON schema of a function, created from its type hints and its Google-style docstring.

    Raises:
        ConfigError: The object is not a function, or it lacks type hints or a docstring.

    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: The first.
    ...         b: The second.
    ...     '''
    ...     return a + b
    >>> tool_schema(add)["function"]["parameters"]["required"]
    ['a', 'b']
    """
    if not callable(tool) or not hasattr(tool, "__name__"):
        raise ConfigError(
            f"tools must be named functions, but one is {tool!r} ({type(tool).__name__}). Wrap it in a def with type "
            "hints and a docstring."
        )
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ConfigError(
            f"tool {tool.__name__!r} has no valid schema: {error} Add a type hint to every parameter, and a docstring "
            "with a line for each parameter under 'Args:'."
        ) from error


KINDS = {"integer": int, "number": int | float, "string": str, "boolean": bool, "array": list, "object": dict}


def by_schema(value: object, schema: Mapping[str, Any], name: str) -> Any:
    """Convert an argument to its declared type. For example, ``"21"`` becomes an integer.

    Args:
        value: Parsed value of the argument.
        schema: JSON schema of the argument, taken from the result of `tool_schema`.
        name: Name of the argument, used in the error message.

    Raises:
        WrongValue: The value cannot be converted. The model receives the error message.

    >>> by_schema("21", {"type": "integer"}, "n"), by_schema(21, {"type": "string"}, "n")
    (21, '21')
    """
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        return _first_fit(value, schema["anyOf"], name)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return _first_fit(value, [schema | {"type": kind} for kind in kinds], name)
    if kinds in KINDS:
        value = _as_kind(value, kinds, name)
    if "enum" in schema and value not in schema["enum"]:
        raise WrongValue(f"argument {name!r} must be one of {schema['enum']}, but is {value!r:.80}")
    if kinds == "array" and "items" in schema:
        return [by_schema(item, schema["items"], f"{name}[{i}]") for i, item in enumerate(value)]
    if kinds == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return {k: by_schema(item, schema["additionalProperties"], f"{name}.{k}") for k, item in value.items()}
    return value


def _first_fit(value: object, schemas: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Convert a value to the first of several types to which it can be converted. A value that already has one of the types
    is not changed.
    """
    for schema in sorted(schemas, key=lambda candidate: not _is_kind(value, candidate.get("type"))):
        try:
            return by_schema(value, schema, name)
        except WrongValue as error:
            last = error
    raise last


def _is_kind(value: object, kind: Any) -> bool:
    if kind == "null" or kind not in KINDS:
        return value is None
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _as_kind(value: object, kind: str, name: str) -> Any:
    if _is_kind(value, kind):
        return value
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value.strip().lower() if kind == "boolean" else value)
        except ValueError:
            read = None
    elif kind == "string" and isinstance(value, int | float):
        return json.dumps(value)
    if kind == "integer" and isinstance(read, float) and read.is_integer():
        return int(read)
    if not _is_kind(read, kind):
        article = "an" if kind[0] in "aio" else "a"
        raise WrongValue(f"argument {name!r} must be {article} {kind}, but is {value!r:.80} ({type(value).__name__})")
    return read


@dataclass(slots=True)
class ToolBox:
    """Tools that one rollout may call.

    Attributes:
        functions: Functions by tool name.
        schemas: JSON schemas of the functions, which the chat template renders.
        owner: Environment with methods that are tools. None: there is no environment.
        lost: Whether a call of the owner did not return in time. Such a call may still be running, so no further method of
            the owner is called.
    """

    functions: dict[str, Callable] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    owner: Any = None
    lost: bool = False

    @classmethod
    def of(cls, tools: Sequence[Callable] | None) -> ToolBox:
        """Create a tool box from functions.

        Raises:
            ConfigError: A function has no valid schema, or two functions have the same name.
        """
        box = cls()
        for tool in tools or ():
            box.schemas.append(tool_schema(tool))
            box.add(tool.__name__, tool)
        return box

    def add(self, name: str, function: Callable) -> None:
        """Add a function under a name that no other tool has.

        Raises:
            ConfigError: Another tool has this name.
        """
        if name in self.functions:
            raise ConfigError(
                f"two tools have the name {name!r}, so the model could call only one of them. Rename one of them."
            )
        self.functions[name] = function

    def function(self, call: dict[str, Any]) -> Callable:
        """Return the function that a tool call requests.

        Raises:
            UnknownTool: There is no tool with this name, or the call is not a function call.
        """
        if call.get("type", "function") != "function":
            raise UnknownTool(f"calls of type {call.get('type')!r} are not supported; use 'function'")
        name = call.get("function", {}).get("name")
        if name not in self.functions:
            names = ", ".join(sorted(self.functions))
            raise UnknownTool(f"there is no tool {name!r}{did_you_mean(name, self.functions)}; the tools are: {names}")
        return self.functions[name]

    def declared(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of the requested function, or {} if it has no schema."""
        name = call.get("function", {}).get("name")
        return next((s["function"] for s in self.schemas if s.get("function", {}).get("name") == name), {})

    def arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, converted to their declared types. Arguments that the schema does not contain are
        not changed.

        Raises:
            WrongValue: An argument cannot be converted.
        """
        arguments = call["function"].get("arguments") or {}
        if not isinstance(arguments, Mapping):
            raise WrongValue(f"arguments must be an object, but are {arguments!r:.80}")
        properties = self.declared(call).get("parameters", {}).get("properties", {})
        return {name: by_schema(value, properties.get(name, {}), name) for name, value in arguments.items()}

    def waits(self, call: dict[str, Any]) -> bool:
        """Return whether the requested function is asynchronous."""
        name = call.get("function", {}).get("name")
        return inspect.iscoroutinefunction(self.functions.get(name))


def as_text(value: object) -> str:
    """Convert a tool's result to text. A string is not changed, text blocks are joined, and other values are converted with
    ``str``.

    Raises:
        TypeError: A block is not text, or the value is an object without a useful text form, for example a generator or a
            function.
    """
    bare = type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__
    bare = bare or is_image(value)
    if bare or isinstance(value, Iterator | AsyncIterator) or inspect.isroutine(value):
        raise TypeError(f"the tool returned a {type(value).__name__} object, which has no text form; return its values")
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        other = [part["type"] for part in value if part["type"] != "text"]
        if other:
            raise TypeError(f"the tool returned {other[0]!r}, but this model supports text only")
        value = "".join(str(part.get("text", "")) for part in value)
    text = value if isinstance(value, str) else str(value)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return text.encode("utf-8", "replace").decode()  # Unpaired surrogates cannot be tokenized, so replace them.


def shows_images(value: object) -> bool:
    """Return whether a tool's result is a PIL image or a list of blocks that contains images.

    >>> shows_images([{"type": "text", "text": "a"}, {"type": "image", "image": "a.png"}]), shows_images("a.png")
    (True, False)
    """
    blocks = value if isinstance(value, list) else ()
    return is_image(value) or any(isinstance(b, Mapping) and b.get("type") in PICTURE_BLOCKS for b in blocks)


class ToolRunner:
    """Runs the tool calls of many rollouts concurrently. The calls of one rollout run in order.

    Plain functions run on threads, and asynchronous functions run on one event loop. Consecutive asynchronous calls of a
    message run concurrently. After ``timeout``, the runner stops waiting for a call, and the model receives an error.

    Args:
        workers: Number of rollouts whose tools run concurrently. None: all rollouts, up to 32. 0: calls run one after the
            other on the calling thread, without a time limit. Use 0 for tools that are not thread-safe.
        timeout: Maximum number of seconds of a call. None: no limit.

    Attributes:
        observed: Function that converts returned images to content blocks. Its arguments are the result, and a description
            of the result's origin. None: the model supports only text.
    """

    def __init__(self, workers: int | None = None, timeout: float | None = 60.0) -> None:
        self.workers, self.timeout = workers, timeout
        self.observed: Observe | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def each(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run all tasks, and return their results in order. If tasks fail, the first error is raised after all tasks have
        ended.
        """
        workers = min(32, len(tasks)) if self.workers is None else min(self.workers, len(tasks))
        if workers == 0 or (workers == 1 and self.workers is not None):
            return [task() for task in tasks]
        with concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="tools") as pool:
            futures = [pool.submit(task) for task in tasks]
        return [future.result() for future in futures]

    def run(self, jobs: Sequence[tuple[ToolBox, Sequence[dict[str, Any]]]]) -> list[list[ToolResult]]:
        """Run the tool calls of each rollout, and return their results in order. Errors of tools and invalid calls become
        results for the model.

        Raises:
            RolloutError: An environment is invalid, for example because its ``done`` is not a bool.
        """
        return self.each([lambda box=box, calls=calls: self._in_order(box, calls) for box, calls in jobs])

    def call(self, function: Callable, arguments: dict[str, Any]) -> Any:
        """Call a plain or asynchronous function, and raise an error after the time limit.

        Raises:
            TooSlow: The function did not return in time.
            Cancelled: The function raised an exception that is not a subclass of `Exception`. All other errors of the
                function are raised unchanged.
        """
        if inspect.iscoroutinefunction(function):
            return self._start(function, arguments)()
        try:
            if self.workers == 0 or self.timeout is None:
                value = function(**arguments)
            else:
                value = _within(self.timeout, lambda: function(**arguments))
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise _cancelled(error) from error
        return self._start(_itself, {"value": value})() if inspect.isawaitable(value) else value

    def _in_order(self, box: ToolBox, calls: Sequence[dict[str, Any]]) -> list[ToolResult]:
        results: list[ToolResult] = []
        for waits, neighbours in itertools.groupby(calls, key=box.waits):
            if not waits:
                results += [self._outcome(lambda call=call: self._plain(box, call), box, call) for call in neighbours]
                continue
            started = [(self._begin(box, call), call) for call in neighbours]
            results += [self._outcome(wait, box, call) for wait, call in started]
        return results

    def _plain(self, box: ToolBox, call: dict[str, Any]) -> Any:
        function = box.function(call)
        owned = box.owner is not None and getattr(function, "__self__", None) is box.owner
        if owned and box.lost:
            raise TooSlow("the environment is still busy with an earlier call")
        try:
            return self.call(function, box.arguments(call))
        except TooSlow:
            box.lost = box.lost or owned
            raise

    def _begin(self, box: ToolBox, call: dict[str, Any]) -> Callable[[], Any]:
        try:
            return self._start(box.function(call), box.arguments(call))
        except (UnknownTool, WrongValue) as error:
            wrong = error

            def refuse() -> Any:
                raise wrong

            return refuse

    def _outcome(self, wait: Callable[[], Any], box: ToolBox, call: dict[str, Any]) -> ToolResult:
        try:
            value, kind = wait(), box.declared(call).get("return") or {}
            if value is None and kind.get("type") not in (None, "null") and not kind.get("nullable"):
                raise WrongValue(f"the tool returned nothing, but its declared type is {kind['type']}")
            if self.observed is not None and shows_images(value):
                return ToolResult("", blocks=self.observed(value, "a tool's result"))
            return ToolResult(as_text(value))
        except BadValue:
            raise
        except (UnknownTool, WrongValue, Cancelled) as error:
            text = str(error)
        except TooSlow as error:
            text = str(error) or f"the tool did not answer within {self.timeout} s"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        return ToolResult(as_text({"error": text}), failed=True)

    def _start(self, function: Callable, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Start an asynchronous function. Return a function that waits for its result."""
        limit = self.timeout

        async def work() -> Any:
            task = asyncio.ensure_future(_itself(function(**arguments)))
            done, _ = await asyncio.wait({task}, timeout=limit)
            if not done:
                task.cancel()
                raise TooSlow
            return task.result()

        future = asyncio.run_coroutine_threadsafe(work(), self._running_loop())

        def wait() -> Any:
            try:
                return future.result(None if limit is None else limit + GRACE)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise  # The tool itself raised this TimeoutError.
                # The coroutine blocks this event loop. Use a new event loop for later calls.
                self._loop = None
                raise TooSlow from None

        return wait

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # Hold the lock. A thread whose call blocks may set the event loop to None at any time.
            loop = self._loop
            if loop is None:
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, daemon=True, name="async-tools").start()
            return loop


async def _itself(value: object) -> Any:
    """Await a value. Exceptions that would end the event loop or the task are converted, so that only this call fails."""
    try:
        return await value
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # The runner canceled this task. Do not convert the exception.
        raise _cancelled(error) from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _cancelled(error) from error


def _cancelled(error: BaseException) -> Cancelled:
    return Cancelled(f"{type(error).__name__}: {error}".rstrip(": "))


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Run a call on a daemon thread, and wait for up to ``seconds``. The thread then continues to run, because it cannot be
    stopped.
    """
    box: list[tuple[T | None, BaseException | None]] = []

    def work() -> None:
        try:
            box.append((call(), None))
        except BaseException as error:  # Store the exception for the waiting thread, which raises it.
            box.append((None, error))

    thread = threading.Thread(target=work, daemon=True, name="tool")
    thread.start()
    thread.join(seconds)
    if not box:
        raise TooSlow
    value, error = box[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
