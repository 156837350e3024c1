"""Environments: objects with a state that a rollout resets, acts on through its methods, and may ask for a reward."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import ConfigError, DataError, RolloutError, did_you_mean
from posttrain.pictures.picture import Background, observed_blocks
from posttrain.rollouts.episodes.toolbox import ToolBox, ToolRunner, TooSlow, shows_images, tool_schema
from posttrain.values import BadValue, given_number, given_truth

logger = logging.getLogger(__name__)

NOT_TOOLS = ("reset", "get_reward", "close")
EMPTY_PROMPT = [{"role": "user", "content": ""}]


@dataclass(slots=True)
class _Kind:
    """What one factory makes: its instances, and what their methods look like to the model."""

    name: str
    factory: Callable[[], Any]
    made: type
    schemas: list[dict[str, Any]]
    methods: list[str]
    instances: list[Any] = field(default_factory=list)
    free: list[Any] = field(default_factory=list)


def _tool_names(kind: type) -> list[str]:
    """Public methods that are tools, read from the class so that no property runs."""
    names = [name for name in dir(kind) if not name.startswith("_") and name not in NOT_TOOLS]
    return [n for n in names if callable(member := getattr(kind, n)) and not inspect.isclass(member)]


class Observed(list):
    """The messages of a prompt to which ``reset`` added text or images, and which of it that was: a template must not obey it.

    Args:
        prompt: As the dataset has it.
        blocks: What was added, at the end of the last message.
    """

    def __init__(self, prompt: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> None:
        last = dict(prompt[-1])
        content = last.get("content") or ""
        if isinstance(content, str) and shows_images(blocks):
            content = [{"type": "text", "text": content}] if content else []
        text = "".join(block.get("text", "") for block in blocks)
        last["content"] = content + text if isinstance(content, str) else [*content, *blocks]
        super().__init__([*prompt[:-1], last])
        self.prompt, self.blocks = prompt, blocks

    def __reduce__(self) -> Any:
        return Observed, (self.prompt, self.blocks)

    def through(self, change: Callable[[str], str]) -> Observed:
        """The same with another spelling of what was added."""
        blocks = [{**b, "text": change(b["text"])} if b["type"] == "text" else b for b in self.blocks]
        return Observed(self.prompt, blocks)


def add_observation(
    prompt: list[dict[str, Any]], observation: Any, where: str, background: Background | None = None
) -> list[dict[str, Any]]:
    """A prompt with what ``reset`` returned at the end of its last message; the given prompt is not changed.

    Args:
        prompt: Of the dataset.
        observation: None, text, a list of blocks, or an image of PIL.
        where: Environment and row, for errors.
        background: See `ToolRunner`.

    Raises:
        RolloutError: The observation is none of these, or holds images for a model that reads text alone.
    """
    if observation is None:
        return prompt
    if background is not None and shows_images(observation):
        content = observation if isinstance(observation, list) else [{"type": "image", "image": observation}]
        try:
            return Observed(prompt, observed_blocks(content, where, background))
        except DataError as error:
            raise RolloutError(f"{where}: what reset returned cannot be shown: {error}") from error
    blocks = [{"type": "text", "text": observation}] if isinstance(observation, str) else observation
    if not isinstance(blocks, list) or not all(_is_text(block) for block in blocks):
        raise RolloutError(
            f"{where}: reset must return None, text, or a list of text blocks, and it returned {observation!r:.120}. A client "
            "with reset and step is adapted by posttrain.step_environment. Images need a processor as processing_class."
        )
    return Observed(prompt, blocks)


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def is_done(environment: object) -> bool:
    """Whether an environment says that its episode is over: its attribute ``done``, unless that is a method (a tool).

    Raises:
        RolloutError: It is neither True nor False, nor a 0 or 1 of any library.
    """
    done = getattr(environment, "done", False)
    return not callable(done) and given_truth(done, f"environment {type(environment).__name__}: done")


class EnvironmentPool:
    """Instances of environments, one a rollout: lent by `begin`, which resets them, and free again after `release`.

    Args:
        factories: Called without arguments, returns an object with ``reset``; or a dict of such, from which each row chooses
            by its ``environment`` column.
        runner: Threads and time limit of ``reset``, ``get_reward`` and the tools.
        retries: Further attempts, each on a fresh instance, when ``reset`` raises.

    Raises:
        ConfigError: Not callable, or what it makes has no ``reset`` or tools that cannot be described.
    """

    def __init__(
        self,
        factories: Callable[[], Any] | Mapping[str, Callable[[], Any]],
        runner: ToolRunner | None = None,
        retries: int = 0,
    ) -> None:
        self.routed = isinstance(factories, Mapping)
        self.runner, self.retries = runner or ToolRunner(), retries
        named = dict(factories) if isinstance(factories, Mapping) else {"": factories}
        if not named:
            raise ConfigError("environment_factory is an empty dict. Give at least one name and factory.")
        self.kinds = {name: _probe(name, factory) for name, factory in named.items()}
        # Instances that a call never came back from: nobody asks them for a reward.
        self.lost: list[Any] = []
        self._warned = False
        # Groups that ask servers begin and end on threads of their own.
        self._lock = threading.Lock()

    @property
    def has_tools(self) -> bool:
        """Whether any environment gives the model something to call."""
        return any(kind.methods for kind in self.kinds.values())

    @property
    def probes(self) -> list[Any]:
        """One instance of each kind."""
        return [kind.instances[0] for kind in self.kinds.values()]

    def rewards(self) -> list[PooledReward]:
        """A reward function for each class (exact type, once) that has ``get_reward``."""
        kinds = dict.fromkeys(type(probe) for probe in self.probes if callable(getattr(probe, "get_reward", None)))
        return [PooledReward(kind, self) for kind in kinds]

    def begin(
        self,
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int] | None = None,
        errors: dict[int, str] | None = None,
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Lend one reset instance a row, and add what ``reset`` returned to the rows' prompts.

        Args:
            rows: Dataset rows; a missing ``prompt`` is an empty user message.
            seeds: Passed as ``group_seed`` where ``reset`` takes it: equal for completions that are compared.
            errors: Where given, a row whose ``reset`` fails is named here with its error, and has None for an environment;
                the others go on.

        Raises:
            DataError: A row asks for an environment that does not exist.
            RolloutError: ``reset`` raised or returned something that is no text; names the environment and the row.
        """
        kinds = [self._kind(row, index) for index, row in enumerate(rows)]
        lent = [self._free(kind) for kind in kinds]
        seeds = seeds or range(len(rows))

        def reset(index: int) -> tuple[Any, dict[str, Any], Any]:
            kind, environment, row = kinds[index], lent[index], rows[index]
            try:
                environment, seen = self._reset(kind, environment, dict(row), seeds[index], index)
                where = f"{_label(kind)}, row {index}"
                prompt = add_observation(_prompt(row, index), seen, where, self.runner.background)
                return environment, {**row, "prompt": prompt}, prompt
            except (DataError, RolloutError) as error:
                self._drop(kind, environment)
                if errors is None:
                    raise
                errors[index] = f"{type(error).__name__}: {error}"
                return None, row, None

        try:
            begun = self.runner.each([functools.partial(reset, index) for index in range(len(rows))])
        except BaseException:
            self.close()
            raise
        self._compare([seen for _, _, seen in begun], seeds)
        return [environment for environment, _, _ in begun], [row for _, row, _ in begun]

    def release(self, environments: Sequence[Any] | None = None) -> None:
        """Take instances back, to be lent again; None: all."""
        with self._lock:
            for kind in self.kinds.values():
                back = [e for e in kind.instances if environments is None or any(e is one for one in environments)]
                kind.free = back if environments is None else kind.free + back
            gone = self.lost if environments is None else environments
            self.lost = [e for e in self.lost if not any(e is one for one in gone)]

    def toolbox(self, environment: object, tools: ToolBox) -> ToolBox:
        """What a rollout in this environment may call: the common tools and the environment's methods."""
        kind = next(k for k in self.kinds.values() if any(environment is e for e in k.instances))
        box = ToolBox(dict(tools.functions), [*tools.schemas, *kind.schemas], owner=environment)
        for name in kind.methods:
            box.add(name, getattr(environment, name))
        return box

    def discard(self, environment: object) -> None:
        """Drop an instance that a call never came back from: it is not reset, asked or closed any more."""
        with self._lock:
            self.lost.append(environment)
            for kind in self.kinds.values():
                kind.instances = [e for e in kind.instances if e is not environment]

    def close(self) -> None:
        """Close every instance that can be closed; the next `begin` makes new ones."""
        for kind in self.kinds.values():
            for instance in kind.instances:
                _close(instance)
            kind.instances, kind.free = [], []

    def _kind(self, row: dict[str, Any], index: int) -> _Kind:
        if not self.routed:
            return self.kinds[""]
        name = row.get("environment")
        if name not in self.kinds:
            raise DataError(
                f"row {index}, column 'environment': {name!r} is no environment{did_you_mean(name, self.kinds)}. "
                f"environment_factory has: {', '.join(sorted(self.kinds))}."
            )
        return self.kinds[name]

    def _free(self, kind: _Kind) -> Any:
        """A free instance; None where there is none."""
        with self._lock:
            return kind.free.pop(0) if kind.free else None

    def _made(self, kind: _Kind) -> Any:
        """A new instance."""
        with self._lock:
            kind.instances.append(kind.factory())
            return kind.instances[-1]

    def _drop(self, kind: _Kind, environment: object) -> None:
        """Close an instance whose ``reset`` failed, and forget it."""
        with self._lock:
            known, kind.instances = kind.instances, [e for e in kind.instances if e is not environment]
        if len(known) > len(kind.instances):
            _close(environment)

    def _reset(self, kind: _Kind, environment: object, row: dict[str, Any], seed: int, index: int) -> tuple[Any, Any]:
        """The instance that was reset, a new one where none is given, and what ``reset`` returned."""
        if self.routed:
            row.pop("environment", None)
        if row.get("prompt") is not None:
            # Completions of a group share the dataset's row.
            row["prompt"] = copy.deepcopy(row["prompt"])
        arguments = {"group_seed": seed, **row}
        for attempt in range(self.retries + 1):
            method = "its factory"
            try:
                environment = self._made(kind) if environment is None else environment
                method = "reset"
                return environment, self.runner.call(
                    environment.reset, accepted_arguments(environment.reset, arguments)
                )
            except (Exception, SystemExit) as error:
                cause = error
            self._drop(kind, environment)
            environment = None
            if attempt < self.retries:
                logger.warning(
                    "%s, row %d: %s failed (%s); a fresh instance is tried.", _label(kind), index, method, cause
                )
        late = f"did not return within tool_timeout={self.runner.timeout} s" if isinstance(cause, TooSlow) else None
        raise RolloutError(
            f"{_label(kind)}, row {index}: {method} {late or f'raised {type(cause).__name__}: {cause}'} "
            f"(attempts: {self.retries + 1}, set by environment_retries; prompt: {row.get('prompt')!r:.120})."
        ) from cause

    def _compare(self, observations: list[Any], seeds: Sequence[int]) -> None:
        first = {}
        for seed, seen in zip(seeds, observations, strict=True):
            if not self._warned and first.setdefault(seed, seen) != seen:
                self._warned = True
                logger.warning(
                    "completions of one group start from different observations: their rewards are compared all the same, "
                    "which makes the baseline noisy. Let reset take group_seed and draw from it."
                )


def _probe(name: str, factory: Any) -> _Kind:
    where = f"environment_factory[{name!r}]" if name else "environment_factory"
    if not callable(factory):
        raise ConfigError(f"{where} must be callable without arguments, and it is {type(factory).__name__}.")
    instance = factory()
    kind = type(instance)
    if not callable(getattr(instance, "reset", None)):
        raise ConfigError(f"{where} made a {kind.__name__}, which has no method reset. An environment needs one.")
    methods = _tool_names(kind)
    schemas = [tool_schema(getattr(instance, method)) for method in methods]
    return _Kind(name, factory, kind, schemas, methods, [instance], [instance])


def _label(kind: _Kind) -> str:
    return f"environment {kind.made.__name__}" + (f" ({kind.name!r})" if kind.name else "")


def _prompt(row: dict[str, Any], index: int) -> list[dict[str, Any]]:
    prompt = row.get("prompt") or EMPTY_PROMPT
    if isinstance(prompt, str):
        raise DataError(
            f"row {index}: the prompt is text, and environments need messages. Give it as [{{'role': 'user', 'content': ...}}]."
        )
    return prompt


def accepted_arguments(function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments a function names, or all where it has ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in arguments.items() if name in named}


def _close(instance: Any) -> None:
    """Close as well as it can be; what is thrown away may be broken already."""
    close = getattr(instance, "close", None)
    if callable(close):
        with contextlib.suppress(Exception):
            value = close()
            if inspect.iscoroutine(value):
                value.close()
                logger.warning("%s.close is asynchronous and was not awaited.", type(instance).__name__)


class PooledReward:
    """The reward that environments of one class give themselves, as a reward function; None for rows of other classes.

    Args:
        made: Exactly this class.
        pool: Where the instances come from: its threads, time limit and retries.
    """

    def __init__(self, made: type, pool: EnvironmentPool) -> None:
        self.made, self.pool, self.runner, self.retries = made, pool, pool.runner, pool.retries
        self.__name__ = made.__name__

    def __call__(self, completions: list[Any], environments: list[Any] | None = None, **_: Any) -> list[Any]:
        """One reward a row."""
        rows = environments or [None] * len(completions)
        return self.runner.each([lambda e=e, i=i: self._ask(e, i) for i, e in enumerate(rows)])

    def _ask(self, environment: object, row: int) -> Any:
        if type(environment) is not self.made or any(environment is e for e in self.pool.lost):
            return None
        for attempt in range(self.retries + 1):
            try:
                return self.runner.call(environment.get_reward, {})
            except Exception as error:
                late = f"did not return within tool_timeout={self.runner.timeout} s"
                what = late if isinstance(error, TooSlow) else f"raised {type(error).__name__}: {error}"
                if attempt == self.retries:
                    raise RolloutError(
                        f"environment {self.made.__name__}, row {row}: get_reward {what} (attempts: {attempt + 1}, set by "
                        "environment_retries)."
                    ) from error
        return None


def step_environment(
    make: Callable[[], Any],
    *,
    action: Callable[[str], Any] = str,
    observe: Callable[[Any], str] = str,
    actions: str = "What to do.",
    name: str = "StepEnvironment",
) -> Callable[[], Any]:
    """A factory of environments around clients with ``reset()`` and ``step(action)``, as OpenEnv and Gymnasium have them.

    The model gets one tool, ``step(action)``; the reward is the sum over steps; when the client says that it is done, the
    rollout ends. A client may return ``(observation, reward, terminated, truncated, info)``, ``(observation, reward, done,
    info)``, or an object with ``observation``, ``reward`` and ``done``; its ``reset`` may also return ``(observation, info)``.

    Args:
        make: Makes a client.
        action: From the model's text to what the client's ``step`` takes; what it raises, the model reads.
        observe: From an observation to the text the model reads.
        actions: Describes the argument to the model, for example ``"One of: up, down, left, right."``.
        name: Of the class, and so of its reward column.

    >>> class Countdown:
    ...     def reset(self, seed=None):
    ...         self.left = 2
    ...         return self.left, {}
    ...     def step(self, action):
    ...         self.left -= int(action)
    ...         return self.left, float(self.left == 0), self.left <= 0, False, {}
    >>> game = step_environment(Countdown, observe="left: {}".format)()
    >>> game.reset(), game.step("1"), game.step("1"), game.get_reward(), game.done
    ('left: 2', 'left: 1', 'left: 0', 1.0, True)
    """

    class StepEnvironment:
        """A client with reset and step, as an environment."""

        def __init__(self) -> None:
            self._client = make()
            self._total, self.done = 0.0, False

        def reset(self, group_seed: int | None = None) -> str:
            arguments = accepted_arguments(self._client.reset, {"seed": group_seed})
            seen, _, self.done = _read(self._client.reset(**arguments), f"{name}: reset")
            self._total = 0.0
            return observe(seen)

        def step(self, action: str) -> str:
            if self.done:
                return "The episode is over."
            seen, reward, self.done = _read(self._client.step(convert(action)), f"{name}: step")
            self._total += reward
            return observe(seen)

        def get_reward(self) -> float:
            return self._total

        def close(self) -> None:
            _close(self._client)

    convert = action
    line = " ".join(actions.split())
    StepEnvironment.step.__doc__ = f"Act, and see what happens.\n\nArgs:\n    action: {line}\n"
    StepEnvironment.__name__ = StepEnvironment.__qualname__ = name
    return StepEnvironment


def _read(result: Any, where: str) -> tuple[Any, float, bool]:
    """Observation, reward and end, from any of the shapes clients return.

    Raises:
        RolloutError: A tuple of another length, a reward that is no finite number (None is 0), or an end that is no truth.
    """
    resets, tells = where.endswith("reset"), hasattr(result, "observation")
    odd = len(result) not in (3, 4, 5) if isinstance(result, tuple) else not tells
    if odd and not (resets and (not isinstance(result, tuple) or len(result) == 2)):
        raise BadValue(
            f"{where} returned {result!r:.80} ({type(result).__name__}). Fix: return (observation, reward, terminated, "
            "truncated, info), or an object with observation, reward and done; from reset an observation will do, or "
            "(observation, info)."
        )
    if isinstance(result, tuple):
        seen, reward, *ends = result if len(result) > 2 else (result[0], None)
        ends = ends[: 2 if len(result) == 5 else 1]
    elif tells:
        seen, reward, ends = result.observation, getattr(result, "reward", None), [getattr(result, "done", False)]
    else:
        return result, 0.0, False
    number = 0.0 if reward is None else given_number(reward, f"{where}: the reward")
    truths = [given_truth(end, f"{where}: the end of the episode") for end in ends]
    return seen, number, any(truths)
