"""Environments: stateful objects with ``reset``, tools as methods, and an optional reward."""

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
    """The environments of one factory: their instances, and the schemas of their methods."""

    name: str
    factory: Callable[[], Any]
    made: type
    schemas: list[dict[str, Any]]
    methods: list[str]
    instances: list[Any] = field(default_factory=list)
    free: list[Any] = field(default_factory=list)


def _tool_names(kind: type) -> list[str]:
    """Return the names of public methods that are tools. They are read from the class, so no property is evaluated."""
    names = [name for name in dir(kind) if not name.startswith("_") and name not in NOT_TOOLS]
    return [n for n in names if callable(member := getattr(kind, n)) and not inspect.isclass(member)]


class Observed(list):
    """The messages of a prompt to which ``reset`` added text or images.

    The added part is stored separately, so that special tokens in it can be encoded as plain text.

    Args:
        prompt: Messages of the dataset.
        blocks: Content blocks that were added to the last message.
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
        """Return a copy in which the added texts are changed by a function."""
        blocks = [{**b, "text": change(b["text"])} if b["type"] == "text" else b for b in self.blocks]
        return Observed(self.prompt, blocks)


def add_observation(
    prompt: list[dict[str, Any]], observation: Any, where: str, background: Background | None = None
) -> list[dict[str, Any]]:
    """Append the result of ``reset`` to the last message of a prompt, and return the new prompt.

    Args:
        prompt: Prompt of the dataset. It is not changed.
        observation: None, text, a list of content blocks, or a PIL image.
        where: Environment and row, for error messages.
        background: See `ToolRunner`.

    Raises:
        RolloutError: The observation has another type, or contains images for a text model.
    """
    if observation is None:
        return prompt
    if background is not None and shows_images(observation):
        content = observation if isinstance(observation, list) else [{"type": "image", "image": observation}]
        try:
            return Observed(prompt, observed_blocks(content, where, background))
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
    """Return whether an environment's episode is over, from its attribute ``done``.

    A method named ``done`` is a tool and is ignored.

    Raises:
        RolloutError: The attribute is neither a bool nor 0 or 1.
    """
    done = getattr(environment, "done", False)
    return not callable(done) and given_truth(done, f"environment {type(environment).__name__}: done")


class EnvironmentPool:
    """Pool of environment instances, one per rollout. `begin` resets and assigns instances, `release` returns them.

    Args:
        factories: Function without arguments that returns an object with ``reset``, or a dict of such functions. The
            column ``environment`` of each row then selects one.
        runner: Threads and time limit of ``reset``, ``get_reward`` and the tools.
        retries: Number of further attempts if ``reset`` raises. Each uses a new instance.

    Raises:
        ConfigError: A factory is not callable, or its objects have no ``reset`` or have tools without a valid schema.
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
        # Instances in which a call has not returned. Their method get_reward is not called.
        self.lost: list[Any] = []
        self._warned = False
        # A lock is needed, because groups that use servers begin and end on different threads.
        self._lock = threading.Lock()

    @property
    def has_tools(self) -> bool:
        """Whether any environment has tools."""
        return any(kind.methods for kind in self.kinds.values())

    @property
    def probes(self) -> list[Any]:
        """One instance of each factory."""
        return [kind.instances[0] for kind in self.kinds.values()]

    def rewards(self) -> list[PooledReward]:
        """Return one reward function for each class (exact type) that has ``get_reward``."""
        kinds = dict.fromkeys(type(probe) for probe in self.probes if callable(getattr(probe, "get_reward", None)))
        return [PooledReward(kind, self) for kind in kinds]

    def begin(
        self,
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int] | None = None,
        errors: dict[int, str] | None = None,
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Call ``reset`` on one instance per row, and append what it returns to the prompts.

        Args:
            rows: Dataset rows. A missing ``prompt`` is an empty user message.
            seeds: Passed as ``group_seed`` if ``reset`` accepts it. Equal for completions of a group.
            errors: If set, errors of ``reset`` are stored here by row instead of raised, and the row's environment is
                None.

        Raises:
            DataError: A row selects an unknown environment.
            RolloutError: ``reset`` raised or returned an invalid observation. The message contains the environment and
                the row.
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
        """Return instances to the pool. None: all instances."""
        with self._lock:
            for kind in self.kinds.values():
                back = [e for e in kind.instances if environments is None or any(e is one for one in environments)]
                kind.free = back if environments is None else kind.free + back
            gone = self.lost if environments is None else environments
            self.lost = [e for e in self.lost if not any(e is one for one in gone)]

    def toolbox(self, environment: object, tools: ToolBox) -> ToolBox:
        """Return the tools of a rollout in this environment: the common tools and the environment's methods."""
        kind = next(k for k in self.kinds.values() if any(environment is e for e in k.instances))
        box = ToolBox(dict(tools.functions), [*tools.schemas, *kind.schemas], owner=environment)
        for name in kind.methods:
            box.add(name, getattr(environment, name))
        return box

    def discard(self, environment: object) -> None:
        """Drop an instance because a call to it did not return. It is not reset, used or closed again."""
        with self._lock:
            self.lost.append(environment)
            for kind in self.kinds.values():
                kind.instances = [e for e in kind.instances if e is not environment]

    def close(self) -> None:
        """Close all instances. The next `begin` creates new instances."""
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
        """Return a free instance, or None."""
        with self._lock:
            return kind.free.pop(0) if kind.free else None

    def _made(self, kind: _Kind) -> Any:
        """Create and return a new instance."""
        with self._lock:
            kind.instances.append(kind.factory())
            return kind.instances[-1]

    def _drop(self, kind: _Kind, environment: object) -> None:
        """Close and remove an instance whose ``reset`` failed."""
        with self._lock:
            known, kind.instances = kind.instances, [e for e in kind.instances if e is not environment]
        if len(known) > len(kind.instances):
            _close(environment)

    def _reset(self, kind: _Kind, environment: object, row: dict[str, Any], seed: int, index: int) -> tuple[Any, Any]:
        """Reset an instance, and return it with the result of ``reset``. If None is passed, a new instance is
        created.
        """
        if self.routed:
            row.pop("environment", None)
        if row.get("prompt") is not None:
            # Copy the prompt, because all completions of a group share the dataset row.
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
        raise ConfigError(f"{where} returned a {kind.__name__}, which has no method reset. An environment needs one.")
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
    """Return those arguments that a function accepts as keywords. A function with ``**kwargs`` accepts all arguments."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in arguments.items() if name in named}


def _close(instance: Any) -> None:
    """Close an instance and ignore errors, because a discarded instance may be broken."""
    close = getattr(instance, "close", None)
    if callable(close):
        with contextlib.suppress(Exception):
            value = close()
            if inspect.iscoroutine(value):
                value.close()
                logger.warning("%s.close is asynchronous and was not awaited.", type(instance).__name__)


class PooledReward:
    """Reward function that calls ``get_reward`` of environments of one class. It returns None for other rows.

    Args:
        made: Exact class of the environments.
        pool: Pool of the instances, with threads, time limit and retries.
    """

    def __init__(self, made: type, pool: EnvironmentPool) -> None:
        self.made, self.pool, self.runner, self.retries = made, pool, pool.runner, pool.retries
        self.__name__ = made.__name__

    def __call__(self, completions: list[Any], environments: list[Any] | None = None, **_: Any) -> list[Any]:
        """Return one reward per row."""
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
    """Return a factory of environments for clients with ``reset()`` and ``step(action)``, like OpenEnv and Gymnasium.

    The model gets one tool, ``step(action)``. The reward is the sum over steps. The rollout ends when the client is
    done. ``step`` may return ``(observation, reward, terminated, truncated, info)``, ``(observation, reward, done,
    info)``, or an object with ``observation``, ``reward`` and ``done``. ``reset`` may also return ``(observation,
    info)``.

    Args:
        make: Function that creates a client.
        action: Converts the model's text to the argument of the client's ``step``. If it raises, the model receives the
            error.
        observe: Converts an observation to text for the model.
        actions: Description of the argument for the model, for example ``"One of: up, down, left, right."``.
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
    """Parse the result of a client's ``reset`` or ``step``. Return the observation, the reward, and whether the episode
    has ended.

    Raises:
        RolloutError: The result has a different form, the reward is not finite (None counts as 0), or a flag for the
            end of the episode is not a bool.
    """
    resets, tells = where.endswith("reset"), hasattr(result, "observation")
    odd = len(result) not in (3, 4, 5) if isinstance(result, tuple) else not tells
    if odd and not (resets and (not isinstance(result, tuple) or len(result) == 2)):
        raise BadValue(
            f"{where} returned {result!r:.80} ({type(result).__name__}). Fix: return (observation, reward, "
            "terminated, truncated, info), or an object with observation, reward and done. reset may return only an "
            "observation, or (observation, info)."
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
