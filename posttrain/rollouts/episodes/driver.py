"""`EpisodeDriver`: episodes of several turns with tools and environments, or a user's rollout function, in any process."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.data.formats import is_conversational
from posttrain.errors import ArgumentTypeError, ConfigError, ModelError, RolloutError
from posttrain.pictures.processors import PictureProcessor
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import decoded
from posttrain.rollouts.episodes.environments import EnvironmentPool
from posttrain.rollouts.episodes.loop import MAX_ITERATIONS, Episode, Generate, ToolLoop
from posttrain.rollouts.episodes.tokens import prepare_tokenizer, tokenize_observed
from posttrain.rollouts.episodes.toolbox import ToolBox, ToolRunner
from posttrain.types import Rollout, Sampling
from posttrain.values import given_truth, listed, scalar, token_ids, token_logps

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import Tokenizer


@dataclass
class EpisodeSetup:
    """What a user gave for episodes, with its options; picklable where the functions are, so that workers get the same.

    Attributes:
        tools: Functions the model may call, with type hints and Google-style docstrings; plain or asynchronous.
        environment_factory: Makes an object with ``reset`` whose public methods are tools; or a dict of factories from which
            each row chooses by its ``environment`` column. One with ``get_reward`` is a reward function too.
        rollout_func: ``f(prompts, trainer) -> dict`` with ``prompt_ids``, ``completion_ids`` and ``logprobs`` (or None), one
            entry a received prompt, optionally ``env_mask``; other keys go to the reward functions.
        template_kwargs: For the chat template.
        max_iterations: Rounds of tool calls; None: unlimited.
        max_output_tokens: A longer tool result is cut in its middle; None: it is left whole.
        tool_workers: Rollouts whose tools run at once; None: all, at most 32; 0: in turn, on the calling thread.
        tool_timeout: Seconds a call, a reset or a get_reward may take; None: no limit.
        environment_retries: Further attempts of a reset or get_reward.
        harness: Runs whole episodes against an address of the policy; see `posttrain.Harness`.
        harness_options: How it is run (`HarnessOptions`). None: the defaults.
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
        """What was given, with the options of a config that has `EpisodeFields`; None: their defaults."""
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
    """Return the worker, the harness and the reward functions of a trainer's arguments.

    A worker that is a harness is returned as the harness. Without ``reward_funcs``, the harness's own result is the reward.

    Raises:
        ConfigError: Two harnesses.
    """
    if worker is None and harness is None:
        return None, None, reward_funcs
    return plugins.module("extensions.agents.harness").take_harness(worker, harness, reward_funcs)


class EpisodeDriver:
    """Runs the episodes of one process: of the trainer, or of a worker.

    Made before the model loads, so that what cannot work is refused early; `use_tokenizer` follows.

    Args:
        setup: What was given.

    Attributes:
        pool: Environments; None where none were given.
        harness: Runs the user's own code; None where none was given.

    Raises:
        ConfigError: A rollout function beside tools or environments; two tools of one name.
        ArgumentTypeError: A rollout function that cannot be called.
    """

    def __init__(self, setup: EpisodeSetup) -> None:
        function, factory = setup.rollout_func, setup.environment_factory
        if function is not None and (setup.tools or factory is not None):
            raise ConfigError(
                "rollout_func runs whole episodes itself, so tools and environment_factory have nothing to do beside it. Give "
                "one of the two."
            )
        if setup.harness is not None and (function is not None or setup.tools or factory is not None):
            raise ConfigError(
                "harness runs whole episodes itself, so tools, environment_factory and rollout_func have nothing to do beside "
                "it. Give one of them."
            )
        if function is not None and not callable(function):
            raise ArgumentTypeError(f"rollout_func must be callable, and it is {type(function).__name__}.")
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
                # A tool's name given twice is found now.
                self.pool.toolbox(probe, self.toolbox)

    @property
    def calls_tools(self) -> bool:
        """Whether the model has anything to call."""
        return bool(self.setup.tools) or (self.pool is not None and self.pool.has_tools)

    def use_tokenizer(self, tokenizer: Tokenizer, reader: PictureProcessor | None = None) -> None:
        """Render and read turns with this tokenizer; with a reader, tools and environments may return images.

        Raises:
            ModelError: Its chat template cannot hold tool calls; or what the model wrote would be read differently in the next
                turn, because a prompt is read both ways, or text before a picture attends to it.
        """
        if reader is not None and not reader.family.several_turns:
            raise ModelError(
                f"{type(reader.processor).__name__}: this model reads a whole prompt both ways, or text before a picture attends "
                "to it: what it wrote would be read differently in the next turn. Fix: prompts of one turn, or a model of "
                "another family."
            )
        self.reader = reader
        self.runner.background = None if reader is None else reader.background
        schema, template = [getattr(tokenizer, f"response_{x}", None) for x in ("schema", "template")]
        if self.calls_tools and schema is not None and template is None:
            warnings.warn("response_schema is not read any more: set response_template.", FutureWarning, stacklevel=2)
        prepared = tokenizer if reader is None else reader.processor
        self.tokenizer = prepare_tokenizer(prepared) if self.calls_tools else tokenizer

    def begin(
        self, rows: list[dict[str, Any]], seeds: Sequence[int], errors: dict[int, str] | None = None
    ) -> tuple[list[Any] | None, list[dict[str, Any]]]:
        """Reset an environment for each row; see `EnvironmentPool.begin`.

        Returns:
            The environments, None where there are none, and the rows with what the environments said first.
        """
        return (None, rows) if self.pool is None else self.pool.begin(rows, seeds, errors)

    def tokenize(self, rows: Sequence[dict[str, Any]]) -> Sequence[list[int]]:
        """Prompts in which nothing that an environment added can open or end a turn."""
        return tokenize_observed(
            rows, self.tokenizer, chat_template_kwargs=self.setup.template_kwargs, reader=self.reader
        )

    def episodes(self, rows: Sequence[dict[str, Any]], environments: Sequence[Any] | None) -> list[Episode]:
        """An episode of each row, with its prompt and its tools, before its first turn."""
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
        """Take episodes to their end, turn by turn.

        Args:
            episodes: From `episodes`.
            sampling: ``max_new_tokens`` is the budget of a whole episode.
            generate: See `ToolLoop`, as are the others.
            context: Most tokens of prompt and completion.
            stop_ids: Tokens that end a turn.
            any_process: Whether any process has episodes left, given whether this one has.

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
        """One episode of the user's own code a row; see `HarnessRunner.run`.

        Args:
            rows: Tasks.
            seeds: Of their draws.
            sampling: ``max_new_tokens`` bounds one call.
            sample: Asks the engine.
            engine: For what it cannot do.
            context: Most tokens of prompt and completion.
            vocabulary: V.
            placeholder: See `as_rollouts`.
            any_process: Whether any process has episodes left, given whether this one has.
            everyone: See `HarnessRunner.run`.
            place: See `HarnessRunner.run`.
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
        """Let the user's rollout function complete the prompts; see `custom_rollouts`.

        Returns:
            Rollouts, what reward functions see of each, and the further columns that the function returned.
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
    """Call ``function(prompts)`` and read what it returns.

    Args:
        function: Returns a dict: ``prompt_ids``, ``completion_ids`` and ``logprobs`` (may be None), one entry a prompt; perhaps
            ``env_mask`` (1 the model's token, 0 another's); anything else is a column for the reward functions.
        prompts: n prompts, each repeated as often as completions of it are wanted.
        stop_ids: A completion that does not end with one of these counts as truncated.
        vocabulary: V; ids lie in [0, V). None: only negative ones are refused.
        most: ``max_completion_length``; None is no bound.

    Returns:
        n rollouts, and the further columns with n values each.

    Raises:
        ArgumentTypeError: The function did not return a dict.
        RolloutError: A key is missing, or an entry cannot be used: names the key, the row, the position and the value.
    """
    returned = function(list(prompts))
    if not isinstance(returned, dict):
        raise ArgumentTypeError(f"rollout_func must return a dict, and it returned {type(returned).__name__}.")
    missing = [key for key in REQUIRED if key not in returned]
    if missing:
        raise _Bad(
            f"rollout_func returned no {missing} (required: {', '.join(REQUIRED)}; it returned {sorted(returned)})."
        )
    n = len(prompts)
    tokens: dict[str, list[Any]] = {}
    for key in RESERVED:
        if returned.get(key) is None and key in OPTIONAL:
            continue
        tokens[key] = listed(returned[key], f"rollout_func: {key!r}")
        if len(tokens[key]) != n:
            raise _Bad(
                f"rollout_func returned {len(tokens[key])} entries in {key!r} for {n} prompts. The prompts it gets are already "
                "repeated once a completion: return one entry for each."
            )
    ends = frozenset(stop_ids)
    rollouts = [_rollout(tokens, i, ends, vocabulary, most) for i in range(n)]
    return rollouts, {k: _column(k, v, n) for k, v in returned.items() if k not in RESERVED}


class _Bad(RolloutError, ValueError):
    """What a rollout function returned cannot be used."""


def for_trainer(function: Callable, trainer: Any) -> Callable[[list[Any]], Any]:
    """The user's ``rollout_func(prompts, trainer)`` as a function of prompts."""
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
            f"{_at('completion_ids', row)} has {len(ids)} tokens, and max_completion_length={most}. Fix: end completions there, "
            "or raise max_completion_length."
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
    """One value a token of the completion."""
    values = listed(returned[key][row], _at(key, row))
    if len(values) != len(ids):
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for row {row}, whose completion has {len(ids)} tokens."
        )
    return values


def _chosen(returned: dict[str, Any], row: int, position: int, value: object, token: int) -> Any:
    """The log-prob of the token that was drawn, out of a number or a list of candidates."""
    if not isinstance(value, list | tuple):
        return value
    if "logprob_token_ids" not in returned:
        return value[0] if value else None  # Engines list the drawn token first.
    names = listed(returned["logprob_token_ids"][row], _at("logprob_token_ids", row))
    candidates = listed(
        names[position] if position < len(names) else None, f"{_at('logprob_token_ids', row)} position {position},"
    )
    if token not in candidates or len(candidates) != len(value):
        raise _Bad(
            f"rollout_func: row {row}, token {position}: 'logprob_token_ids' {candidates} do not hold the token {token}, or are "
            f"not as many as its {len(value)} log-probs."
        )
    return value[candidates.index(token)]


def _column(key: str, values: Any, n: int) -> list[Any]:
    values = scalar(values) if not getattr(values, "shape", (1,)) else values
    if isinstance(values, str | bytes | dict) or not isinstance(values, Sized):
        return [values] * n
    if len(values) != n:
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for {n} prompts. Give one each, or one scalar."
        )
    return list(values)
