"""What a worker runs: an engine with its weights, its waiting jobs and what it can do; made by name."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from posttrain.errors import ConfigError, PosttrainError, RolloutError
from posttrain.serve.jobs import Failure, Job, Score, Scored
from posttrain.types import Request, Rollout, Sampling

__all__ = ["Backend", "BatchBackend", "Unsupported", "failure_of"]

STATUS = ((ConfigError, 400),)


class Unsupported(PosttrainError, NotImplementedError):
    """Something that this engine does not offer."""


def failure_of(error: BaseException, status: int | None = None, **extra: Any) -> Failure:
    """An exception as it travels to the HTTP process."""
    if status is None:
        status = 501 if isinstance(error, Unsupported) else 400 if isinstance(error, ConfigError) else 500
    return Failure(type(error).__name__, str(error), status, extra)


class Backend:
    """An engine that is being served; methods run between two steps of the worker's loop.

    Attributes:
        name: Of the engine.
        finished: Jobs that ended, with why they failed or None; whoever runs the loop takes them away.
    """

    name = "none"
    accepts_lora = False
    scores = False
    sleeps = False
    beats = True  # `advance` returns within seconds, so that silence means that the worker is stuck.

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.waiting: list[tuple[int, int, Job, int]] = []
        self.finished: list[tuple[Job, Failure | None]] = []
        self.jobs: dict[int, Job] = {}
        self.tokens = 0
        self._order = itertools.count()

    # Generation ------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job: lower priority numbers first, then in the order of arrival."""
        self.jobs[job.id] = job
        if job.left == 0:
            self._end(job)
        for place, ask in enumerate(job.asks):
            if ask.n:
                heapq.heappush(self.waiting, (job.priority, next(self._order), job, place))

    def abort(self, job_id: int) -> bool:
        """Forget a job; false where it has ended."""
        job = self._taken_back(job_id)
        if job is not None:
            del self.jobs[job_id]
            self.drop(job)
        return job is not None

    def _taken_back(self, job_id: int) -> Job | None:
        """The job, of which nothing waits any more."""
        job = self.jobs.get(job_id)
        if job is not None:
            self.waiting = [entry for entry in self.waiting if entry[2] is not job]
            heapq.heapify(self.waiting)
        return job

    def drop(self, job: Job) -> None:
        """Stop writing a job's completions."""

    def finish_early(self, job_id: int) -> bool:
        """End a job with what is written of it; completions that were not begun are empty. False where it has ended."""
        job = self._taken_back(job_id)
        if job is None:
            return False
        self.cut(job)
        for place, ask in enumerate(job.asks):
            for index in range(ask.n):
                if job.rollouts[place][index] is None:
                    self.deliver(job, place, index, Rollout(ask.prompt_ids, [], [], "abort"))
        return True

    def cut(self, job: Job) -> None:
        """Deliver what is written of a job's completions, and stop writing them."""

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self.waiting)

    @property
    def running(self) -> int:
        """Completions that are being written."""
        return 0

    def advance(self) -> None:
        """Do a piece of the work and return."""
        raise NotImplementedError

    def rest(self) -> None:
        """Nothing is written from now on until the next `advance`: other work may use the model."""

    def deliver(self, job: Job, place: int, index: int, rollout: Rollout) -> None:
        """Take a completion in; the last one ends its job."""
        if job.rollouts[place][index] is None:
            job.left -= 1
        job.rollouts[place][index] = rollout
        self.tokens += len(rollout.token_ids)
        if job.left == 0 and job.id in self.jobs:
            self._end(job)

    def fail(self, job: Job, failure: Failure) -> None:
        """End a job without a result."""
        if self.abort(job.id):
            self.finished.append((job, failure))

    def _end(self, job: Job) -> None:
        del self.jobs[job.id]
        self.finished.append((job, None))

    # Weights ---------------------------------------------------------------------------------------------------------

    def begin_update(self, adapter: dict[str, Any] | None) -> None:
        """New weights are on their way."""
        raise NotImplementedError

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, list[str]]:
        """How many were taken, and names that the engine does not have."""
        raise NotImplementedError

    def end_update(self, version: int) -> list[str]:
        """All came: the names that nothing came for."""
        raise NotImplementedError

    def join(self, **spec: Any) -> None:
        """Join the trainer's weight-update group.

        Raises:
            Unsupported: The engine receives none.
        """
        raise Unsupported(
            f"the {self.name} engine receives no broadcasts of weights. Push them with /begin_update/, /update_bucket/ and "
            "/end_update/."
        )

    def receive(self, parts: list[dict[str, Any]], *, packed: bool) -> list[tuple[str, Tensor]]:
        """Tensors of one broadcast, or of one each."""
        raise Unsupported("no weight-update group was joined; call /init_communicator/ first.")

    def leave(self) -> None:
        """Leave the weight-update group; fine without one."""

    # Other -----------------------------------------------------------------------------------------------------------

    def score(self, items: list[Score], top: int, temperature: float) -> list[Scored]:
        """Log-probs of given sequences."""
        raise Unsupported(f"the {self.name} engine does not score sequences; serve with --engine native or vllm.")

    def reset_cache(self) -> bool:
        """Forget keys and values that outlive a request; false where it could not."""
        return True

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 keeps the weights, level 2 does not."""
        raise Unsupported(f"the {self.name} engine does not sleep.")

    def wake(self, tags: list[str] | None) -> None:
        """Take memory again."""
        raise Unsupported(f"the {self.name} engine does not sleep.")

    def info(self) -> dict[str, Any]:
        """What `/info/` says of it."""
        return {"engine": self.name, "accepts_lora": self.accepts_lora, "scores": self.scores}

    def close(self) -> None:
        """It is not used again."""


class BatchBackend(Backend):
    """Any `RolloutEngine`: what waits is one call of ``generate``, and joins nothing that runs.

    Args:
        engine: Its own weights, or a copy.
        own_sampling: Whether the engine heeds the sampling of each request; otherwise a call holds equal ones.
        most: Completions of one call.
    """

    beats = False

    def __init__(self, engine: Any, *, own_sampling: bool = False, most: int = 256, tokenizer: Any = None) -> None:
        super().__init__(tokenizer)
        self.engine, self.own_sampling, self.most = engine, own_sampling, most
        self.name = engine.name
        self.names: set[str] = set()
        self._running = 0

    @property
    def running(self) -> int:
        """See `Backend`."""
        return self._running

    def advance(self) -> None:
        """One call of the engine with what waits."""
        taken = self._take()
        asks = [job.asks[place] for job, place in taken]
        requests = [Request(a.prompt_ids, a.n, a.sampling) for a in asks]
        self._running = sum(a.n for a in asks)
        try:
            rollouts = self.engine.generate(requests, asks[0].sampling)
            if len(rollouts) != self._running:
                raise RolloutError(f"the engine gave {len(rollouts)} completions where {self._running} were asked for.")
        except Exception as error:
            for job in {id(job): job for job, _ in taken}.values():
                self.fail(job, failure_of(error))
            return
        finally:
            self._running = 0
        stream = iter(rollouts)
        for job, place in taken:
            for index in range(job.asks[place].n):
                self.deliver(job, place, index, next(stream))

    def _take(self) -> list[tuple[Job, int]]:
        """The first that waits, and those behind it that a call can take along."""
        taken: list[tuple[Job, int]] = []
        left, count = [], 0
        first: Sampling | None = None
        while self.waiting:
            entry = heapq.heappop(self.waiting)
            ask = entry[2].asks[entry[3]]
            alike = first is None or self.own_sampling or ask.sampling == first
            if alike and (not taken or count + ask.n <= self.most):
                first = first or ask.sampling
                taken.append((entry[2], entry[3]))
                count += ask.n
            else:
                left.append(entry)
        self.waiting = left
        heapq.heapify(self.waiting)
        return taken

    def begin_update(self, adapter: dict[str, Any] | None) -> None:
        """See `Backend`."""
        if adapter is not None and not self.accepts_lora:
            raise Unsupported(f"the {self.name} engine takes no adapters: merge it, and push whole weights.")
        self.names = set()
        self._tensors: list[tuple[str, Tensor]] = []

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, list[str]]:
        """Kept until the end: engines take a whole set."""
        pairs = [(name, tensor.clone()) for name, tensor in tensors]
        self._tensors += pairs
        return len(pairs), []

    def end_update(self, version: int) -> list[str]:
        """See `Backend`."""
        pairs, self._tensors = self._tensors, []
        self.engine.load_weights(pairs, version)
        return []

    def close(self) -> None:
        """See `Backend`."""
        with contextlib.suppress(Exception):
            self.engine.close()


Factory = Callable[[Any, int], Backend]
