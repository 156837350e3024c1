"""`AsyncRollouts`: rollouts that workers write ahead; `RolloutService`: these workers and the weights they sample with."""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from posttrain.checks.server import Probe
from posttrain.errors import RolloutError
from posttrain.extensions.asynchronous.engine import EngineRecipe
from posttrain.extensions.asynchronous.grpo_config import AsyncGRPOConfig
from posttrain.extensions.asynchronous.jobs import RolloutJob
from posttrain.extensions.asynchronous.ledger import DROP_REASONS, DropWatch, Ledger, balanced_shares
from posttrain.extensions.asynchronous.processes import PoolSettings, WorkerPool
from posttrain.extensions.asynchronous.samples import RolloutBuffer, RolloutSample, TaskSource, Trajectory
from posttrain.extensions.asynchronous.worker import ActiveClock
from posttrain.loop.reward_watch import RewardWatch
from posttrain.loop.scoring import (
    completion_lengths,
    completion_metrics,
    completion_rows,
    reward_metrics,
    reward_options,
    reward_spread,
)
from posttrain.loop.weight_sync import WeightSync, whole_update
from posttrain.metrics import Metric, maximum, mean, total
from posttrain.models import parallel
from posttrain.models.heads import causal_lm
from posttrain.pictures.processors import PictureProcessor
from posttrain.rewards.runner import RewardRunner, RewardTable, unscorable
from posttrain.rollouts.base import WeightTransfer
from posttrain.rollouts.batch import (
    RolloutBatch,
    decoded,
)
from posttrain.rollouts.episodes.driver import EpisodeSetup
from posttrain.rollouts.shared_weights import SharedWeights, check_mergeable
from posttrain.types import Advantages, Sampling

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)

# Parameters of a reward model that is slow without the accelerator.
BIG_MODEL = 50_000_000
# Completions' limit times this is what a rollout reserves where the context is unknown.
LONGEST_PROMPT = 2
# Seconds that the queue may be empty before the workers' health is checked.
LOOK_S = 5.0
# Versions whose log-probs are kept until the workers' arrive.
PROBES_KEPT = 8
# Rollouts in a row that are too long for a row, after which none will ever fit.
TOO_LONG_IN_A_ROW = 100


def by_context(samples: Sequence[RolloutSample]) -> list[RolloutSample]:
    """Samples of one group and context side by side, so that their rows share the prompt; groups in the order they came."""
    together: dict[tuple[int, tuple[Any, ...]], list[RolloutSample]] = {}
    for sample in samples:
        context = (*sample.pictures, *sample.input_ids[: sample.start])
        together.setdefault((sample.group_id, context), []).append(sample)
    return [sample for members in together.values() for sample in members]


def rollout_batch(samples: Sequence[RolloutSample]) -> RolloutBatch:
    """Samples as a rollout batch with ``advantages`` and ``rollout_logp``, in their order."""
    return RolloutBatch(
        [sample.example() for sample in samples],
        [sample.rollout() for sample in samples],
        [sample.completion for sample in samples],
        columns={"advantages": [sample.advantage for sample in samples]},
        token_columns={"rollout_logp": [sample.old_log_probs[sample.start :] for sample in samples]},
    )


def trajectory_batch(trajectories: Sequence[Trajectory]) -> RolloutBatch:
    """Whole rollouts as a rollout batch with ``advantages``, in their order: what the trainer's own engine would have given."""
    first = [trajectory.samples[0] for trajectory in trajectories]
    return RolloutBatch(
        [sample.example() for sample in first],
        [trajectory.rollout() for trajectory in trajectories],
        [sample.completion for sample in first],
        columns={"advantages": [sample.advantage for sample in first]},
    )


def warn_of_reward_models(functions: Any) -> None:
    """Reward models run where the workers are: on the CPU."""
    for function in functions if isinstance(functions, list | tuple) else [functions]:
        size = sum(p.numel() for p in function.parameters()) if isinstance(function, nn.Module) else 0
        if size > BIG_MODEL or isinstance(function, str):
            logger.warning(
                "the reward model %s runs in the rollout workers, on the CPU: slow. Serve it, and let a function ask the "
                "server.", function if isinstance(function, str) else f"of {size / 1e6:.0f}M parameters",
            )  # fmt: skip


class Scoring(Protocol):
    """What is asked about every rollout besides its rewards, while the step before its own is trained."""

    def begin(self, trajectory: Trajectory) -> None:
        """It has arrived."""

    def finish(self, samples: Sequence[RolloutSample]) -> dict[str, Metric]:
        """Fill in ``scores`` of the samples of a step; returns what to log."""
        ...


class RolloutService:
    """Starts the rollout workers, pushes weights to them and stops them; only the main process has workers.

    Args:
        args: Of the trainer.
        given: What the trainer was given: ``rollout_worker``, ``weight_transfer``, ``engine_factory``, reward functions (or
            ``unscored``, where there are none), tools.
        sync: Of the trainer: its model and accelerator, the check of servers, the log.
        tasks: Prompts.
        ledger: Counts rollouts.
        tokenizer: Of the policy.
        pad_token_id: Of the policy.
        sampling: Settings of the workers' engines.
        reader: Reads prompts with pictures; None: prompts are text.

    Attributes:
        worker: Writes rollouts; None before the first step, and on processes other than the main one.
        transfer: Takes weights to the engines; None before the first step.
        told: What it tells beside the protocol.
        scoring: What else is asked about rollouts as they arrive; None: nothing.
        version: Of the weights that were pushed last.
    """

    def __init__(
        self,
        args: AsyncGRPOConfig,
        given: dict[str, Any],
        sync: WeightSync,
        *,
        tasks: TaskSource,
        ledger: Ledger,
        tokenizer: Tokenizer,
        pad_token_id: int,
        sampling: Callable[[], Sampling],
        reader: PictureProcessor | None = None,
    ) -> None:
        self.args, self.given, self.sync, self.accelerator = args, given, sync, sync.accelerator
        self.tasks, self.ledger, self.sampling = tasks, ledger, sampling
        self.tokenizer, self.pad_token_id, self.reader = tokenizer, pad_token_id, reader
        check_mergeable(sync.run.model)
        self.worker: Any = None
        self.transfer: Any = None
        self.told = WeightTransfer()
        self.scoring: Scoring | None = None
        self.version = 0
        self._serving = False
        # Step after which weights were pushed last.
        self._sent_at = -1
        self._probes: dict[int, Probe] = {}

    @property
    def pool(self) -> WorkerPool | None:
        """The workers where they are ours, so that every rollout can be accounted for from its beginning."""
        return self.worker if isinstance(self.worker, WorkerPool) else None

    # Start and stop ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Push the weights as they are now, then start the workers, once; every rank must call it."""
        if self._serving:
            return
        self._serving = True
        self.transfer = self.given["weight_transfer"] or self.make_transfer()
        if isinstance(self.transfer, WeightTransfer):
            self.told = self.transfer
        if isinstance(self.transfer, WeightTransfer | SharedWeights):
            self.transfer.version = self.version
        parallel.run_and_share(self._on_main(self.transfer.init_weight_transfer), self.accelerator)
        if self._engine_kind == "server":
            self.sync.check_engine(self.told.engine)
        self.worker = (self.given["rollout_worker"] or self.make_worker()) if self._is_main else None
        self.push_weights()
        parallel.run_and_share(self._on_main(lambda: self.worker.start()), self.accelerator)

    @property
    def _is_main(self) -> bool:
        return self.accelerator.is_main_process

    def _on_main(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function if self._is_main else lambda: None

    def close(self) -> None:
        """Stop workers and remove weights; never raises over another error."""
        if not self._serving:
            return
        self._serving = False
        ends = [("workers", self.worker.stop)] if self.worker is not None else []
        ends += [("weights", self.transfer.destroy)] if self.transfer is not None else []
        for name, end in ends if self._is_main else ():
            try:
                end()
            except Exception:
                logger.exception("the %s could not be closed", name)
        left = {"writing": self.ledger.writing, "waiting": self.ledger.waiting, "held": self.ledger.held}
        for place, count in left.items():  # Nothing is left there unless an error ended the run.
            self.ledger.drop(count, "unfinished", place)

    # Weights -----------------------------------------------------------------------------------------------------

    def push_weights(self, again: bool = False) -> None:
        """The next version; every rank must call it, since reading sharded weights is a collective.

        Args:
            again: The same version, to servers that lack it; the weights must not have moved since.

        Raises:
            WeightSyncError: It did not arrive; on every rank.
        """
        began = time.perf_counter()
        if isinstance(self.transfer, SharedWeights):
            self._probe_workers(self.transfer)
        tensors = self.sync.outgoing(self.told.capabilities)  # Of the rank that sends.
        tries = self.args.vllm_sync_retries + 1 if self._engine_kind == "server" else 1
        whole_update(lambda: parallel.run_and_share(lambda: self._send(tensors, again), self.accelerator), tries)
        self.version += not again
        self._sent_at = self.sync.run.progress.state.global_step
        engine = self.told.engine
        if self._engine_kind == "server" and self.told.capabilities.scores_sequences and self.sync.parity_due(again):
            with self.sync.parity.timed():
                self.sync.refuse(self.sync.parity_finding(engine, self.version), self.version)
        if self.worker is not None:
            if self.pool is not None:
                self.pool.holders = self.told.holders
            self.worker.update_model_version(self.version)
        self.sync.run.log(
            {"perf/weight_sync_s": mean(time.perf_counter() - began), "weight_sync_mb": mean(tensors.nbytes / 1e6)}
        )

    def _probe_workers(self, transfer: SharedWeights) -> None:
        """Let workers score the probe sequences with the next version, where a comparison is due."""
        transfer.probe = None
        if self.sync.parity_due():
            with self.sync.parity.timed():
                probe = self.sync.probe()
            transfer.probe = probe.sequences
            self._probes = dict(list(self._probes.items())[1 - PROBES_KEPT :]) | {transfer.version + 1: probe}

    def compare_workers(self) -> None:
        """Compare the log-probs that workers sent since the last call with the trainer's of the same version.

        Raises:
            WeightSyncError: A worker samples from other weights than the trainer's.
        """
        while self.pool is not None and self.pool.scored:
            index, version, theirs = self.pool.scored.popleft()
            probe = self._probes.get(version)
            found = probe and self.sync.parity.compare(
                probe, f"rollout worker {index}", theirs, dtype=probe.computed, version=version
            )
            self.sync.refuse(found, version)

    def _send(self, tensors: Iterable[tuple[str, Tensor]], again: bool) -> None:
        if not self._is_main:
            for _ in tensors:
                pass
        elif again:
            self.transfer.send_again(tensors)  # Nobody asks those servers yet: nothing is to be paused.
        else:
            self.transfer.pause()
            try:
                self.transfer.send_weights(tensors)
            finally:
                self.transfer.resume()

    def serve_again(self) -> None:
        """Give servers that lack the weights what the others have; every rank must call it."""
        self.push_weights(again=self._sent_at == self.sync.run.progress.state.global_step)

    def make_transfer(self) -> Any:
        """Shared memory for engines that hold a copy, the servers' own way for servers."""
        if self._engine_kind != "server":
            return SharedWeights()
        from posttrain.extensions.server.engine import ServerEngine, ServerTransfer

        urls = self.args.server_urls
        options = self._server_options() | {"connection_timeout": self.args.vllm_server_timeout}
        return ServerTransfer(functools.partial(ServerEngine, urls if len(urls) > 1 else urls[0], **options))

    # Workers -----------------------------------------------------------------------------------------------------

    @property
    def _engine_kind(self) -> str:
        return "custom" if self.given["engine_factory"] is not None else self.args.resolved_engine

    def _server_options(self) -> dict[str, Any]:
        from posttrain.extensions.server.engine import server_options

        return server_options(self.args) | {"reader": self.reader}

    def make_worker(self) -> WorkerPool:
        """Processes as the config says."""
        args = self.args
        longest = self.sync.context or LONGEST_PROMPT * args.max_completion_length
        settings = PoolSettings(
            workers=args.num_rollout_workers,
            group_size=args.num_generations,
            max_inflight=args.max_inflight_tasks,
            window=(args.max_staleness + 1) * (args.samples_per_step or 1) if args.staleness_policy == "pace" else None,
            max_staleness=args.max_staleness,
            max_staleness_hard=args.max_staleness_hard or args.max_staleness,
            rollout_tokens=min(longest, LONGEST_PROMPT * args.max_completion_length),
            failure_budget=args.rollout_failure_budget,
            max_restarts=args.max_worker_restarts,
            stale_after_s=args.heartbeat_stale_after_s,
            sync_timeout_s=args.sync_timeout_s,
        )
        arriving = None if self.scoring is None else self.scoring.begin
        buffer = RolloutBuffer(args.queue_maxsize, args.queue_max_tokens, arriving)
        folder = Path(args.output_dir, "rollout_workers")
        return WorkerPool(self.make_job(), self.tasks, settings, buffer=buffer, ledger=self.ledger, folder=folder)

    def make_job(self) -> RolloutJob:
        """What is sent to every worker."""
        args, given = self.args, self.given
        shared = args.worker_threads or max(1, (os.cpu_count() or 1) // (args.num_rollout_workers + 1))
        episodes = {name: given.get(name) for name in ("tools", "environment_factory", "harness")}
        contexts = [self.sync.context, self.told.capabilities.context]
        return RolloutJob(
            engine=self._engine_recipe(),
            tokenizer=self.tokenizer,
            sampling=self.sampling(),
            context=min((c for c in contexts if c), default=None),
            episodes=EpisodeSetup.of(args, **episodes),
            rewards=None
            if given.get("unscored")
            else reward_options(given["reward_funcs"], args, given["reward_processing_classes"])
            | {"score_twice": False},
            method=type(self.sync.run.method)(args),
            mask_truncated=args.mask_truncated_completions,
            threads=shared,
            segment_s=args.worker_segment_s,
            slots=max(args.num_generations, -(-args.max_inflight_tasks // args.num_rollout_workers)),
            reader=self.reader,
        )

    def _engine_recipe(self) -> EngineRecipe:
        kind, inner, factory = self._engine_kind, causal_lm(self.sync.run.model), self.given["engine_factory"]
        if kind == "server":
            from posttrain.extensions.server.engine import FollowingEngine

            factory = functools.partial(FollowingEngine, **self._server_options())
        return EngineRecipe(
            kind,
            config=inner.config,
            dtype=str(next(inner.parameters()).dtype).removeprefix("torch."),
            pad_token_id=self.pad_token_id,
            trust_remote_code=self.args.trust_remote_code,
            weights=str(self.transfer.folder) if isinstance(self.transfer, SharedWeights) else "",
            factory=factory,
            processor=None if self.reader is None else self.reader.processor,
        )


class AsyncRollouts:
    """Rollouts that workers write ahead, taken from a queue as steps need them; each in exactly one place of the ledger.

    Args:
        service: Workers and their weights.
        rewards: For their names, weights and verdicts.
        watch: Notices rewards that cannot teach anything; None: rollouts have no rewards.
        add_completions: Takes rows of the completions table.

    Attributes:
        ledger: Where every rollout is.
        held: Rollouts of the step under way, on the main process.
    """

    def __init__(
        self,
        service: RolloutService,
        rewards: RewardRunner,
        watch: RewardWatch | None,
        add_completions: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self.service, self.rewards, self.watch, self.add_completions = service, rewards, watch, add_completions
        self.args, self.sync, self.accelerator = service.args, service.sync, service.accelerator
        self.tasks, self.ledger, self.tokenizer = service.tasks, service.ledger, service.tokenizer
        self.drops = DropWatch(self.args.max_staleness)
        self.held: list[Trajectory] = []
        self._straight = 0
        self._seen_stale = 0

    def next(self, n: int) -> RolloutBatch:
        """The share that this process has of ``n`` rollouts; workers are started before the first."""
        self.service.serve()
        main = self.accelerator.is_main_process
        while True:
            with parallel.failing_together(self.accelerator):
                self.service.compare_workers()
                dealt = self._deal(n) if main else None
            # Each process is sent its own share alone. None for all: servers are to be given their weights first.
            share = parallel.scatter_objects(dealt or [None] * self.accelerator.num_processes, self.accelerator)
            if share is not None:
                samples = by_context(share)
                batch = rollout_batch(samples)
                if self.service.scoring is not None:
                    batch.extra["scores"] = [sample.scores for sample in samples]
                return batch
            self.service.serve_again()

    def _deal(self, count: int) -> list[list[RolloutSample]] | None:
        """The step's samples, one list a process; None: servers are to be given their weights first."""
        began = time.perf_counter()
        if not self.take(count):
            return None
        waited = time.perf_counter() - began
        samples = [sample for trajectory in self.held for sample in trajectory.samples]
        if self.service.pool is None:  # Ours looked at every token before they sent it (`score_group`).
            for sample in samples:
                sample.check()
        self._log_step(waited)
        if self.service.scoring is not None:
            self.sync.run.log(self.service.scoring.finish(samples))
        shares = balanced_shares([len(sample) for sample in samples], self.accelerator.num_processes)
        return [[samples[i] for i in share] for share in shares]

    @property
    def token_budget(self) -> int:
        """Tokens of a row; 0: no bound."""
        budget = self.args.token_budget
        return max(0, budget) if budget is not None else (self.sync.context or 0)

    def take(self, count: int) -> bool:
        """Hold so many rollouts, none further behind the weights than ``max_staleness_hard`` as this step trains it.

        Returns:
            False: not yet, since servers lack the weights and nothing arrives; what is held stays held.

        Raises:
            RolloutError: Nothing came for too long, or 100 in a row were too long for a row.
        """
        pending, self.held = self.held, []
        for trajectory in pending:  # Of a call that was broken off to push weights.
            self._hold(trajectory, "held")
        while len(self.held) < count:
            trajectory = self._wait()
            if trajectory is None:
                return False
            self._hold(trajectory, "waiting")
        stale = self.ledger.dropped["stale_in_flight"] + self.ledger.dropped["stale_in_queue"]
        pool = self.service.pool
        limit = 0 if pool is None else pool.max_inflight
        lower = self.drops.add(count, stale - self._seen_stale, limit)
        self._seen_stale = stale
        if pool is not None and lower != limit:
            pool.max_inflight = max(self.args.num_generations, lower)
        return True

    def _hold(self, trajectory: Trajectory, place: str) -> None:
        reason = self._refused(trajectory)
        if reason is not None:
            self.ledger.drop(1, reason, place)
            self._close_group(trajectory.group_id)
            return
        if place == "waiting":
            self.ledger.hold(1)
        self.held.append(trajectory)

    def _refused(self, trajectory: Trajectory) -> str | None:
        bound = self.args.max_staleness_hard
        assert bound is not None
        if self.service.version - trajectory.version > bound:
            return "stale_in_queue"
        longest = max(len(sample) for sample in trajectory.samples)
        if 0 < self.token_budget < longest:
            self._straight += 1
            logger.warning("a rollout of %d tokens does not fit token_budget=%d: dropped", longest, self.token_budget)
            if self._straight >= TOO_LONG_IN_A_ROW:
                raise RolloutError(
                    f"{TOO_LONG_IN_A_ROW} rollouts in a row were longer than token_budget={self.token_budget} (the last: "
                    f"{longest} tokens): nothing would ever be trained. Raise token_budget, or lower max_completion_length."
                )
            return "too_long"
        self._straight = 0
        return None

    def _wait(self) -> Trajectory | None:
        """The next rollout from the queue; while there is none, the health of the workers is checked.

        Returns:
            None where servers lack the weights.
        """
        stale = self.args.heartbeat_stale_after_s
        clock = ActiveClock(2 * LOOK_S)
        began = clock.look()
        while True:
            self.service.worker.check_health(stale)
            try:
                item = self.service.worker.rollout_buffer.get(timeout=min(LOOK_S, stale))
            except queue.Empty:
                if self.service.pool is not None and self.service.pool.starting:
                    began = clock.look()
                if clock.look() - began > 2 * stale:
                    raise self._nothing(clock.now - began) from None
                if self.service.told.missing_weights():
                    return None
                continue
            return self._booked(item) if self.service.pool is None else item

    def _booked(self, item: object) -> Trajectory:
        """What a user's own worker hands over, which counts from now on: a sample, several rows, a trajectory."""
        self.ledger.dispatch(1)
        self.ledger.arrive(1)
        if isinstance(item, Trajectory):
            return replace(item, arrived=self.service.version)
        return Trajectory([item] if isinstance(item, RolloutSample) else list(item), arrived=self.service.version)

    def _nothing(self, waited: float) -> RolloutError:
        dropped = dict(self.ledger.dropped)
        servers = self.service.told.failure_reason()
        return RolloutError(
            f"no fresh rollout arrived for {waited:.0f} s (2 x heartbeat_stale_after_s), and the workers say that they are "
            f"well: {self.ledger.writing} rollouts are under way, {dropped} were dropped. "
            + (f"Rollout servers that are not: {servers}. " if servers else "")
            + "If one rollout takes that long, raise heartbeat_stale_after_s or lower max_completion_length."
        )

    def _close_group(self, group_id: int) -> None:
        """No rollout of this group is under way any more."""
        if self.service.pool is not None:
            with self.service.pool.lock:
                self.tasks.done(group_id)

    # The account -------------------------------------------------------------------------------------------------

    def book(self, *, skipped: bool) -> None:
        """The step is done: what it held is trained; or, where its update was left out, dropped with the queue."""
        pool = self.service.pool
        if skipped:
            self.ledger.drop(self.ledger.held, "skipped", "held")
            if pool is not None:
                with pool.lock:
                    drained = pool.rollout_buffer.drain()
                    self.ledger.drop(len(drained), "skipped", "waiting")
                self.held += drained
        else:
            self.ledger.train()
        for trajectory in self.held:
            self._close_group(trajectory.group_id)
        self.held = []
        (pool or self.ledger).audit()

    def close(self) -> None:
        """Stop the workers; what was under way counts as unfinished."""
        self.service.close()
        self.held = []

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
            "async/worker_restarts": 0 if self.service.pool is None else self.service.pool.restarts,
        }
        return {name: float(value) for name, value in counts.items()}

    def state(self) -> dict[str, Any]:
        """For a checkpoint: where prompts and counts stand; rollouts under way are asked for again after a resume."""
        with (self.service.pool or self.ledger).lock:
            mine = {"tasks": self.tasks.state(), "ledger": self.ledger.state()}
        return mine | {"version": self.service.version}

    def load(self, state: dict[str, Any]) -> None:
        """Undo `state`."""
        self.tasks.load(state["tasks"])
        self.ledger.load(state["ledger"])
        self.service.version = state["version"]

    # Logging -----------------------------------------------------------------------------------------------------

    def _log_step(self, waited: float) -> None:
        """What the step holds, of all processes; only the main one logs it."""
        first = [trajectory.samples[0] for trajectory in self.held]
        batch, table = trajectory_batch(self.held), self._table(first)
        metrics = _sample_metrics(first) | self._age_metrics() | self._pool_metrics()
        metrics |= completion_metrics(batch, masks_truncated=self.args.mask_truncated_completions)
        metrics["perf/rollout_wait_s"] = mean(waited)
        self.sync.run.log(metrics | self._reward_metrics(batch, table, first))
        shown = replace(batch, rollouts=decoded(self.tokenizer, batch.rollouts, conversational=False)[0])
        self.add_completions(completion_rows(shown, table, self.tokenizer, self.sync.run.progress.state.global_step))
        if self.watch is not None:
            self._watch_rewards(self.watch, first, table)

    def _age_metrics(self) -> dict[str, Metric]:
        trajectories = self.held
        ages = torch.tensor([float(self.service.version - c.version) for c in trajectories])
        flight = torch.tensor([float(c.arrived - c.version) for c in trajectories])
        rows = [sample for c in trajectories for sample in c.samples]
        lengths = torch.tensor([float(len(sample)) for sample in rows])
        return {
            "sample/staleness_mean": mean(ages),
            "sample/staleness_max": maximum(ages),
            "async/staleness_in_flight_mean": mean(flight),
            "async/staleness_in_queue_mean": mean(ages - flight),
            "async/at_staleness_bound": mean((ages == self.args.max_staleness_hard).float()),
            "async/mixed_versions": mean(torch.tensor([float(len(sample.spans) > 1) for sample in rows])),
            "rollout/fork_rate": mean((len(rows) - len(trajectories)) / len(trajectories), weight=len(trajectories)),
            "sample/forwarded_tokens_mean": mean(lengths),
        }

    def _pool_metrics(self) -> dict[str, Metric]:
        pool = self.service.pool
        if pool is None:
            return {}
        spent = pool.spent()
        metrics = {
            "sample/rollout_queue_size": mean(float(len(pool.rollout_buffer))),
            "async/queue_tokens": mean(float(pool.rollout_buffer.tokens)),
        }
        if spent.get("generate"):
            metrics["rollout/generated_tok_s"] = mean(spent.get("tokens", 0.0) / spent["generate"])
        if spent.get("groups"):
            metrics["rollout/score_s"] = mean(spent.get("score", 0.0) / spent["groups"])
        return metrics

    def _reward_metrics(self, batch: RolloutBatch, table: RewardTable, first: list[RolloutSample]) -> dict[str, Metric]:
        """As in synchronous training, of samples that bring their rewards."""
        if table.values.isnan().all():
            return {}
        made = _advantages(first)
        return reward_metrics(table, made, completion_lengths(batch)) | {"reward_std": reward_spread(made.totals)}

    def _table(self, samples: list[RolloutSample]) -> RewardTable:
        """Rewards as samples bring them, NaN where one does not."""
        names = list(self.rewards.names)
        values = [[sample.metrics.get(f"rewards/{name}", math.nan) for name in names] for sample in samples]
        return RewardTable(torch.tensor(values), names, self.rewards.weights)

    def _watch_rewards(self, watch: RewardWatch, first: list[RolloutSample], table: RewardTable) -> None:
        """Rewards that cannot teach anything end the run, as in synchronous training."""
        # A user's own worker may send no rewards but the advantage.
        known = [i for i, s in enumerate(first) if any(f"rewards/{name}" in s.metrics for name in table.names)]
        table = replace(table, values=table.values[known])
        self.sync.run.log(unscorable(table.values))
        groups = torch.tensor([first[i].group_id for i in known], dtype=torch.long)
        far = int(sum(s.metrics.get("advantages/clipped_share", 0.0) for s in first))
        prompts = [first[i].prompt for i in known]
        watch.report(table, _advantages(first), groups, (far, len(first), None), prompts)


def _advantages(first: list[RolloutSample]) -> Advantages:
    """Advantages and total rewards as samples bring them."""
    totals = torch.tensor([sample.metrics.get("reward", math.nan) for sample in first])
    return Advantages(torch.tensor([sample.advantage for sample in first]), totals)


def _sample_metrics(first: list[RolloutSample]) -> dict[str, Metric]:
    """Means over rollouts of the numbers that came with them; one that lacks a number is left out of its mean."""
    names = sorted({name for sample in first for name in sample.metrics})
    metrics: dict[str, Metric] = {}
    for name in names:
        values = torch.tensor([sample.metrics.get(name, math.nan) for sample in first])
        known = ~values.isnan()
        metrics[name] = mean(values.nan_to_num(0.0), known)
        if name.startswith("rewards/") and name.endswith("/nan"):
            metrics[name] = total(float(values.nansum()))  # Rows, as in synchronous training.
        if name.startswith("rewards/") and name.count("/") == 1:
            metrics[f"{name}/mean"] = metrics[name]
    if not any("reward" in sample.metrics for sample in first):
        return metrics
    metrics["advantages/abs_max"] = maximum(torch.tensor([sample.advantage for sample in first]).abs())
    groups: dict[int, bool] = {}
    for sample in first:
        groups[sample.group_id] = groups.get(sample.group_id, True) and sample.advantage == 0
    metrics["frac_reward_zero_std"] = mean(sum(groups.values()) / len(groups), weight=len(groups))
    return metrics
