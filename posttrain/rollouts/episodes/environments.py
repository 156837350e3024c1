"""Environments of episodes: objects with state and a method ``reset``. Their other methods are either tools or functions
that return a reward.
"""

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
from posttrain.rollouts.episodes.toolbox import Observe, ToolBox, ToolRunner, TooSlow, shows_images, tool_schema
from posttrain.values import BadValue, given_number, given_truth

logger = logging.getLogger(__name__)

NOT_TOOLS = ("reset", "get_reward", "close")
EMPTY_PROMPT = [{"role": "user", "content": ""}]


@dataclass(slots=True)
class _Kind:
    """Factory of environments, with the instances that it created and the schemas of their methods."""

    name: str
    factory: Callable[[], Any]
    made: type
    schemas: list[dict[str, Any]]
    methods: list[str]
    instances: list[Any] = field(default_factory=list)
    free: list[Any] = field(default_factory=list)


def _tool_names(kind: type) -> list[str]:
    """Return the names of public methods that are tools. The names are read from the class, so that no property is
    evaluated.
    """
    names = [name for name in dir(kind) if not name.startswith("_") and name not in NOT_TOOLS]
    return [n for n in names if callable(member := getattr(kind, n)) and not inspect.isclass(member)]


class Observed(list):
    """Messages of a prompt to whose last message an environment's ``reset`` has added text or images.

    The added blocks are also stored separately, so that special tokens in them can be encoded as ordinary text.

    Args:
        prompt: Messages of the dataset.
        blocks: Content blocks that ``reset`` added to the last message.
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
        """Return a copy of the messages in which the function ``change`` was applied to the texts that ``reset`` added."""
        blocks = [{**b, "text": change(b["text"])} if b["type"] == "text" else b for b in self.blocks]
        return Observed(self.prompt, blocks)


def add_observation(
    prompt: list[dict[str, Any]], observation: Any, where: str, observed: Observe | None = None
) -> list[dict[str, Any]]:
    """Return the prompt with an observation of ``reset`` appended to its last message.

    Args:
        prompt: Prompt of the dataset. It is not changed.
        observation: Result of ``reset``: None, text, a list of content blocks, or a PIL image.
        where: Description of environment and row, used in error messages.
        observed: Function that converts images to content blocks. None: the model supports only text.

    Raises:
        RolloutError: The observation has an unsupported type, or contains images although the model supports only text.
    """
    if observation is None:
        return prompt
    if observed is not None and shows_images(observation):
        try:
            return Observed(prompt, observed(observation, where))
        except DataError as error:
            raise RolloutError(f"{where}: the result of reset cannot be rendered: {error}") from error
    blocks = [{"type": "text", "text": observation}] if isinstance(observation, str) else observation
    if not isinstance(blocks, list) or not all(_is_text(block) for block in blocks):
        raise RolloutError(
            f"{where}: reset must return None, text, or a list of text blocks, but returned {observation!r:.120}. "
            "Wrap a client with reset and step in posttrain.step_environment. Images need a processor as "
            "processing_class."
        )
    return Observed(prompt, blocks)


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def is_done(environment: object) -> bool:
    """Return whether the episode of an environment has ended, from the environment's attribute ``done``.

    If ``done`` is a method, it is a tool, and this function returns False.

    Raises:
        RolloutError: The attribute is neither a bool nor 0 or 1.
    """
    done = getattr(environment, "done", False)
    return not callable(done) and given_truth(done, f"environment {type(environment).__name__}: done")


class EnvironmentPool:
    """Pool of environments, one per rollout. `begin` resets environments and assigns them to rollouts. `release` returns
    them to the pool.

    Args:
        factories: Function without arguments that returns an object with ``reset``, or a dict of such functions. With a
            dict, the column ``environment`` of each row selects a function.
        runner: Runner with the threads and the time limit of ``reset``, ``get_reward`` and tools.
        retries: Number of further attempts after an error in ``reset``. Each attempt uses a new instance.

    Raises:
        ConfigError: A factory is not callable, its objects have no ``reset``, or a tool has no valid schema.
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
            raise ConfigError("environment_factory is an empty dict. Pass at least one name and factory.")
        self.kinds = {name: _probe(name, factory) for name, factory in named.items()}
        # Environments with a call that did not return in time. Their method get_reward is not called.
        self.lost: list[Any] = []
        self._warned = False
        # Lock for the lists of environments. The lock is needed because groups of completions can begin and end on different
        # threads if the engine uses servers.
        self._lock = threading.Lock()

    @property
    def has_tools(self) -> bool:
        """Whether any environment has tools."""
        return any(kind.methods for kind in self.kinds.values())

    @property
    def probes(self) -> list[Any]:
        """One environment per factory. Tools and schemas are read from these environments."""
        return [kind.instances[0] for kind in self.kinds.values()]

    def rewards(self) -> list[PooledReward]:
        """Return one reward function for each class of environments that has ``get_reward``. Subclasses have separate reward
        functions.
        """
        kinds = dict.fromkeys(type(probe) for probe in self.probes if callable(getattr(probe, "get_reward", None)))
        return [PooledReward(kind, self) for kind in kinds]

    def begin(
        self,
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int] | None = None,
        errors: dict[int, str] | None = None,
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Call ``reset`` on one environment per row, and append the returned observations to the prompts.

        Args:
            rows: Dataset rows. A row without ``prompt`` gets an empty user message.
            seeds: Seed of each row. If ``reset`` has the parameter ``group_seed``, it receives this seed. All completions of
                a group have the same seed.
            errors: Dict that collects errors of ``reset`` by row index. The environment of such a row is None. If ``errors``
                is None, the first error is raised.

        Raises:
            DataError: A row selects an unknown environment.
            RolloutError: ``reset`` raised an error or returned an invalid observation. The message contains the environment
                and the row.
        """
        kinds = [self._kind(row, index) for index, row in enumerate(rows)]
        lent = [self._free(kind) for kind in kinds]
        seeds = seeds or range(len(rows))

        def reset(index: int) -> tuple[Any, dict[str, Any], Any]:
            kind, environment, row = kinds[index], lent[index], rows[index]
            try:
                environment, seen = self._reset(kind, environment, dict(row), seeds[index], index)
                where = f"{_label(kind)}, row {index}"
                prompt = add_observation(_prompt(row, index), seen, where, self.runner.observed)
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
        """Return environments to the pool, so that other rollouts can use them. None: all environments of the pool."""
        with self._lock:
            for kind in self.kinds.values():
                back = [e for e in kind.instances if environments is None or any(e is env for env in environments)]
                kind.free = back if environments is None else kind.free + back
            gone = self.lost if environments is None else environments
            self.lost = [e for e in self.lost if not any(e is env for env in gone)]

    def toolbox(self, environment: object, tools: ToolBox) -> ToolBox:
        """Return the tools of a rollout. They are the tools that all rollouts have, and the methods of the rollout's
        environment.
        """
        kind = next(k for k in self.kinds.values() if any(environment is e for e in k.instances))
        box = ToolBox(dict(tools.functions), [*tools.schemas, *kind.schemas], owner=environment)
        for name in kind.methods:
            box.add(name, getattr(environment, name))
        return box

    def discard(self, environment: object) -> None:
        """Remove an environment with a call that did not return. It is never reset, used or closed again."""
        with self._lock:
            self.lost.append(environment)
            for kind in self.kinds.values():
                kind.instances = [e for e in kind.instances if e is not environment]

    def close(self) -> None:
        """Close all environments. The next call of `begin` creates new environments."""
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
                f"row {index}, column 'environment': {name!r} is unknown{did_you_mean(name, self.kinds)}. "
                f"environment_factory has: {', '.join(sorted(self.kinds))}."
            )
        return self.kinds[name]

    def _free(self, kind: _Kind) -> Any:
        """Return an environment that no rollout uses, or None if there is none."""
        with self._lock:
            return kind.free.pop(0) if kind.free else None

    def _made(self, kind: _Kind) -> Any:
        """Create an environment, add it to the pool, and return it."""
        with self._lock:
            kind.instances.append(kind.factory())
            return kind.instances[-1]

    def _drop(self, kind: _Kind, environment: object) -> None:
        """Close an environment whose ``reset`` failed, and remove it from the pool."""
        with self._lock:
            instances, kind.instances = kind.instances, [e for e in kind.instances if e is not environment]
        if len(instances) > len(kind.instances):
            _close(environment)

    def _reset(self, kind: _Kind, environment: object, row: dict[str, Any], seed: int, index: int) -> tuple[Any, Any]:
        """Reset an environment, and return it with its observation. If ``environment`` is None, create a new environment."""
        if self.routed:
            row.pop("environment", None)
        if row.get("prompt") is not None:
            # Copy the prompt, because all completions of a group use the same dataset row.
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
                    "%s, row %d: %s failed (%s). Trying again with a new instance.", _label(kind), index, method, cause
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
                    "completions of a group start from different observations, but their rewards are compared, which "
                    "makes the baseline noisy. Accept group_seed in reset and use it as the random seed."
                )


def _probe(name: str, factory: Any) -> _Kind:
    where = f"environment_factory[{name!r}]" if name else "environment_factory"
    if not callable(factory):
        raise ConfigError(f"{where} must be callable without arguments, but is {type(factory).__name__}.")
    instance = factory()
    kind = type(instance)
    if not callable(getattr(instance, "reset", None)):
        raise ConfigError(f"{where} returned a {kind.__name__}, but an environment must have a method reset.")
    methods = _tool_names(kind)
    schemas = [tool_schema(getattr(instance, method)) for method in methods]
    return _Kind(name, factory, kind, schemas, methods, [instance], [instance])


def _label(kind: _Kind) -> str:
    return f"environment {kind.made.__name__}" + (f" ({kind.name!r})" if kind.name else "")


def _prompt(row: dict[str, Any], index: int) -> list[dict[str, Any]]:
    prompt = row.get("prompt") or EMPTY_PROMPT
    if isinstance(prompt, str):
        raise DataError(
            f"row {index}: the prompt is text, but environments need messages. Pass it as "
            f"[{{'role': 'user', 'content': ...}}]."
        )
    return prompt


def accepted_arguments(function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts as keyword arguments. A function with ``**kwargs`` accepts all of them."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in arguments.items() if name in named}


def _close(instance: Any) -> None:
    """Close an environment. Errors are ignored, because a removed environment may be broken."""
    close = getattr(instance, "close", None)
    if callable(close):
        with contextlib.suppress(Exception):
            value = close()
            if inspect.iscoroutine(value):
                value.close()
                logger.warning("%s.close is asynchronous and was not awaited.", type(instance).__name__)


class PooledReward:
    """Reward function that calls ``get_reward`` of environments of one class. For environments of other classes, the reward
    is None.

    Args:
        made: Class of the environments. Subclasses are not included.
        pool: Pool of the environments, with threads, time limit and retries.
    """

    def __init__(self, made: type, pool: EnvironmentPool) -> None:
        self.made, self.pool, self.runner, self.retries = made, pool, pool.runner, pool.retries
        self.__name__ = made.__name__

    def __call__(self, completions: list[Any], environments: list[Any] | None = None, **_: Any) -> list[Any]:
        """Return one reward per row, or None for rows without an environment of this class."""
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
    """Return a function that creates environments from clients with ``reset()`` and ``step(action)``. Clients of OpenEnv and
    Gymnasium have this interface.

    The model gets one tool, ``step(action)``. The reward of an episode is the sum of the rewards of its steps. The episode
    ends when the client reports the end. ``step`` may return ``(observation, reward, terminated, truncated, info)``,
    ``(observation, reward, done, info)``, or an object with ``observation``, ``reward`` and ``done``. ``reset`` may also
    return ``(observation, info)``.

    Args:
        make: Function that creates a client.
        action: Function that converts the model's text to the argument of the client's ``step``. If it raises an error, the
            model receives the error message.
        observe: Function that converts an observation to text for the model.
        actions: Description of the argument of ``step`` for the model, for example ``"One of: up, down, left, right."``.
        name: Name of the class and of its reward column.

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
        """Environment that wraps a client with ``reset`` and ``step``."""

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
    """Parse the result of a client's ``reset`` or ``step``. Return the observation, the reward, and whether the episode has
    ended.

    Raises:
        RolloutError: The result has an unsupported form, the reward is not finite (None means 0), or a flag for the end of
            the episode is not a bool.
    """
    resets, is_object = where.endswith("reset"), hasattr(result, "observation")
    odd = len(result) not in (3, 4, 5) if isinstance(result, tuple) else not is_object
    if odd and not (resets and (not isinstance(result, tuple) or len(result) == 2)):
        raise BadValue(
            f"{where} returned {result!r:.80} ({type(result).__name__}). Fix: return (observation, reward, "
            "terminated, truncated, info), or an object with observation, reward and done. reset may return only an "
            "observation, or (observation, info)."
        )
    if isinstance(result, tuple):
        seen, reward, *ends = result if len(result) > 2 else (result[0], None)
        ends = ends[: 2 if len(result) == 5 else 1]
    elif is_object:
        seen, reward, ends = result.observation, getattr(result, "reward", None), [getattr(result, "done", False)]
    else:
        return result, 0.0, False
    number = 0.0 if reward is None else given_number(reward, f"{where}: the reward")
    truths = [given_truth(end, f"{where}: the end of the episode") for end in ends]
    return seen, number, any(truths)
