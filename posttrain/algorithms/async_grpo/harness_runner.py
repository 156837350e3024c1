"""Sessions of an agent in a worker, as groups that can be scored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posttrain.algorithms.async_grpo.scoring import Finished
from posttrain.data.responses import add_response_schema
from posttrain.errors import ModelError, RolloutError
from posttrain.rollouts.harness import HarnessRolloutOutcome, Sessions
from posttrain.rollouts.partial import Writer
from posttrain.rollouts.reconcile import TokenRow
from posttrain.rollouts.samples import GroupTask
from posttrain.types import Rollout

if TYPE_CHECKING:
    from posttrain.algorithms.async_grpo.producer import RolloutJob

__all__ = ["HarnessRunner"]


class HarnessRunner:
    """Stands where `EpisodeRunner` does, for rollouts that are sessions.

    Args:
        job: With its ``harness``.
        writer: The engine.
    """

    episodic = True
    probes: tuple[Any, ...] = ()

    def __init__(self, job: RolloutJob, writer: Writer) -> None:
        assert job.harness is not None
        self.setup, self.harness, self.writer = job.setup, job.harness, writer
        with contextlib.suppress(ModelError):  # Without a format for calls, answers are plain text.
            add_response_schema(job.setup.tokenizer)
        tokenizer = job.setup.tokenizer
        shared = {"context": job.setup.context, "template_kwargs": job.setup.template_kwargs}
        self.sessions = Sessions(job.harness, writer, tokenizer, **shared)

    def pooled(self, functions: Sequence[Any]) -> list[Any]:
        """Nothing is pooled."""
        return list(functions)

    @contextlib.contextmanager
    def holding(self, groups: Sequence[Finished]) -> Iterator[None]:
        """Sessions are closed already."""
        yield

    def episodes(self, tasks: Sequence[GroupTask], version: int) -> list[Finished]:
        """All sessions of some tasks; the members of a group get one seed, and draw differently."""
        jobs = [
            (dict(task.row), task.group_id, replace(self.setup.sampling, seed=task.seed * 1_009 + member))
            for task in tasks
            for member in range(task.size)
        ]
        outcomes = iter(self.sessions.run(jobs))
        return [self._finished(task, version, [next(outcomes) for _ in range(task.size)]) for task in tasks]

    def _finished(self, task: GroupTask, version: int, outcomes: list[HarnessRolloutOutcome | str]) -> Finished:
        group = Finished(task.group_id, version, [], [], [], parts=[])
        for outcome in outcomes:
            try:
                self._add(group, task, outcome)
            except Exception as error:
                group.errors.append(f"{type(error).__name__}: {error}")
        return group

    def _add(self, group: Finished, task: GroupTask, outcome: HarnessRolloutOutcome | str) -> None:
        if isinstance(outcome, str):
            raise RolloutError(outcome)
        reward, found = self.harness.reward(outcome), self.harness.rows(outcome)
        if not found.rows:
            raise RolloutError("the session ended without an answer that could be trained")
        reason = outcome.trace[-1].finish_reason
        parts = [_rollout(row, reason) for row in found.rows]
        assert group.parts is not None
        group.parts.append(parts)
        group.rollouts.append(parts[0])
        group.rows.append({**task.row, "prompt": task.row.get("prompt") or "", "harness_reward": reward})
        group.completions.append(outcome.completion)
        calls = {f"tools/{name}": float(count) for name, count in outcome.tools.items()}
        group.metrics.append(
            {"tools/call_frequency": float(outcome.tool_calls), "rollout/turns": float(len(outcome.trace)), **calls}
        )


def _rollout(row: TokenRow, reason: str) -> Rollout:
    """A row from its first trained token on."""
    start = row.mask.index(1)
    oldest = min((version for version, _ in row.spans), default=0)
    return Rollout(
        row.input_ids[:start],
        row.input_ids[start:],
        row.logp[start:],
        reason,  # type: ignore[arg-type]
        oldest,
        tool_mask=row.mask[start:],
        spans=row.spans,
    )
