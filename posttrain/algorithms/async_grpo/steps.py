"""One optimiser step of an asynchronous run: rollouts taken from the queue, none too old, dealt to processes, logged."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from posttrain.algorithms.async_grpo.config import AsyncGRPOConfig
from posttrain.algorithms.async_grpo.service import RolloutService
from posttrain.errors import RolloutError
from posttrain.losses.kl import k3
from posttrain.losses.policy import clip_metrics, clipped
from posttrain.losses.ratio import importance_log_ratio, rollout_correction
from posttrain.losses.reduce import spread
from posttrain.metrics import Metric, maximum, mean, total
from posttrain.models import parallel
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.rollouts.workers.ledger import DROP_REASONS, DropWatch, Ledger, plan_step
from posttrain.rollouts.workers.samples import RolloutSample, Trajectory
from posttrain.rollouts.workers.worker import AwakeClock
from posttrain.training.scoring import RewardWatch
from posttrain.types import Batch, LossTerms, ModelOutputs

if TYPE_CHECKING:
    pass

__all__ = [
    "NEEDS",
    "StepPlanner",
    "async_grpo_objective",
]

logger = logging.getLogger(__name__)


LOOK_S = 5.0  # How long the queue may be empty before the workers' health is looked at.
STRAIGHT = 100  # Rollouts in a row that are too long for a row, after which none will ever fit.


class StepPlanner:
    """Takes the rollouts of each optimiser step from the queue, deals them to processes, and logs what the step holds.

    Args:
        args: Of the trainer.
        accelerator: Of the run.
        service: Workers and their weights.
        ledger: Counts rollouts.
        drops: Lowers what is written at once where too much is dropped.
        rewards: For their names, weights and verdicts.
        watch: Notices rewards that cannot teach anything.
        tokenizer: Of the policy.
        context: Most tokens of prompt and completion.
        step: Optimiser steps that were made.
        log: Takes metrics.
        add_completions: Takes rows of the completions table.
    """

    def __init__(
        self,
        args: AsyncGRPOConfig,
        accelerator: Any,
        service: RolloutService,
        *,
        ledger: Ledger,
        drops: DropWatch,
        rewards: RewardRunner,
        watch: RewardWatch,
        tokenizer: Any,
        context: int | None,
        step: Callable[[], int],
        log: Callable[[dict[str, Metric]], None],
        add_completions: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self.args, self.accelerator, self.service = args, accelerator, service
        self.ledger, self.drops, self.rewards, self.watch = ledger, drops, rewards, watch
        self.tokenizer, self.context = tokenizer, context
        self.step, self.log, self.add_completions = step, log, add_completions
        # Rollouts of the step under way.
        self.held: list[Trajectory] = []
        self._straight = 0
        self._seen_stale = 0

    # Taking ------------------------------------------------------------------------------------------------------

    def next_step(self) -> list[list[RolloutSample]]:
        """The samples of the next step, one list a process; every rank must call it."""
        main = self.accelerator.is_main_process
        while True:
            dealt = parallel.run_and_share(lambda: self._deal() if main else None, self.accelerator)
            shares = parallel.all_gather_objects([dealt] if main else [], self.accelerator)[0]
            if shares is not None:
                return shares
            self.service.serve_again()

    def _deal(self) -> list[list[RolloutSample]] | None:
        """The step's samples, one list a process; None: servers are to be given their weights first."""
        began = time.perf_counter()
        if not self.take(self.args.samples_per_step or 1):
            return None
        waited = time.perf_counter() - began
        samples = [sample for trajectory in self.held for sample in trajectory.samples]
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
        return max(0, given) if given is not None else (self.context or 0)

    def take(self, count: int) -> bool:
        """Hold so many rollouts, none further behind the weights than ``max_staleness_hard`` as this step trains it.

        Returns:
            False: not yet, since servers lack the weights and nothing arrives; what is held stays held.

        Raises:
            RolloutError: Nothing came for too long, or 100 in a row were too long for a row.
        """
        held, self.held = self.held, []
        for trajectory in held:  # Of a call that was broken off to push weights.
            self._hold(trajectory, "held")
        while len(self.held) < count:
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
            self.close_group(trajectory.group_id)
            return
        if place == "waiting":
            self.ledger.hold(1)
        self.held.append(trajectory)

    def _watch_drops(self, count: int) -> None:
        stale = self.ledger.dropped["stale_in_flight"] + self.ledger.dropped["stale_in_queue"]
        limit = getattr(self.service.worker, "max_inflight", 0)
        lower = self.drops.add(count, stale - self._seen_stale, limit)
        self._seen_stale = stale
        if lower != limit and self.service.owns_workers:
            self.service.worker.limit(lower)

    def _refused(self, trajectory: Trajectory) -> str | None:
        bound = self.args.max_staleness_hard
        assert bound is not None
        if self.service.version - trajectory.version > bound:
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
        passed = (lambda: self.service.worker.worked) if self.service.owns_workers else AwakeClock(2 * LOOK_S).look
        began = passed()
        while True:
            self.service.worker.check_health(stale)
            try:
                item = self.service.worker.rollout_buffer.get(timeout=min(LOOK_S, stale))
            except queue.Empty:
                if passed() - began > 2 * stale:
                    raise self._nothing(passed() - began) from None
                if getattr(self.service.transfer, "lacking", bool)():
                    return None
                continue
            return item if self.service.owns_workers else self._booked(item)

    def _booked(self, item: Any) -> Trajectory:
        """What a worker of the caller's own hands over, which counts from now on: a sample, several rows, a trajectory."""
        self.ledger.dispatch(1)
        self.ledger.arrive(1)
        if isinstance(item, Trajectory):
            return replace(item, arrived=self.service.version)
        return Trajectory([item] if isinstance(item, RolloutSample) else list(item), arrived=self.service.version)

    def _nothing(self, waited: float) -> RolloutError:
        dropped = dict(self.ledger.dropped)
        servers = getattr(self.service.transfer, "trouble", str)()
        return RolloutError(
            f"no fresh rollout arrived for {waited:.0f} s (2 x heartbeat_stale_after_s), and the workers say that they are "
            f"well: {self.ledger.writing} rollouts are under way, {dropped} were dropped. "
            + (f"Rollout servers that are not: {servers}. " if servers else "")
            + "If one rollout takes that long, raise heartbeat_stale_after_s or lower max_completion_length."
        )

    def close_group(self, group_id: int) -> None:
        """No rollout of this group is under way any more."""
        if self.service.owns_workers:
            with self.service.worker.lock:
                self.service.worker.source.done(group_id)

    # Logging -----------------------------------------------------------------------------------------------------

    def _log_step(self, waited: float) -> None:
        """What the step holds, of all processes; only the main one logs it."""
        metrics = self._sample_metrics() | self._age_metrics() | self._pool_metrics()
        metrics["queue_wait_time_s"] = mean(waited)
        self.log(metrics)
        self.add_completions([self._completion_row(c) for c in self.held])
        self._watch()

    def _sample_metrics(self) -> dict[str, Metric]:
        """Means over rollouts of what came with them; one that lacks a number is left out of its mean."""
        first = [trajectory.samples[0] for trajectory in self.held]
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
        held = self.held
        ages = torch.tensor([float(self.service.version - c.version) for c in held])
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
        if not self.service.owns_workers:
            return {}
        spent = self.service.worker.spent()
        found = {
            "buffer_qsize": mean(float(len(self.service.worker.rollout_buffer))),
            "async/queue_tokens": mean(float(self.service.worker.rollout_buffer.tokens)),
        }
        if spent.get("generate"):
            found["generation_tok_per_s"] = mean(spent.get("tokens", 0.0) / spent["generate"])
        if spent.get("groups"):
            found["scoring_time_ms"] = mean(1e3 * spent.get("score", 0.0) / spent["groups"])
        return found

    def _watch(self) -> None:
        """Rewards that cannot teach anything end the run, as in synchronous training."""
        first = [trajectory.samples[0] for trajectory in self.held]
        names = self.rewards.names
        values = torch.tensor([[s.metrics.get(f"rewards/{n}", math.nan) for n in names] for s in first])
        totals = torch.tensor([s.metrics.get("reward", math.nan) for s in first])
        table = RewardTable(values, list(names), self.rewards.weights)
        # A worker of the caller's own may say nothing of rewards but the advantage.
        known = [i for i, s in enumerate(first) if any(f"rewards/{n}" in s.metrics for n in names)]
        if known:
            judged = RewardTable(values[known], list(names), self.rewards.weights)
            groups = torch.tensor([first[i].group_id for i in known])
            self.rewards.judge(judged, groups, prompts=[first[i].prompt for i in known])
            self.log(judged.metrics)
        self.watch.clipped(int(sum(s.metrics.get("advantages/clipped_share", 0.0) for s in first)), len(first))
        self.watch.batch(table, totals, torch.tensor([s.advantage for s in first]))

    def _completion_row(self, trajectory: Trajectory) -> dict[str, Any]:
        sample = trajectory.samples[0]
        decode, start = self.tokenizer.decode, sample.start
        rewards = {n: sample.metrics.get(f"rewards/{n}", math.nan) for n in self.rewards.names}
        return {
            "step": self.step(),
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
        counts |= {
            "async/version": self.service.version,
            "async/worker_restarts": getattr(self.service.worker, "restarts", 0),
        }
        return {name: float(value) for name, value in counts.items()}


NEEDS = frozenset({"logp", "entropy"})


def async_grpo_objective(out: ModelOutputs, batch: Batch, cfg: AsyncGRPOConfig) -> LossTerms:
    """``-min(rho A, clip(rho, 1 - eps, 1 + eps_high) A)``, per token, divided by the tokens of the whole step.

    ``is_correction=None``: ``rho = pi / mu`` with the log-probs ``log mu`` of the weights that sampled each token. Otherwise
    ``rho = pi / pi_start`` (1, with its gradient, since all passes of a step see the same weights), and the term is weighted
    by ``pi_start / mu``, bounded: decoupled PPO, whose proximal policy costs no pass of its own here.

    Args:
        out: Log-probs and entropies of the policy.
        batch: With ``rollout_logp`` and ``advantages``.
        cfg: `AsyncGRPOConfig`.

    Reference: PPO, arXiv:1707.06347, equation 7; AReaL, arXiv:2505.24298, equation 5.
    """
    assert out.logp is not None and batch.rollout_logp is not None and batch.advantages is not None
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    advantages = spread(batch.advantages, batch.sequence)
    old = batch.rollout_logp if cfg.is_correction is None else None
    log_ratio = importance_log_ratio(out.logp, old, *forest, level="token")
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    terms = clipped(log_ratio, advantages, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta)
    ratio = (out.logp - batch.rollout_logp).detach().exp()
    metrics: dict[str, Metric] = {
        "entropy": mean(out.entropy, batch.loss_mask),  # type: ignore[arg-type]
        "ratio": mean(ratio, batch.loss_mask),
        "ratio/max": maximum(ratio[batch.loss_mask]),
        "kl": mean(k3(batch.rollout_logp, out.logp.detach()), batch.loss_mask),
    }
    metrics |= clip_metrics(log_ratio, advantages, *forest, epsilon=cfg.epsilon, epsilon_high=high, delta=cfg.delta)
    if cfg.is_correction is not None:
        bounds = {"clip_max": cfg.is_clip_max, "clip_min": cfg.is_clip_min}
        weight = rollout_correction(out.logp.detach(), batch.rollout_logp, *forest, mode=cfg.is_correction, **bounds)
        terms = terms * weight
        values = weight[batch.loss_mask]
        metrics |= {
            "sampling/importance_sampling_ratio/mean": mean(values),
            "sampling/importance_sampling_ratio/max": maximum(values),
            "sampling/frac_masked": mean((values == 0).float()),
        }
    return LossTerms(
        terms,
        batch.loss_mask,
        "token",
        sequence=batch.sequence,
        num_sequences=batch.num_sequences,
        metrics=metrics,
    )
