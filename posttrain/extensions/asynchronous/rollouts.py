"""`AsyncRollouts` is the queue of rollouts from workers. `RolloutService` starts the workers and pushes weights to them."""

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
from posttrain.extensions.images.processors import PictureProcessor
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

# A reward model with more than BIG_MODEL parameters causes a warning, because workers run it on the CPU, where it is slow.
BIG_MODEL = 50_000_000
# If the model's context length is unknown, the maximum length of a rollout is LONGEST_PROMPT times the maximum completion
# length.
LONGEST_PROMPT = 2
# Timeout in seconds of one read of the queue. The health of the workers is checked before each read.
LOOK_S = 5.0
# Number of weight versions for which the policy's log-probs are stored. Workers' log-probs are compared with them.
PROBES_KEPT = 8
# The run stops after TOO_LONG_IN_A_ROW consecutive rollouts that are longer than a batch row.
TOO_LONG_IN_A_ROW = 100


def by_context(samples: Sequence[RolloutSample]) -> list[RolloutSample]:
    """Sort samples so that samples with the same group and context are consecutive and can share their prompt."""
    together: dict[tuple[int, tuple[Any, ...]], list[RolloutSample]] = {}
    for sample in samples:
        context = (*sample.pictures, *sample.input_ids[: sample.start])
        together.setdefault((sample.group_id, context), []).append(sample)
    return [sample for members in together.values() for sample in members]


def rollout_batch(samples: Sequence[RolloutSample]) -> RolloutBatch:
    """Convert samples to a rollout batch with the columns ``advantages`` and ``rollout_logp``."""
    return RolloutBatch(
        [sample.example() for sample in samples],
        [sample.rollout() for sample in samples],
        [sample.completion for sample in samples],
        columns={"advantages": [sample.advantage for sample in samples]},
        token_columns={"rollout_logp": [sample.old_log_probs[sample.start :] for sample in samples]},
    )


def trajectory_batch(trajectories: Sequence[Trajectory]) -> RolloutBatch:
    """Convert whole rollouts to a rollout batch with the column ``advantages``. The batch has the form of a batch that the
    trainer's own engine generated.
    """
    first = [trajectory.samples[0] for trajectory in trajectories]
    return RolloutBatch(
        [sample.example() for sample in first],
        [trajectory.rollout() for trajectory in trajectories],
        [sample.completion for sample in first],
        columns={"advantages": [sample.advantage for sample in first]},
    )


def warn_of_reward_models(functions: Any) -> None:
    """Warn about large reward models, because workers run reward models on the CPU."""
    for function in functions if isinstance(functions, list | tuple) else [functions]:
        size = sum(p.numel() for p in function.parameters()) if isinstance(function, nn.Module) else 0
        if size > BIG_MODEL or isinstance(function, str):
            logger.warning(
                "the reward model %s runs in the rollout workers on the CPU, which is slow. Serve it, and use a "
                "reward function that calls the server.",
                function if isinstance(function, str) else f"of {size / 1e6:.0f}M parameters",
            )  # fmt: skip


class Scoring(Protocol):
    """Computes additional scores of rollouts, for example with teacher servers, while the previous training step runs."""

    def begin(self, trajectory: Trajectory) -> None:
        """Start scoring a rollout as soon as it has arrived."""

    def finish(self, samples: Sequence[RolloutSample]) -> dict[str, Metric]:
        """Wait for the scores of the step's samples, store them in `RolloutSample.scores`, and return metrics."""
        ...


class RolloutService:
    """Starts and stops rollout workers and pushes weights to them. Only the main process has workers.

    Args:
        args: Config of the trainer.
        given: Arguments that the trainer received: ``rollout_worker``, ``weight_transfer``, ``engine_factory``, tools, and the
            reward functions. If the method has no reward functions, the key ``unscored`` is True.
        sync: The trainer's weight sync. It also provides the model, the accelerator and the log.
        tasks: Source of prompts.
        ledger: Ledger of all rollouts.
        tokenizer: Tokenizer of the policy.
        pad_token_id: Pad token of the policy.
        sampling: Function that returns the sampling settings of the workers' engines.
        reader: Image processor for prompts. None: prompts are text.

    Attributes:
        worker: Worker pool, or the worker that the user passed. None before the first step, and on all processes except the
            main process.
        transfer: Object that sends weights to the engines. None before the first step.
        server_state: State of the weight transfer, for example which servers lack the weights. See `WeightTransfer`.
        scoring: Object that computes additional scores of arriving rollouts. None: no additional scores.
        version: Version of the weights that were pushed last.
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
        self.server_state = WeightTransfer()
        self.scoring: Scoring | None = None
        self.version = 0
        self._serving = False
        # Number of the training step after which the weights were pushed for the last time.
        self._sent_at = -1
        self._probes: dict[int, Probe] = {}

    @property
    def pool(self) -> WorkerPool | None:
        """The worker pool. All of its rollouts are recorded in the ledger. None if the user passed a worker."""
        return self.worker if isinstance(self.worker, WorkerPool) else None

    # Start and stop ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Push the current weights and start the workers. Later calls have no effect. All ranks must call this method."""
        if self._serving:
            return
        self._serving = True
        self.transfer = self.given["weight_transfer"] or self.make_transfer()
        if isinstance(self.transfer, WeightTransfer):
            self.server_state = self.transfer
        if isinstance(self.transfer, WeightTransfer | SharedWeights):
            self.transfer.version = self.version
        parallel.run_and_share(self._on_main(self.transfer.init_weight_transfer), self.accelerator)
        if self._engine_kind == "server":
            self.sync.check_engine(self.server_state.engine)
        self.worker = (self.given["rollout_worker"] or self.make_worker()) if self._is_main else None
        self.push_weights()
        parallel.run_and_share(self._on_main(lambda: self.worker.start()), self.accelerator)

    @property
    def _is_main(self) -> bool:
        return self.accelerator.is_main_process

    def _on_main(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function if self._is_main else lambda: None

    def close(self) -> None:
        """Stop the workers and delete the shared weights. Errors while stopping are only logged, so that they do not hide an
        earlier error that ended the run.
        """
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
        # If an error ended the run, some rollouts are still in progress or in the queue. Record them as unfinished.
        for place, count in left.items():
            self.ledger.drop(count, "unfinished", place)

    # Weights -----------------------------------------------------------------------------------------------------

    def push_weights(self, again: bool = False) -> None:
        """Push the current weights under a new version number. All ranks must call this method, because all ranks take part in
        reading sharded weights.

        Args:
            again: Push the last version again, to servers that lack it. The weights must not have changed since the last
                push.

        Raises:
            WeightSyncError: The weights did not arrive. All ranks raise this error.
        """
        began = time.perf_counter()
        if isinstance(self.transfer, SharedWeights):
            self._probe_workers(self.transfer)
        # All ranks read the tensors, but only one rank sends them.
        tensors = self.sync.outgoing(self.server_state.capabilities)
        tries = self.args.vllm_sync_retries + 1 if self._engine_kind == "server" else 1
        whole_update(lambda: parallel.run_and_share(lambda: self._send(tensors, again), self.accelerator), tries)
        self.version += not again
        self._sent_at = self.sync.run.progress.state.global_step
        engine = self.server_state.engine
        if (
            self._engine_kind == "server"
            and self.server_state.capabilities.scores_sequences
            and self.sync.parity_due(again)
        ):
            with self.sync.parity.timed():
                self.sync.refuse(self.sync.parity_finding(engine, self.version), self.version)
        if self.worker is not None:
            if self.pool is not None:
                self.pool.holders = self.server_state.holders
            self.worker.update_model_version(self.version)
        self.sync.run.log(
            {"perf/weight_sync_s": mean(time.perf_counter() - began), "weight_sync_mb": mean(tensors.nbytes / 1e6)}
        )

    def _probe_workers(self, transfer: SharedWeights) -> None:
        """Send probe sequences together with the next weights if a comparison of log-probs is due."""
        transfer.probe = None
        if self.sync.parity_due():
            with self.sync.parity.timed():
                probe = self.sync.probe()
            transfer.probe = probe.sequences
            self._probes = dict(list(self._probes.items())[1 - PROBES_KEPT :]) | {transfer.version + 1: probe}

    def compare_workers(self) -> None:
        """Compare workers' log-probs of probe sequences, received since the last call, with the trainer's log-probs of the
        same weight version.

        Raises:
            WeightSyncError: The weights of a worker differ from the trainer's.
        """
        while self.pool is not None and self.pool.scored:
            index, version, theirs = self.pool.scored.popleft()
            probe = self._probes.get(version)
            finding = probe and self.sync.parity.compare(
                probe, f"rollout worker {index}", theirs, dtype=probe.computed, version=version
            )
            self.sync.refuse(finding, version)

    def _send(self, tensors: Iterable[tuple[str, Tensor]], again: bool) -> None:
        if not self._is_main:
            for _ in tensors:
                pass
        elif again:
            # Servers that lack the weights receive no requests, so generation does not have to be paused.
            self.transfer.send_again(tensors)
        else:
            self.transfer.pause()
            try:
                self.transfer.send_weights(tensors)
            finally:
                self.transfer.resume()

    def serve_again(self) -> None:
        """Push the current weights to servers that lack them. All ranks must call this method."""
        self.push_weights(again=self._sent_at == self.sync.run.progress.state.global_step)

    def make_transfer(self) -> Any:
        """Create the object that sends weights. If workers have copies of the model, weights are sent through shared
        memory. If there are rollout servers, weights are sent over HTTP.
        """
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
        """Create the worker pool from the config."""
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
        """Create the job that every worker receives."""
        args, arguments = self.args, self.given
        shared = args.worker_threads or max(1, (os.cpu_count() or 1) // (args.num_rollout_workers + 1))
        episodes = {name: arguments.get(name) for name in ("tools", "environment_factory", "harness")}
        contexts = [self.sync.context, self.server_state.capabilities.context]
        return RolloutJob(
            engine=self._engine_recipe(),
            tokenizer=self.tokenizer,
            sampling=self.sampling(),
            context=min((c for c in contexts if c), default=None),
            episodes=EpisodeSetup.of(args, **episodes),
            rewards=None
            if arguments.get("unscored")
            else reward_options(arguments["reward_funcs"], args, arguments["reward_processing_classes"], self.tokenizer)
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
    """Queue of rollouts from workers. The ledger counts each rollout in exactly one state.

    Args:
        service: Workers and their weights.
        rewards: Reward functions. Only their names and weights are used here, because workers compute the
            rewards.
        watch: Check that stops the run if rewards have no variance. None: rollouts have no rewards.
        add_completions: Function that adds rows to the table of completions.

    Attributes:
        ledger: Ledger of all rollouts.
        held: Rollouts that were taken from the queue for the current step. Empty on all processes except the main process.
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
        """Take ``n`` rollouts from the queue, and return the rollouts that this process trains on. The first call starts the
        workers.
        """
        self.service.serve()
        main = self.accelerator.is_main_process
        while True:
            with parallel.failing_together(self.accelerator):
                self.service.compare_workers()
                shares = self._distribute(n) if main else None
            # Each process receives only the rollouts that it trains on. If servers lack the weights, each process receives
            # None. The weights are then pushed to these servers, and rollouts are taken again.
            share = parallel.scatter_objects(shares or [None] * self.accelerator.num_processes, self.accelerator)
            if share is not None:
                samples = by_context(share)
                batch = rollout_batch(samples)
                if self.service.scoring is not None:
                    batch.extra["scores"] = [sample.scores for sample in samples]
                return batch
            self.service.serve_again()

    def _distribute(self, count: int) -> list[list[RolloutSample]] | None:
        """Take the rollouts of a step from the queue, and split their samples into one list per process. Return None if
        no rollout can arrive, because servers lack the weights.
        """
        began = time.perf_counter()
        if not self.take(count):
            return None
        waited = time.perf_counter() - began
        samples = [sample for trajectory in self.held for sample in trajectory.samples]
        if self.service.pool is None:  # The pool's samples have already been checked in `score_group`.
            for sample in samples:
                sample.check()
        self._log_step(waited)
        if self.service.scoring is not None:
            self.sync.run.log(self.service.scoring.finish(samples))
        shares = balanced_shares([len(sample) for sample in samples], self.accelerator.num_processes)
        return [[samples[i] for i in share] for share in shares]

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens in a batch row. 0: no limit."""
        budget = self.args.token_budget
        return max(0, budget) if budget is not None else (self.sync.context or 0)

    def take(self, count: int) -> bool:
        """Take rollouts from the queue until ``count`` rollouts are in ``held``. Rollouts older than
        ``max_staleness_hard`` versions are dropped.

        Returns:
            False if no rollout can arrive, because servers lack the weights. The rollouts that were already taken stay in
            ``held``.

        Raises:
            RolloutError: No rollout arrived for too long, or 100 consecutive rollouts had more than ``token_budget``
                tokens.
        """
        pending, self.held = self.held, []
        # An earlier call took these rollouts and then returned False. Check their age again, because weights were pushed
        # since then.
        for trajectory in pending:
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
            logger.warning("a rollout of %d tokens exceeds token_budget=%d and is dropped", longest, self.token_budget)
            if self._straight >= TOO_LONG_IN_A_ROW:
                raise RolloutError(
                    f"{TOO_LONG_IN_A_ROW} consecutive rollouts exceeded token_budget={self.token_budget} (the last "
                    f"one has {longest} tokens), so there would be nothing to train on. Raise token_budget, or lower "
                    "max_completion_length."
                )
            return "too_long"
        self._straight = 0
        return None

    def _wait(self) -> Trajectory | None:
        """Return the next rollout from the queue. The health of the workers is checked before each read.

        Returns:
            The next rollout. None if no rollout can arrive, because servers lack the weights.
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
                if self.service.server_state.missing_weights():
                    return None
                continue
            return self._booked(item) if self.service.pool is None else item

    def _booked(self, item: object) -> Trajectory:
        """Record a rollout from a user's worker in the ledger. ``item`` is a `RolloutSample`, a list of rows, or a
        `Trajectory`.
        """
        self.ledger.dispatch(1)
        self.ledger.arrive(1)
        if isinstance(item, Trajectory):
            return replace(item, arrived=self.service.version)
        return Trajectory([item] if isinstance(item, RolloutSample) else list(item), arrived=self.service.version)

    def _nothing(self, waited: float) -> RolloutError:
        dropped = dict(self.ledger.dropped)
        servers = self.service.server_state.failure_reason()
        return RolloutError(
            f"no rollout arrived for {waited:.0f} s (2 x heartbeat_stale_after_s), although the workers are alive: "
            f"{self.ledger.writing} rollouts are in progress, {dropped} were dropped. "
            + (f"Rollout servers with problems: {servers}. " if servers else "")
            + "If one rollout takes that long, raise heartbeat_stale_after_s or lower max_completion_length."
        )

    def _close_group(self, group_id: int) -> None:
        """Record that a group is finished. Its prompt is then not retried after a resume."""
        if self.service.pool is not None:
            with self.service.pool.lock:
                self.tasks.done(group_id)

    # Methods that update the ledger.

    def book(self, *, skipped: bool) -> None:
        """Record that the rollouts of the step were used for training. If the update was skipped, record these rollouts and
        all rollouts in the queue as dropped.
        """
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
        """Stop the workers, and record rollouts in progress as unfinished."""
        self.service.close()
        self.held = []

    def account(self) -> dict[str, float]:
        """Return a consistent snapshot of the counts of rollouts: ``produced = trained + dropped + in_flight``."""
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
        """Return the position in the prompts and the counts of rollouts. After a resume, rollouts in progress are sampled
        again.
        """
        with (self.service.pool or self.ledger).lock:
            mine = {"tasks": self.tasks.state(), "ledger": self.ledger.state()}
        return mine | {"version": self.service.version}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.tasks.load(state["tasks"])
        self.ledger.load(state["ledger"])
        self.service.version = state["version"]

    # Logging -----------------------------------------------------------------------------------------------------

    def _log_step(self, waited: float) -> None:
        """Log metrics and a table of the step's rollouts of all processes. The main process calls this method."""
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
        """Compute the reward metrics of the samples that have rewards, as synchronous training does."""
        if table.values.isnan().all():
            return {}
        made = _advantages(first)
        return reward_metrics(table, made, completion_lengths(batch)) | {"reward_std": reward_spread(made.totals)}

    def _table(self, samples: list[RolloutSample]) -> RewardTable:
        """Return the table of the samples' rewards, with NaN for missing rewards."""
        names = list(self.rewards.names)
        values = [[sample.metrics.get(f"rewards/{name}", math.nan) for name in names] for sample in samples]
        return RewardTable(torch.tensor(values), names, self.rewards.weights)

    def _watch_rewards(self, watch: RewardWatch, first: list[RolloutSample], table: RewardTable) -> None:
        """Stop the run if rewards have no variance, as in synchronous training."""
        # A user's worker may send advantages without rewards.
        scored = [i for i, s in enumerate(first) if any(f"rewards/{name}" in s.metrics for name in table.names)]
        table = replace(table, values=table.values[scored])
        self.sync.run.log(unscorable(table.values))
        groups = torch.tensor([first[i].group_id for i in scored], dtype=torch.long)
        far = int(sum(s.metrics.get("advantages/clipped_share", 0.0) for s in first))
        prompts = [first[i].prompt for i in scored]
        watch.report(table, _advantages(first), groups, (far, len(first), None), prompts)


def _advantages(first: list[RolloutSample]) -> Advantages:
    """Collect the advantages and the total rewards of samples in an `Advantages` object."""
    totals = torch.tensor([sample.metrics.get("reward", math.nan) for sample in first])
    return Advantages(torch.tensor([sample.advantage for sample in first]), totals)


def _sample_metrics(first: list[RolloutSample]) -> dict[str, Metric]:
    """Return the mean of each metric over the rollouts that have this metric."""
    names = sorted({name for sample in first for name in sample.metrics})
    metrics: dict[str, Metric] = {}
    for name in names:
        values = torch.tensor([sample.metrics.get(name, math.nan) for sample in first])
        valid = ~values.isnan()
        metrics[name] = mean(values.nan_to_num(0.0), valid)
        if name.startswith("rewards/") and name.endswith("/nan"):
            metrics[name] = total(float(values.nansum()))  # Number of unscored rows, as in synchronous training.
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
