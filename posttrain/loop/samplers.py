"""Samplers that generate completions for dataset rows with one engine call, with tools, with a harness, or with the user's
rollout function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from posttrain import plugins
from posttrain.data.formats import is_conversational
from posttrain.errors import ConfigError
from posttrain.loop.prompts import PromptSource
from posttrain.loop.weight_sync import WeightSync
from posttrain.methods.base import Traits
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.rollouts.batch import RolloutBatch, decoded, shared_requests
from posttrain.types import Prompt, Request, Rollout, SampleSettings, Sampling

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.rollouts.episodes.driver import EpisodeDriver
    from posttrain.rollouts.episodes.loop import Batches, Episode
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


class Sampler(Protocol):
    """Object that samples completions of dataset rows."""

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """Return one completion per row, in the same order. This is a collective operation.

        Args:
            examples: Dataset rows. The rows of a group are consecutive.
            settings: Settings of this rollout batch.
        """
        ...


class SingleTurn:
    """Completes each prompt in a single turn. One engine call completes all prompts of a batch.

    Args:
        sync: Object that pushes weights and calls the engine.
        prompts: Object that tokenizes prompts and checks that they fit into the model's context.
        tokenizer: Tokenizer of the policy.
    """

    def __init__(self, sync: WeightSync, prompts: PromptSource, tokenizer: Tokenizer) -> None:
        self.sync, self.prompts, self.tokenizer = sync, prompts, tokenizer

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """See `Sampler.sample`."""
        rollouts = self.complete(self.prompts.token_ids(examples), settings.sampling)
        return self.batch_of(examples, rollouts)

    def complete(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """Return one completion per prompt. Consecutive equal prompts share one request, so that the engine computes the
        prompt only once.
        """
        requests = shared_requests(prompts)
        self.prompts.check_lengths(requests, self.sync.context, sampling.max_new_tokens)
        rollouts = self.sync.ask([(requests, sampling)])[0]
        pictures = map(Prompt.pictures_of, prompts)
        return [replace(r, pictures=shown) if shown else r for r, shown in zip(rollouts, pictures, strict=True)]

    def batch_of(self, examples: list[dict[str, Any]], rollouts: list[Rollout]) -> RolloutBatch:
        """Return a rollout batch of rows and rollouts, with the text of each completion."""
        chat = is_conversational(examples[0])
        return RolloutBatch(examples, *decoded(self.tokenizer, rollouts, conversational=chat))


def make_driver(
    traits: Traits, name: str, args: PostTrainingConfig | None, given: dict[str, Any]
) -> EpisodeDriver | None:
    """Create the episode driver from a trainer's arguments. Return None if all completions are single turns.

    Args:
        traits: Traits of the method.
        name: Name of the trainer class.
        args: The trainer's config. None: no config was passed.
        given: The trainer's arguments ``tools``, ``environment_factory``, ``rollout_func`` and ``harness``, without those
            that are None.

    Raises:
        ConfigError: The trainer does not support one of these arguments.
    """
    if given and not traits.takes_episodes:
        raise ConfigError(
            f"{name} does not support {', '.join(given)}, because its completions are single turns of the engine. "
            "Fix: use GRPOTrainer, or remove the argument."
        )
    if not any(given.values()):
        return None
    from posttrain.rollouts.episodes.driver import EpisodeDriver, EpisodeSetup

    if "harness" in given:
        plugins.module("extensions.agents.harness").check_harness(args, name)
    return EpisodeDriver(EpisodeSetup.of(args, **given))


def place_of(count: int, sync: WeightSync) -> int:
    """Return how many rows the preceding processes have in total. This is a collective operation."""
    return sum(parallel.all_gather_objects([count], sync.accelerator)[: sync.accelerator.process_index])


def group_seeds(count: int, number: int, group_size: int, place: int, seed: int) -> list[int]:
    """Return a seed for each row. All completions of a group get the same seed, even if they are on different ranks."""
    base = seed * 1_000_003 + number * 100_003
    return [(base + (place + i) // group_size) % 2**31 for i in range(count)]


class Tools:
    """Completes rows with multi-turn episodes that use tools, environments, or both.

    Args:
        driver: Driver that runs the episodes of this process.
        single: Sampler for environments without tools. Their episodes have a single turn.
        stop_ids: Tokens that end a turn.
    """

    def __init__(self, driver: EpisodeDriver, single: SingleTurn, stop_ids: tuple[int, ...]) -> None:
        self.driver, self.single, self.stop_ids, self.sync = driver, single, stop_ids, single.sync

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """See `Sampler.sample`. An environment is reset for every row."""
        environments, rows = self._begin(examples, settings)
        if self.driver.calls_tools:
            batch = RolloutBatch(rows, *self._run(rows, environments, settings))
        else:
            driver, prompts = self.driver, self.single.prompts
            ids = prompts.token_ids(rows) if driver.pool is None else driver.tokenize(rows)
            batch = self.single.batch_of(rows, self.single.complete(list(ids), settings.sampling))
        return replace(batch, environments=environments)

    def _begin(
        self, rows: list[dict[str, Any]], settings: SampleSettings
    ) -> tuple[list[Any] | None, list[dict[str, Any]]]:
        """Reset an environment for each row. Return the environments, and the rows with their first observations."""
        driver, sync = self.driver, self.sync
        if driver.pool is None:
            return None, rows
        driver.pool.release()
        place = place_of(len(rows), sync)
        seeds = group_seeds(len(rows), settings.number, settings.group_size, place, sync.args.seed)
        rows = [dict(row) for row in rows]
        with parallel.failing_together(sync.accelerator):
            return driver.begin(rows, seeds)

    def _run(
        self, rows: list[dict[str, Any]], environments: list[Any] | None, settings: SampleSettings
    ) -> tuple[list[Rollout], list[Any]]:
        """Run one multi-turn episode per row. Engine calls may be collective, so all ranks leave the loop at the same time."""
        sync = self.sync

        def generate(batches: Batches) -> list[list[Rollout]]:
            return sync.ask([(shared_requests(prompts), sampling) for prompts, sampling in batches])

        def any_process(here: bool) -> bool:
            return parallel.all_reduce_sum([float(here)], sync.accelerator)[0] > 0

        episodes = self.driver.episodes(rows, environments)
        self.single.prompts.check_lengths([Request(episode.prompt_ids) for episode in episodes], sync.context)
        limits = {"context": sync.context, "stop_ids": self.stop_ids}
        with sync.engine.prefix_cache():
            results = self.driver.run_tools(episodes, settings.sampling, generate, **limits, any_process=any_process)
        sync.run.log(_call_metrics(episodes, pictures=self.driver.reader is not None), settings.mode)
        return results


class Harness:
    """Completes rows by running the user's agent. The agent's model calls are recorded as episodes.

    Args:
        driver: Driver that runs the episodes of this process.
        sync: Object that pushes weights and calls the engine.
        vocabulary: Vocabulary size, V.
    """

    def __init__(self, driver: EpisodeDriver, sync: WeightSync, vocabulary: int) -> None:
        self.driver, self.sync, self.vocabulary = driver, sync, vocabulary

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """See `Sampler.sample`."""
        driver, sync = self.driver, self.sync
        assert driver.harness is not None

        def any_process(here: bool) -> bool:
            return parallel.all_reduce_sum([float(here)], sync.accelerator)[0] > 0

        def everyone(here: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return parallel.all_gather_objects(here, sync.accelerator)

        place = place_of(len(examples), sync)
        size = max(sync.args.num_generations if settings.mode == "train" else 1, 1)
        seeds = group_seeds(len(examples), settings.number, size, place, sync.args.seed)
        with sync.engine.prefix_cache():
            episodes = driver.run_harness(
                examples, seeds, settings.sampling, sync.ask,
                engine=sync.engine, context=sync.context, vocabulary=self.vocabulary, placeholder=sync.run.pad_token_id,
                any_process=any_process, everyone=everyone, place=place,
            )  # fmt: skip
        sync.run.log(episodes.metrics, settings.mode)
        failure = driver.harness.options.failure
        return RolloutBatch(
            examples, episodes.rollouts, episodes.completions, extra=episodes.extra, failure_reward=failure
        )


class Function:
    """Completes rows with the user's ``rollout_func``.

    Args:
        driver: Driver that checks the result of the function.
        function: Rollout function. It receives prompts and returns a dict of lists.
        sync: Object that pushes weights.
        stop_ids: Tokens that end a completion.
        vocabulary: Vocabulary size, V.
    """

    def __init__(
        self,
        driver: EpisodeDriver,
        function: Callable[[list[Any]], Any],
        sync: WeightSync,
        stop_ids: tuple[int, ...],
        vocabulary: int,
    ) -> None:
        self.driver, self.function, self.sync = driver, function, sync
        self.limits = {"vocabulary": vocabulary, "stop_ids": (*stop_ids, sync.run.pad_token_id)}
        self._warned = False

    def sample(self, examples: list[dict[str, Any]], settings: SampleSettings) -> RolloutBatch:
        """See `Sampler.sample` and `EpisodeDriver.run_function`."""
        sync, args = self.sync, self.sync.args
        if sync.needs_weight_sync:
            # Push the weights first, because the rollout function may send requests to the same servers.
            sync.push_if_due()
        with parallel.failing_together(sync.accelerator):
            rollouts, completions, extra = self.driver.run_function(
                examples, self.function, **self.limits, most=args.max_completion_length
            )
        if args.vllm_importance_sampling_correction and not any(r.logp for r in rollouts) and not self._warned:
            self._warned = True
            logger.warning(
                "rollout_func returned no log-probs (logprobs=None), so there is no correction for the difference between "
                "its sampler and the policy. Return the log-probs of the sampler."
            )
        return RolloutBatch(examples, rollouts, completions, extra=extra)


def _call_metrics(episodes: list[Episode], *, pictures: bool) -> dict[str, Metric]:
    calls, failures = sum(e.calls for e in episodes), sum(e.failures for e in episodes)
    return {
        "tools/call_frequency": mean(calls / max(len(episodes), 1), weight=len(episodes)),
        "tools/failure_frequency": mean(failures / calls, weight=calls) if calls else mean(0.0, weight=1e-9),
        "tools/escaped_control_tokens": mean(float(sum(e.escaped for e in episodes))),
    } | ({"images/masked_episodes": mean(float(sum(e.masked for e in episodes)))} if pictures else {})
