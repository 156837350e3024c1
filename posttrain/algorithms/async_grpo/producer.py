"""What a rollout worker does: prompts to rollouts, over weights that change meanwhile, to scored samples."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.algorithms.async_grpo.episodes import EpisodeRunner, EpisodeSetup
from posttrain.algorithms.async_grpo.scoring import Finished, Scorer
from posttrain.rewards.runner import RewardRunner
from posttrain.rollouts.workers.engine_spec import EngineHandle, EngineSpec
from posttrain.rollouts.workers.partial import Writer, Writing, writings
from posttrain.rollouts.workers.processes import GroupResult
from posttrain.rollouts.workers.samples import GroupTask
from posttrain.rollouts.workers.shared_weights import remove_weights
from posttrain.rollouts.workers.worker import Link
from posttrain.types import Request

__all__ = ["Producer", "RolloutJob"]

logger = logging.getLogger(__name__)

SCORE_BACKLOG = 16  # Groups that wait for the reward functions before writing waits too.
LOOK_S, REST_S = 0.05, 0.5


@dataclass
class RolloutJob:
    """Everything a worker needs, as it is sent to it.

    Attributes:
        engine: How to make the engine.
        setup: Tokenizer, sampling, tools and environments.
        rewards: Keywords for `RewardRunner`.
        scale_rewards: See `Scorer`.
        mask_truncated: See `Scorer`.
        threads: Of torch; None: all.
        segment_s: Seconds after which a call to the engine is interrupted, so that what is finished is handed over.
        slots: Rollouts of one call, at most.
    """

    engine: EngineSpec
    setup: EpisodeSetup
    rewards: dict[str, Any]
    scale_rewards: str = "population"
    mask_truncated: bool = False
    threads: int | None = None
    segment_s: float = 30.0
    slots: int = 256

    def run(self, link: Link) -> None:
        """Make the engine and the reward functions, then serve."""
        logging.basicConfig(level=logging.WARNING)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.engine.weights:
            link.on_orphaned = functools.partial(remove_weights, Path(self.engine.weights))
        handle = self.engine.make()
        try:
            producer = Producer(self, link, handle)
            link.ready()
            producer.work()
        finally:
            handle.engine.close()


@dataclass
class _Group:
    """A prompt under way in a call to the engine."""

    task: GroupTask
    version: int
    prompt_ids: list[int]
    written: list[Writing]
    began: float = field(default_factory=time.perf_counter)


class Producer:
    """Serves one link with one engine.

    An engine in this process runs on the main thread, all prompts in one call, which is interrupted when there are new
    weights, and now and then so that finished groups go out and new prompts come in. Calls to servers each have a thread.
    """

    def __init__(self, job: RolloutJob, link: Link, handle: EngineHandle) -> None:
        self.job, self.link, self.handle = job, link, handle
        writer = Writer(handle.engine, self.refresh)
        self.runner = EpisodeRunner(job.setup, writer)
        self.parallel = job.engine.kind == "server"
        rewards = RewardRunner(**job.rewards, environments=self.runner.probes)
        rewards.functions = self.runner.pooled(rewards.functions)
        rewards.start("cpu")
        self.scorer = Scorer(
            rewards, job.setup.tokenizer, scale_rewards=job.scale_rewards, mask_truncated=job.mask_truncated
        )
        self.active: list[_Group] = []
        self._calling: float | None = None
        self._loading, self._judging = threading.Lock(), threading.Lock()
        workers = max(1, job.slots) if self.parallel else 1
        self._calls = concurrent.futures.ThreadPoolExecutor(min(workers, 256), thread_name_prefix="rollouts")
        self._scoring = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._pending: set[concurrent.futures.Future] = set()
        if not self.parallel:
            threading.Thread(target=self._interrupter, daemon=True, name="interrupter").start()

    def refresh(self) -> None:
        """Load the newest weights, where they are newer than ours."""
        with self._loading:
            began = time.perf_counter()
            version, holders = self.link.version, self.link.holders
            if self.handle.refresh(version, holders):
                self.link.send("loaded", version=self.handle.version, seconds=time.perf_counter() - began)

    def work(self) -> None:
        """Until told to stop."""
        while not self.link.stopping.is_set():
            self.link.progress()
            if self.link.version:
                self.refresh()
            self._forget_cancelled()
            tasks = self._admit()
            if self.parallel:
                for task in tasks:
                    self._submit(self._calls, self._episodes, [task])
                self.link.wait(REST_S)
            elif self.runner.episodic:
                self._episodes(tasks)
            else:
                self._begin(tasks)
                self._segment()
            if not tasks and not self.active:
                self.link.wait(REST_S)

    def _admit(self) -> list[GroupTask]:
        """Tasks that are begun now: as many as the call has slots for, and at least one when nothing else is under way."""
        taken: list[GroupTask] = []
        busy = sum(len(group.written) for group in self.active)
        # One that came with newer weights waits until they are loaded, so that its version is theirs.
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

    def _forget_cancelled(self) -> None:
        self.active = [g for g in self.active if g.task.group_id not in self.link.cancelled]

    # One turn, on this thread ------------------------------------------------------------------------------------

    def _begin(self, tasks: list[GroupTask]) -> None:
        for task in tasks:
            try:
                prompt_ids, sampling = self.runner.prompt(task)
            except Exception as error:
                self._send(GroupResult(task.group_id, errors=[_text(error)] * task.size))
                continue
            written = writings([Request(prompt_ids, task.size, sampling)], sampling)
            self.active.append(_Group(task, self.handle.version, prompt_ids, written))

    def _segment(self) -> None:
        """One call to the engine for everything unfinished; what is finished then goes to be scored."""
        unfinished = [w for group in self.active for w in group.written if w.finish_reason is None]
        if not unfinished:
            return
        before = sum(len(w.token_ids) for w in unfinished)
        began = self._calling = time.perf_counter()
        try:
            self.runner.writer.advance(unfinished)
        except Exception as error:
            logger.warning("the engine failed: %s", error, exc_info=True)
            for group in self.active:
                self._send(GroupResult(group.task.group_id, errors=[_text(error)] * group.task.size))
            self.active = []
            return
        finally:
            self._calling = None
        spent = {"generate": time.perf_counter() - began}
        tokens = sum(len(w.token_ids) for w in unfinished) - before
        done = [g for g in self.active if all(w.finish_reason is not None for w in g.written)]
        self.active = [g for g in self.active if g not in done]
        for group in done:
            finished = self.runner.single_turn(group.task, group.version, [w.rollout() for w in group.written])
            self._submit(self._scoring, self._score, finished, group.task.size, spent, tokens)
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

    def _episodes(self, tasks: list[GroupTask]) -> None:
        """Whole episodes of some prompts, and their rewards, before anything else happens to their environments."""
        if not tasks or (self.parallel and tasks[0].group_id in self.link.cancelled):
            return
        version = self.handle.version
        began = self._calling = time.perf_counter()
        try:
            groups = self.runner.episodes(tasks, version)
        except Exception as error:
            logger.warning("episodes failed: %s", error, exc_info=True)
            groups = [Finished(t.group_id, version, [], [], [], errors=[_text(error)] * t.size) for t in tasks]
        finally:
            self._calling = None
        spent = {"generate": time.perf_counter() - began}
        with self.runner.holding(groups):
            for group, task in zip(groups, tasks, strict=True):
                tokens = sum(len(rollout.token_ids) for rollout in group.rollouts)
                self._score(group, task.size, spent, tokens)
                spent = {}

    # Scoring -----------------------------------------------------------------------------------------------------

    def _submit(self, where: concurrent.futures.Executor, *call: Any) -> None:
        if where is self._scoring and len(self._pending) >= SCORE_BACKLOG:
            concurrent.futures.wait(self._pending, return_when=concurrent.futures.FIRST_COMPLETED)
        self._pending = {future for future in self._pending if not future.done()}
        self._pending.add(where.submit(*call))

    def _score(self, group: Finished, size: int, spent: dict[str, float], tokens: int) -> None:
        self.link.progress()
        began = time.perf_counter()
        errors = list(group.errors)
        trajectories, alone = [], 0
        if len(group.rollouts) >= min(2, size):
            try:
                with self._judging:  # Calls to servers end on many threads.
                    trajectories = self.scorer(group)
            except Exception as error:
                logger.warning("scoring failed: %s", error, exc_info=True)
                errors += [_text(error)] * len(group.rollouts)
        else:
            alone = len(group.rollouts)
        seconds = {**spent, "score": time.perf_counter() - began}
        untrainable = size - len(errors) - len(trajectories) - alone
        self._send(GroupResult(group.group_id, trajectories, errors, untrainable, alone, seconds, tokens))

    def _send(self, result: GroupResult) -> None:
        try:
            self.link.send("result", result=result)
        except OSError:
            os._exit(0)  # The trainer is gone.


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
