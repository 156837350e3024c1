"""What one call to an engine produced, with what scoring adds to it, on its way to rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from posttrain.data.responses import parse_response
from posttrain.types import Rollout, Row

__all__ = ["Generation", "judged_completions"]


def judged_completions(tokenizer: Any, rollouts: Sequence[Rollout], *, conversational: bool) -> list[Any]:
    """What reward functions see: the text, or one message, read with the tokenizer's response template if it has one."""
    if not conversational:
        return [rollout.text for rollout in rollouts]
    return [[parse_response(tokenizer, rollout.token_ids, prefix=rollout.prompt_ids)] for rollout in rollouts]


@dataclasses.dataclass(slots=True)
class Generation:
    """What one call to the engine produced on this rank, one entry a completion, groups consecutive.

    Attributes:
        examples: The dataset row each completion answers.
        rollouts: Token ids, log-probs and finish reasons.
        completions: What reward functions see: text, or a list of messages.
        columns: Filled in after scoring, one number a completion (``advantages``).
        token_columns: Per-completion lists of per-token numbers (``old_logp``, ``ref_logp``, ``rollout_logp``).
        born: Optimiser step whose weights sampled it.
        environments: The environment each completion came about in, if there was one.
        extra: Further columns for the reward functions, one value a completion.
        left_out: Completions that carry no loss, whatever their tokens.
    """

    examples: list[dict[str, Any]]
    rollouts: list[Rollout]
    completions: list[Any]
    columns: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    token_columns: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    born: int = 0
    environments: list[Any] | None = None
    extra: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    left_out: set[int] = dataclasses.field(default_factory=set)

    def loss_mask(self, index: int, skip_truncated: bool) -> list[int]:
        """1 on tokens the model wrote; all 0 on one left out, and on a truncated one when those are masked."""
        rollout = self.rollouts[index]
        if index in self.left_out or (skip_truncated and rollout.finish_reason != "stop"):
            return [0] * len(rollout.token_ids)
        return rollout.tool_mask or [1] * len(rollout.token_ids)

    def reward_columns(self) -> dict[str, list[Any]]:
        """What reward functions get besides prompts and completions: dataset columns (those of the first row decide)."""
        if not self.examples:
            return dict(self.extra)
        own = ("prompt", "completion", "completion_ids")
        columns = {k: [e.get(k) for e in self.examples] for k in self.examples[0] if k not in own}
        return columns | self.extra

    def shown(self) -> dict[str, list[float]]:
        """Columns as the completions table names them."""
        return {name.removesuffix("s"): column for name, column in self.columns.items()}

    def groups(self) -> list[list[int]]:
        """Indices of completions that stand together and share a prompt."""
        found: list[list[int]] = []
        for i, rollout in enumerate(self.rollouts):
            if found and self.rollouts[found[-1][0]].prompt_ids == rollout.prompt_ids:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def rows(self, indices: Sequence[int], *, skip_truncated: bool) -> list[Row]:
        """The chosen completions as rows; neighbours with the same prompt share one."""
        rows: list[Row] = []
        for i in indices:
            rollout = self.rollouts[i]
            if not rows or rows[-1].prompt_ids != rollout.prompt_ids:
                rows.append(Row(list(rollout.prompt_ids), [], []))
            row = rows[-1]
            row.completions.append(list(rollout.token_ids))
            row.loss_masks.append(self.loss_mask(i, skip_truncated))
            for name, numbers in self.columns.items():
                row.sequence_columns.setdefault(name, []).append(numbers[i])
            for name, column in self.token_columns.items():
                row.token_columns.setdefault(name, []).append(column[i])
        return rows

    def every_row(self) -> list[Row]:
        """All completions as rows, cut ones with their tokens."""
        return self.rows(range(len(self.rollouts)), skip_truncated=False)
