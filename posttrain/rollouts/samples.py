"""`RolloutSample`: one scored row on its way from a worker to the trainer, with the version of every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import RolloutError
from posttrain.given import ROUNDING, given_number, token_ids, token_logps
from posttrain.types import Row

__all__ = ["Conversation", "GroupTask", "RolloutSample", "sample_rows"]


@dataclass(slots=True)
class RolloutSample:
    """One row for the trainer: a conversation, or the part of one since its context was last rewritten.

    Attributes:
        prompt: As the dataset has it, or the text of the row's context.
        completion: What reward functions saw: text or messages.
        input_ids: Context and what the model wrote.
        completion_mask: 1 on tokens the model wrote; as long as ``input_ids``, and so is the next.
        old_log_probs: As the engine said; 0.0 where the mask is 0.
        advantage: Of the whole conversation.
        model_version: Of the weights when the group's first request was sent: its oldest token is not older.
        group_id: Completions of one prompt share it.
        metrics: Numbers to log: rewards by name, tool calls, seconds.
        spans: Runs of (weights version, tokens) of what the model wrote.
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

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def start(self) -> int:
        """Where the first trained token stands."""
        return next((i for i, kept in enumerate(self.completion_mask) if kept), len(self.completion_mask))

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
class Conversation:
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


def sample_rows(samples: Sequence[RolloutSample]) -> list[Row]:
    """Samples as rows; those of one group with the same context share it.

    Completions keep their order within a group; ``advantages`` and ``rollout_logp`` go with them.
    """
    rows: dict[tuple[int, tuple[int, ...]], Row] = {}
    for sample in samples:
        start = sample.start
        key = (sample.group_id, tuple(sample.input_ids[:start]))
        row = rows.get(key)
        if row is None:
            row = rows[key] = Row(list(key[1]), [], [], {"advantages": []}, {"rollout_logp": []})
        row.completions.append(sample.input_ids[start:])
        row.loss_masks.append(sample.completion_mask[start:])
        row.sequence_columns["advantages"].append(sample.advantage)
        row.token_columns["rollout_logp"].append(sample.old_log_probs[start:])
    return list(rows.values())
