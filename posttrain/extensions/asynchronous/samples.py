"""`RolloutSample`: one scored row on its way from a worker to the trainer, with the version of every token."""

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
    # Workers that need neither start in a fraction of a second.

    from posttrain.data.samplers import Origin, PromptStream


@dataclass(slots=True)
class RolloutSample:
    """One row for the trainer: a trajectory, or the part of one since its context was last rewritten.

    Attributes:
        prompt: As the dataset has it, or the text of the row's context.
        completion: What reward functions saw: text or messages.
        input_ids: Context and what the model wrote.
        completion_mask: 1 on tokens the model wrote; as long as ``input_ids``, and so is the next.
        old_log_probs: Of the engine; 0.0 where the mask is 0.
        advantage: Of the whole trajectory.
        model_version: Of the weights when the group's first request was sent: its oldest token is not older.
        group_id: Completions of one prompt share it.
        metrics: Numbers to log: rewards by name, tool calls, seconds.
        spans: Runs of (weights version, tokens) of what the model wrote.
        pictures: Of the context, as `Prompt.pictures`: encoded bytes or paths, never pixels.
        teacher_id: Column of the row, which names its teacher where there are several.
        scores: What teachers behind servers say of the completion, by their names; a future of it while they are asked.
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
        """Where the first trained token stands."""
        return next((i for i, kept in enumerate(self.completion_mask) if kept), len(self.completion_mask))

    def example(self) -> dict[str, Any]:
        """What is known of its row of the dataset."""
        return {"prompt": self.prompt} | ({} if self.teacher_id is None else {"teacher_id": self.teacher_id})

    def rollout(self) -> Rollout:
        """Context and what followed it, apart."""
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
        """Refuse a row that would train the wrong thing.

        Raises:
            RolloutError: Lists of different lengths, a trained token without a log-prob or with one that cannot be, without
                anything before it, or an advantage or a token id that is no number in its range.
        """
        lengths = (len(self.input_ids), len(self.completion_mask), len(self.old_log_probs))
        if len(set(lengths)) > 1:
            raise RolloutError(
                f"group {self.group_id}: input_ids, completion_mask and old_log_probs have lengths {lengths}; they must be equal."
            )
        pairs = zip(self.completion_mask, self.old_log_probs, strict=True)
        unknown = sum(bool(kept) and (logp is None or math.isnan(logp)) for kept, logp in pairs)
        if unknown:
            raise RolloutError(
                f"group {self.group_id}: {unknown} trained tokens have no log-prob. Ask the engine for those of sampled tokens."
            )
        given_number(self.advantage, f"group {self.group_id}: advantage")
        pairs = zip(self.completion_mask, self.old_log_probs, strict=True)
        if any(kept and not -math.inf < logp <= ROUNDING for kept, logp in pairs):
            token_logps(self.old_log_probs, self.completion_mask, f"group {self.group_id}: old_log_probs")
        if any(type(token) is not int or token < 0 for token in self.input_ids):
            self.input_ids = token_ids(self.input_ids, f"group {self.group_id}: input_ids")
        if self.start == 0:
            raise RolloutError(f"group {self.group_id}: the first token is trained, and nothing precedes it.")


@dataclass(slots=True)
class Trajectory:
    """All rows of one rollout, which are trained in one optimiser step or not at all.

    Attributes:
        samples: At least one.
        arrived: Weights version of the trainer when it came.
        finished: Its model came to an end by itself.
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
        """Of all rows."""
        return sum(len(sample) for sample in self.samples)

    def rollout(self) -> Rollout:
        """Its first row as a completion, the others as branches of it."""
        first, *others = [sample.rollout() for sample in self.samples]
        reason: FinishReason = "stop" if self.finished else "length"
        return replace(first, finish_reason=reason, branches=others)


@dataclass(slots=True)
class GroupTask:
    """A prompt that is to be completed ``size`` times.

    Attributes:
        group_id: Counts prompts over the whole run.
        row: Of the dataset.
        size: G.
        seed: Of its sampling, and of its environments.
        attempt: How often it was begun before.
        version: Least weights version it may be begun with.
    """

    group_id: int
    row: dict[str, Any]
    size: int
    seed: int
    attempt: int = 0
    version: int = 0


@runtime_checkable
class RolloutWorkerProtocol(Protocol):
    """What the trainer asks of a writer of rollouts."""

    # With ``get(timeout)``, which raises `queue.Empty`; holds samples or trajectories.
    rollout_buffer: Any

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, version: int) -> None: ...
    def check_health(self, stale_after_s: float | None = None) -> None: ...


class RolloutBuffer:
    """First in, first out. It never refuses: the pool asks `room` before it begins another group.

    Args:
        max_samples: Trajectories it is meant to hold.
        max_tokens: Tokens it is meant to hold.
        arriving: Called with each as it comes.
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
        """Whether so many more would fit."""
        fits = len(self) + samples <= self.max_samples
        return fits and (self.max_tokens is None or self.tokens + tokens <= self.max_tokens)

    def put(self, item: Trajectory) -> None:
        """Append; never waits."""
        self._count(item.tokens)
        if self.arriving is not None:
            self.arriving(item)
        self._items.put(item)

    def get(self, timeout: float | None = None) -> Trajectory:
        """The oldest.

        Raises:
            queue.Empty: Nothing came within ``timeout`` seconds.
        """
        item = self._items.get(timeout=timeout)
        self._count(-item.tokens)
        return item

    def drain(self) -> list[Trajectory]:
        """Take everything."""
        drained = []
        with contextlib.suppress(queue.Empty):
            while True:
                drained.append(self.get(timeout=0))
        return drained

    def _count(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens


class TaskSource:
    """Prompts as tasks of workers, without end: those that came to nothing are asked again.

    Args:
        prompts: Rows in their order.
        group_size: Completions of a prompt.
        seed: Of every group's sampling.

    >>> from posttrain.data.samplers import PromptStream
    >>> source = TaskSource(PromptStream([{"prompt": "a"}, {"prompt": "b"}], seed=0, shuffle=False), 2)
    >>> [source.next().row["prompt"] for _ in range(3)], source.prompts.passes
    (['a', 'b', 'a'], 1)
    """

    def __init__(self, prompts: PromptStream, group_size: int, seed: int = 0) -> None:
        self.prompts, self.group_size, self.seed = prompts, group_size, seed
        # Groups that were made, which numbers the next one.
        self.group = 0
        self._again: deque[tuple[GroupTask, Origin]] = deque()
        # Where the groups under way stand in the data.
        self._origin: dict[int, Origin] = {}

    def next(self) -> GroupTask:
        """The next prompt; those that were given back come first."""
        if self._again:
            task, origin = self._again.popleft()
        else:
            origin, row = self.prompts.next()
            task = self._task(row, 0)
        self._origin[task.group_id] = origin
        return task

    def give_back(self, task: GroupTask) -> None:
        """Its completions came to nothing: ask again, as another group with other draws."""
        origin = self._origin.pop(task.group_id)
        self._again.append((self._task(task.row, task.attempt + 1), origin))

    def done(self, group_id: int) -> None:
        """A group was trained or dropped for good."""
        self._origin.pop(group_id, None)

    def _task(self, row: dict[str, Any], attempt: int) -> GroupTask:
        number, self.group = self.group, self.group + 1
        seed = (self.seed * 1_000_003 + number * 7_919) % 2**31
        return GroupTask(number, row, self.group_size, seed, attempt)

    def state(self) -> dict[str, Any]:
        """Where it stands; prompts under way are asked for again after a resume."""
        pending = [*(origin for _, origin in self._again), *self._origin.values()]
        return {"prompts": self.prompts.state(), "group": self.group, "pending": [list(x) for x in pending]}

    def load(self, state: dict[str, Any]) -> None:
        """Undo `state`; a stream goes on without its prompts under way."""
        self.prompts.load(state["prompts"])
        self.group, self._origin, self._again = state["group"], {}, deque()
        for passes, position in state["pending"] if isinstance(self.prompts.dataset, Sized) else []:
            origin = (passes, position)
            self._again.append((self._task(self.prompts.at(origin), 0), origin))
