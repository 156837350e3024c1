"""Rollouts of several turns in the trainer's process: tools, environments, or a rollout function of the user's."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

from posttrain.data.formats import is_conversational
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, RolloutError
from posttrain.given import given_truth, listed, scalar, token_ids, token_logps
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.rewards.call import EnvironmentReward
from posttrain.rollouts.batch import completions_for_rewards
from posttrain.rollouts.episodes.driver import Batches, Episode, ToolLoop, share_prompts
from posttrain.rollouts.episodes.environments import EMPTY_PROMPT, EnvironmentPool, PooledReward
from posttrain.rollouts.episodes.tokens import prepare_tokenizer, tokenize_observed
from posttrain.rollouts.episodes.toolbox import ToolBox, ToolRunner
from posttrain.training.prompts import PROMPT_COLUMNS
from posttrain.training.weight_sync import WeightSync
from posttrain.types import Request, Rollout, Sampling

__all__ = [
    "EpisodeDriver",
    "EpisodeParts",
    "custom_rollouts",
    "refuse_episodes",
]

logger = logging.getLogger(__name__)


REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
OPTIONAL = ("logprobs", "env_mask", "logprob_token_ids")
RESERVED = ("prompt_ids", "completion_ids", *OPTIONAL)


def custom_rollouts(
    function: Callable,
    prompts: Sequence[Any],
    trainer: Any,
    *,
    stop_ids: Sequence[int],
    vocabulary: int | None = None,
    most: int | None = None,
) -> tuple[list[Rollout], dict[str, list[Any]]]:
    """Call ``function(prompts, trainer)`` and read what it returns.

    Args:
        function: Returns a dict: ``prompt_ids``, ``completion_ids`` and ``logprobs`` (may be None), one entry a prompt; perhaps
            ``env_mask`` (1 the model's token, 0 another's); anything else is a column for the reward functions.
        prompts: n prompts, each repeated as often as completions of it are wanted.
        trainer: Passed on.
        stop_ids: A completion that does not end with one of these counts as truncated.
        vocabulary: V; ids lie in [0, V). None: only negative ones are refused.
        most: ``max_completion_length``; None is no bound.

    Returns:
        n rollouts, and the further columns with n values each.

    Raises:
        ArgumentTypeError: The function did not return a dict.
        RolloutError: A key is missing, or an entry cannot be used: names the key, the row, the position and the value.
    """
    given = function(prompts=list(prompts), trainer=trainer) if _takes_names(function) else function(prompts, trainer)
    if not isinstance(given, dict):
        raise ArgumentTypeError(f"rollout_func must return a dict, and it returned {type(given).__name__}.")
    missing = [key for key in REQUIRED if key not in given]
    if missing:
        raise _Bad(
            f"rollout_func returned no {missing} (required: {', '.join(REQUIRED)}; it returned {sorted(given)})."
        )
    n = len(prompts)
    tokens: dict[str, list[Any]] = {}
    for key in RESERVED:
        if given.get(key) is None and key in OPTIONAL:
            continue
        tokens[key] = listed(given[key], f"rollout_func: {key!r}")
        if len(tokens[key]) != n:
            raise _Bad(
                f"rollout_func returned {len(tokens[key])} entries in {key!r} for {n} prompts. The prompts it gets are already "
                "repeated once a completion: return one entry for each."
            )
    ends = frozenset(stop_ids)
    rollouts = [_rollout(tokens, i, ends, vocabulary, most) for i in range(n)]
    return rollouts, {k: _column(k, v, n) for k, v in given.items() if k not in RESERVED}


class _Bad(RolloutError, ValueError):
    """What a rollout function returned cannot be used."""


def _takes_names(function: Callable) -> bool:
    import inspect

    try:
        return {"prompts", "trainer"} <= set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False


def _at(key: str, row: int) -> str:
    return f"rollout_func: {key!r}, row {row},"


def _rollout(
    given: dict[str, Any], row: int, ends: frozenset[int], vocabulary: int | None, most: int | None
) -> Rollout:
    prompt, ids = [token_ids(given[key][row], _at(key, row), vocabulary) for key in ("prompt_ids", "completion_ids")]
    if most is not None and len(ids) > most:
        raise _Bad(
            f"{_at('completion_ids', row)} has {len(ids)} tokens, and max_completion_length={most}. Fix: end completions there, "
            "or raise max_completion_length."
        )
    mask, logp = None, []
    if "env_mask" in given:
        flags = _listed_alike(given, "env_mask", row, ids)
        mask = [int(given_truth(x, f"{_at('env_mask', row)} position {t},")) for t, x in enumerate(flags)]
    if "logprobs" in given:
        values = _listed_alike(given, "logprobs", row, ids)
        model = mask or [1] * len(ids)
        chosen = [_chosen(given, row, t, x, ids[t]) if model[t] else None for t, x in enumerate(values)]
        logp = token_logps(chosen, model, _at("logprobs", row))
    return Rollout(prompt, ids, logp, "stop" if ids[-1] in ends else "length", 0, mask)


def _listed_alike(given: dict[str, Any], key: str, row: int, ids: list[int]) -> list[Any]:
    """One value a token of the completion."""
    values = listed(given[key][row], _at(key, row))
    if len(values) != len(ids):
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for row {row}, whose completion has {len(ids)} tokens."
        )
    return values


def _chosen(given: dict[str, Any], row: int, position: int, value: Any, token: int) -> Any:
    """The log-prob of the token that was drawn, out of a number or a list of candidates."""
    if not isinstance(value, list | tuple):
        return value
    if "logprob_token_ids" not in given:
        return value[0] if value else None  # Engines list the drawn token first.
    names = listed(given["logprob_token_ids"][row], _at("logprob_token_ids", row))
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
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        return [values] * n
    if len(values) != n:
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for {n} prompts. Give one each, or one scalar."
        )
    return list(values)


# Rollouts, what reward functions see of each, further columns for them.
Rolled = tuple[list[Rollout], list[Any], dict[str, list[Any]]]


def refuse_episodes(trainer: str, given: dict[str, Any]) -> None:
    """Refuse what only trainers with episodes take.

    Raises:
        ConfigError: One of the arguments is there.
    """
    for name in [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{trainer} has no {name}: its completions are single turns of the engine. Fix: use GRPOTrainer, or leave {name} "
            "out."
        )


class EpisodeParts:
    """What a trainer was given for its episodes, ready before the model loads.

    Args:
        args: Of the trainer; None: defaults.
        tools: Functions the model may call, with type hints and Google-style docstrings; plain or asynchronous.
        rollout_func: ``f(prompts, trainer) -> dict`` with ``prompt_ids``, ``completion_ids`` and ``logprobs`` (or None), one
            entry a received prompt, optionally ``env_mask``; other keys go to the reward functions.
        environment_factory: Makes an object with ``reset`` whose public methods are tools; or a dict of factories from which
            each row chooses by its ``environment`` column. One with ``get_reward`` is a reward function too.

    Raises:
        ConfigError: A rollout function beside tools or environments.
        ArgumentTypeError: A rollout function that cannot be called.
    """

    def __init__(
        self,
        args: Any,
        *,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        if rollout_func is not None and (tools or environment_factory is not None):
            raise ConfigError(
                "rollout_func runs whole episodes itself, so tools and environment_factory have nothing to do beside it. Give "
                "one of the two."
            )
        if rollout_func is not None and not callable(rollout_func):
            raise ArgumentTypeError(f"rollout_func must be callable, and it is {type(rollout_func).__name__}.")
        for name, value in {"rollout_func": rollout_func, "environment_factory": environment_factory}.items():
            if value is not None and not _silenced():
                logger.warning("%s is experimental: its contract may change between versions.", name)
        self.rollout_func, self.tools = rollout_func, list(tools or ())
        self.toolbox = ToolBox.of(self.tools)
        self.runner = ToolRunner(getattr(args, "tool_workers", None), getattr(args, "tool_timeout", 60.0))
        self.environments: EnvironmentPool | None = None
        self.probes: list[Any] = []
        self.tokenizer: Any = None
        if environment_factory is not None:
            pool = EnvironmentPool(environment_factory, self.runner, getattr(args, "environment_retries", 0))
            self.environments, self.probes = pool, [kind.instances[0] for kind in pool.kinds.values()]
            for probe in self.probes:
                # A tool's name given twice is found now.
                pool.toolbox(probe, self.toolbox)

    @property
    def calls_tools(self) -> bool:
        """Whether the model has anything to call."""
        return bool(self.tools) or (self.environments is not None and self.environments.has_tools)

    def pooled(self, function: Any) -> Any:
        """A reward that environments give themselves, on the tools' threads, within their time and with their retries."""
        pool = self.environments
        return PooledReward(function.kind, pool) if isinstance(function, EnvironmentReward) and pool else function

    def without_dataset(self, trainer: str, args: Any) -> datasets.Dataset:
        """One empty prompt for each group of a generation: the environment says what is to be done.

        Args:
            trainer: Name of the trainer, for messages.
            args: Of the trainer; None where none were given.

        Raises:
            DataError: There is no environment to say it.
            ConfigError: Rows must choose an environment, or nothing bounds the run.
        """
        if self.environments is None:
            raise DataError(
                f"{trainer} needs train_dataset, and it is None: only an environment_factory can do without."
            )
        if self.environments.routed:
            raise ConfigError(
                "train_dataset=None with a dict of environments: each row says which it wants, in a column 'environment'. Give "
                "such a dataset, or a single factory."
            )
        if args is None or args.max_steps <= 0:
            given = None if args is None else args.max_steps
            raise ConfigError(f"train_dataset=None has no length: set max_steps above 0 (it is {given}).")
        groups = (args.generation_batch_size or 0) // args.num_generations
        return datasets.Dataset.from_list([{"prompt": list(EMPTY_PROMPT)} for _ in range(groups)])

    def prepared(self, train: Any, evaluation: Any, tokenizer: Any, *, drops_columns: bool) -> tuple[Any, Any]:
        """Rows without a prompt get an empty one where an environment speaks first; a template that cannot hold tools fails.

        Args:
            train: The training set.
            evaluation: A set, or several by name, or None.
            tokenizer: Of the policy.
            drops_columns: Whether columns that are not prompts are left out.
        """
        if self.environments is not None:
            many = isinstance(evaluation, dict)
            for dataset in (train, *(evaluation.values() if many else (evaluation,))):
                _check_columns(dataset, drops_columns)
            train = _with_prompts(train)
            evaluation = {k: _with_prompts(v) for k, v in evaluation.items()} if many else _with_prompts(evaluation)
        if self.calls_tools:
            row: dict[str, Any] = next(iter(train), {})
            if "prompt" in row and not is_conversational({"prompt": row["prompt"]}):
                raise DataError(
                    "tools need conversational prompts, and train_dataset has text in 'prompt'. Give lists of messages: "
                    "[{'role': 'user', 'content': ...}]."
                )
            schema, template = [getattr(tokenizer, f"response_{x}", None) for x in ("schema", "template")]
            if schema is not None and template is None:
                warnings.warn(
                    "response_schema is not read any more: set response_template.", FutureWarning, stacklevel=2
                )
            self.tokenizer = prepare_tokenizer(tokenizer)
        return train, evaluation


class EpisodeDriver:
    """Runs the episodes of one trainer, and gives their tokens and what reward functions see of them.

    Args:
        parts: What the trainer was given.
        args: Of the trainer, with `EpisodeFields`.
        tokenizer: Of the policy.
        accelerator: Of the run.
        sync: Pushes weights and asks the engine.
        check_lengths: Refuses prompts that do not fit the context.
        stop_ids: Tokens that end a turn.
        pad_token_id: Of the policy.
        log: Takes metrics and a mode.
    """

    def __init__(
        self,
        parts: EpisodeParts,
        args: Any,
        *,
        tokenizer: Any,
        accelerator: Any,
        sync: WeightSync,
        check_lengths: Callable[[list[Request]], None],
        stop_ids: tuple[int, ...],
        pad_token_id: int,
        log: Callable[[dict[str, Metric], str], None],
    ) -> None:
        self.parts, self.args, self.tokenizer, self.accelerator = parts, args, tokenizer, accelerator
        self.sync, self.check_lengths, self.log = sync, check_lengths, log
        self.stop_ids, self.pad_token_id = stop_ids, pad_token_id
        self.template_kwargs = args.chat_template_kwargs or {}
        self._told_uncorrected = False

    def begin(
        self, examples: list[dict[str, Any]], *, number: int, group_size: int
    ) -> tuple[list[Any] | None, list[Any]]:
        """Reset an environment for each example; a collective.

        Args:
            examples: Dataset rows, groups consecutive.
            number: Of the generation; seeds follow from it.
            group_size: G.

        Returns:
            The environments, None where there are none, and the rows with what the environments said first.
        """
        pool = self.parts.environments
        if pool is None:
            return None, examples
        seeds, rows = self._group_seeds(len(examples), number, group_size), [dict(example) for example in examples]
        return parallel.run_and_share(lambda: pool.begin(rows, seeds), self.accelerator)

    def _group_seeds(self, count: int, number: int, group_size: int) -> list[int]:
        """A number for each row, equal for completions that are compared with each other, over ranks too."""
        start = sum(parallel.all_gather_objects([count], self.accelerator)[: self.accelerator.process_index])
        base = self.args.seed * 1_000_003 + number * 100_003
        return [(base + (start + i) // group_size) % 2**31 for i in range(count)]

    def tokenize(self, examples: list[dict[str, Any]]) -> list[list[int]]:
        """Prompts in which nothing that an environment added can open or end a turn."""
        return tokenize_observed(examples, self.tokenizer, chat_template_kwargs=self.template_kwargs)

    def run_tools(
        self, examples: list[dict[str, Any]], environments: list[Any] | None, sampling: Sampling, mode: str
    ) -> tuple[list[Rollout], list[Any]]:
        """One episode per example, of turns and tool calls.

        Args:
            examples: Dataset rows.
            environments: One for each, or None.
            sampling: Of every turn.
            mode: ``train`` or ``eval``, for the log.

        Returns:
            Rollouts, and the messages of each episode.
        """
        pool, each = self.parts.environments, environments or [None] * len(examples)
        shared = self.parts.toolbox
        boxes = [shared if e is None or pool is None else pool.toolbox(e, shared) for e in each]
        rows = [{**row, "tools": box.schemas} for row, box in zip(examples, boxes, strict=True)]
        prompts = tokenize_observed(rows, self.parts.tokenizer, chat_template_kwargs=self.template_kwargs)
        self.check_lengths(share_prompts(prompts))
        episodes = [Episode(ids, box, e) for ids, box, e in zip(prompts, boxes, each, strict=True)]
        with self.sync.engine.prefix_cache():
            self._loop().run(episodes, sampling)
        for episode in episodes:
            if episode.tools.lost and pool is not None:
                pool.discard(episode.environment)
        self.log(_call_metrics(episodes), mode)
        texts = self.tokenizer.batch_decode([e.token_ids for e in episodes], skip_special_tokens=True)
        rollouts = [e.rollout(text) for e, text in zip(episodes, texts, strict=True)]
        return rollouts, [e.messages or [{"role": "assistant", "content": ""}] for e in episodes]

    def _loop(self) -> ToolLoop:
        args, limit = self.args, self.args.max_tool_calling_iterations

        def generate(batches: Batches) -> list[list[Rollout]]:
            return self.sync.ask([(share_prompts(prompts), sampling) for prompts, sampling in batches])

        def any_process(here: bool) -> bool:
            return parallel.all_reduce_sum([float(here)], self.accelerator)[0] > 0

        rounds = {} if limit is None else {"max_iterations": None if limit == -1 else limit}
        return ToolLoop(
            self.parts.tokenizer,
            generate,
            stop_ids=self.stop_ids,
            runner=self.parts.runner,
            max_output_tokens=args.max_tool_output_tokens,
            context=self.sync.context,
            any_process=any_process,
            template_kwargs=self.template_kwargs,
            **rounds,
        )

    def run_function(self, examples: list[dict[str, Any]], trainer: Any, *, vocabulary: int) -> Rolled:
        """Let the user's rollout function complete the prompts.

        Args:
            examples: Dataset rows.
            trainer: Passed on to the function.
            vocabulary: V of the policy.

        Returns:
            Rollouts, what reward functions see of each, and the further columns that the function returned.
        """
        function, ends = self.parts.rollout_func, (*self.stop_ids, self.pad_token_id)
        assert function is not None
        if self.sync.needs_weight_sync:
            self.sync.push_if_due()  # The function may ask the same servers: with the weights of now.
        prompts = [example["prompt"] for example in examples]
        limits = {"vocabulary": vocabulary, "most": self.args.max_completion_length}
        rollouts, extra = parallel.run_and_share(
            lambda: custom_rollouts(function, prompts, trainer, stop_ids=ends, **limits), self.accelerator
        )
        if self.args.vllm_importance_sampling_correction and not any(r.logp for r in rollouts):
            self._tell_uncorrected()
        texts = self.tokenizer.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        rollouts = [dataclasses.replace(r, text=text) for r, text in zip(rollouts, texts, strict=True)]
        chat = is_conversational(examples[0])
        return rollouts, completions_for_rewards(self.tokenizer, rollouts, conversational=chat), extra

    def _tell_uncorrected(self) -> None:
        if not self._told_uncorrected:
            logger.warning(
                "rollout_func returned no log-probs (logprobs=None): nothing corrects for how far what it sampled from is from "
                "the policy. Return those of the sampler."
            )
        self._told_uncorrected = True


def _call_metrics(episodes: list[Episode]) -> dict[str, Metric]:
    calls, failures = sum(e.calls for e in episodes), sum(e.failures for e in episodes)
    return {
        "tools/call_frequency": mean(calls / max(len(episodes), 1), weight=len(episodes)),
        "tools/failure_frequency": mean(failures / calls, weight=calls) if calls else mean(0.0, weight=1e-9),
    }


def _check_columns(dataset: Any, drops_columns: bool) -> None:
    """Refuse to drop what ``reset`` is given."""
    others = sorted(set(getattr(dataset, "column_names", None) or ()) - {*PROMPT_COLUMNS})
    if drops_columns and others:
        raise ConfigError(
            f"remove_unused_columns=True would leave out {others}, and an environment's reset gets all columns of its row. "
            "Leave it off, or remove the columns from the dataset."
        )


def _silenced() -> bool:
    names = ("POSTTRAIN_EXPERIMENTAL_SILENCE", "TRL_EXPERIMENTAL_SILENCE")
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def _with_prompts(dataset: Any) -> Any:
    """A dataset whose rows all have a ``prompt``."""
    names = getattr(dataset, "column_names", None)
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset) or (names and "prompt" in names):
        return dataset
    if isinstance(dataset, datasets.Dataset):
        return dataset.add_column("prompt", [list(EMPTY_PROMPT)] * len(dataset))
    return dataset.map(lambda row: {"prompt": row.get("prompt") or list(EMPTY_PROMPT)})
