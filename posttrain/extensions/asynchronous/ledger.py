"""How old a sample may be when it is trained, and an account of what became of every rollout."""

from __future__ import annotations

import heapq
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.errors import RolloutError

logger = logging.getLogger(__name__)


# Why a rollout was never trained.
DROP_REASONS = (
    "stale_in_flight",  # its weights were too old while it was still being written
    "stale_in_queue",  # or when its turn came
    "failed",  # the engine, a tool, an environment or a reward raised
    "alone",  # fewer than two of its group are left to be compared
    "worker_lost",  # its process died
    "too_long",  # longer than a row may be
    "untrainable",  # no token of it carries loss
    "skipped",  # its update was left out, since policy and sampler were too far apart
    "unfinished",  # it was on its way when the run ended, or when a checkpoint was written that is resumed from
)


@dataclass
class Ledger:
    """Counts of rollouts, each in exactly one place: written, waiting, held by the step, trained, or dropped.

    ``produced = trained + dropped + in flight`` holds after every call; `audit` compares the places with what is really there.

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
        """Rollouts that are neither trained nor dropped yet."""
        return self.writing + self.waiting + self.held

    def dispatch(self, count: int) -> None:
        """A worker begins to write so many."""
        with self.lock:
            self.produced += count
            self.writing += count

    def arrive(self, count: int) -> None:
        """So many are written, scored, and wait."""
        self._move("writing", "waiting", count)

    def hold(self, count: int) -> None:
        """The trainer takes so many for its step."""
        self._move("waiting", "held", count)

    def train(self) -> None:
        """The step is done: what it held is trained."""
        with self.lock:
            self.trained += self.held
            self.held = 0

    def drop(self, count: int, reason: str, place: str) -> None:
        """So many of a place (``writing``, ``waiting`` or ``held``) will never be trained."""
        assert reason in DROP_REASONS, reason
        with self.lock:
            setattr(self, place, getattr(self, place) - count)
            self.dropped[reason] += count

    def _move(self, source: str, target: str, count: int) -> None:
        with self.lock:
            setattr(self, source, getattr(self, source) - count)
            setattr(self, target, getattr(self, target) + count)

    def audit(self, *, writing: int | None = None, waiting: int | None = None) -> None:
        """Compare with what workers and queue hold.

        Args:
            writing: Rollouts that workers were asked for and have not returned; None: nobody knows.
            waiting: Rollouts in the queue.

        Raises:
            RolloutError: The account does not add up: a rollout was lost or counted twice.
        """
        with self.lock:
            accounted = self.trained + sum(self.dropped.values()) + self.in_flight
            places = {"writing": (self.writing, writing), "waiting": (self.waiting, waiting)}
            wrong = {k: pair for k, pair in places.items() if pair[1] is not None and pair[0] != pair[1]}
            if accounted == self.produced and not wrong and min(self.writing, self.waiting, self.held) >= 0:
                return
            seen = "".join(f"; {real} are {place}, and {booked} are booked" for place, (booked, real) in wrong.items())
            raise RolloutError(
                f"the account of rollouts does not add up: produced {self.produced}, trained {self.trained}, dropped "
                f"{dict(self.dropped)}, in flight {self.in_flight}{seen}. This is a mistake of the library; please report it."
            )

    def state(self) -> dict[str, object]:
        """For a checkpoint: what is in flight counts as unfinished after a resume."""
        with self.lock:
            dropped = self.dropped + Counter({"unfinished": self.in_flight})
            return {"produced": self.produced, "trained": self.trained, "dropped": dict(dropped)}

    def load(self, state: dict[str, object]) -> None:
        """Undo `state`."""
        with self.lock:
            self.produced, self.trained = int(state["produced"]), int(state["trained"])  # type: ignore[call-overload]
            self.dropped = Counter(state["dropped"])  # type: ignore[arg-type]
            self.writing = self.waiting = self.held = 0


class FailureBudget:
    """Stops a run in which too many rollouts fail.

    Args:
        share: Of the last ``window`` rollouts.
        window: How far back it looks.
    """

    def __init__(self, share: float, window: int = 200) -> None:
        self.share, self.window = share, window
        self.recent: deque[str | None] = deque(maxlen=window)

    def add(self, fine: int, errors: Sequence[str]) -> None:
        """Outcomes of a group.

        Raises:
            RolloutError: More failed than allowed; shows the commonest error.
        """
        self.recent.extend([None] * fine)
        self.recent.extend(errors)
        failed = [text for text in self.recent if text is not None]
        if len(failed) > self.share * self.window:
            common, times = Counter(failed).most_common(1)[0]
            raise RolloutError(
                f"{len(failed)} of the last {len(self.recent)} rollouts failed, more than "
                f"rollout_failure_budget={self.share:g} of {self.window} allows. The commonest error ({times} times): {common}"
            )


class DropWatch:
    """Says when too much of what is generated is thrown away, and halves what is generated ahead.

    Args:
        max_staleness: For the message.
        window: Rollouts it judges at a time.
    """

    WARN, CUT, PATIENCE = 0.5, 0.3, 3  # Shares dropped of a window; windows in a row before the limit is halved.

    def __init__(self, max_staleness: int, window: int = 100) -> None:
        self.max_staleness, self.window = max_staleness, window
        self.seen = self.stale = self.bad_windows = 0

    def add(self, fresh: int, stale: int, limit: int) -> int:
        """Count rollouts that were taken or found too old; returns the new limit of rollouts under way (or the old one)."""
        self.seen += fresh + stale
        self.stale += stale
        if self.seen < self.window:
            return limit
        share = self.stale / self.seen
        self.seen = self.stale = 0
        if share > self.WARN:
            logger.warning(
                "%.0f %% of rollouts were discarded as older than %d weight versions; generation outpaces training. Lower "
                "max_inflight_tasks (now %d), raise max_staleness, or raise weight_sync_steps so that versions pass more slowly.",
                100 * share, self.max_staleness, limit,
            )  # fmt: skip
        self.bad_windows = self.bad_windows + 1 if share > self.CUT else 0
        if self.bad_windows < self.PATIENCE:
            return limit
        self.bad_windows = 0
        return max(1, limit // 2)


class MismatchGuard:
    """Notices a policy that has run away from what samples: mean of ``rho - 1 - log rho`` above a limit for many steps.

    Args:
        limit: Nats per token.
        patience: Steps in a row.
    """

    def __init__(self, limit: float = 0.5, patience: int = 20) -> None:
        self.limit, self.patience = limit, patience
        self.steps = self.alarms = 0

    def add(self, kl: float) -> bool:
        """One step's mismatch; True when the next update is to be left out, weights pushed and the queue drained.

        Raises:
            RolloutError: The second time: draining did not help.
        """
        self.steps = self.steps + 1 if kl > self.limit else 0
        if self.steps < self.patience:
            return False
        self.steps, self.alarms = 0, self.alarms + 1
        if self.alarms > 1:
            raise RolloutError(
                f"policy and sampler are {kl:.3g} nats per token apart and were above {self.limit:g} for {self.patience} steps, "
                "again after the weights were pushed and the queue was drained. Lower learning_rate or max_staleness; check "
                "that the engine samples at this temperature and from these weights."
            )
        logger.warning(
            "policy mismatch KL %.3g, above %g for %d steps: the update is left out, the weights are pushed and the queue is "
            "drained.", kl, self.limit, self.patience,
        )  # fmt: skip
        return True


def balanced_shares(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Indices of samples for each process: longest first, each to the one with the smallest sum of squared lengths.

    None is empty while there are at least ``world`` samples.

    >>> balanced_shares([4, 3, 2, 1], 2)
    [[0], [1, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, target) for target in range(world)]  # A heap: the least loaded one first.
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, target = loads[0]
        shares[target].append(index)
        heapq.heapreplace(loads, (load + lengths[index] ** 2, target))
    return [sorted(share) for share in shares]
