"""`WorkerPool`: pool that assigns prompts to worker processes, collects scored rollouts, and replaces failed workers."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from posttrain.errors import RolloutError
from posttrain.extensions.asynchronous.ledger import FailureBudget, Ledger
from posttrain.extensions.asynchronous.samples import GroupTask, RolloutBuffer, TaskSource, Trajectory
from posttrain.extensions.asynchronous.worker import GAP_S, JOIN_S, ActiveClock, WorkerJob, WorkerProcess

logger = logging.getLogger(__name__)

POLL_S = 0.2
# Only worker restarts in the last RESTART_WINDOW_S seconds are counted, so that rare failures do not stop a long run.
RESTART_WINDOW_S = 600.0
# Maximum number of retries of a prompt: LOST_ATTEMPTS if its worker died, FAILED_ATTEMPTS if its rollouts failed.
LOST_ATTEMPTS, FAILED_ATTEMPTS = 3, 1


@dataclass(slots=True)
class GroupResult:
    """Result of a `GroupTask` that a worker sends to the trainer.

    Attributes:
        group_id: ``group_id`` of the task.
        trajectories: Scored rollouts with their advantages.
        errors: One error per failed rollout.
        untrainable: Number of rollouts without a token that contributes to the loss.
        alone: Number of rollouts without another rollout of their group to compare with, because the other rollouts failed.
        seconds: Time in seconds by activity, for example ``generate`` and ``score``.
        tokens: Number of generated tokens.
    """

    group_id: int
    trajectories: list[Trajectory] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    untrainable: int = 0
    alone: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0


@dataclass(slots=True)
class PoolSettings:
    """Sizes and time limits of a worker pool.

    Attributes:
        workers: Number of worker processes.
        group_size: Number of completions per prompt (group size G).
        max_inflight: Maximum number of rollouts in generation.
        window: Maximum number of rollouts in generation, in the queue and in the current step together, for
            ``staleness_policy="pace"``. None: no limit.
        max_staleness: Maximum age of a rollout when it arrives, in weight versions.
        max_staleness_hard: Maximum age of a rollout in generation, in weight versions. Older rollouts are canceled.
        rollout_tokens: Number of tokens in the queue that are reserved for an unfinished rollout. It is the maximum length
            of a rollout, including the prompt.
        failure_budget: Maximum fraction of failed rollouts among the last 200 rollouts.
        max_restarts: Maximum number of worker restarts in ten minutes.
        stale_after_s: Number of seconds without progress after which a worker is replaced.
        ready_within_s: Maximum number of seconds from the start of a worker until it is ready.
        sync_timeout_s: Maximum number of seconds that a worker may need to load new weights.
    """

    workers: int
    group_size: int
    max_inflight: int
    window: int | None = None
    max_staleness: int = 4
    max_staleness_hard: int = 4
    rollout_tokens: int = 1
    failure_budget: float = 0.05
    max_restarts: int = 8
    stale_after_s: float = 300.0
    ready_within_s: float = 300.0
    sync_timeout_s: float = 720.0


@dataclass(slots=True)
class _UnderWay:
    task: GroupTask
    worker: WorkerProcess
    version: int | None = None  # Version of the weights when the task began.


class WorkerPool:
    """Pool of worker processes that implements `RolloutWorkerProtocol`.

    A thread of the trainer's process assigns prompts and collects rollouts, so that workers keep sampling during a training
    step.

    Args:
        job: Job of every worker. It must be picklable.
        source: Source of prompts.
        settings: Sizes and time limits of the pool.
        buffer: Queue of scored rollouts.
        ledger: Ledger of all rollouts.
        folder: Folder of the workers' logs.
    """

    def __init__(
        self,
        job: WorkerJob,
        source: TaskSource,
        settings: PoolSettings,
        *,
        buffer: RolloutBuffer,
        ledger: Ledger,
        folder: str | Path,
    ) -> None:
        self.payload = bytes(ForkingPickler.dumps(job))
        self.source, self.settings, self.folder = source, settings, folder
        self.rollout_buffer, self.ledger = buffer, ledger
        self.budget = FailureBudget(settings.failure_budget)
        # The trainer lowers this limit if too many rollouts become stale.
        self.max_inflight = settings.max_inflight
        self.version, self._announced = 0, 0.0
        self.holders: Any = None  # Servers that have the current weight version. None: workers do not use servers.
        # This clock does not count time during which this process was suspended.
        self.clock = ActiveClock(GAP_S)
        self.workers: list[WorkerProcess] = []
        self.under_way: dict[int, _UnderWay] = {}
        self.loaded: dict[int, int] = {}
        # Each item contains the worker's index, the version of the weights, and the worker's log-probs of the probe
        # sequences. The trainer compares these log-probs with its own.
        self.scored: deque[tuple[int, int, list[list[float]]]] = deque(maxlen=64)
        self.restarts = 0
        self.error: BaseException | None = None
        self.lock = threading.RLock()
        self._restarted: deque[float] = deque()
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._spent: dict[str, float] = {}

    # The protocol ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers and wait until they are ready.

        Raises:
            RolloutError: A worker died or was not ready in time. The message contains the last lines of its log.
        """
        self.workers = [self._spawn(index) for index in range(self.settings.workers)]
        self._thread = threading.Thread(target=self._serve, daemon=True, name="rollout-pool")
        self._thread.start()
        while not self._ready.wait(POLL_S):
            self.check_health()

    def stop(self) -> None:
        """Stop all workers. Rollouts in generation are recorded as unfinished."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for worker in self.workers:
            worker.send("stop")
        limit = time.monotonic() + JOIN_S
        for worker in self.workers:
            worker.stop(max(0.1, limit - time.monotonic()))
        with self.lock:
            for lost in self.under_way.values():
                self.ledger.drop(lost.task.size, "unfinished", "writing")
            self.ledger.drop(len(self.rollout_buffer.drain()), "unfinished", "waiting")
            self.under_way, self.workers, self._thread = {}, [], None

    def update_model_version(self, version: int) -> None:
        """Announce new weights to the workers. Cancel rollouts in generation that are now too old, and retry their prompts."""
        with self.lock:
            self.version, self._announced = version, self.clock.look()
            for worker in self.workers:
                worker.send("weights", (version, self.holders))
            limit = version - self.settings.max_staleness_hard
            old = [k for k, u in self.under_way.items() if u.version is not None and u.version < limit]
            of_worker: dict[int, list[int]] = {id(worker): [] for worker in self.workers}
            for key in old:
                of_worker[id(self.under_way[key].worker)].append(key)
            for worker in self.workers:
                worker.send("cancel", of_worker[id(worker)])
            for key in old:
                self._lose(self.under_way.pop(key).task, "stale_in_flight", FAILED_ATTEMPTS)

    def check_health(self, stale_after_s: float | None = None) -> None:
        """Raise the error that stopped the pool, if one occurred."""
        if stale_after_s is not None:
            self.settings.stale_after_s = stale_after_s
        if self.error is not None:
            raise self.error
        if self._thread is not None and not self._thread.is_alive() and not self._stop.is_set():
            raise RolloutError("the thread that serves rollout workers has ended without an error.")

    # Queries of the trainer ---------------------------------------------------------------------------------------

    @property
    def writing(self) -> int:
        """Number of rollouts that workers have started but not returned."""
        return sum(u.task.size for u in self.under_way.values())

    def audit(self) -> None:
        """Compare the counts in the ledger with the actual numbers of rollouts in the workers and in the queue."""
        with self.lock:
            self.ledger.audit(writing=self.writing, waiting=len(self.rollout_buffer))

    @property
    def starting(self) -> bool:
        """Whether a worker is still starting. `PoolSettings.ready_within_s` limits the duration of a start."""
        return not all(worker.is_ready for worker in self.workers)

    def spent(self) -> dict[str, float]:
        """Return the seconds and the tokens that all workers have reported since the last call of this method."""
        with self.lock:
            spent, self._spent = self._spent, {}
            return spent

    # The thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                ends = [w.connection for w in self.workers] + [w.process.sentinel for w in self.workers]
                wait(ends, timeout=POLL_S)
                with self.lock:
                    self._receive()
                    self._look_after()
                    self._dispatch()
                if not self.starting:
                    self._ready.set()
        except BaseException as error:
            self.error = error

    def _spawn(self, index: int) -> WorkerProcess:
        worker = WorkerProcess(index, self.payload, self.folder, clock=self.clock)
        worker.start()
        self.loaded[index] = 0
        if self.version:
            worker.send("weights", (self.version, self.holders))
        return worker

    def _receive(self) -> None:
        for worker in self.workers:
            for kind, content in worker.receive():
                if kind == "begun" and content["group_id"] in self.under_way:
                    self.under_way[content["group_id"]].version = content["version"]
                elif kind == "loaded":
                    self.loaded[worker.index] = content["version"]
                    if content.get("scored") is not None:
                        self.scored.append((worker.index, content["version"], content["scored"]))
                elif kind == "spent":
                    self._spend(content["seconds"], content["tokens"])
                elif kind == "result":
                    self._take(worker, content["result"])

    def _take(self, worker: WorkerProcess, result: GroupResult) -> None:
        dispatched = self.under_way.get(result.group_id)
        if dispatched is None or dispatched.worker is not worker:
            return  # The task was canceled in the meantime.
        task = self.under_way.pop(result.group_id).task
        fine, failed = len(result.trajectories), len(result.errors)
        if fine + failed + result.untrainable + result.alone != task.size:
            raise RolloutError(
                f"group {task.group_id}: {task.size} rollouts were requested; {fine} arrived, {failed} failed, "
                f"{result.untrainable} have no token with loss and {result.alone} have no other rollout to be compared "
                "with."
            )
        self._spend({**result.seconds, "groups": 1.0}, result.tokens)
        self.ledger.drop(failed, "failed", "writing")
        self.ledger.drop(result.untrainable, "untrainable", "writing")
        self.ledger.drop(result.alone, "alone", "writing")
        self.budget.add(task.size - failed, result.errors)
        if failed and fine + result.untrainable < 2:
            self.ledger.drop(fine, "alone", "writing")
            self._request_again(task, FAILED_ATTEMPTS)
            return
        fresh = [c for c in result.trajectories if self.version - c.version <= self.settings.max_staleness]
        self.ledger.drop(fine - len(fresh), "stale_in_flight", "writing")
        self.ledger.arrive(len(fresh))
        for trajectory in fresh:
            trajectory.arrived = self.version
            self.rollout_buffer.put(trajectory)
        if not fresh:
            self.source.done(task.group_id)

    def _spend(self, seconds: dict[str, float], tokens: int) -> None:
        for name, value in {**seconds, "tokens": float(tokens)}.items():
            self._spent[name] = self._spent.get(name, 0.0) + value

    def _lose(self, task: GroupTask, reason: str, attempts: int) -> None:
        self.ledger.drop(task.size, reason, "writing")
        self._request_again(task, attempts)

    def _request_again(self, task: GroupTask, attempts: int) -> None:
        if task.attempt < attempts:
            self.source.give_back(task)
        else:
            self.source.done(task.group_id)

    def _look_after(self) -> None:
        for position, worker in enumerate(self.workers):
            settings = self.settings
            problem = worker.problem(settings.stale_after_s, settings.ready_within_s)
            late = self.clock.look() - max(self._announced, worker.ready_at) if worker.is_ready else 0.0
            if problem is None and self.loaded[worker.index] < self.version and late > settings.sync_timeout_s:
                problem = f"did not load weights version {self.version} within {settings.sync_timeout_s:g} s"
            if problem is not None:
                self.workers[position] = self._replace(worker, problem)

    def _replace(self, worker: WorkerProcess, problem: str) -> WorkerProcess:
        error = worker.describe(problem)
        if not self._ready.is_set():
            raise error
        now = time.monotonic()
        self._restarted.append(now)
        while now - self._restarted[0] > RESTART_WINDOW_S:
            self._restarted.popleft()
        if len(self._restarted) > self.settings.max_restarts:
            raise RolloutError(
                f"{len(self._restarted)} workers failed within {RESTART_WINDOW_S / 60:.0f} minutes, more than "
                f"max_worker_restarts={self.settings.max_restarts}. The last error: {error}"
            )
        logger.warning("%s A new worker replaces it, and its prompts are retried.", error)
        self.restarts += 1
        worker.kill()
        for key in [k for k, u in self.under_way.items() if u.worker is worker]:
            self._lose(self.under_way.pop(key).task, "worker_lost", LOST_ATTEMPTS)
        return self._spawn(worker.index)

    def _dispatch(self) -> None:
        """Assign new groups to workers within the limits. Each group goes to the worker with the fewest rollouts in
        progress.
        """
        ready = [worker for worker in self.workers if worker.is_ready]
        if not (ready and self.version and self._room()):
            return
        load = {id(worker): 0 for worker in ready}
        for under_way in self.under_way.values():
            if id(under_way.worker) in load:
                load[id(under_way.worker)] += under_way.task.size
        least = [(load[id(worker)], position) for position, worker in enumerate(ready)]
        heapq.heapify(least)
        while self._room():
            busy, position = least[0]
            task, worker = self.source.next(), ready[position]
            task.version = self.version
            self.under_way[task.group_id] = _UnderWay(task, worker)
            self.ledger.dispatch(task.size)
            worker.send("task", task)
            heapq.heapreplace(least, (busy + task.size, position))

    def _room(self) -> bool:
        """Return whether another group may begin. The limits of ``max_inflight``, of the queue and of ``window`` are
        checked.
        """
        size, writing, waiting = self.settings.group_size, self.ledger.writing, len(self.rollout_buffer)
        if not writing and not waiting:
            # At least one group must be in progress, even if it exceeds a limit.
            return True
        reserved = (writing + size) * self.settings.rollout_tokens
        ahead = writing + waiting + self.ledger.held + size
        paced = self.settings.window is None or ahead <= self.settings.window
        return (
            paced
            and writing + size <= self.settings.max_inflight
            and self.rollout_buffer.room(writing + size, reserved)
        )
