"""Turns of a conversation, as an agent had them, to rows that hold exactly the tokens the model wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.errors import RolloutError

__all__ = ["FORK_THRESHOLD", "Reconciled", "TokenRow", "Turn", "reconcile"]

FORK_THRESHOLD = 1024  # Tokens of drift from which a new row begins.


@dataclass(slots=True)
class Turn:
    """One request to the model and its answer.

    Attributes:
        prompt_ids: Everything the model read, as it was tokenised for this turn.
        token_ids: What it wrote.
        logp: One a written token.
        version: Of the weights.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logp: list[float]
    version: int = 0


@dataclass(slots=True)
class TokenRow:
    """One row for the trainer.

    Attributes:
        input_ids: Context and answers.
        mask: 1 on tokens the model wrote.
        logp: As the engine said; 0.0 where ``mask`` is 0.
        spans: Runs of (weights version, tokens) of what the model wrote, in order.
    """

    input_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def context(self, ids: Sequence[int]) -> None:
        """Append tokens that are read only."""
        self.input_ids += ids
        self.mask += [0] * len(ids)
        self.logp += [0.0] * len(ids)

    def answer(self, turn: Turn) -> None:
        """Append what the model wrote."""
        self.input_ids += turn.token_ids
        self.mask += [1] * len(turn.token_ids)
        self.logp += turn.logp
        self.spans.append((turn.version, len(turn.token_ids)))

    def cut(self, length: int) -> None:
        """Forget everything from a position on."""
        gone = sum(self.mask[length:])
        del self.input_ids[length:], self.mask[length:], self.logp[length:]
        while gone:
            version, count = self.spans.pop()
            if count > gone:
                self.spans.append((version, count - gone))
            gone = max(0, gone - count)


@dataclass(slots=True)
class Reconciled:
    """Rows of one conversation, and how often its context was rewritten."""

    rows: list[TokenRow]
    realigned: int = 0
    forks: int = 0


def reconcile(turns: Sequence[Turn], fork_threshold_tokens: int = FORK_THRESHOLD) -> Reconciled:
    """Join turns whose prompts repeat what came before, and begin a new row where an agent rewrote too much.

    With the held tokens H, the new prompt P, their common beginning m and the start s of the last answer:

    - clean (``m = |H|``): append ``P[m:]`` as context, then the answer;
    - realign (``m >= s`` and ``|H| - m`` below the threshold): ``P[m:]`` replaces ``H[m:]`` as context, then the answer;
    - fork: close the row; a new one holds P as context and the answer.

    The test is on the size of the drift: a long reasoning block that an agent drops forks, so that it stays trained.

    Args:
        turns: In order.
        fork_threshold_tokens: Drift from which a fork keeps what was written.

    Returns:
        Rows that train at least one token.

    Raises:
        RolloutError: A written token without a log-prob: 0.0 would claim that it was certain.

    >>> turns = [Turn([1, 2], [3, 4], [-1.0, -1.0]), Turn([1, 2, 3, 4, 5], [6], [-2.0])]
    >>> row, = reconcile(turns).rows
    >>> row.input_ids, row.mask
    ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    """
    found = Reconciled([])
    row, start = TokenRow(), 0
    for number, turn in enumerate(turns):
        _check(turn, number)
        same = _common(row.input_ids, turn.prompt_ids)
        drift = len(row.input_ids) - same
        if drift and same >= start and drift < fork_threshold_tokens:
            row.cut(same)
            found.realigned += 1
        elif drift:
            found.rows.append(row)
            found.forks += 1
            row, same = TokenRow(), 0
        row.context(turn.prompt_ids[same:])
        start = len(row.input_ids)
        row.answer(turn)
    found.rows = [r for r in [*found.rows, row] if any(r.mask)]
    return found


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(held, prompt, strict=False)):
        if a != b:
            return index
    return min(len(held), len(prompt))


def _check(turn: Turn, number: int) -> None:
    if len(turn.logp) != len(turn.token_ids) or any(value is None or math.isnan(value) for value in turn.logp):
        known = sum(value is not None and not math.isnan(value) for value in turn.logp)
        raise RolloutError(
            f"turn {number}: {len(turn.token_ids)} tokens were written and {known} have a log-prob. Every trained token needs "
            "one: ask the engine for log-probs of the sampled tokens."
        )
