"""One optimiser step of an asynchronous run: rollouts taken from the queue, none too old, dealt to processes, logged."""

from __future__ import annotations

import logging
import math
import queue
import time
from dataclasses import replace
from typing import Any

import torch

from posttrain.algorithms.async_grpo.config import AsyncGRPOConfig
from posttrain.data.forest import collate
from posttrain.errors import RolloutError
from posttrain.metrics import Metric, maximum, mean, total
from posttrain.models import parallel
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.workers.ledger import DROP_REASONS, DropWatch, Ledger, plan_step
from posttrain.rollouts.workers.samples import RolloutSample, Trajectory, sample_rows
from posttrain.rollouts.workers.worker import AwakeClock
from posttrain.types import Batch

__all__ = ["StepMixin"]

logger = logging.getLogger(__name__)

LOOK_S = 5.0  # How long the queue may be empty before the workers' health is looked at.
STRAIGHT = 100  # Rollouts in a row that are too long for a row, after which none will ever fit.


class StepMixin:
    """The part of `AsyncGRPOTrainer` between the queue and the batches of a step."""

    args: AsyncGRPOConfig
    accelerator: Any
    worker: Any
    transfer: Any
    ledger: Ledger
    drops: DropWatch
    version: int
    _straight = 0
    _seen_stale = 0
    _held: list[Trajectory]

    # Taking ------------------------------------------------------------------------------------------------------

    def next_step(self) -> list[Batch]:
        """The batches of the next step that are for this process; every rank must call it."""
        main = self.accelerator.is_main_process
        while True:
            dealt = parallel.run_and_share(lambda: self._deal() if main else None, self.accelerator)
            shares = parallel.all_gather_objects([dealt] if main else [], self.accelerator)[0]
            if shares is not None:
                break
            self.serve_again()  # type: ignore[attr-defined]
        self.counters["num_tokens"] += sum(len(s) for share in shares for s in share)  # type: ignore[attr-defined]
        rows = sample_rows(shares[self.accelerator.process_index])
        layout, budget = self.layout, self.token_budget  # type: ignore[attr-defined]
        if self.args.token_budget is not None and budget > 0:
            layout = replace(layout, row_tokens=min(layout.row_tokens, budget))
        return collate(rows, pad_token_id=self.pad_token_id, layout=layout)  # type: ignore[attr-defined]

    def _deal(self) -> list[list[RolloutSample]] | None:
        """The step's samples, one list a process; None: servers are to be given their weights first."""
        began = time.perf_counter()
        if not self.take(self.args.samples_per_step or 1):
            return None
        waited = time.perf_counter() - began
        samples = [sample for trajectory in self._held for sample in trajectory.samples]
        for sample in samples:
            sample.check()
        self._log_step(waited)
        world = self.accelerator.num_processes
        plan = plan_step([len(sample) for sample in samples], budget=self.token_budget, world=world)
        return [[samples[i] for row in rows for i in row] for rows in plan]

    @property
    def token_budget(self) -> int:
        """Tokens of a row; 0: no bound."""
        given = self.args.token_budget
        return max(0, given) if given is not None else (self.context or 0)  # type: ignore[attr-defined]

    def take(self, count: int) -> bool:
        """Hold so many rollouts, none further behind the weights than ``max_staleness_hard`` as this step trains it.

        Returns:
            False: not yet, since servers lack the weights and nothing arrives; what is held stays held.

        Raises:
            RolloutError: Nothing came for too long, or 100 in a row were too long for a row.
        """
        held, self._held = self._held, []
        for trajectory in held:  # Of a call that was broken off to push weights.
            self._hold(trajectory, "held")
        while len(self._held) < count:
            trajectory = self._wait()
            if trajectory is None:
                return False
            self._hold(trajectory, "waiting")
        self._watch_drops(count)
        return True

    def _hold(self, trajectory: Trajectory, place: str) -> None:
        reason = self._refused(trajectory)
        if reason is not None:
            self.ledger.drop(1, reason, place)
            self._close_group(trajectory.group_id)
            return
        if place == "waiting":
            self.ledger.hold(1)
        self._held.append(trajectory)

    def _watch_drops(self, count: int) -> None:
        stale = self.ledger.dropped["stale_in_flight"] + self.ledger.dropped["stale_in_queue"]
        limit = getattr(self.worker, "max_inflight", 0)
        lower = self.drops.add(count, stale - self._seen_stale, limit)
        self._seen_stale = stale
        if lower != limit and self.owns_workers:  # type: ignore[attr-defined]
            self.worker.limit(lower)

    def _refused(self, trajectory: Trajectory) -> str | None:
        bound = self.args.max_staleness_hard
        assert bound is not None
        if self.version - trajectory.version > bound:
            return "stale_in_queue"
        longest = max(len(sample) for sample in trajectory.samples)
        if 0 < self.token_budget < longest:
            self._straight += 1
            logger.warning("a rollout of %d tokens does not fit token_budget=%d: dropped", longest, self.token_budget)
            if self._straight >= STRAIGHT:
                raise RolloutError(
                    f"{STRAIGHT} rollouts in a row were longer than token_budget={self.token_budget} (the last: {longest} "
                    "tokens): nothing would ever be trained. Raise token_budget, or lower max_completion_length."
                )
            return "too_long"
        self._straight = 0
        return None

    def _wait(self) -> Trajectory | None:
        """The next rollout from the queue; while there is none, whoever should bring it is looked at.

        Returns:
            None where servers lack the weights.
        """
        stale = self.args.heartbeat_stale_after_s
        # Our own workers are not waited for while they start, or while they have no processor: that has limits of its own.
        passed = (lambda: self.worker.worked) if self.owns_workers else AwakeClock(2 * LOOK_S).look  # type: ignore[attr-defined]
        began = passed()
        while True:
            self.worker.check_health(stale)
            try:
                item = self.worker.rollout_buffer.get(timeout=min(LOOK_S, stale))
            except queue.Empty:
                if passed() - began > 2 * stale:
                    raise self._nothing(passed() - began) from None
                if getattr(self.transfer, "lacking", bool)():
                    return None
                continue
            return item if self.owns_workers else self._booked(item)  # type: ignore[attr-defined]

    def _booked(self, item: Any) -> Trajectory:
        """What a worker of the caller's own hands over, which counts from now on: a sample, several rows, a trajectory."""
        self.ledger.dispatch(1)
        self.ledger.arrive(1)
        if isinstance(item, Trajectory):
            return replace(item, arrived=self.version)
        return Trajectory([item] if isinstance(item, RolloutSample) else list(item), arrived=self.version)

    def _nothing(self, waited: float) -> RolloutError:
        dropped = dict(self.ledger.dropped)
        servers = getattr(self.transfer, "trouble", str)()
        return RolloutError(
            f"no fresh rollout arrived for {waited:.0f} s (2 x heartbeat_stale_after_s), and the workers say that they are "
            f"well: {self.ledger.writing} rollouts are under way, {dropped} were dropped. "
            + (f"Rollout servers that are not: {servers}. " if servers else "")
            + "If one rollout takes that long, raise heartbeat_stale_after_s or lower max_completion_length."
        )

    def _close_group(self, group_id: int) -> None:
        if self.owns_workers:  # type: ignore[attr-defined]
            with self.worker.lock:
                self.worker.source.done(group_id)

    # Logging -----------------------------------------------------------------------------------------------------

    def _log_step(self, waited: float) -> None:
        """What the step holds, of all processes; only the main one logs it."""
        metrics = self._sample_metrics() | self._age_metrics() | self._pool_metrics()
        metrics["queue_wait_time_s"] = mean(waited)
        self.log_metrics_now(metrics)  # type: ignore[attr-defined]
        self.record.add_completions([self._completion_row(c) for c in self._held])  # type: ignore[attr-defined]
        self._watch()

    def _sample_metrics(self) -> dict[str, Metric]:
        """Means over rollouts of what came with them; one that lacks a number is left out of its mean."""
        first = [trajectory.samples[0] for trajectory in self._held]
        names = sorted({name for sample in first for name in sample.metrics})
        found: dict[str, Metric] = {}
        for name in names:
            values = torch.tensor([sample.metrics.get(name, math.nan) for sample in first])
            known = ~values.isnan()
            found[name] = mean(values.nan_to_num(0.0), known)
            if name.startswith("rewards/") and name.endswith("/nan"):
                found[name] = total(float(values.nansum()))  # Rows, as in synchronous training.
            if name.startswith("rewards/") and name.count("/") == 1:
                found[f"{name}/mean"] = found[name]
        advantages = torch.tensor([sample.advantage for sample in first])
        found["advantages/abs_max"] = maximum(advantages.abs())
        groups: dict[int, bool] = {}
        for sample in first:
            groups[sample.group_id] = groups.get(sample.group_id, True) and sample.advantage == 0
        found["frac_reward_zero_std"] = mean(sum(groups.values()) / len(groups), weight=len(groups))
        return found

    def _age_metrics(self) -> dict[str, Metric]:
        held = self._held
        ages = torch.tensor([float(self.version - c.version) for c in held])
        flight = torch.tensor([float(c.arrived - c.version) for c in held])
        rows = [sample for c in held for sample in c.samples]
        lengths = torch.tensor([float(len(sample)) for sample in rows])
        return {
            "async/staleness_mean": mean(ages),
            "async/staleness_max": maximum(ages),
            "async/staleness_in_flight_mean": mean(flight),
            "async/staleness_in_queue_mean": mean(ages - flight),
            "async/at_staleness_bound": mean((ages == self.args.max_staleness_hard).float()),
            "async/mixed_versions": mean(torch.tensor([float(len(sample.spans) > 1) for sample in rows])),
            "rollout/fork_rate": mean((len(rows) - len(held)) / len(held), weight=len(held)),
            "train_seq_len": mean(lengths),
        }

    def _pool_metrics(self) -> dict[str, Metric]:
        if not self.owns_workers:  # type: ignore[attr-defined]
            return {}
        spent = self.worker.spent()
        found = {
            "buffer_qsize": mean(float(len(self.worker.rollout_buffer))),
            "async/queue_tokens": mean(float(self.worker.rollout_buffer.tokens)),
        }
        if spent.get("generate"):
            found["generation_tok_per_s"] = mean(spent.get("tokens", 0.0) / spent["generate"])
        if spent.get("groups"):
            found["scoring_time_ms"] = mean(1e3 * spent.get("score", 0.0) / spent["groups"])
        return found

    def _watch(self) -> None:
        """Rewards that cannot teach anything end the run, as in synchronous training."""
        first = [trajectory.samples[0] for trajectory in self._held]
        names = self.rewards.names  # type: ignore[attr-defined]
        values = torch.tensor([[s.metrics.get(f"rewards/{n}", math.nan) for n in names] for s in first])
        totals = torch.tensor([s.metrics.get("reward", math.nan) for s in first])
        table = RewardTable(values, list(names), self.rewards.weights)  # type: ignore[attr-defined]
        # A worker of the caller's own may say nothing of rewards but the advantage.
        known = [i for i, s in enumerate(first) if any(f"rewards/{n}" in s.metrics for n in names)]
        if known:
            judged = RewardTable(values[known], list(names), self.rewards.weights)  # type: ignore[attr-defined]
            groups = torch.tensor([first[i].group_id for i in known])
            self.rewards.judge(judged, groups, prompts=[first[i].prompt for i in known])  # type: ignore[attr-defined]
            self.log_metrics_now(judged.metrics)  # type: ignore[attr-defined]
        self.reward_watch.clipped(int(sum(s.metrics.get("advantages/clipped_share", 0.0) for s in first)), len(first))  # type: ignore[attr-defined]
        self.reward_watch.batch(table, totals, torch.tensor([s.advantage for s in first]))  # type: ignore[attr-defined]

    def _completion_row(self, trajectory: Trajectory) -> dict[str, Any]:
        sample = trajectory.samples[0]
        decode, start = self.processing_class.decode, sample.start  # type: ignore[attr-defined]
        rewards = {n: sample.metrics.get(f"rewards/{n}", math.nan) for n in self.rewards.names}  # type: ignore[attr-defined]
        return {
            "step": self.state.global_step,  # type: ignore[attr-defined]
            "prompt": decode(sample.input_ids[:start]),
            "completion": decode(sample.input_ids[start:], skip_special_tokens=True),
            **rewards,
            "advantage": sample.advantage,
        }

    def account(self) -> dict[str, float]:
        """Where all rollouts are, in one moment: ``produced = trained + dropped + in_flight``."""
        ledger = self.ledger
        with ledger.lock:
            counts = {
                "async/produced": ledger.produced,
                "async/trained": ledger.trained,
                "async/dropped": sum(ledger.dropped.values()),
                "async/in_flight": ledger.in_flight,
                "async/queued": ledger.waiting,
                "async/stale_dropped": ledger.dropped["stale_in_flight"] + ledger.dropped["stale_in_queue"],
                **{f"async/dropped_{reason}": ledger.dropped[reason] for reason in DROP_REASONS},
            }
        counts |= {"async/version": self.version, "async/worker_restarts": getattr(self.worker, "restarts", 0)}
        return {name: float(value) for name, value in counts.items()}
