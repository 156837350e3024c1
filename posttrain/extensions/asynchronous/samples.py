"""Rollouts and tasks of asynchronous training. `RolloutSample` and `Trajectory` are scored rollouts from workers.
`GroupTask` is a task, `TaskSource` creates tasks, and `RolloutBuffer` is the queue of finished rollouts.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from posttrain.errors import ROUNDING, RolloutError
from posttrain.types import FinishReason, Rollout
from posttrain.values import given_number, token_ids, token_logps

if TYPE_CHECKING:
    # Import these packages only for type checking, so that a worker starts faster.

    from posttrain.data.samplers import Origin, PromptStream


@dataclass(slots=True)
class RolloutSample:
    """One training row: a whole rollout, or the part of a rollout after its context was rewritten for the last time.

    Attributes:
        prompt: Prompt from the dataset, or the text of the row's context.
        completion: Completion as text or messages, as reward functions receive it.
        input_ids: Token ids of the context and the completion.
        completion_mask: 1 for tokens that the model sampled, else 0. Same length as ``input_ids``.
        old_log_probs: The engine's log-probs. 0.0 for tokens whose ``completion_mask`` is 0. Same length as ``input_ids``.
        advantage: Advantage of the whole rollout. All rows of a rollout have the same advantage.
        model_version: Version of the weights when the group's first request was sent. No token was sampled with older
            weights.
        group_id: Id of the prompt. All completions of one prompt have the same id.
        metrics: Values to log: rewards by name, tool calls, seconds.
        spans: Versions of the weights that sampled the model's tokens, as (version, number of consecutive tokens).
        pictures: Images of the context, as in `Prompt.pictures`: encoded bytes or paths, not pixels.
        teacher_id: Name of the row's teacher, if there are several teachers.
        scores: Scores from teacher servers, as a mapping or as a future that returns the mapping.
    """

    prompt: Any
    completion: Any
    input_ids: list[int]
    completion_mask: list[int]
    old_log_probs: list[float]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)
    pictures: Sequence[Any] = ()
    teacher_id: Any = None
    scores: Any = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def start(self) -> int:
        """Index of the first token in ``input_ids`` that contributes to the loss."""
        return next((i for i, in_loss in enumerate(self.completion_mask) if in_loss), len(self.completion_mask))

    def example(self) -> dict[str, Any]:
        """Return the columns of the dataset row that are stored in this sample: ``prompt`` and ``teacher_id``."""
        return {"prompt": self.prompt} | ({} if self.teacher_id is None else {"teacher_id": self.teacher_id})

    def rollout(self) -> Rollout:
        """Convert the row to a rollout, with context and completion separated."""
        start = self.start
        mask = self.completion_mask[start:]
        logp, tools = self.old_log_probs[start:], None if all(mask) else mask
        return Rollout(
            self.input_ids[:start],
            self.input_ids[start:],
            logp,
            "stop",
            self.model_version,
            tools,
            pictures=self.pictures,
        )

    def check(self) -> None:
        """Reject an invalid row.

        Raises:
            RolloutError: The lists have different lengths, the advantage or a token id is invalid, or a token with loss has
                no valid log-prob or no preceding token.
        """
        lengths = (len(self.input_ids), len(self.completion_mask), len(self.old_log_probs))
        if len(set(lengths)) > 1:
            raise RolloutError(
                f"group {self.group_id}: input_ids, completion_mask and old_log_probs have the lengths {lengths}, "
                "which must be equal."
            )
        pairs = zip(self.completion_mask, self.old_log_probs, strict=True)
        unknown = sum(bool(in_loss) and (logp is None or math.isnan(logp)) for in_loss, logp in pairs)
        if unknown:
            raise RolloutError(
                f"group {self.group_id}: {unknown} tokens with loss have no log-prob. Request the log-probs of "
                "sampled tokens from the engine."
            )
        given_number(self.advantage, f"group {self.group_id}: advantage")
        pairs = zip(self.completion_mask, self.old_log_probs, strict=True)
        if any(in_loss and not -math.inf < logp <= ROUNDING for in_loss, logp in pairs):
            token_logps(self.old_log_probs, self.completion_mask, f"group {self.group_id}: old_log_probs")
        if any(type(token) is not int or token < 0 for token in self.input_ids):
            self.input_ids = token_ids(self.input_ids, f"group {self.group_id}: input_ids")
        if self.start == 0:
            raise RolloutError(f"group {self.group_id}: the first token has a loss, but no token precedes it.")


@dataclass(slots=True)
class Trajectory:
    """All rows of one rollout. One optimizer step trains on all rows together, or the whole rollout is dropped.

    Attributes:
        samples: Rows of the rollout, at least one.
        arrived: Version of the trainer's weights at the time when the rollout arrived.
        finished: Whether the model ended the rollout itself. False: the rollout was truncated.
    """

    samples: list[RolloutSample]
    arrived: int = 0
    finished: bool = True

    @property
    def group_id(self) -> int:
        return self.samples[0].group_id

    @property
    def version(self) -> int:
        return min(sample.model_version for sample in self.samples)

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(len(sample) for sample in self.samples)

    def rollout(self) -> Rollout:
        """Convert the rows to one `Rollout`. The first row becomes its completion, and all further rows become its branches."""
        first, *others = [sample.rollout() for sample in self.samples]
        reason: FinishReason = "stop" if self.finished else "length"
        return replace(first, finish_reason=reason, branches=others)


@dataclass(slots=True)
class GroupTask:
    """A prompt for which a worker samples ``size`` completions.

    Attributes:
        group_id: Number of the prompt in the run.
        row: Dataset row.
        size: Number of completions to sample (group size G).
        seed: Seed for sampling and for environments.
        attempt: Number of earlier attempts to sample completions of this prompt.
        version: Minimum version of the weights with which a worker may start this task.
    """

    group_id: int
    row: dict[str, Any]
    size: int
    seed: int
    attempt: int = 0
    version: int = 0


@runtime_checkable
class RolloutWorkerProtocol(Protocol):
    """Methods of a rollout worker that the trainer calls."""

    # Queue of samples or trajectories. Its method ``get(timeout)`` raises `queue.Empty` if nothing arrives in time.
    rollout_buffer: Any

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, version: int) -> None: ...
    def check_health(self, stale_after_s: float | None = None) -> None: ...


class RolloutBuffer:
    """FIFO queue of finished rollouts. `put` does not enforce the limits, because `WorkerPool` calls `room` before it
    starts a group.

    Args:
        max_samples: Maximum number of trajectories in the queue.
        max_tokens: Maximum number of tokens of all trajectories in the queue. None: no limit.
        arriving: Function called with each rollout that is put into the queue.
    """

    def __init__(
        self, max_samples: int, max_tokens: int | None = None, arriving: Callable[[Trajectory], None] | None = None
    ) -> None:
        self.arriving = arriving
        self.max_samples, self.max_tokens, self.tokens = max_samples, max_tokens, 0
        self._items: queue.SimpleQueue[Trajectory] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._items.qsize()

    def room(self, samples: int = 0, tokens: int = 0) -> bool:
        """Return whether the queue has space for ``samples`` additional rollouts with ``tokens`` tokens in total."""
        fits = len(self) + samples <= self.max_samples
        return fits and (self.max_tokens is None or self.tokens + tokens <= self.max_tokens)

    def put(self, item: Trajectory) -> None:
        """Append a rollout without waiting."""
        self._count(item.tokens)
        if self.arriving is not None:
            self.arriving(item)
        self._items.put(item)

    def get(self, timeout: float | None = None) -> Trajectory:
        """Remove and return the oldest rollout.

        Raises:
            queue.Empty: No rollout arrived within ``timeout`` seconds.
        """
        item = self._items.get(timeout=timeout)
        self._count(-item.tokens)
        return item

    def drain(self) -> list[Trajectory]:
        """Remove and return all rollouts."""
        drained = []
        with contextlib.suppress(queue.Empty):
            while True:
                drained.append(self.get(timeout=0))
        return drained

    def _count(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens


class TaskSource:
    """Infinite source of tasks, one per prompt. Prompts whose rollouts failed are retried.

    Args:
        prompts: Dataset rows in order.
        group_size: Number of completions per prompt.
        seed: Seed from which the seed of each group is derived.

    >>> from posttrain.data.samplers import PromptStream
    >>> source = TaskSource(PromptStream([{"prompt": "a"}, {"prompt": "b"}], seed=0, shuffle=False), 2)
    >>> [source.next().row["prompt"] for _ in range(3)], source.prompts.passes
    (['a', 'b', 'a'], 1)
    """

    def __init__(self, prompts: PromptStream, group_size: int, seed: int = 0) -> None:
        self.prompts, self.group_size, self.seed = prompts, group_size, seed
        # Number of groups that were created so far. It is the ``group_id`` of the next group.
        self.group = 0
        self._again: deque[tuple[GroupTask, Origin]] = deque()
        # Maps the id of each group in progress to the position of its prompt in the dataset.
        self._origin: dict[int, Origin] = {}

    def next(self) -> GroupTask:
        """Return the task of the next prompt. Prompts to retry come first."""
        if self._again:
            task, origin = self._again.popleft()
        else:
            origin, row = self.prompts.next()
            task = self._task(row, 0)
        self._origin[task.group_id] = origin
        return task

    def give_back(self, task: GroupTask) -> None:
        """Put back a prompt whose rollouts failed. The prompt is retried as a new group with a new seed."""
        origin = self._origin.pop(task.group_id)
        self._again.append((self._task(task.row, task.attempt + 1), origin))

    def done(self, group_id: int) -> None:
        """Record that a group is finished: it was used for training, or it was dropped and will not be retried."""
        self._origin.pop(group_id, None)

    def _task(self, row: dict[str, Any], attempt: int) -> GroupTask:
        number, self.group = self.group, self.group + 1
        seed = (self.seed * 1_000_003 + number * 7_919) % 2**31
        return GroupTask(number, row, self.group_size, seed, attempt)

    def state(self) -> dict[str, Any]:
        """Return the position in the prompts for a checkpoint. A resumed run samples new completions of the prompts that
        were in progress.
        """
        pending = [*(origin for _, origin in self._again), *self._origin.values()]
        return {"prompts": self.prompts.state(), "group": self.group, "pending": [list(x) for x in pending]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a position that `state` returned. If the dataset is a stream, prompts that were in progress are not
        sampled again.
        """
        self.prompts.load(state["prompts"])
        self.group, self._origin, self._again = state["group"], {}, deque()
        for passes, position in state["pending"] if isinstance(self.prompts.dataset, Sized) else []:
            origin = (passes, position)
            self._again.append((self._task(self.prompts.at(origin), 0), origin))
