"""Agents with a loop of their own: sessions that ask the model what they like, and rows made of what it answered."""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from posttrain.data.responses import parse_response
from posttrain.data.tokenize import tokenize_prompts
from posttrain.errors import RolloutError
from posttrain.rollouts.partial import Writer
from posttrain.rollouts.reconcile import FORK_THRESHOLD, Reconciled, Turn, reconcile
from posttrain.types import Request, Rollout, Sampling

__all__ = [
    "HarnessAdapter",
    "HarnessRolloutOutcome",
    "HarnessRolloutWorker",
    "HarnessSession",
    "Sessions",
    "TraceEntry",
    "harness_reward",
    "has_tool_call",
]

logger = logging.getLogger(__name__)

TURNS = 8  # Of a session that an adapter drives, when nobody said.
LOOK_S = 0.05


class HarnessSession(Protocol):
    """One task, from its beginning to its reward; ``verify`` says what the outcome is worth."""

    def run(self, model: Callable[..., dict[str, Any]]) -> None:
        """The agent's own loop; ``model(messages, tools=None)`` returns the next assistant message."""
        ...

    def verify(self) -> float: ...
    def close(self) -> None: ...


class HarnessAdapter(Protocol):
    """Drives a session turn by turn, where the library is to sample each."""

    def messages(self, session: Any) -> list[dict[str, Any]]: ...
    def tools(self, session: Any) -> list[dict[str, Any]] | None: ...
    def step(self, session: Any, message: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """What follows the model's message, and whether the session is over."""
        ...


@dataclass(slots=True)
class TraceEntry:
    """One request of an agent and the model's answer, in messages and in tokens."""

    messages: list[dict[str, Any]]
    message: dict[str, Any]
    prompt_ids: list[int]
    token_ids: list[int]
    logp: list[float]
    finish_reason: str
    spans: list[tuple[int, int]]


@dataclass(slots=True)
class HarnessRolloutOutcome:
    """What a session came to, for reward functions.

    Attributes:
        env_reward: What ``verify`` said.
        completion: All messages after the first request's.
        trace: Every answer of the model.
        tool_calls: In all answers.
        tools: Calls by name.
        timed_out: It did not end within its time.
    """

    env_reward: float | None
    completion: list[dict[str, Any]]
    trace: list[TraceEntry]
    tool_calls: int = 0
    tools: dict[str, int] = field(default_factory=dict)
    timed_out: bool = False


def has_tool_call(entry: TraceEntry) -> bool:
    """Whether the model called a tool in this turn; as ``train_turn_fn`` it trains those turns alone."""
    return bool(entry.message.get("tool_calls"))


def written(entry: TraceEntry) -> bool:
    """Whether the turn holds anything."""
    return bool(entry.token_ids)


def harness_reward(completions: list[Any], harness_reward: list[float], **_: Any) -> list[float]:
    """The reward of each session, which came with its row."""
    return harness_reward


@dataclass
class HarnessRolloutWorker:
    """Rollouts that are sessions of an agent; given as ``rollout_worker``, it runs in the usual worker processes.

    Args:
        harness_session_factory: ``(row, seed) -> session``; the seed is the group's, so that all its members get one task.
        harness_adapter: Drives sessions turn by turn; None: ``session.run(model)`` is the agent's own loop.
        rollout_reward_fn: ``(outcome) -> float``; None: the session's ``verify``.
        train_turn_fn: Which turns are trained; None: all.
        agent_turn_fn: Which entries of the trace are the agent's; None: those that are not empty.
        max_turns: Of a session that an adapter drives.
        session_timeout_s: Seconds a session may take.
        fork_threshold_tokens: See `posttrain.rollouts.reconcile`.
    """

    harness_session_factory: Callable[[dict[str, Any], int], Any]
    harness_adapter: Any = None
    rollout_reward_fn: Callable[[HarnessRolloutOutcome], float] | None = None
    train_turn_fn: Callable[[TraceEntry], bool] | None = None
    agent_turn_fn: Callable[[TraceEntry], bool] | None = None
    max_turns: int = TURNS
    session_timeout_s: float = 600.0
    fork_threshold_tokens: int = FORK_THRESHOLD

    def rows(self, outcome: HarnessRolloutOutcome) -> Reconciled:
        """The agent's turns as token rows; a turn that is not trained is context of those after it."""
        keep = self.agent_turn_fn or written
        turns, trained = [], []
        for entry in (e for e in outcome.trace if keep(e)):
            version = min((v for v, _ in entry.spans), default=0)
            turns.append(Turn(entry.prompt_ids, entry.token_ids, entry.logp, version))
            trained.append(self.train_turn_fn is None or self.train_turn_fn(entry))
        found = reconcile(turns, self.fork_threshold_tokens)
        for row in found.rows if not all(trained) else ():
            _untrain(row, turns, trained)
        found.rows = [row for row in found.rows if any(row.mask)]
        return found

    def reward(self, outcome: HarnessRolloutOutcome) -> float:
        """Of one session."""
        value = outcome.env_reward if self.rollout_reward_fn is None else self.rollout_reward_fn(outcome)
        if value is None:
            raise RolloutError(
                "the session has no reward: give rollout_reward_fn, or a session whose verify returns one."
            )
        return float(value)


def _untrain(row: Any, turns: Sequence[Turn], trained: Sequence[bool]) -> None:
    """Take the mask off the turns that are not trained."""
    for turn, kept in zip(turns, trained, strict=True):
        begin, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        if not kept and row.input_ids[begin:end] == turn.token_ids and all(row.mask[begin:end]):
            row.mask[begin:end] = [0] * (end - begin)
            row.logp[begin:end] = [0.0] * (end - begin)


class _Spent(Exception):
    """The token budget of a conversation is used up."""


class _Model:
    """What one session asks: every call waits until the engine has served it, together with those of other sessions."""

    def __init__(self, sessions: Sessions, sampling: Sampling) -> None:
        self.sessions, self.sampling, self.left = sessions, sampling, sampling.max_new_tokens
        self.trace: list[TraceEntry] = []
        self.truncated = False

    def __call__(self, messages: list[dict[str, Any]], tools: Any = None, **_: Any) -> dict[str, Any]:
        shared = self.sessions
        row: dict[str, Any] = {"prompt": messages, **({"tools": tools} if tools else {})}
        (ids,) = tokenize_prompts([row], shared.tokenizer, chat_template_kwargs=shared.template_kwargs)
        room = self.left if shared.context is None else min(self.left, shared.context - len(ids))
        if room < 1:
            self.truncated = True
            raise _Spent
        seed = None if self.sampling.seed is None else self.sampling.seed + 7_919 * len(self.trace)
        rollout = shared.ask(ids, replace(self.sampling, max_new_tokens=room, seed=seed))
        self.left -= len(rollout.token_ids)
        message = parse_response(shared.tokenizer, rollout.token_ids, prefix=ids, tools=tools)
        spans = rollout.spans or [(rollout.version, len(rollout.token_ids))]
        reason = str(rollout.finish_reason)
        self.trace.append(TraceEntry(list(messages), message, ids, rollout.token_ids, rollout.logp, reason, spans))
        self.truncated = rollout.finish_reason == "length"
        return message


class Sessions:
    """Runs sessions side by side, each on a thread, while their questions are answered by one engine on this one.

    Args:
        harness: See `HarnessRolloutWorker`.
        writer: The engine.
        tokenizer: With a chat template and a response schema.
        context: Most tokens the model can read.
        template_kwargs: For the chat template, the same in every turn.
    """

    def __init__(
        self,
        harness: HarnessRolloutWorker,
        writer: Writer,
        tokenizer: Any,
        *,
        context: int | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.harness, self.writer, self.tokenizer = harness, writer, tokenizer
        self.context, self.template_kwargs = context, dict(template_kwargs or {})
        self._questions: queue.Queue[tuple[Request, concurrent.futures.Future]] = queue.Queue()
        self._live: set[Any] = set()
        self._lock = threading.Lock()

    def ask(self, prompt_ids: list[int], sampling: Sampling) -> Rollout:
        """From a session's thread: one completion."""
        answer: concurrent.futures.Future = concurrent.futures.Future()
        self._questions.put((Request(prompt_ids, 1, sampling), answer))
        return answer.result()

    def run(self, jobs: Sequence[tuple[dict[str, Any], int, Sampling]]) -> list[HarnessRolloutOutcome | str]:
        """Outcomes of ``(row, seed, sampling)``, or what went wrong, in their order."""
        with concurrent.futures.ThreadPoolExecutor(max(1, len(jobs)), thread_name_prefix="session") as pool:
            futures = [pool.submit(self._session, *job) for job in jobs]
            limit = time.monotonic() + self.harness.session_timeout_s
            while not all(future.done() for future in futures):
                self._answer()
                if time.monotonic() > limit:
                    self.close()  # Frees threads that wait inside their session.
                    limit = float("inf")
            return [_text(future) for future in futures]

    def close(self) -> None:
        """Close every live session."""
        with self._lock:
            live = list(self._live)
        for session in live:
            _close(session)

    def _answer(self) -> None:
        try:
            waiting = [self._questions.get(timeout=LOOK_S)]
        except queue.Empty:
            return
        while not self._questions.empty():
            waiting.append(self._questions.get())
        try:
            rollouts = self.writer.finish([request for request, _ in waiting], waiting[0][0].sampling or Sampling(1))
        except BaseException as error:
            for _, answer in waiting:
                answer.set_exception(error)
            return
        for (_, answer), rollout in zip(waiting, rollouts, strict=True):
            answer.set_result(rollout)

    def _session(self, row: dict[str, Any], seed: int, sampling: Sampling) -> HarnessRolloutOutcome:
        model, began = _Model(self, sampling), time.monotonic()
        session = self.harness.harness_session_factory(row, seed)
        with self._lock:
            self._live.add(session)
        try:
            try:
                self._drive(session, model)
            except _Spent:
                logger.debug("a session has used up its tokens")
            if time.monotonic() - began > self.harness.session_timeout_s:
                raise RolloutError(f"the session did not end within {self.harness.session_timeout_s:g} s")
            verify = getattr(session, "verify", None)
            return _outcome(model.trace, None if verify is None else verify())
        finally:
            with self._lock:
                self._live.discard(session)
            _close(session)

    def _drive(self, session: Any, model: _Model) -> None:
        adapter = self.harness.harness_adapter
        if adapter is None:
            session.run(model)
            return
        messages = list(adapter.messages(session))
        for _ in range(self.harness.max_turns):
            message = model(messages, tools=adapter.tools(session))
            added, done = adapter.step(session, message)
            messages = [*messages, message, *added]
            if done or model.truncated:
                return


def _outcome(trace: list[TraceEntry], reward: float | None) -> HarnessRolloutOutcome:
    calls = [c for entry in trace for c in entry.message.get("tool_calls") or []]
    names = Counter(str(call.get("function", {}).get("name")) for call in calls)
    first = len(trace[0].messages) if trace else 0
    completion = [*trace[-1].messages[first:], trace[-1].message] if trace else []
    return HarnessRolloutOutcome(reward, completion, trace, len(calls), dict(names))


def _text(future: concurrent.futures.Future) -> HarnessRolloutOutcome | str:
    error = future.exception()
    return future.result() if error is None else f"{type(error).__name__}: {error}"


def _close(session: Any) -> None:
    try:
        getattr(session, "close", lambda: None)()
    except Exception:
        logger.warning("a session could not be closed", exc_info=True)
