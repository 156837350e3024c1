"""Prompts to finished rollouts in a worker: one turn, or as many as tools and environments take."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.algorithms.async_grpo.scoring import Finished
from posttrain.data.chat import tokenize_prompts
from posttrain.data.formats import is_conversational
from posttrain.errors import RolloutError
from posttrain.rewards.call import EnvironmentReward
from posttrain.rollouts.batch import completions_for_rewards
from posttrain.rollouts.episodes.driver import Batches, Episode, ToolLoop, share_prompts
from posttrain.rollouts.episodes.environments import EnvironmentPool, PooledReward
from posttrain.rollouts.episodes.tokens import prepare_tokenizer, tokenize_observed
from posttrain.rollouts.episodes.toolbox import ToolBox, ToolRunner
from posttrain.rollouts.workers.partial import Writer
from posttrain.rollouts.workers.samples import GroupTask
from posttrain.types import Rollout, Sampling

__all__ = ["EpisodeRunner", "EpisodeSetup"]

Factory = Callable[[], Any] | Mapping[str, Callable[[], Any]]


@dataclass
class EpisodeSetup:
    """What a rollout is made of, as it is sent to workers.

    Attributes:
        tokenizer: With its chat template.
        sampling: All fields, defaults included; the seed is each group's own.
        context: Most tokens the model can read.
        template_kwargs: For the chat template.
        tools: Functions the model may call.
        environment_factory: Makes environments, or a dict of such.
        max_iterations: Rounds of calls; None: unlimited.
        max_output_tokens: A longer tool result is cut in its middle.
        tool_workers: Rollouts whose tools run at once.
        tool_timeout: Seconds a call, a reset or a get_reward may take.
        environment_retries: Further attempts of a reset or get_reward.
    """

    tokenizer: Any
    sampling: Sampling
    context: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[Callable] = ()
    environment_factory: Factory | None = None
    max_iterations: int | None = 32
    max_output_tokens: int | None = None
    tool_workers: int | None = None
    tool_timeout: float | None = 60.0
    environment_retries: int = 0


@dataclass(slots=True)
class _Member:
    """One rollout on its way: its row, its environment (from a pool of its own), and what went wrong."""

    task: GroupTask
    row: dict[str, Any]
    pool: EnvironmentPool | None = None
    environment: Any = None
    episode: Episode | None = None
    rollout: Rollout | None = None
    error: str | None = None


class EpisodeRunner:
    """Runs rollouts on any engine; each has a pool of environments to itself, so that one that fails harms no other.

    Args:
        setup: See `EpisodeSetup`.
        writer: The engine.
    """

    def __init__(self, setup: EpisodeSetup, writer: Writer) -> None:
        self.setup, self.writer = setup, writer
        self.toolbox = ToolBox.of(setup.tools)
        self.tool_runner = ToolRunner(setup.tool_workers, setup.tool_timeout)
        self._probe = None if setup.environment_factory is None else self._make_pool()
        self._free: list[EnvironmentPool] = []
        self._held: dict[int, list[_Member]] = {}
        self._lock = threading.Lock()
        self.calls_tools = bool(setup.tools) or (self._probe is not None and self._probe.has_tools)
        self.episodic = self.calls_tools or self._probe is not None
        self.tokenizer = prepare_tokenizer(setup.tokenizer) if self.calls_tools else setup.tokenizer

    def _make_pool(self) -> EnvironmentPool:
        assert self.setup.environment_factory is not None
        return EnvironmentPool(self.setup.environment_factory, self.tool_runner, self.setup.environment_retries)

    @property
    def probes(self) -> list[Any]:
        """One instance of each environment, for the rewards they give."""
        return [] if self._probe is None else [kind.instances[0] for kind in self._probe.kinds.values()]

    def pooled(self, functions: Sequence[Any]) -> list[Any]:
        """Reward functions, those of environments on the tools' threads and within their time."""
        pool = self._probe
        return [
            PooledReward(f.kind, pool) if isinstance(f, EnvironmentReward) and pool is not None else f
            for f in functions
        ]

    # One turn ----------------------------------------------------------------------------------------------------

    def prompt(self, task: GroupTask) -> tuple[list[int], Sampling]:
        """A prompt's tokens, and the sampling of its completions.

        Raises:
            RolloutError: It leaves no room for an answer.
        """
        (ids,) = tokenize_prompts([task.row], self.setup.tokenizer, chat_template_kwargs=self.setup.template_kwargs)
        return ids, self._sampling(task, len(ids))

    def _sampling(self, task: GroupTask, length: int) -> Sampling:
        base, context = self.setup.sampling, self.setup.context
        room = base.max_new_tokens if context is None else min(base.max_new_tokens, context - length)
        if room < 1:
            raise RolloutError(
                f"a prompt of {length} tokens leaves no room for an answer in the model's context of {context} tokens."
            )
        return replace(base, max_new_tokens=room, seed=task.seed)

    def single_turn(self, task: GroupTask, version: int, rollouts: list[Rollout]) -> Finished:
        """Completions of one prompt, decoded."""
        texts = [self._text(rollout.token_ids) for rollout in rollouts]
        for rollout, text in zip(rollouts, texts, strict=True):
            rollout.text = text
        chat = is_conversational({"prompt": task.row["prompt"]})
        completions = completions_for_rewards(self.setup.tokenizer, rollouts, conversational=chat)
        return Finished(task.group_id, version, [task.row] * len(rollouts), rollouts, completions)

    def _text(self, token_ids: list[int]) -> str:
        return self.setup.tokenizer.decode(token_ids, skip_special_tokens=True)

    # Several -----------------------------------------------------------------------------------------------------

    def episodes(self, tasks: Sequence[GroupTask], version: int) -> list[Finished]:
        """All rollouts of some prompts, from the reset of their environments to their last turn."""
        if not self.episodic:
            return [self._plain(task, version) for task in tasks]
        members = [_Member(task, dict(task.row)) for task in tasks for _ in range(task.size)]
        self._reset(members)
        self._prepare(members)
        self._speak([m for m in members if m.episode is not None], tasks[0].seed)
        found = []
        for task in tasks:
            own = [m for m in members if m.task is task]
            found.append(self._finished(task, version, own))
            with self._lock:
                self._held[task.group_id] = own
        return found

    @contextlib.contextmanager
    def holding(self, groups: Sequence[Finished]) -> Iterator[None]:
        """Until the groups are scored their environments stay as they are; then others may use them."""
        try:
            yield
        finally:
            for group in groups:
                with self._lock:
                    members = self._held.pop(group.group_id, [])
                for member in members:
                    self._give_back(member)

    def _plain(self, task: GroupTask, version: int) -> Finished:
        try:
            ids, sampling = self.prompt(task)
        except RolloutError as error:
            return Finished(task.group_id, version, [], [], [], errors=[f"RolloutError: {error}"] * task.size)
        return self.single_turn(task, version, self.writer.finish(share_prompts([ids] * task.size), sampling))

    def _reset(self, members: list[_Member]) -> None:
        """Every rollout's environment, on threads; one that fails is out."""
        if self._probe is None:
            return
        with self._lock:
            for member in members:
                member.pool = self._free.pop() if self._free else None
        for member in members:
            member.pool = member.pool or self._make_pool()

        def reset(member: _Member) -> None:
            assert member.pool is not None
            try:
                (member.environment,), (member.row,) = member.pool.begin([member.row], [member.task.seed])
            except Exception as error:
                member.error = f"{type(error).__name__}: {error}"

        self.tool_runner.each([functools.partial(reset, member) for member in members])

    def _prepare(self, members: list[_Member]) -> None:
        """Prompts with what environments said, tokenised; those without room are out."""
        for member in members:
            if member.error is not None:
                continue
            has = member.environment is not None and member.pool is not None
            box = member.pool.toolbox(member.environment, self.toolbox) if has and member.pool else self.toolbox
            row = {**member.row, "tools": box.schemas} if self.calls_tools else member.row
            try:
                (ids,) = tokenize_observed([row], self.tokenizer, chat_template_kwargs=self.setup.template_kwargs)
                self._sampling(member.task, len(ids))
            except Exception as error:
                member.error = f"{type(error).__name__}: {error}"
                continue
            member.episode = Episode(ids, box, member.environment)

    def _speak(self, members: list[_Member], seed: int) -> None:
        """All turns of those that have a prompt; without tools there is one."""
        if not members:
            return
        sampling = replace(self.setup.sampling, seed=seed)
        if self.calls_tools:
            self._loop().run([m.episode for m in members if m.episode is not None], sampling)
            for member in members:
                if member.episode is not None and member.episode.tools.lost and self._probe is not None:
                    self._probe.lost.append(member.environment)  # Nobody asks it for a reward.
            return
        prompts = [m.episode.prompt_ids for m in members if m.episode is not None]
        shortest = min(self._sampling(m.task, len(ids)).max_new_tokens for m, ids in zip(members, prompts, strict=True))
        room = replace(sampling, max_new_tokens=shortest)
        for member, rollout in zip(members, self.writer.finish(share_prompts(prompts), room), strict=True):
            member.rollout = rollout

    def _loop(self) -> ToolLoop:
        setup = self.setup

        def generate(batches: Batches) -> list[list[Rollout]]:
            return [self.writer.finish(share_prompts(prompts), sampling) for prompts, sampling in batches]

        return ToolLoop(
            self.tokenizer,
            generate,
            stop_ids=setup.sampling.stop_token_ids,
            runner=self.tool_runner,
            max_iterations=setup.max_iterations,
            max_output_tokens=setup.max_output_tokens,
            context=setup.context,
            template_kwargs=setup.template_kwargs,
        )

    def _finished(self, task: GroupTask, version: int, members: list[_Member]) -> Finished:
        fine = [m for m in members if m.error is None]
        errors = [m.error for m in members if m.error is not None]
        environments = [m.environment for m in fine] if self._probe is not None else None
        if not self.calls_tools:
            group = self.single_turn(task, version, [m.rollout for m in fine if m.rollout is not None])
            group.rows, group.environments, group.errors = [m.row for m in fine], environments, errors
            return group
        episodes = [m.episode for m in fine if m.episode is not None]
        texts = [self._text(episode.token_ids) for episode in episodes]
        return Finished(
            task.group_id,
            version,
            [m.row for m in fine],
            [e.rollout(text) for e, text in zip(episodes, texts, strict=True)],
            [e.messages or [{"role": "assistant", "content": ""}] for e in episodes],
            environments=environments,
            metrics=[_calls(e) for e in episodes],
            errors=errors,
        )

    def _give_back(self, member: _Member) -> None:
        pool = member.pool
        if pool is None:
            return
        if member.error is not None:
            pool.close()
            return
        if member.episode is not None and member.episode.tools.lost:
            pool.discard(member.environment)
        with self._lock:
            self._free.append(pool)


def _calls(episode: Episode) -> dict[str, float]:
    found = {"tools/call_frequency": float(episode.calls)}
    return found | ({"tools/failure_frequency": episode.failures / episode.calls} if episode.calls else {})
