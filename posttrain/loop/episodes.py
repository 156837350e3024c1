"""Rollouts of several turns: environments are reset, tools run, a user's rollout function is called, on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from posttrain.errors import ConfigError
from posttrain.loop.prompts import PromptSource
from posttrain.loop.weight_sync import WeightSync
from posttrain.methods.base import Traits
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.rollouts.episodes.driver import EpisodeDriver
    from posttrain.rollouts.episodes.loop import Batches, Episode

logger = logging.getLogger(__name__)


def make_driver(
    traits: Traits, name: str, args: PostTrainingConfig | None, given: dict[str, Any]
) -> EpisodeDriver | None:
    """The driver of what a trainer was given; None where completions are single turns of the engine.

    Args:
        traits: Of the method.
        name: Of the trainer's class.
        args: Its config; None where none was given.
        given: ``tools``, ``environment_factory``, ``rollout_func``, ``harness``, those that are not None.

    Raises:
        ConfigError: The trainer takes none of them.
    """
    if given and not traits.takes_episodes:
        raise ConfigError(
            f"{name} has no {', '.join(given)}: its completions are single turns of the engine. Fix: use "
            "GRPOTrainer, or leave it out."
        )
    if not any(given.values()):
        return None
    from posttrain.rollouts.episodes.driver import EpisodeDriver, EpisodeSetup
    from posttrain.rollouts.episodes.harness import check_harness

    if "harness" in given:
        check_harness(args, name)
    return EpisodeDriver(EpisodeSetup.of(args, **given))


class EpisodeRunner:
    """Runs episodes with the trainer's engine, in the trainer's process.

    Args:
        driver: Of episodes with tools, environments or a rollout function; None: single turns alone.
        sync: Pushes weights and asks the engine; its accelerator makes every call here one of all ranks.
        prompts: Refuses those that do not fit the context.
        stop_ids: Tokens that end a turn.

    Attributes:
        environments: Of the generation under way, one for each row; None: there are none.
        extra: Further columns of its rows, for reward functions.
    """

    def __init__(
        self,
        driver: EpisodeDriver | None,
        sync: WeightSync,
        prompts: PromptSource,
        *,
        stop_ids: tuple[int, ...],
    ) -> None:
        self.driver, self.sync, self.prompts = driver, sync, prompts
        self.run, self.accelerator, self.stop_ids = sync.run, sync.accelerator, stop_ids
        self._warned = False
        self.environments: list[Any] | None = None
        self.extra: dict[str, list[Any]] = {}

    def begin(self, rows: list[dict[str, Any]], *, number: int, group_size: int) -> list[dict[str, Any]]:
        """Reset an environment for each row; a collective.

        Args:
            rows: Dataset rows, groups consecutive.
            number: Of the generation; seeds follow from it.
            group_size: G.

        Returns:
            The rows, with what the environments said first.
        """
        driver, self.environments, self.extra = self.driver, None, {}
        if driver is None or driver.pool is None:
            return rows
        driver.pool.release()
        place = self._place(len(rows))
        seeds, rows = self._group_seeds(len(rows), number, group_size, place), [dict(row) for row in rows]
        with parallel.failing_together(self.accelerator):
            self.environments, rows = driver.begin(rows, seeds)
        return rows

    def _place(self, count: int) -> int:
        """How many rows stand before the ``count`` of this process; a collective."""
        return sum(parallel.all_gather_objects([count], self.accelerator)[: self.accelerator.process_index])

    def _group_seeds(self, count: int, number: int, group_size: int, place: int) -> list[int]:
        """A number for each row, equal for completions that are compared with each other, over ranks too."""
        base = self.sync.args.seed * 1_000_003 + number * 100_003
        return [(base + (place + i) // group_size) % 2**31 for i in range(count)]

    def run_tools(self, rows: list[dict[str, Any]], sampling: Sampling, mode: str) -> tuple[list[Rollout], list[Any]]:
        """One episode a row, of turns and tool calls; a collective, since ranks leave the loop together.

        Args:
            rows: Dataset rows.
            sampling: Of every turn.
            mode: ``train`` or ``eval``, for the log.

        Returns:
            Rollouts, and the messages of each episode.
        """
        from posttrain.rollouts.batch import shared_requests

        def generate(batches: Batches) -> list[list[Rollout]]:
            return self.sync.ask([(shared_requests(prompts), one) for prompts, one in batches])

        def any_process(here: bool) -> bool:
            return parallel.all_reduce_sum([float(here)], self.accelerator)[0] > 0

        assert self.driver is not None
        episodes = self.driver.episodes(rows, self.environments)
        self.prompts.check_lengths([Request(episode.prompt_ids) for episode in episodes], self.sync.context)
        limits = {"context": self.sync.context, "stop_ids": self.stop_ids}
        with self.sync.engine.prefix_cache():
            results = self.driver.run_tools(episodes, sampling, generate, **limits, any_process=any_process)
        self.run.log(_call_metrics(episodes, pictures=self.driver.reader is not None), mode)
        return results

    def run_harness(
        self, rows: list[dict[str, Any]], sampling: Sampling, mode: str, *, vocabulary: int, number: int
    ) -> tuple[list[Rollout], list[Any]]:
        """One episode of the user's own code a row; a collective, since ranks leave the loop together.

        Args:
            rows: Dataset rows.
            sampling: Of every call.
            mode: ``train`` or ``eval``, for the log.
            vocabulary: V.
            number: Of the generation; seeds follow from it.
        """
        driver, sync = self.driver, self.sync
        assert driver is not None

        def any_process(here: bool) -> bool:
            return parallel.all_reduce_sum([float(here)], self.accelerator)[0] > 0

        def everyone(here: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return parallel.all_gather_objects(here, self.accelerator)

        place = self._place(len(rows))
        size = max(sync.args.num_generations if mode == "train" else 1, 1)
        seeds = self._group_seeds(len(rows), number, size, place)
        with sync.engine.prefix_cache():
            episodes = driver.run_harness(
                rows, seeds, sampling, sync.ask,
                engine=sync.engine, context=sync.context, vocabulary=vocabulary, placeholder=self.run.pad_token_id,
                any_process=any_process, everyone=everyone, place=place,
            )  # fmt: skip
        self.run.log(episodes.metrics, mode)
        self.extra = episodes.extra
        return episodes.rollouts, episodes.completions

    def run_function(
        self, rows: list[dict[str, Any]], function: Callable[[list[Any]], Any], *, vocabulary: int
    ) -> tuple[list[Rollout], list[Any]]:
        """Let the user's rollout function complete the prompts; see `EpisodeDriver.run_function`."""
        driver, args = self.driver, self.sync.args
        assert driver is not None
        if self.sync.needs_weight_sync:
            # The function may ask the same servers: with the weights of now.
            self.sync.push_if_due()
        ends = (*self.stop_ids, self.run.pad_token_id)
        limits = {"stop_ids": ends, "vocabulary": vocabulary, "most": args.max_completion_length}
        with parallel.failing_together(self.accelerator):
            rollouts, completions, self.extra = driver.run_function(rows, function, **limits)
        if args.vllm_importance_sampling_correction and not any(r.logp for r in rollouts) and not self._warned:
            self._warned = True
            logger.warning(
                "rollout_func returned no log-probs (logprobs=None): nothing corrects for how far what it sampled from is from "
                "the policy. Return those of the sampler."
            )
        return rollouts, completions


def _call_metrics(episodes: list[Episode], *, pictures: bool) -> dict[str, Metric]:
    calls, failures = sum(e.calls for e in episodes), sum(e.failures for e in episodes)
    return {
        "tools/call_frequency": mean(calls / max(len(episodes), 1), weight=len(episodes)),
        "tools/failure_frequency": mean(failures / calls, weight=calls) if calls else mean(0.0, weight=1e-9),
        "tools/escaped_control_tokens": mean(float(sum(e.escaped for e in episodes))),
    } | ({"images/masked_episodes": mean(float(sum(e.masked for e in episodes)))} if pictures else {})
