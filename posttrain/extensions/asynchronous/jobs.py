"""Jobs of rollout workers: complete prompts with the newest weights, score the completions, and send them to the trainer."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from posttrain.data.chat import tokenize_prompts
from posttrain.data.formats import is_conversational, is_messages
from posttrain.errors import RolloutError
from posttrain.extensions.asynchronous.engine import (
    EngineRecipe,
    PartialCompletion,
    ResumableGenerator,
    WorkerEngine,
    begin_completions,
)
from posttrain.extensions.asynchronous.processes import GroupResult
from posttrain.extensions.asynchronous.samples import GroupTask, RolloutSample, Trajectory
from posttrain.extensions.asynchronous.worker import Link
from posttrain.extensions.images.picture import without_pictures
from posttrain.extensions.images.processors import PictureProcessor
from posttrain.extensions.images.rows import opened, picture_prompt
from posttrain.loop.scoring import reward_runner, score_rollouts
from posttrain.losses.advantages import MOST_ADVANTAGE
from posttrain.methods.base import Method
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rollouts.batch import RolloutBatch, decoded, sampled_logps, shared_requests
from posttrain.rollouts.episodes.driver import EpisodeDriver, EpisodeSetup
from posttrain.rollouts.episodes.loop import Batches, Episode
from posttrain.rollouts.shared_weights import remove_weights
from posttrain.types import ALONE, WHOLE, Prompt, Request, Rollout, Sampling, Truncation

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)

# Generation pauses while this number of finished groups wait for their rewards.
SCORE_BACKLOG = 16
# Polling intervals in seconds: LOOK_S of the thread that interrupts the engine, REST_S of an idle worker.
LOOK_S, REST_S = 0.05, 0.5


@dataclass
class RolloutJob:
    """Job of a worker process, with all data that the process receives when it starts.

    Attributes:
        engine: Recipe from which the worker creates its engine.
        tokenizer: Tokenizer with a chat template.
        sampling: Sampling settings of all groups. Only the seed is replaced for each group.
        context: Maximum number of tokens of a prompt together with its completion. None: no limit.
        episodes: Tools, environments and harness of multi-turn rollouts.
        rewards: Keyword arguments of `RewardRunner`. None: completions are not scored.
        method: Method that computes advantages.
        mask_truncated: Whether truncated completions are excluded from the loss.
        threads: Number of torch threads of the worker. None: torch's default.
        segment_s: Number of seconds after which an engine call is interrupted, so that the worker can send its finished
            groups.
        slots: Maximum number of rollouts in progress. One engine call samples all of them.
        reader: Image processor for prompts. None: prompts contain only text.
    """

    engine: EngineRecipe
    tokenizer: Any
    sampling: Sampling
    context: int | None
    episodes: EpisodeSetup
    rewards: dict[str, Any] | None
    method: Method[Any] | None = None
    mask_truncated: bool = False
    threads: int | None = None
    segment_s: float = 30.0
    slots: int = 256
    reader: PictureProcessor | None = None

    def run(self, link: Link) -> None:
        """Create the engine and the reward functions, then process tasks until the trainer stops the worker."""
        logging.basicConfig(level=logging.WARNING)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.engine.weights:
            link.on_orphaned = functools.partial(remove_weights, Path(self.engine.weights))
        handle = WorkerEngine(self.engine)
        try:
            loop = RolloutWorkerLoop(self, link, handle)
            link.ready()
            loop.run()
        finally:
            handle.engine.close()


@dataclass(slots=True)
class RolloutGroup:
    """The completions of one prompt before they are scored.

    Attributes:
        task: Task with the prompt.
        version: Version of the weights when the first engine request was sent.
        batch: Completions that finished without an error.
        errors: One error for each completion that failed.
        metrics: Values to log, one dict per completion.
        lent: Environments that stay reserved until the group is scored.
    """

    task: GroupTask
    version: int
    batch: RolloutBatch
    errors: list[str] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    lent: list[Any] = field(default_factory=list)


class GroupGenerator:
    """Generates the completions of prompts. A completion has one turn, or several turns if there are tools or environments.

    Args:
        driver: Driver that runs tools and environments.
        generator: Generator that calls the engine.
        tokenizer: Tokenizer with a chat template.
        sampling: Sampling settings. The seed is replaced for each group.
        context: Maximum number of tokens of a prompt together with its completion.
        reader: Image processor for prompts. None: prompts contain only text.
    """

    def __init__(
        self,
        driver: EpisodeDriver,
        generator: ResumableGenerator,
        tokenizer: Tokenizer,
        sampling: Sampling,
        context: int | None = None,
        reader: PictureProcessor | None = None,
    ) -> None:
        self.driver, self.generator, self.tokenizer, self.reader = driver, generator, tokenizer, reader
        self.base, self.context = sampling, context
        driver.use_tokenizer(tokenizer)
        # Whether a group may need more than one engine call, because its completions can have several turns.
        self.episodic = driver.calls_tools or driver.pool is not None or driver.harness is not None
        # Callback that a running harness calls to report progress. The callback raises an error to stop the episodes.
        self.alive: Callable[[bool], bool] = bool

    def prompt(self, task: GroupTask) -> tuple[list[int], Sampling]:
        """Return the token ids of a prompt and the sampling settings of its completions.

        Raises:
            RolloutError: The prompt leaves no space for a completion.
        """
        kwargs = self.driver.setup.template_kwargs
        if self.reader is None:
            (ids,) = tokenize_prompts([task.row], self.tokenizer, chat_template_kwargs=kwargs)
        else:
            ids = picture_prompt(self.reader, task.row, kwargs)
        return ids, replace(self.base, max_new_tokens=self._room(ids), seed=task.seed)

    def _room(self, ids: list[int]) -> int:
        """Return the maximum number of completion tokens after the prompt ``ids``."""
        base, context = self.base, self.context
        room = base.max_new_tokens if context is None else min(base.max_new_tokens, context - len(ids))
        if room < 1:
            raise RolloutError(
                f"a prompt of {len(ids)} tokens leaves no space for a completion in the model's context of "
                f"{context} tokens."
            )
        return room

    def single_turn(self, task: GroupTask, version: int, rollouts: list[Rollout]) -> RolloutGroup:
        """Decode the single-turn completions of one prompt, and return them as a group."""
        chat = is_conversational({"prompt": task.row["prompt"]})
        rollouts, completions = decoded(self.tokenizer, rollouts, conversational=chat)
        (row,) = [task.row] if self.reader is None else opened([task.row])
        return RolloutGroup(task, version, RolloutBatch([row] * len(rollouts), rollouts, completions))

    def groups(self, tasks: Sequence[GroupTask], version: int) -> list[RolloutGroup]:
        """Generate all completions of the prompts. With tools, environments or a harness, this method resets the
        environments and runs all turns.
        """
        if not self.episodic:
            return [self._plain(task, version) for task in tasks]
        if self.driver.harness is not None:
            return self._harnessed(tasks, version)
        rows = [dict(task.row) for task in tasks for _ in range(task.size)]
        errors: dict[int, str] = {}
        environments, rows = self.driver.begin(rows, [task.seed for task in tasks for _ in range(task.size)], errors)
        try:
            episodes = dict(self._episodes(rows, environments, errors))
            done = dict(zip(episodes, self._completed(list(episodes.values()), tasks[0].seed), strict=True))
        except BaseException:
            self._release(environments or [])
            raise
        groups, start = [], 0
        for task in tasks:
            members = range(start, start + task.size)
            fine, start = [i for i in members if i in done], start + task.size
            lent = [] if environments is None else [environments[i] for i in members]
            batch = RolloutBatch(
                [rows[i] for i in fine],
                [done[i][0] for i in fine],
                [done[i][1] for i in fine],
                environments=None if environments is None else [environments[i] for i in fine],
            )
            metrics = [_call_metrics(episodes[i]) for i in fine] if self.driver.calls_tools else []
            groups.append(
                RolloutGroup(task, version, batch, [errors[i] for i in members if i in errors], metrics, lent)
            )
        return groups

    def _harnessed(self, tasks: Sequence[GroupTask], version: int) -> list[RolloutGroup]:
        """Run the episodes of the prompts with the user's harness. A failed episode is recorded as an error of its group,
        unless the harness options set a reward for failed episodes.
        """
        assert self.driver.harness is not None
        failure = self.driver.harness.options.failure
        rows = [dict(task.row) for task in tasks for _ in range(task.size)]
        episodes = self.driver.run_harness(
            rows, [task.seed for task in tasks for _ in range(task.size)], self.base, self._sample,
            engine=self.generator.engine, context=self.context, vocabulary=len(self.tokenizer),
            placeholder=next(iter(self.base.stop_token_ids), 0), any_process=self.alive,
        )  # fmt: skip
        errors, groups, start = episodes.extra["harness_error"], [], 0
        shared = {name: float(metric.value) / float(metric.weight) for name, metric in episodes.metrics.items()}
        for task in tasks:
            members = range(start, start + task.size)
            fine, start = [i for i in members if errors[i] is None or failure is not None], start + task.size
            extra = {name: [values[i] for i in fine] for name, values in episodes.extra.items()}
            batch = RolloutBatch(
                [rows[i] for i in fine], [episodes.rollouts[i] for i in fine], [episodes.completions[i] for i in fine],
                extra=extra, failure_reward=failure,
            )  # fmt: skip
            failed = [errors[i] for i in members if i not in fine]
            groups.append(RolloutGroup(task, version, batch, failed, [dict(shared) for _ in fine]))
        return groups

    def _sample(self, batches: list[tuple[list[Request], Sampling]]) -> list[list[Rollout]]:
        return [self.generator.finish(requests, sampling) for requests, sampling in batches]

    def release(self, groups: Sequence[RolloutGroup]) -> None:
        """Return the environments of scored groups to the pool."""
        self._release([environment for group in groups for environment in group.lent])

    def _release(self, environments: Sequence[Any]) -> None:
        if self.driver.pool is not None:
            self.driver.pool.release([e for e in environments if e is not None])

    def _plain(self, task: GroupTask, version: int) -> RolloutGroup:
        try:
            ids, sampling = self.prompt(task)
        except RolloutError as error:
            return RolloutGroup(task, version, RolloutBatch([], [], []), [_text(error)] * task.size)
        request = Request(ids, task.size, pictures=Prompt.pictures_of(ids))
        return self.single_turn(task, version, self.generator.finish([request], sampling))

    def _episodes(
        self, rows: list[dict[str, Any]], environments: list[Any] | None, errors: dict[int, str]
    ) -> Iterator[tuple[int, Episode]]:
        """Yield an index and an episode for each row without an error. If a prompt leaves no space for a completion, record
        an error for its row.
        """
        for index, row in enumerate(rows):
            if index in errors:
                continue
            try:
                (episode,) = self.driver.episodes([row], environments and [environments[index]])
                self._room(episode.prompt_ids)
            except Exception as error:
                errors[index] = _text(error)
                continue
            yield index, episode

    def _completed(self, episodes: list[Episode], seed: int) -> list[tuple[Rollout, Any]]:
        """Complete all turns of episodes. Return, for each episode, the rollout and the completion for reward functions."""
        if not episodes:
            return []
        sampling = replace(self.base, seed=seed)
        if self.driver.calls_tools:
            limits = {"context": self.context, "stop_ids": sampling.stop_token_ids}
            return list(zip(*self.driver.run_tools(episodes, sampling, self._generate, **limits), strict=True))
        prompts = [episode.prompt_ids for episode in episodes]
        room = replace(sampling, max_new_tokens=min(map(self._room, prompts)))
        rollouts = self.generator.finish(shared_requests(prompts), room)
        return list(zip(*decoded(self.tokenizer, rollouts, conversational=True), strict=True))

    def _generate(self, batches: Batches) -> list[list[Rollout]]:
        return [self.generator.finish(shared_requests(prompts), sampling) for prompts, sampling in batches]


def _call_metrics(episode: Episode) -> dict[str, float]:
    metrics = {"tools/call_frequency": float(episode.calls), "tools/escaped_control_tokens": float(episode.escaped)}
    return metrics | ({"tools/failure_frequency": episode.failures / episode.calls} if episode.calls else {})


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# Scoring -------------------------------------------------------------------------------------------------------------


def score_group(
    group: RolloutGroup,
    rewards: RewardRunner,
    tokenizer: Tokenizer,
    *,
    method: Method[Any],
    mask_truncated: bool,
    truncation: Truncation = WHOLE,
) -> list[Trajectory]:
    """Return one trajectory per completion, with its advantage and metrics.

    A completion is excluded if none of its tokens contributes to the loss.

    Args:
        group: Completions of one prompt.
        rewards: Reward functions.
        tokenizer: Tokenizer of the policy. For format rewards, it decodes the ends of prompts.
        method: The trainer's method, which computes the advantages.
        mask_truncated: Whether to exclude truncated completions.
        truncation: Truncation (such as top-p) with which tokens were sampled. Log-probs must be those of the truncated
            distribution.

    Raises:
        RewardError: A function raised an error or returned an invalid reward.
        RolloutError: A token that contributes to the loss has no log-prob.
    """
    batch, step = replace(group.batch, group_size=len(group.batch.rollouts)), SimpleNamespace(global_step=group.version)
    table = score_rollouts(rewards, batch, tokenizer, step)
    groups = torch.zeros(len(batch.rollouts), dtype=torch.long)
    table = replace(table, values=rewards.transformed(table.values, groups))
    result = method.advantages(batch, table, {}, ALONE)
    far = torch.zeros(len(result.values)) if result.unbounded is None else result.unbounded.abs() > MOST_ADVANTAGE
    shared, trajectories = _group_metrics(table), []
    for i, rollout in enumerate(batch.rollouts):
        masks = batch.trained(i, mask_truncated)
        if not any(map(any, masks)):
            continue
        metrics = {
            **shared,
            **(group.metrics[i] if group.metrics else {}),
            "reward": float(result.totals[i]),
            **{f"rewards/{n}": v for n, v in zip(table.names, table.values[i].tolist(), strict=True)},
            "advantages/clipped_share": float(far[i]),
        }
        advantage, sequences = float(result.values[i]), (rollout, *rollout.branches)
        active = [sequence for sequence, mask in zip(sequences, masks, strict=True) if any(mask)]
        samples = [_sample(group, i, advantage * sequence.credit, metrics, sequence, truncation) for sequence in active]
        for sample in samples:
            sample.check()
        trajectories.append(Trajectory(samples, finished=rollout.finish_reason == "stop"))
    return trajectories


def _group_metrics(table: RewardTable) -> dict[str, float]:
    """Return the metrics of a whole group: the means that scoring logged, and the fraction of NaN rewards per function."""
    metrics = {name: float(m.value) / float(m.weight) for name, m in table.metrics.items() if m.reduction == "mean"}
    odd = {name: float(m.value) for name, m in table.metrics.items() if name.endswith("/nan")}
    return metrics | {name: count / len(table.values) for name, count in odd.items()}


def unscored_group(group: RolloutGroup, *, mask_truncated: bool, truncation: Truncation = WHOLE) -> list[Trajectory]:
    """Return trajectories as `score_group` does, but with advantage 0. Methods without rewards use this function."""
    trajectories = []
    for i, rollout in enumerate(group.batch.rollouts):
        if any(map(any, group.batch.trained(i, mask_truncated))):
            sample = _sample(group, i, 0.0, {}, rollout, truncation)
            sample.check()
            trajectories.append(Trajectory([sample], finished=rollout.finish_reason == "stop"))
    return trajectories


def _sample(
    group: RolloutGroup,
    index: int,
    advantage: float,
    metrics: dict[str, float],
    rollout: Rollout,
    truncation: Truncation,
) -> RolloutSample:
    before, count = len(rollout.prompt_ids), len(rollout.token_ids)
    mask = rollout.tool_mask or [1] * count
    sampled = sampled_logps([rollout], truncation)
    if sampled is None:
        raise RolloutError(
            f"the engine returns log-probs before {truncation}, but samples tokens after it, so importance ratios would be "
            "wrong by the excluded probability mass. Fix: use an engine that sets Rollout.processed_logp, or no truncation."
        )
    logp = sampled[0] if len(sampled[0]) == count else [math.nan] * count
    versions = [version for version, _ in rollout.spans or [(rollout.version, count)]]
    prompt = group.batch.examples[index]["prompt"]
    return RolloutSample(
        # Do not send decoded images to the trainer, because only reward functions use them.
        prompt=without_pictures(prompt) if is_messages(prompt) else prompt,
        completion=group.batch.completions[index],
        input_ids=[*rollout.prompt_ids, *rollout.token_ids],
        completion_mask=[*[0] * before, *mask],
        old_log_probs=[*[0.0] * before, *(x if in_loss else 0.0 for x, in_loss in zip(logp, mask, strict=True))],
        advantage=advantage,
        model_version=min([group.version, *versions]),
        group_id=group.task.group_id,
        metrics=metrics,
        spans=list(rollout.spans or [(rollout.version, sum(mask))]),
        pictures=rollout.pictures,
        teacher_id=group.task.row.get("teacher_id"),
    )


# The loop of a worker ------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """A prompt whose completions are in progress."""

    task: GroupTask
    version: int
    completions: list[PartialCompletion]


class RolloutWorkerLoop:
    """Loop of a worker process that processes the tasks of one link with one engine.

    An in-process engine runs on the main thread with all prompts in one call. This call is interrupted when new weights
    arrive, and regularly, so that finished groups are sent and new prompts begin. With rollout servers, each call runs on a
    separate thread.
    """

    def __init__(self, job: RolloutJob, link: Link, handle: WorkerEngine) -> None:
        self.job, self.link, self.handle = job, link, handle
        if handle.engine.tokenizer is None:
            handle.engine.tokenizer = job.tokenizer
        driver = EpisodeDriver(job.episodes)
        generator = ResumableGenerator(handle.engine, self.refresh)
        self.generator = GroupGenerator(driver, generator, job.tokenizer, job.sampling, job.context, job.reader)
        self.rewards = None if job.rewards is None else reward_runner(RewardRunner, job.rewards, driver.pool)
        if self.rewards is not None:
            self.rewards.start("cpu")
        self.generator.alive = self._at_work
        self.parallel = job.engine.kind == "server"
        self.active: list[_Open] = []
        self._calling: float | None = None
        self._loading, self._judging = threading.Lock(), threading.Lock()
        workers = max(1, job.slots) if self.parallel else 1
        self._calls = concurrent.futures.ThreadPoolExecutor(min(workers, 256), thread_name_prefix="rollouts")
        self._scoring = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._pending: set[concurrent.futures.Future] = set()
        if not self.parallel:
            threading.Thread(target=self._interrupter, daemon=True, name="interrupter").start()

    def refresh(self) -> None:
        """Load the newest weights if the engine does not have them yet, and report progress. This method is called between
        two engine calls.
        """
        self.link.progress()
        with self._loading:
            began = time.perf_counter()
            version, holders = self.link.version, self.link.holders
            if self.handle.refresh(version, holders):
                seconds = time.perf_counter() - began
                self.link.send("loaded", version=self.handle.version, seconds=seconds, scored=self.handle.scored)

    def _at_work(self, here: bool) -> bool:
        self.link.progress()
        if self.link.stopping.is_set():
            raise RolloutError("the trainer has stopped this worker")
        return here

    def run(self) -> None:
        """Process tasks until the trainer stops the worker."""
        while not self.link.stopping.is_set():
            self.link.progress()
            if self.link.version:
                self.refresh()
            self.active = [g for g in self.active if g.task.group_id not in self.link.cancelled]
            tasks = self._admit()
            if self.parallel:
                for task in tasks:
                    self._submit(self._calls, self._groups, [task])
                self.link.wait(REST_S)
            elif self.generator.episodic:
                self._groups(tasks)
            else:
                self._begin(tasks)
                self._generate_chunk()
            if not tasks and not self.active:
                self.link.wait(REST_S)

    def _admit(self) -> list[GroupTask]:
        """Return the tasks to begin now: as many as fit into the free slots, but at least one if no task is in progress."""
        taken: list[GroupTask] = []
        busy = sum(len(group.completions) for group in self.active)
        # A task that requires newer weights starts after these weights are loaded, so that its rollouts have the correct
        # version.
        while self.link.tasks and self.link.tasks[0].version <= self.handle.version:
            size = self.link.tasks[0].size
            if (busy or taken) and busy + sum(t.size for t in taken) + size > self.job.slots and not self.parallel:
                break
            task = self.link.tasks.popleft()
            if task.group_id in self.link.cancelled:
                continue
            taken.append(task)
            self.link.send("begun", group_id=task.group_id, version=self.handle.version)
        return taken

    # One turn, on this thread ------------------------------------------------------------------------------------

    def _begin(self, tasks: list[GroupTask]) -> None:
        for task in tasks:
            try:
                prompt_ids, sampling = self.generator.prompt(task)
            except Exception as error:
                self._send(GroupResult(task.group_id, errors=[_text(error)] * task.size))
                continue
            request = Request(prompt_ids, task.size, sampling, Prompt.pictures_of(prompt_ids))
            completions = begin_completions([request], sampling)
            self.active.append(_Open(task, self.handle.version, completions))

    def _generate_chunk(self) -> None:
        """Run one engine call for all unfinished completions, and start scoring the groups that are finished."""
        unfinished = [
            completion for group in self.active for completion in group.completions if completion.finish_reason is None
        ]
        if not unfinished:
            return
        before = sum(len(completion.token_ids) for completion in unfinished)
        began = self._calling = time.perf_counter()
        try:
            self.generator.generator.advance(unfinished)
        except Exception as error:
            logger.warning("the engine failed: %s", error, exc_info=True)
            for group in self.active:
                self._send(GroupResult(group.task.group_id, errors=[_text(error)] * group.task.size))
            self.active = []
            return
        finally:
            self._calling = None
        spent = {"generate": time.perf_counter() - began}
        tokens = sum(len(completion.token_ids) for completion in unfinished) - before
        done = [g for g in self.active if all(completion.finish_reason is not None for completion in g.completions)]
        self.active = [g for g in self.active if g not in done]
        for group in done:
            rollouts = [completion.rollout() for completion in group.completions]
            finished = self.generator.single_turn(group.task, group.version, rollouts)
            self._submit(self._scoring, self._score, finished, spent, tokens)
            spent, tokens = {}, 0
        if tokens or spent:
            self.link.send("spent", seconds=spent, tokens=tokens)

    def _interrupter(self) -> None:
        while not self.link.stopping.is_set():
            time.sleep(LOOK_S)
            began = self._calling
            if began is None:
                continue
            cancelled = any(g.task.group_id in self.link.cancelled for g in list(self.active))
            long = time.perf_counter() - began > self.job.segment_s
            if long or cancelled or self.link.version > self.handle.version or self.link.stopping.is_set():
                self.handle.engine.interrupt()

    # Several turns -----------------------------------------------------------------------------------------------

    def _groups(self, tasks: list[GroupTask]) -> None:
        """Run the episodes of the tasks, and score them before their environments are released for other episodes."""
        if not tasks or (self.parallel and tasks[0].group_id in self.link.cancelled):
            return
        version = self.handle.version
        began = self._calling = time.perf_counter()
        try:
            groups = self.generator.groups(tasks, version)
        except Exception as error:
            logger.warning("episodes failed: %s", error, exc_info=True)
            groups = [RolloutGroup(t, version, RolloutBatch([], [], []), [_text(error)] * t.size) for t in tasks]
        finally:
            self._calling = None
        spent = {"generate": time.perf_counter() - began}
        try:
            for group in groups:
                self._score(group, spent, sum(len(rollout.token_ids) for rollout in group.batch.rollouts))
                spent = {}
        finally:
            self.generator.release(groups)

    # Scoring -----------------------------------------------------------------------------------------------------

    def _submit(self, where: concurrent.futures.Executor, *call: Any) -> None:
        if where is self._scoring and len(self._pending) >= SCORE_BACKLOG:
            concurrent.futures.wait(self._pending, return_when=concurrent.futures.FIRST_COMPLETED)
        self._pending = {future for future in self._pending if not future.done()}
        self._pending.add(where.submit(*call))

    def _score(self, group: RolloutGroup, spent: dict[str, float], tokens: int) -> None:
        self.link.progress()
        began = time.perf_counter()
        size, errors = group.task.size, list(group.errors)
        trajectories, alone = [], 0
        options: dict[str, Any] = {
            "mask_truncated": self.job.mask_truncated,
            # Without rewards, the loss has no importance ratio and log-probs are only logged. Ids that ``logit_bias``
            # forbids then need not be excluded from the distribution.
            "truncation": self.job.sampling.truncation if self.rewards is None else self.job.sampling.left_out,
        }
        if len(group.batch.rollouts) >= min(2, size):
            try:
                if self.rewards is None:
                    trajectories = unscored_group(group, **options)
                else:
                    options |= {"method": self.job.method}
                    # Score one group at a time, because calls to servers end on several threads.
                    with self._judging:
                        trajectories = score_group(group, self.rewards, self.job.tokenizer, **options)
            except Exception as error:
                logger.warning("scoring failed: %s", error, exc_info=True)
                errors += [_text(error)] * len(group.batch.rollouts)
        else:
            alone = len(group.batch.rollouts)
        seconds = {**spent, "score": time.perf_counter() - began}
        untrainable = size - len(errors) - len(trajectories) - alone
        self._send(GroupResult(group.task.group_id, trajectories, errors, untrainable, alone, seconds, tokens))

    def _send(self, result: GroupResult) -> None:
        try:
            self.link.send("result", result=result)
        except OSError:
            # The pipe is closed, because the trainer has ended.
            os._exit(0)
