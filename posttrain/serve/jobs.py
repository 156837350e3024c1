"""What the HTTP process and its workers say to each other; never read from the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.types import Rollout, Sampling

__all__ = ["Answer", "Ask", "Beat", "Command", "Failure", "Job", "Score", "Scored"]


@dataclass(slots=True)
class Ask:
    """One prompt to complete.

    Attributes:
        prompt_ids: At least one token.
        n: Completions.
        sampling: With its seed.
        draws: Number of its first completion as the seed counts them.
    """

    prompt_ids: list[int]
    n: int
    sampling: Sampling
    draws: int = 0


@dataclass(slots=True)
class Job:
    """A worker's share of one generation request.

    Attributes:
        asks: Prompts, in order.
        priority: The lowest is begun first.
        rollouts: One list a prompt, filled as completions end.
        spans: By place in ``rollouts``, runs of (version, tokens) of completions that were written under several versions.
        left: Completions that have not ended.
    """

    id: int
    asks: list[Ask]
    priority: int = 0
    rollouts: list[list[Rollout | None]] = field(default_factory=list)
    spans: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    left: int = 0

    def __post_init__(self) -> None:
        self.rollouts = [[None] * ask.n for ask in self.asks]
        self.left = sum(ask.n for ask in self.asks)


@dataclass(slots=True)
class Score:
    """One sequence whose log-probs are asked for.

    Attributes:
        ids: The whole sequence.
        begin: Its first position that is scored.
    """

    ids: list[int]
    begin: int


@dataclass(slots=True)
class Scored:
    """Log-probs of one sequence's positions.

    Attributes:
        actual: Of the tokens that stand there.
        ids: The most likely tokens, by rank.
        logps: Theirs.
    """

    actual: list[float]
    ids: list[list[int]]
    logps: list[list[float]]


@dataclass(slots=True)
class Command:
    """HTTP process to worker: every one is answered, under its id."""

    id: int
    method: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Failure:
    """An exception as it travels: ``status`` is the HTTP status that it means."""

    type: str
    message: str
    status: int = 500
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """Worker to HTTP process: the result of a command, or why there is none."""

    id: int
    result: Any = None
    failure: Failure | None = None


@dataclass(slots=True)
class Beat:
    """Worker to HTTP process: it lives and moves.

    Attributes:
        running: Completions that are being written.
        waiting: Completions that are not begun.
        tokens: Written since the last beat.
    """

    running: int = 0
    waiting: int = 0
    tokens: int = 0


Message = Answer | Beat
Asks = Sequence[Ask]
