"""`Ledger`: counts of rollouts that were trained on or dropped. `FailureBudget`, `DropWatch` and `MismatchGuard` react to
failed, dropped and mismatched rollouts.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.errors import RolloutError

logger = logging.getLogger(__name__)


# Reasons why a rollout was not used for training.
DROP_REASONS = (
    "stale_in_flight",  # the rollout's weights became too old before its generation ended
    "stale_in_queue",  # the rollout's weights became too old while it waited in the queue
    "failed",  # the engine, a tool, an environment or a reward function raised an error
    # no other completion of the rollout's group is left, so its reward cannot be compared with another reward
    "alone",
    "worker_lost",  # the rollout's worker process died
    "too_long",  # the rollout is longer than the maximum row length
    "untrainable",  # no token of the rollout contributes to the loss
    "skipped",  # the rollout's update was skipped, because policy and sampler differed too much
    # the rollout was in progress when the run ended, or when the checkpoint was written from which this run resumed
    "unfinished",
)


@dataclass
class Ledger:
    """Counts of rollouts by state. A rollout is in generation, waits in the queue, is held by the current step, was used
    for training, or was dropped.

    ``produced = trained + dropped + in flight`` holds after every call, where "in flight" is the sum of the first three
    states. `audit` compares the counts with the actual numbers.

    >>> ledger = Ledger()
    >>> ledger.dispatch(4); ledger.arrive(3); ledger.drop(1, "failed", "writing")
    >>> ledger.hold(2); ledger.train(); ledger.in_flight, ledger.trained, ledger.dropped["failed"]
    (1, 2, 1)
    """

    produced: int = 0
    trained: int = 0
    writing: int = 0
    waiting: int = 0
    held: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def in_flight(self) -> int:
        """Number of rollouts that were neither used for training nor dropped yet."""
        return self.writing + self.waiting + self.held

    def dispatch(self, count: int) -> None:
        """Record that a worker starts to generate ``count`` rollouts."""
        with self.lock:
            self.produced += count
            self.writing += count

    def arrive(self, count: int) -> None:
        """Record that ``count`` rollouts have arrived with their scores and wait in the queue."""
        self._move("writing", "waiting", count)

    def hold(self, count: int) -> None:
        """Record that the trainer takes ``count`` rollouts from the queue for the current step."""
        self._move("waiting", "held", count)

    def train(self) -> None:
        """Record that the step is done and its rollouts were used for training."""
        with self.lock:
            self.trained += self.held
            self.held = 0

    def drop(self, count: int, reason: str, place: str) -> None:
        """Record that ``count`` rollouts will not be used for training. ``place`` is the state in which they were before:
        ``writing``, ``waiting`` or ``held``.
        """
        assert reason in DROP_REASONS, reason
        with self.lock:
            setattr(self, place, getattr(self, place) - count)
            self.dropped[reason] += count

    def _move(self, source: str, target: str, count: int) -> None:
        with self.lock:
            setattr(self, source, getattr(self, source) - count)
            setattr(self, target, getattr(self, target) + count)

    def audit(self, *, writing: int | None = None, waiting: int | None = None) -> None:
        """Compare the recorded counts with the actual numbers of rollouts in the workers and in the queue.

        Args:
            writing: Number of rollouts that workers have started but not returned. None: not compared.
            waiting: Number of rollouts in the queue. None: not compared.

        Raises:
            RolloutError: The counts are inconsistent: a rollout was lost or counted twice.
        """
        with self.lock:
            accounted = self.trained + sum(self.dropped.values()) + self.in_flight
            places = {"writing": (self.writing, writing), "waiting": (self.waiting, waiting)}
            wrong = {k: pair for k, pair in places.items() if pair[1] is not None and pair[0] != pair[1]}
            if accounted == self.produced and not wrong and min(self.writing, self.waiting, self.held) >= 0:
                return
            seen = "".join(
                f"; {real} are {place}, but {booked} are recorded" for place, (booked, real) in wrong.items()
            )
            raise RolloutError(
                f"the counts of rollouts are inconsistent: produced {self.produced}, trained {self.trained}, dropped "
                f"{dict(self.dropped)}, in flight {self.in_flight}{seen}. This is a bug in posttrain; please report "
                "it."
            )

    def state(self) -> dict[str, object]:
        """Return the counts for a checkpoint. The counts include rollouts in flight as dropped with the reason
        ``unfinished``.
        """
        with self.lock:
            dropped = self.dropped + Counter({"unfinished": self.in_flight})
            return {"produced": self.produced, "trained": self.trained, "dropped": dict(dropped)}

    def load(self, state: dict[str, object]) -> None:
        """Restore counts that `state` returned."""
        with self.lock:
            self.produced, self.trained = int(state["produced"]), int(state["trained"])  # type: ignore[call-overload]
            self.dropped = Counter(state["dropped"])  # type: ignore[arg-type]
            self.writing = self.waiting = self.held = 0


class FailureBudget:
    """Stops a run if too many rollouts fail.

    Args:
        share: Maximum fraction of failed rollouts among the last ``window`` rollouts.
        window: Number of rollouts in the window.
    """

    def __init__(self, share: float, window: int = 200) -> None:
        self.share, self.window = share, window
        self.recent: deque[str | None] = deque(maxlen=window)

    def add(self, fine: int, errors: Sequence[str]) -> None:
        """Record how many rollouts of a group succeeded, and the errors of its failed rollouts.

        Raises:
            RolloutError: Too many rollouts failed. The message contains the most common error.
        """
        self.recent.extend([None] * fine)
        self.recent.extend(errors)
        failed = [text for text in self.recent if text is not None]
        if len(failed) > self.share * self.window:
            common, times = Counter(failed).most_common(1)[0]
            raise RolloutError(
                f"{len(failed)} of the last {len(self.recent)} rollouts failed, more than "
                f"rollout_failure_budget={self.share:g} of {self.window} allows. The most common error ({times} "
                f"times): {common}"
            )


class DropWatch:
    """Warns if too many rollouts are dropped because they are too old. If this happens in several consecutive windows of
    rollouts, the limit of rollouts in flight is halved.

    Args:
        max_staleness: Value of the option ``max_staleness``, which the warning shows.
        window: Number of rollouts per window.
    """

    # WARN: a warning is logged if the fraction of dropped rollouts in a window is above WARN. CUT: a window is bad if this
    # fraction is above CUT. PATIENCE: the limit is halved after PATIENCE consecutive bad windows.
    WARN, CUT, PATIENCE = 0.5, 0.3, 3

    def __init__(self, max_staleness: int, window: int = 100) -> None:
        self.max_staleness, self.window = max_staleness, window
        self.seen = self.stale = self.bad_windows = 0

    def add(self, fresh: int, stale: int, limit: int) -> int:
        """Record the number of accepted rollouts and of rollouts that were too old. Return the new limit of rollouts in
        flight.
        """
        self.seen += fresh + stale
        self.stale += stale
        if self.seen < self.window:
            return limit
        share = self.stale / self.seen
        self.seen = self.stale = 0
        if share > self.WARN:
            logger.warning(
                "%.0f %% of rollouts were discarded because they were more than %d weight versions old: generation "
                "is faster than training. Lower max_inflight_tasks (now %d), raise max_staleness, or raise "
                "weight_sync_steps for fewer versions.",
                100 * share, self.max_staleness, limit,
            )  # fmt: skip
        self.bad_windows = self.bad_windows + 1 if share > self.CUT else 0
        if self.bad_windows < self.PATIENCE:
            return limit
        self.bad_windows = 0
        return max(1, limit // 2)


class MismatchGuard:
    """Detects that policy and sampler differ too much. The mismatch of a step is the mean of ``rho - 1 - log rho`` over
    tokens. The mismatch is too large if it is above ``limit`` in ``patience`` consecutive steps.

    Args:
        limit: Maximum mismatch in nats per token.
        patience: Number of consecutive steps above ``limit`` after which the update is skipped.
    """

    def __init__(self, limit: float = 0.5, patience: int = 20) -> None:
        self.limit, self.patience = limit, patience
        self.steps = self.alarms = 0

    def add(self, kl: float) -> bool:
        """Record the mismatch of a step. Return True if the next update must be skipped and the queue must be emptied.

        Raises:
            RolloutError: The mismatch is too large for the second time, although the queue was emptied the first time.
        """
        self.steps = self.steps + 1 if kl > self.limit else 0
        if self.steps < self.patience:
            return False
        self.steps, self.alarms = 0, self.alarms + 1
        if self.alarms > 1:
            raise RolloutError(
                f"policy and sampler differ by {kl:.3g} nats per token. This difference has again been above {self.limit:g} "
                f"for {self.patience} steps, although weights were pushed and the queue was emptied. Lower learning_rate or "
                "max_staleness, and check that the engine uses the trainer's temperature and weights."
            )
        logger.warning(
            "the mismatch KL of policy and sampler is %.3g, above %g for %d steps: the update is skipped, weights "
            "are pushed and the queue is emptied.", kl, self.limit, self.patience,
        )  # fmt: skip
        return True


def balanced_shares(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Assign samples to processes so that their computing times are similar. Samples are assigned in descending order
    of length. Each sample goes to the process with the smallest sum of squared lengths so far.

    The result contains one list of sample indices per process. With at least ``world`` samples, no list is empty.

    >>> balanced_shares([4, 3, 2, 1], 2)
    [[0], [1, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    # Heap of (load, process). The first item is the process with the lowest load.
    loads = [(0, target) for target in range(world)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, target = loads[0]
        shares[target].append(index)
        heapq.heapreplace(loads, (load + lengths[index] ** 2, target))
    return [sorted(share) for share in shares]
