"""`EpisodeDriver`: runs multi-turn episodes with tools and environments, a harness, or a user's rollout function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.data.formats import is_conversational
from posttrain.errors import ArgumentTypeError, ConfigError, RolloutError
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import decoded
from posttrain.rollouts.episodes.environments import EnvironmentPool
from posttrain.rollouts.episodes.loop import MAX_ITERATIONS, Episode, Generate, ToolLoop
from posttrain.rollouts.episodes.tokens import prepare_tokenizer, tokenize_observed
from posttrain.rollouts.episodes.toolbox import ToolBox, ToolRunner
from posttrain.types import Rollout, Sampling
from posttrain.values import given_truth, listed, scalar, token_ids, token_logps

if TYPE_CHECKING:
    from posttrain.extensions.images.processors import PictureProcessor
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import Tokenizer


@dataclass
class EpisodeSetup:
    """Arguments and options of multi-turn episodes. Rollout workers receive a pickled copy, so all functions should be
    picklable.

    Attributes:
        tools: Functions that the model may call, with type hints and Google-style docstrings. They may be asynchronous.
        environment_factory: Function that creates an environment: an object with a method ``reset``. Its other public
            methods are tools. If it has ``get_reward``, it also provides a reward. With a dict of such functions, the column
            ``environment`` of each row selects a function.
        rollout_func: Function ``f(prompts, trainer)`` that returns a dict with ``prompt_ids``, ``completion_ids`` and
            ``logprobs`` (or None). Each value is a list with one item per prompt. The key ``env_mask`` is optional. Further
            keys are passed to reward functions.
        template_kwargs: Arguments of the chat template.
        max_iterations: Maximum number of rounds of tool calls. None: no limit.
        max_output_tokens: Maximum number of tokens of a tool result. The middle of a longer result is removed. None: no
            limit.
        tool_workers: Number of rollouts whose tools run concurrently. None: all rollouts, up to 32. 0: tools run one after
            the other on the calling thread.
        tool_timeout: Maximum number of seconds of a tool call, of ``reset`` or of ``get_reward``. None: no limit.
        environment_retries: Number of further attempts after an error in ``reset`` or ``get_reward``.
        harness: Object that runs the episodes of the user's agent, which calls an HTTP endpoint of the policy; see
            `posttrain.Harness`.
        harness_options: Options of the harness (`HarnessOptions`). None: the defaults.
    """

    tools: Sequence[Callable] | None = None
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    rollout_func: Callable | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_iterations: int | None = MAX_ITERATIONS
    max_output_tokens: int | None = None
    tool_workers: int | None = None
    tool_timeout: float | None = 60.0
    environment_retries: int = 0
    harness: Any = None
    harness_options: Any = None

    @classmethod
    def of(cls, args: PostTrainingConfig, **given: Any) -> EpisodeSetup:
        """Create a setup from a trainer's arguments and from a config with the options of `EpisodeFields`. If ``args`` is
        None, the default options are used.
        """
        if args is None:
            return cls(**given)
        rounds, options = args.max_tool_calling_iterations, None
        if given.get("harness") is not None:
            options = plugins.module("extensions.agents.harness").HarnessOptions.of(args)
        return cls(
            **given,
            template_kwargs=dict(args.chat_template_kwargs or {}),
            max_iterations=MAX_ITERATIONS if rounds is None else None if rounds == -1 else rounds,
            max_output_tokens=args.max_tool_output_tokens,
            tool_workers=args.tool_workers,
            tool_timeout=args.tool_timeout,
            environment_retries=args.environment_retries,
            harness_options=options,
        )


def take_harness(worker: object, harness: object, reward_funcs: object) -> tuple[Any, Any, Any]:
    """Separate a trainer's arguments into a rollout worker, a harness, and reward functions.

    If the worker is a harness, it is returned as the harness. If there is a harness but no ``reward_funcs``, the harness
    provides the reward.

    Raises:
        ConfigError: Both ``worker`` and ``harness`` are harnesses.
    """
    if worker is None and harness is None:
        return None, None, reward_funcs
    return plugins.module("extensions.agents.harness").take_harness(worker, harness, reward_funcs)


class EpisodeDriver:
    """Runs the episodes of one process, either the trainer or a worker.

    The driver is created before the model is loaded, so that invalid arguments are reported early. `use_tokenizer` is called
    later, when the tokenizer is available.

    Args:
        setup: Arguments and options.

    Attributes:
        pool: Pool of environments. None: there are no environments.
        harness: Harness that runs the user's agent. None: there is no harness.

    Raises:
        ConfigError: A rollout function is combined with tools or environments, or two tools have the same name.
        ArgumentTypeError: The rollout function is not callable.
    """

    def __init__(self, setup: EpisodeSetup) -> None:
        function, factory = setup.rollout_func, setup.environment_factory
        if function is not None and (setup.tools or factory is not None):
            raise ConfigError(
                "rollout_func runs whole episodes itself and cannot be combined with tools or environment_factory. "
                "Pass one of them."
            )
        if setup.harness is not None and (function is not None or setup.tools or factory is not None):
            raise ConfigError(
                "harness runs whole episodes itself and cannot be combined with tools, environment_factory or "
                "rollout_func. Pass one of them."
            )
        if function is not None and not callable(function):
            raise ArgumentTypeError(f"rollout_func must be callable, but is {type(function).__name__}.")
        if function is not None and not _accepts(function, 2):
            raise ArgumentTypeError(
                f"rollout_func is called with two arguments (prompts, trainer), but its signature is "
                f"{inspect.signature(function)}. Fix: def rollout_func(prompts, trainer)."
            )
        self.setup, self.tokenizer = setup, None
        self.reader: PictureProcessor | None = None
        self.harness: Any = None
        if setup.harness is not None:
            self.harness = plugins.module("extensions.agents.harness").HarnessRunner(
                setup.harness, setup.harness_options
            )
        self.toolbox = ToolBox.of(setup.tools)
        self.runner = ToolRunner(setup.tool_workers, setup.tool_timeout)
        self.pool: EnvironmentPool | None = None
        if factory is not None:
            self.pool = EnvironmentPool(factory, self.runner, setup.environment_retries)
            for probe in self.pool.probes:
                # Create the tool box once as a check. Its constructor raises an error if two tools have the same name.
                self.pool.toolbox(probe, self.toolbox)

    @property
    def calls_tools(self) -> bool:
        """Whether the model can call tools."""
        return bool(self.setup.tools) or (self.pool is not None and self.pool.has_tools)

    def use_tokenizer(self, tokenizer: Tokenizer, reader: PictureProcessor | None = None) -> None:
        """Set the tokenizer that renders and parses turns. Tools may return images if the image processor ``reader`` is
        passed.

        Raises:
            ModelError: The chat template does not support tool calls, or the model's attention is bidirectional within
                prompts or images. Bidirectional attention would change the hidden states of a turn when the next prompt
                includes this turn.
        """
        if reader is not None:
            reader.check_turns()
        self.reader = reader
        self.runner.observed = None if reader is None else reader.observed
        schema, template = [getattr(tokenizer, f"response_{x}", None) for x in ("schema", "template")]
        if self.calls_tools and schema is not None and template is None:
            names = [info.frame.f_globals["__name__"] for info in inspect.stack(0)]
            level = 1 + next(depth for depth, name in enumerate(names) if not name.startswith("posttrain."))
            warnings.warn("response_schema is no longer used: set response_template.", FutureWarning, stacklevel=level)
        prepared = tokenizer if reader is None else reader.processor
        self.tokenizer = prepare_tokenizer(prepared) if self.calls_tools else tokenizer

    def begin(
        self, rows: list[dict[str, Any]], seeds: Sequence[int], errors: dict[int, str] | None = None
    ) -> tuple[list[Any] | None, list[dict[str, Any]]]:
        """Reset an environment for each row; see `EnvironmentPool.begin`.

        Returns:
            The environments (None without environments), and the rows with the first observations in their prompts.
        """
        return (None, rows) if self.pool is None else self.pool.begin(rows, seeds, errors)

    def tokenize(self, rows: Sequence[dict[str, Any]]) -> Sequence[list[int]]:
        """Tokenize the prompts of rows. Special tokens in text from environments are encoded as ordinary text."""
        return tokenize_observed(
            rows, self.tokenizer, chat_template_kwargs=self.setup.template_kwargs, reader=self.reader
        )

    def episodes(self, rows: Sequence[dict[str, Any]], environments: Sequence[Any] | None) -> list[Episode]:
        """Create an episode for each row, with its prompt and tools, but without turns."""
        each, shared = environments or [None] * len(rows), self.toolbox
        boxes = [shared if e is None or self.pool is None else self.pool.toolbox(e, shared) for e in each]
        rows = (
            [{**row, "tools": box.schemas} for row, box in zip(rows, boxes, strict=True)] if self.calls_tools else rows
        )
        return [Episode(ids, box, e) for ids, box, e in zip(self.tokenize(rows), boxes, each, strict=True)]

    def run_tools(
        self,
        episodes: list[Episode],
        sampling: Sampling,
        generate: Generate,
        *,
        context: int | None,
        stop_ids: Sequence[int],
        any_process: Callable[[bool], bool] = bool,
    ) -> tuple[list[Rollout], list[Any]]:
        """Run episodes turn by turn until all episodes are finished.

        Args:
            episodes: Result of `episodes`.
            sampling: Sampling settings. ``max_new_tokens`` is the budget of a whole episode.
            generate: Function that calls the engine; see `ToolLoop`.
            context: Maximum number of tokens of prompt and completion.
            stop_ids: Tokens that end a turn.
            any_process: Function whose argument is True if this process has unfinished episodes. It returns whether any
                process has unfinished episodes.

        Returns:
            Rollouts, and the messages of each episode.
        """
        loop = ToolLoop(
            self.tokenizer,
            generate,
            stop_ids=stop_ids,
            runner=self.runner,
            max_iterations=self.setup.max_iterations,
            max_output_tokens=self.setup.max_output_tokens,
            context=context,
            any_process=any_process,
            template_kwargs=self.setup.template_kwargs,
            reader=self.reader,
        )
        loop.run(episodes, sampling)
        for episode in episodes:
            if episode.tools.lost and self.pool is not None:
                self.pool.discard(episode.environment)
        texts = loop.suffix.tokenizer.batch_decode([e.token_ids for e in episodes], skip_special_tokens=True)
        rollouts = [e.rollout(text) for e, text in zip(episodes, texts, strict=True)]
        return rollouts, [e.messages or [{"role": "assistant", "content": ""}] for e in episodes]

    def run_harness(
        self,
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        sampling: Sampling,
        sample: Callable[[list[Any]], list[list[Rollout]]],
        *,
        engine: RolloutEngine,
        context: int | None,
        vocabulary: int | None,
        placeholder: int,
        any_process: Callable[[bool], bool] = bool,
        everyone: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
        place: int = 0,
    ) -> Any:
        """Run one episode of the harness for each row; see `HarnessRunner.run`.

        Args:
            rows: Tasks of the episodes.
            seeds: Sampling seeds of the episodes.
            sampling: Sampling settings. ``max_new_tokens`` limits the completion of one call.
            sample: Function that calls the engine.
            engine: Rollout engine. Only its name and capabilities are used.
            context: Maximum number of tokens of prompt and completion.
            vocabulary: Vocabulary size V.
            placeholder: Same as in `as_rollouts`.
            any_process: Function whose argument is True if this process has unfinished episodes. It returns whether any
                process has unfinished episodes.
            everyone: Same as in `HarnessRunner.run`.
            place: Same as in `HarnessRunner.run`.
        """
        assert self.harness is not None
        options, can = self.harness.options, engine.capabilities
        policy = plugins.module("extensions.agents.calls").Policy(
            self.tokenizer,
            sampling,
            context=context,
            vocabulary=vocabulary,
            model=options.model,
            template_kwargs=self.setup.template_kwargs,
            unsupported=can.unsupported,
            overrides=options.overrides,
            call_timeout=options.call_timeout,
            max_calls=options.max_calls,
            max_tokens=options.max_tokens,
        )
        episodes = self.harness.run(
            rows,
            seeds,
            policy,
            sample,
            per_request=can.per_request_sampling,
            any_process=any_process,
            everyone=everyone,
            place=place,
        )
        leave_out = options.failure is None
        as_rollouts = plugins.module("extensions.agents.harness").as_rollouts
        return as_rollouts(episodes, self.harness.harness, placeholder=placeholder, leave_out=leave_out)

    def run_function(
        self,
        rows: Sequence[dict[str, Any]],
        function: Callable[[list[Any]], Any],
        *,
        stop_ids: Sequence[int],
        vocabulary: int,
        most: int,
    ) -> tuple[list[Rollout], list[Any], dict[str, list[Any]]]:
        """Complete prompts with the user's rollout function; see `custom_rollouts`.

        Returns:
            Rollouts, completions for reward functions, and additional columns that the function returned.
        """
        prompts = [row["prompt"] for row in rows]
        limits = {"stop_ids": stop_ids, "vocabulary": vocabulary, "most": most}
        rollouts, extra = custom_rollouts(function, prompts, **limits)
        return *decoded(self.tokenizer, rollouts, conversational=is_conversational(rows[0])), extra


REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
OPTIONAL = ("logprobs", "env_mask", "logprob_token_ids")
RESERVED = ("prompt_ids", "completion_ids", *OPTIONAL)


def custom_rollouts(
    function: Callable[[list[Any]], Any],
    prompts: Sequence[Any],
    *,
    stop_ids: Sequence[int],
    vocabulary: int | None = None,
    most: int | None = None,
) -> tuple[list[Rollout], dict[str, list[Any]]]:
    """Call the user's rollout function with the prompts, and check its result.

    Args:
        function: Function that returns a dict with ``prompt_ids``, ``completion_ids`` and ``logprobs`` (may be None). Each
            value is a list with one item per prompt. The key ``env_mask`` is optional (1: token of the model, 0: other
            token). Further keys are columns for reward functions.
        prompts: List of n prompts. A prompt is repeated for each of its completions.
        stop_ids: Token ids that end a completion. A completion that ends with another token is treated as truncated.
        vocabulary: Vocabulary size V. Token ids must be in [0, V). None: only negative ids are rejected.
        most: Maximum number of tokens of a completion (``max_completion_length``). None: no limit.

    Returns:
        A list of n rollouts, and the additional columns with n values each.

    Raises:
        ArgumentTypeError: The function did not return a dict.
        RolloutError: A key is missing, or a value is invalid. The message contains key, row, position and value.
    """
    returned = function(list(prompts))
    if not isinstance(returned, dict):
        raise ArgumentTypeError(f"rollout_func must return a dict, but returned {type(returned).__name__}.")
    missing = [key for key in REQUIRED if key not in returned]
    if missing:
        raise _Bad(
            f"rollout_func returned no {missing}. Required keys are {', '.join(REQUIRED)}; it returned "
            f"{sorted(returned)}."
        )
    n = len(prompts)
    tokens: dict[str, list[Any]] = {}
    for key in RESERVED:
        if returned.get(key) is None and key in OPTIONAL:
            continue
        tokens[key] = listed(returned[key], f"rollout_func: {key!r}")
        if len(tokens[key]) != n:
            raise _Bad(
                f"rollout_func returned {len(tokens[key])} entries in {key!r} for {n} prompts. Prompts are already "
                "repeated for each completion, so return one entry per prompt."
            )
    ends = frozenset(stop_ids)
    rollouts = [_rollout(tokens, i, ends, vocabulary, most) for i in range(n)]
    return rollouts, {k: _column(k, v, n) for k, v in returned.items() if k not in RESERVED}


class _Bad(RolloutError, ValueError):
    """Error for an invalid result of a rollout function."""


def _accepts(function: Callable, count: int) -> bool:
    """Return whether a function may accept ``count`` positional arguments. For C functions without a signature, return True."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def for_trainer(function: Callable, trainer: Any) -> Callable[[list[Any]], Any]:
    """Return a function of prompts that calls the user's ``rollout_func(prompts, trainer)``."""
    try:
        named = {"prompts", "trainer"} <= set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        named = False
    return lambda prompts: function(prompts=prompts, trainer=trainer) if named else function(prompts, trainer)


def _at(key: str, row: int) -> str:
    return f"rollout_func: {key!r}, row {row},"


def _rollout(
    returned: dict[str, Any], row: int, ends: frozenset[int], vocabulary: int | None, most: int | None
) -> Rollout:
    prompt, ids = [token_ids(returned[key][row], _at(key, row), vocabulary) for key in ("prompt_ids", "completion_ids")]
    if most is not None and len(ids) > most:
        raise _Bad(
            f"{_at('completion_ids', row)} has {len(ids)} tokens, but max_completion_length={most}. Fix: end "
            "completions at this length, or raise max_completion_length."
        )
    mask, logp = None, []
    if "env_mask" in returned:
        flags = _listed_alike(returned, "env_mask", row, ids)
        mask = [int(given_truth(x, f"{_at('env_mask', row)} position {t},")) for t, x in enumerate(flags)]
    if "logprobs" in returned:
        values = _listed_alike(returned, "logprobs", row, ids)
        model = mask or [1] * len(ids)
        chosen = [_chosen(returned, row, t, x, ids[t]) if model[t] else None for t, x in enumerate(values)]
        logp = token_logps(chosen, model, _at("logprobs", row))
    return Rollout(prompt, ids, logp, "stop" if ids[-1] in ends else "length", 0, mask)


def _listed_alike(returned: dict[str, Any], key: str, row: int, ids: list[int]) -> list[Any]:
    """Return the values of one row under ``key``. The completion must have one value per token."""
    values = listed(returned[key][row], _at(key, row))
    if len(values) != len(ids):
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for row {row}, whose completion has {len(ids)} tokens."
        )
    return values


def _chosen(returned: dict[str, Any], row: int, position: int, value: object, token: int) -> Any:
    """Return the log-prob of the sampled token. ``value`` is this log-prob, or a list with the log-probs of several
    candidates.
    """
    if not isinstance(value, list | tuple):
        return value
    if "logprob_token_ids" not in returned:
        return value[0] if value else None  # In lists of engines, the sampled token is first.
    names = listed(returned["logprob_token_ids"][row], _at("logprob_token_ids", row))
    candidates = listed(
        names[position] if position < len(names) else None, f"{_at('logprob_token_ids', row)} position {position},"
    )
    if token not in candidates or len(candidates) != len(value):
        raise _Bad(
            f"rollout_func: row {row}, token {position}: 'logprob_token_ids' {candidates} does not contain the token "
            f"{token}, or the number of these ids differs from the number of log-probs ({len(value)})."
        )
    return value[candidates.index(token)]


def _column(key: str, values: Any, n: int) -> list[Any]:
    values = scalar(values) if not getattr(values, "shape", (1,)) else values
    if isinstance(values, str | bytes | dict) or not isinstance(values, Sized):
        return [values] * n
    if len(values) != n:
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for {n} prompts. Return one value per prompt, "
            "or one scalar."
        )
    return list(values)
