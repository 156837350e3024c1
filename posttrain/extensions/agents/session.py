"""`Session`: the calls of one episode. Their token ids form a prefix tree, and the branches of the tree become training
sequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import DataError
from posttrain.rollouts.episodes.loop import Episode, turn_spans
from posttrain.types import Rollout

# Version of the file format of recorded sessions. Files with another version are rejected.
FORMAT = 1

State = Literal["waiting", "answered", "cancelled", "failed"]
UNREAD_FIRST: tuple[State, ...] = ("cancelled", "waiting", "failed", "answered")


@dataclass(slots=True)
class CapturedCall:
    """A recorded call of the endpoint, with its prompt and one completion per choice.

    Attributes:
        number: Number of the call in its session.
        prompt_ids: Token ids of the prompt. If the prompt continues a completion, they begin with the token ids of the
            earlier prompt and this completion.
        text: Rendered prompt. Empty if the prompt was sent as token ids.
        parent: Completion that the prompt continues, as (call number, choice index). None: the prompt continues no
            completion.
        messages: Messages of the request. Empty if the prompt is plain text or token ids.
        tools: Schemas of the tools in the request.
        completions: Sampled completions, one per choice.
        answers: Completions as assistant messages with parsed tool calls.
        state: ``waiting``: the engine has not finished the call. ``answered``: the response was sent. ``cancelled``:
            the client disconnected before the response. ``failed``: the engine raised an error, or the call timed out.
            Only answered calls contribute to the loss.
        body: Digest of the request body. Retries are recognized by this digest.
        retries: Number of times that the client has retried the call.
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
    # Text of prompt and completion for each choice. A later prompt that begins with this text continues the choice.
    ends: list[str] = field(default_factory=list)

    def ids(self, choice: int) -> list[int]:
        """Return the token ids of the prompt followed by the token ids of completion ``choice``."""
        return [*self.prompt_ids, *self.completions[choice].token_ids]


@dataclass(slots=True)
class Counts:
    """Number of calls of a session by outcome. After all calls have ended, the outcomes sum to ``received``.

    Attributes:
        received: Number of calls that arrived with the key of the session.
        answered: Number of calls whose response was sent.
        retried: Number of retries, which got the response of an earlier call.
        cancelled: Number of calls whose client disconnected before the response. The tokens of canceled calls are excluded
            from the loss.
        refused: Number of invalid calls. They were not sampled.
        failed: Number of calls that timed out or for which the engine raised an error.
        tokens: Number of sampled tokens, including tokens of canceled calls.
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
        """Number of calls that have no outcome yet."""
        return self.received - self.answered - self.retried - self.cancelled - self.refused - self.failed


@dataclass(slots=True)
class Branch:
    """A path of the prefix tree: a sequence of calls in which each call continues the completion of the previous call.

    Attributes:
        episode: Tokens of all calls of the branch, with loss mask and log-probs.
        calls: One pair per call: the number of the call and the index of its choice in this branch.
        forked: Length of the longest common prefix of the branch's first prompt and any earlier branch, in tokens. 0 for
            the first branch.
    """

    episode: Episode
    calls: list[tuple[int, int]]
    forked: int = 0


class Session:
    """The calls of one harness episode.

    Training uses exactly the token ids that were sampled. If a later prompt begins with the text of an earlier prompt and
    its completion, the token ids of both are reused, and only the remaining text is tokenized. Otherwise, the prompt starts
    a new branch. The new branch may have a common prefix with earlier branches. For example, a new branch starts if the
    agent truncated, summarized or reformatted the history, or if several agents use the session.

    Args:
        key: API key of the session. All calls with this key belong to the session.
        seed: Seed from which the seeds of the calls are derived.

    Attributes:
        calls: Recorded calls in the order of arrival.
        counts: Number of calls by outcome.
        closed: Whether new calls are rejected.
    """

    def __init__(self, key: str, seed: int = 0) -> None:
        self.key, self.seed = key, seed
        self.calls: list[CapturedCall] = []
        self.counts = Counts()
        self.closed = False

    def parent_of_text(self, text: str) -> tuple[int, int] | None:
        """Return the (call, choice) pair with the longest text that is a prefix of ``text``. Only answered calls are
        considered. Return None if no text is a prefix.
        """
        parent, longest = None, 0
        for call in self.calls:
            for choice, end in enumerate(call.ends if call.state == "answered" else ()):
                if len(end) > longest and text.startswith(end):
                    parent, longest = (call.number, choice), len(end)
        return parent

    def parent_of_ids(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Return the (call, choice) pair of an answered call whose token ids are the longest prefix of ``ids``, or None."""
        parent, longest, prompt_ids = None, 0, list(ids)
        for call in self.calls:
            for choice in range(len(call.completions) if call.state == "answered" else 0):
                end = call.ids(choice)
                if len(end) > longest and prompt_ids[: len(end)] == end:
                    parent, longest = (call.number, choice), len(end)
        return parent

    def begin(self, call: CapturedCall) -> CapturedCall:
        """Record a call and set its number. All calls must be recorded on the same thread."""
        call.number = len(self.calls)
        self.calls.append(call)
        return call

    def same_body(self, body: str, attempt: int = 0) -> CapturedCall | None:
        """Return the earlier call that a request with this body retries, or None.

        Calls that were retried ``attempt - 1`` times are preferred. Among them, a call is preferred if its response was not
        received.
        """
        calls = [call for call in reversed(self.calls) if call.body == body]
        alike = [call for call in calls if call.retries == attempt - 1]
        return min(alike or calls, key=lambda call: UNREAD_FIRST.index(call.state), default=None)

    # Training sequences
    # ---------------------------------------------------------------------------------------------------

    def branches(self) -> list[Branch]:
        """Return all branches of the prefix tree. Each sampled token of an answered call has loss mask 1 in exactly one
        branch. All other tokens have loss mask 0.
        """
        branches: list[Branch] = []
        # Maps the last (call, choice) pair of each branch to the branch. The first prompt that continues a choice extends
        # the branch of this choice. Every further prompt that continues the choice starts a new branch.
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
        """Convert the session to one rollout. The rollout is the first branch, and its ``branches`` are the further
        branches. Return None if no call was answered.
        """
        rollouts = [branch.episode.rollout() for branch in self.branches()]
        rollouts = [rollout for rollout in rollouts if rollout.token_ids]
        if not rollouts:
            return None
        return replace(rollouts[0], branches=tuple(rollouts[1:]))

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages for reward functions. They come from the branch that contains the last answered call. They
        start at the first answer of this branch, and include tool results.
        """
        last = next((call for call in reversed(self.calls) if call.state == "answered"), None)
        if last is None:
            return []
        branch = next(b for b in self.branches() if (last.number, 0) in b.calls)
        first = self.calls[branch.calls[0][0]]
        return [*last.messages[len(first.messages) :], last.answers[0]]

    def tokens_seen(self) -> int:
        """Return the total number of prompt and completion tokens of all answered calls. Common prefixes are counted in
        every call.
        """
        calls = [call for call in self.calls if call.state == "answered"]
        return sum(len(call.ids(choice)) for call in calls for choice in range(len(call.completions)))

    def tokens_once(self) -> int:
        """Return the number of tokens in the prefix tree. Each common prefix is counted once, because it is computed once."""
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
        """Convert the session to a dict that can be written as JSON."""
        calls = [asdict(call) for call in self.calls]
        return {"format": FORMAT, "key": self.key, "seed": self.seed, "counts": asdict(self.counts), "calls": calls}

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str = "a session") -> Session:
        """Restore a session from a dict that `to_dict` returned.

        Raises:
            DataError: ``content`` has another format version, or is not a session.
        """
        if content.get("format") != FORMAT:
            raise DataError(
                f"{where}: format={content.get('format')!r}, but this version reads format {FORMAT}. Fix: record a new file."
            )
        try:
            session = cls(content["key"], content["seed"])
            session.counts = Counts(**content["counts"])
            for call in content["calls"]:
                completions = [Rollout(**fields) for fields in call["completions"]]
                parent = None if call["parent"] is None else (call["parent"][0], call["parent"][1])
                session.calls.append(CapturedCall(**{**call, "completions": completions, "parent": parent}))
        except (KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"{where}: the line is not a recorded session ({type(error).__name__}: {error}). Fix: record a new file."
            ) from error
        session.closed = True
        return session


def _shared(branches: Sequence[Branch], ids: Sequence[int]) -> int:
    """Return the number of tokens that a prompt has in common with the beginning of any branch."""
    most = 0
    for branch in branches:
        own = (*branch.episode.prompt_ids, *branch.episode.token_ids)
        same = next((i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), min(len(own), len(ids)))
        most = max(most, same)
    return most


def _append(episode: Episode, rollout: Rollout) -> None:
    """Append sampled tokens and their log-probs to an episode."""
    ids = list(rollout.token_ids)
    episode.finish_reason, episode.version = rollout.finish_reason, rollout.version
    episode.spans += turn_spans(rollout, len(ids))
    episode.has_logps = episode.has_logps and len(rollout.logp) == len(ids)
    episode.add(ids, 1, list(rollout.logp), rollout.processed_logp)


@dataclass(slots=True)
class Recorded:
    """One episode of a replay file.

    Attributes:
        task: Dataset row that the harness received.
        session: Calls of the harness.
        result: Return value of the harness. None if the episode failed or if the value cannot be written as JSON.
        error: Error message. None: the episode succeeded.
    """

    task: dict[str, Any]
    session: Session
    result: Any = None
    error: str | None = None


def record_session(path: str | Path, episode: Recorded) -> None:
    """Append an episode to a replay file as one line of JSON."""
    line = {"task": episode.task, "result": episode.result, "error": episode.error} | episode.session.to_dict()
    text = json.dumps(line, default=str)
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Write the line with a single call, so that the lines of several processes are not interleaved.
    with file.open("ab", buffering=0) as out:
        out.write((text + "\n").encode())


def read_sessions(path: str | Path) -> Iterator[Recorded]:
    """Yield the episodes of a replay file.

    Raises:
        DataError: The file does not exist, or a line is not a session. The message contains the path and the line number.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: the sessions cannot be read: {error}. Fix: pass a file written by harness_record."
        ) from error
    # Do not use splitlines. It also splits at line separators other than \n, which texts may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{where}: the line is not valid JSON ({error}). Fix: remove the line, or record a new file."
            ) from error
        if not isinstance(content, dict):
            raise DataError(
                f"{where}: the line is not a recorded session but {type(content).__name__}. Fix: record a new file."
            )
        session = Session.of(content, where)
        yield Recorded(content.get("task") or {}, session, content.get("result"), content.get("error"))
