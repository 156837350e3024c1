"""`Session`: the calls of one episode as a trie of token ids, and the branches of it that are trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import DataError
from posttrain.rollouts.episodes.loop import Episode, turn_spans
from posttrain.types import Rollout

# Of a recorded session; a reader refuses others.
FORMAT = 1

State = Literal["waiting", "answered", "cancelled", "failed"]
UNREAD_FIRST: tuple[State, ...] = ("cancelled", "waiting", "failed", "answered")


@dataclass(slots=True)
class CapturedCall:
    """One call that was sampled for: its prompt, and a completion for each choice.

    Attributes:
        number: Counts the calls of a session, in the order in which they came.
        prompt_ids: As the engine read them: ids of the completion that the prompt runs through, then its own.
        text: The same as the chat template rendered it; empty where the prompt came as token ids.
        parent: Number of the call, and index of its choice, whose completion the prompt runs through; None: of none.
        messages: Of the request, as they were rendered; empty of a plain completion.
        tools: Schemas that were rendered.
        completions: What was sampled, one rollout a choice.
        answers: The same as messages, tool calls parsed.
        state: ``waiting`` for the engine; ``answered``; ``cancelled``: the client left before it had the answer; ``failed``:
            the engine raised, or the time was up. Only answered calls are trained.
        body: Digest of the request, by which a retry is recognised.
        retries: How often its answer was asked for again.
    """

    number: int
    prompt_ids: list[int]
    text: str = ""
    parent: tuple[int, int] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    completions: list[Rollout] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    state: State = "waiting"
    body: str = ""
    retries: int = 0
    # Text of prompt and completion, of each choice: a later prompt that begins so runs through it.
    ends: list[str] = field(default_factory=list)

    def ids(self, choice: int) -> list[int]:
        """Prompt and one completion."""
        return [*self.prompt_ids, *self.completions[choice].token_ids]


@dataclass(slots=True)
class Counts:
    """Where every call of a session is: ``received`` is the sum of all others but ``tokens``.

    Attributes:
        received: Calls that named the session.
        answered: Their answer was sent.
        retried: Answered with what an earlier call had been sampled.
        cancelled: The client left before it had the answer; nothing of it is trained.
        refused: Bad input; nothing was sampled.
        failed: The engine raised, or the time was up.
        tokens: Sampled, cancelled ones included.
    """

    received: int = 0
    answered: int = 0
    retried: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def open(self) -> int:
        """Calls that have no end yet."""
        return self.received - self.answered - self.retried - self.cancelled - self.refused - self.failed


@dataclass(slots=True)
class Branch:
    """A run of calls each of which continues the one before: one sequence of the trie.

    Attributes:
        episode: Its tokens.
        calls: Numbers of its calls, and the choice of each that it goes on from.
        forked: Tokens at its beginning that an earlier branch has; 0 of the first.
    """

    episode: Episode
    calls: list[tuple[int, int]]
    forked: int = 0


class Session:
    """What one rollout of a harness asked the model for.

    Tokens that were sampled are what is trained: a later prompt whose text begins with the text of an earlier prompt and its
    completion keeps the ids of both, and only what follows is tokenised. A prompt that does not (its history was cut,
    rendered otherwise, summarised, or is another agent's) is a fork: a branch of its own, which shares with earlier ones
    whatever tokens both begin with.

    Args:
        key: What calls name it by.
        seed: Of its draws.

    Attributes:
        calls: In the order in which they came.
        counts: Where every call is.
        closed: Calls are refused from now on.
    """

    def __init__(self, key: str, seed: int = 0) -> None:
        self.key, self.seed = key, seed
        self.calls: list[CapturedCall] = []
        self.counts = Counts()
        self.closed = False

    def parent_of_text(self, text: str) -> tuple[int, int] | None:
        """The answered call and choice with the longest text that this one begins with."""
        parent, longest = None, 0
        for call in self.calls:
            for choice, end in enumerate(call.ends if call.state == "answered" else ()):
                if len(end) > longest and text.startswith(end):
                    parent, longest = (call.number, choice), len(end)
        return parent

    def parent_of_ids(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """The same by token ids, for prompts that come so."""
        parent, longest, prompt_ids = None, 0, list(ids)
        for call in self.calls:
            for choice in range(len(call.completions) if call.state == "answered" else 0):
                end = call.ids(choice)
                if len(end) > longest and prompt_ids[: len(end)] == end:
                    parent, longest = (call.number, choice), len(end)
        return parent

    def begin(self, call: CapturedCall) -> CapturedCall:
        """Take a call in; its number is given here, on the one thread that calls come on."""
        call.number = len(self.calls)
        self.calls.append(call)
        return call

    def same_body(self, body: str, attempt: int = 0) -> CapturedCall | None:
        """The call that a retry of this body is of: one that was tried as often, and best one that nobody has an answer of."""
        calls = [call for call in reversed(self.calls) if call.body == body]
        alike = [call for call in calls if call.retries == attempt - 1]
        return min(alike or calls, key=lambda call: UNREAD_FIRST.index(call.state), default=None)

    # What is trained ---------------------------------------------------------------------------------------------------

    def branches(self) -> list[Branch]:
        """Every sampled token that was answered with stands in exactly one branch, with mask 1; context has mask 0."""
        branches: list[Branch] = []
        # The branch that ends with a call's choice: a prompt that runs through it goes on there, the second one forks.
        ends: dict[tuple[int, int], Branch] = {}
        for call in (call for call in self.calls if call.state == "answered"):
            for choice, rollout in enumerate(call.completions):
                branch = None if call.parent is None else ends.pop(call.parent, None)
                if branch is None:
                    branch = Branch(Episode(list(call.prompt_ids)), [], _shared(branches, call.prompt_ids))
                    branches.append(branch)
                else:
                    episode = branch.episode
                    context = call.prompt_ids[len(episode.prompt_ids) + len(episode.token_ids) :]
                    episode.add(context, 0, [0.0] * len(context))
                _append(branch.episode, rollout)
                branch.calls.append((call.number, choice))
                ends[call.number, choice] = branch
        return branches

    def rollout(self) -> Rollout | None:
        """All branches: the first one, with the others as its ``branches``; None where no call was answered."""
        rollouts = [branch.episode.rollout() for branch in self.branches()]
        rollouts = [rollout for rollout in rollouts if rollout.token_ids]
        if not rollouts:
            return None
        return replace(rollouts[0], branches=tuple(rollouts[1:]))

    def messages(self) -> list[dict[str, Any]]:
        """What reward functions see: from the first answer of the last call's branch on, tool results among them."""
        last = next((call for call in reversed(self.calls) if call.state == "answered"), None)
        if last is None:
            return []
        branch = next(b for b in self.branches() if (last.number, 0) in b.calls)
        first = self.calls[branch.calls[0][0]]
        return [*last.messages[len(first.messages) :], last.answers[0]]

    def tokens_seen(self) -> int:
        """Tokens of all answered calls, prompts included: what is computed where every call is a sequence."""
        calls = [call for call in self.calls if call.state == "answered"]
        return sum(len(call.ids(choice)) for call in calls for choice in range(len(call.completions)))

    def tokens_once(self) -> int:
        """Tokens of the trie: each computed once."""
        trie: dict[int, Any] = {}
        count = 0
        for branch in self.branches():
            node = trie
            for token in (*branch.episode.prompt_ids, *branch.episode.token_ids):
                if token not in node:
                    node[token], count = {}, count + 1
                node = node[token]
        return count

    # A file ------------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        calls = [asdict(call) for call in self.calls]
        return {"format": FORMAT, "key": self.key, "seed": self.seed, "counts": asdict(self.counts), "calls": calls}

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str = "a session") -> Session:
        """Undo `to_dict`.

        Raises:
            DataError: It is of another format, or no session.
        """
        if content.get("format") != FORMAT:
            raise DataError(
                f"{where}: format={content.get('format')!r}, and this version reads {FORMAT}. Fix: record it again."
            )
        try:
            session = cls(content["key"], content["seed"])
            session.counts = Counts(**content["counts"])
            for call in content["calls"]:
                completions = [Rollout(**one) for one in call["completions"]]
                parent = None if call["parent"] is None else (call["parent"][0], call["parent"][1])
                session.calls.append(CapturedCall(**{**call, "completions": completions, "parent": parent}))
        except (KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"{where}: it is no recorded session ({type(error).__name__}: {error}). Fix: record it again."
            ) from error
        session.closed = True
        return session


def _shared(branches: Sequence[Branch], ids: Sequence[int]) -> int:
    """Most tokens that a prompt begins with and a branch has."""
    most = 0
    for branch in branches:
        own = (*branch.episode.prompt_ids, *branch.episode.token_ids)
        same = next((i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), min(len(own), len(ids)))
        most = max(most, same)
    return most


def _append(episode: Episode, rollout: Rollout) -> None:
    """What was sampled, behind what stands there."""
    ids = list(rollout.token_ids)
    episode.finish_reason, episode.version = rollout.finish_reason, rollout.version
    episode.spans += turn_spans(rollout, len(ids))
    episode.knows_logp = episode.knows_logp and len(rollout.logp) == len(ids)
    episode.add(ids, 1, list(rollout.logp), rollout.processed_logp)


@dataclass(slots=True)
class Recorded:
    """One episode of a replay file.

    Attributes:
        task: The row that the harness was given.
        session: Its calls.
        result: What the harness returned; None where it failed, or its result is no JSON.
        error: Why it failed; None.
    """

    task: dict[str, Any]
    session: Session
    result: Any = None
    error: str | None = None


def record_session(path: str | Path, episode: Recorded) -> None:
    """Append an episode to a replay file, one line of JSON each."""
    line = {"task": episode.task, "result": episode.result, "error": episode.error} | episode.session.to_dict()
    text = json.dumps(line, default=str)
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    # In one piece: workers and ranks append to one file.
    with file.open("ab", buffering=0) as out:
        out.write((text + "\n").encode())


def read_sessions(path: str | Path) -> Iterator[Recorded]:
    """The episodes of a replay file.

    Raises:
        DataError: There is no such file, or a line is no session; names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: the sessions cannot be read: {error}. Fix: name a file of recorded sessions."
        ) from error
    # Not splitlines: a text may hold other line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: it is no JSON ({error}). Fix: remove the line, or record again.") from error
        if not isinstance(content, dict):
            raise DataError(f"{where}: it is no recorded session but {type(content).__name__}. Fix: record it again.")
        session = Session.of(content, where)
        yield Recorded(content.get("task") or {}, session, content.get("result"), content.get("error"))
