"""Tools a model may call: their schemas, and calls that can neither break, block nor outlast a rollout."""

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

from posttrain.data.formats import PICTURE_BLOCKS
from posttrain.errors import ConfigError, did_you_mean
from posttrain.pictures.picture import Background, is_image, observed_blocks
from posttrain.values import BadValue

T = TypeVar("T")
LONGEST = 1_000_000  # Characters of a result; more fits no context, and would only cost time to tokenise.
GRACE = 1.0  # Seconds an event loop gets to report a time-out itself before it counts as blocked.


class TooSlow(Exception):
    """A call that did not return in its time."""


class UnknownTool(Exception):
    """A call of something that is not there."""


class WrongValue(Exception):
    """An argument that is not of its declared type, or a result that is none."""


class Cancelled(Exception):
    """A call that raised what is meant to end a thread or a task (``CancelledError``, ``SystemExit``): it ended itself alone."""


@dataclass(slots=True)
class ToolResult:
    """What one call gave: the text the model will read, and whether it is an error; ``blocks`` where it holds images."""

    text: str
    failed: bool = False
    blocks: list[dict[str, Any]] | None = None


def tool_schema(tool: Any) -> dict[str, Any]:
    """The JSON schema of a function, from its type hints and its Google-style docstring.

    Raises:
        ConfigError: Not a function, or one without the hints or the docstring.

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
            f"tools must hold named functions, and one is {tool!r} ({type(tool).__name__}). Wrap it in a def with type hints "
            "and a docstring."
        )
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ConfigError(
            f"tool {tool.__name__!r} cannot be described to the model: {error} Give every parameter a type hint, and the "
            "function a docstring with a line for each under 'Args:'."
        ) from error


KINDS = {"integer": int, "number": int | float, "string": str, "boolean": bool, "array": list, "object": dict}


def by_schema(value: object, schema: Mapping[str, Any], name: str) -> Any:
    """An argument as its declaration wants it: a model often writes ``"21"`` where an integer is declared.

    Args:
        value: As it was parsed.
        schema: Of the argument, JSON schema as `tool_schema` writes it.
        name: Of the argument, for the message.

    Raises:
        WrongValue: It cannot be read as what is declared; the model reads why.

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
        raise WrongValue(f"argument {name!r} must be one of {schema['enum']}, and it is {value!r:.80}")
    if kinds == "array" and "items" in schema:
        return [by_schema(item, schema["items"], f"{name}[{i}]") for i, item in enumerate(value)]
    if kinds == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return {k: by_schema(item, schema["additionalProperties"], f"{name}.{k}") for k, item in value.items()}
    return value


def _first_fit(value: object, schemas: Sequence[Mapping[str, Any]], name: str) -> Any:
    """By the schema whose type it has already, else by the first it can be read as."""
    for schema in sorted(schemas, key=lambda one: not _is_kind(value, one.get("type"))):
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
        raise WrongValue(
            f"argument {name!r} must be {article} {kind}, and it is {value!r:.80} ({type(value).__name__})"
        )
    return read


@dataclass(slots=True)
class ToolBox:
    """The functions one rollout may call.

    Attributes:
        functions: By name.
        schemas: What the chat template shows of them.
        owner: The environment some of them belong to.
        lost: A call to the owner never returned: it may still be at work, so nobody calls it again.
    """

    functions: dict[str, Callable] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    owner: Any = None
    lost: bool = False

    @classmethod
    def of(cls, tools: Sequence[Callable] | None) -> ToolBox:
        """A box of plain functions.

        Raises:
            ConfigError: One cannot be described, or two have one name.
        """
        box = cls()
        for tool in tools or ():
            box.schemas.append(tool_schema(tool))
            box.add(tool.__name__, tool)
        return box

    def add(self, name: str, function: Callable) -> None:
        """Another function; a name is given once.

        Raises:
            ConfigError: The name is taken.
        """
        if name in self.functions:
            raise ConfigError(f"two tools are called {name!r}; the model could only call one of them. Rename one.")
        self.functions[name] = function

    def function(self, call: dict[str, Any]) -> Callable:
        """What a call asks for.

        Raises:
            UnknownTool: No such tool, or a call that is not of a function.
        """
        if call.get("type", "function") != "function":
            raise UnknownTool(f"a call of type {call.get('type')!r} cannot be run; only 'function' can")
        name = call.get("function", {}).get("name")
        if name not in self.functions:
            known = ", ".join(sorted(self.functions))
            raise UnknownTool(f"no tool is called {name!r}{did_you_mean(name, self.functions)}; there are: {known}")
        return self.functions[name]

    def declared(self, call: dict[str, Any]) -> dict[str, Any]:
        """What is declared of the called function; empty where nothing is."""
        name = call.get("function", {}).get("name")
        return next((s["function"] for s in self.schemas if s.get("function", {}).get("name") == name), {})

    def arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments, each of its declared type; one that is not declared is left to the function.

        Raises:
            WrongValue: One cannot be read as its type.
        """
        arguments = call["function"].get("arguments") or {}
        if not isinstance(arguments, Mapping):
            raise WrongValue(f"arguments must be an object, and they are {arguments!r:.80}")
        known = self.declared(call).get("parameters", {}).get("properties", {})
        return {name: by_schema(value, known.get(name, {}), name) for name, value in arguments.items()}

    def waits(self, call: dict[str, Any]) -> bool:
        """Whether a call is of an asynchronous function."""
        name = call.get("function", {}).get("name")
        return inspect.iscoroutinefunction(self.functions.get(name))


def as_text(value: object) -> str:
    """A tool's result as the model reads it: text as it is, text blocks joined, anything else as ``str`` shows it.

    Raises:
        TypeError: A block that is no text, or a value that no text shows: a generator, a function, a bare object.
    """
    bare = type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__
    bare = bare or is_image(value)
    if bare or isinstance(value, Iterator | AsyncIterator) or inspect.isroutine(value):
        raise TypeError(f"the tool returned a {type(value).__name__} object, which no text shows; return its values")
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        other = [part["type"] for part in value if part["type"] != "text"]
        if other:
            raise TypeError(f"the tool returned {other[0]!r}; this model reads text only")
        value = "".join(str(part.get("text", "")) for part in value)
    text = value if isinstance(value, str) else str(value)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return text.encode("utf-8", "replace").decode()  # Half a surrogate pair has no tokens.


def shows_images(value: object) -> bool:
    """Whether a value is an image of PIL, or a list of blocks with images.

    >>> shows_images([{"type": "text", "text": "a"}, {"type": "image", "image": "a.png"}]), shows_images("a.png")
    (True, False)
    """
    blocks = value if isinstance(value, list) else ()
    return is_image(value) or any(isinstance(b, Mapping) and b.get("type") in PICTURE_BLOCKS for b in blocks)


class ToolRunner:
    """Runs calls of many rollouts side by side, those of one rollout in their order.

    Plain functions run on threads, asynchronous ones on one event loop; neighbouring asynchronous calls of a message run at
    once. A call that takes longer than ``timeout`` is left behind, and the model reads that it was.

    Args:
        workers: Rollouts served at once; None is one each, at most 32; 0 runs everything in turn on the calling thread,
            without a time limit (for tools that belong to one thread).
        timeout: Seconds a call may take; None waits for ever.

    Attributes:
        background: What shows through transparent pixels of images that are returned; None: the model reads text alone.
    """

    def __init__(self, workers: int | None = None, timeout: float | None = 60.0) -> None:
        self.workers, self.timeout = workers, timeout
        self.background: Background | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def each(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Results of all tasks in their order; the first error among them is raised after all have ended."""
        workers = min(32, len(tasks)) if self.workers is None else min(self.workers, len(tasks))
        if workers == 0 or (workers == 1 and self.workers is not None):
            return [task() for task in tasks]
        with concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="tools") as pool:
            futures = [pool.submit(task) for task in tasks]
        return [future.result() for future in futures]

    def run(self, jobs: Sequence[tuple[ToolBox, Sequence[dict[str, Any]]]]) -> list[list[ToolResult]]:
        """The results of every job's calls, in their order. Never raises on what a tool or a model does.

        Raises:
            RolloutError: An environment broke its contract (a reward that is no number): no model can mend that.
        """
        return self.each([lambda box=box, calls=calls: self._in_order(box, calls) for box, calls in jobs])

    def call(self, function: Callable, arguments: dict[str, Any]) -> Any:
        """One call, plain or asynchronous, within its time.

        Raises:
            TooSlow: It did not return.
            Cancelled: It raised something that is no `Exception`. Otherwise whatever the function raises.
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
                raise WrongValue(f"the tool returned nothing, and its declaration says {kind['type']}")
            if self.background is not None and shows_images(value):
                content = value if isinstance(value, list) else [{"type": "image", "image": value}]
                return ToolResult("", blocks=observed_blocks(content, "a tool's result", self.background))
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
        """Set an asynchronous function going; the result waits for it."""
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
                    raise  # The tool's own.
                self._loop = None  # A coroutine that never gives the loop back has it to itself from now on.
                raise TooSlow from None

        return wait

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A call that never gave its loop back leaves it, at any time and without this lock.
            loop = self._loop
            if loop is None:
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, daemon=True, name="async-tools").start()
            return loop


async def _itself(value: object) -> Any:
    """Wait for it; what would end the event loop or its task ends this call alone."""
    try:
        return await value
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # By us.
        raise _cancelled(error) from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _cancelled(error) from error


def _cancelled(error: BaseException) -> Cancelled:
    return Cancelled(f"{type(error).__name__}: {error}".rstrip(": "))


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Call on a daemon thread and stop waiting after ``seconds``: a thread cannot be ended, only left."""
    box: list[tuple[T | None, BaseException | None]] = []

    def work() -> None:
        try:
            box.append((call(), None))
        except BaseException as error:  # Carried over to the waiting thread.
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
