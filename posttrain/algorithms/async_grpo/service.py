"""The trainer's side of asynchronous rollouts: workers started, weights pushed, everything stopped however it ends."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from posttrain.algorithms.async_grpo.config import AsyncGRPOConfig
from posttrain.algorithms.async_grpo.episodes import EpisodeRunner, EpisodeSetup
from posttrain.algorithms.async_grpo.scoring import Finished, Scorer
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.models.forward import causal_lm
from posttrain.rewards.runner import RewardRunner
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.episodes.driver import MAX_ITERATIONS
from posttrain.rollouts.workers.engine_spec import EngineHandle, EngineSpec
from posttrain.rollouts.workers.ledger import Ledger
from posttrain.rollouts.workers.partial import Writer, Writing, writings
from posttrain.rollouts.workers.processes import GroupResult, PoolSettings, WorkerPool
from posttrain.rollouts.workers.samples import GroupTask, RolloutBuffer, TaskSource
from posttrain.rollouts.workers.shared_weights import SharedWeights, Weights, remove_weights
from posttrain.rollouts.workers.worker import Link
from posttrain.training.scoring import reward_model_options
from posttrain.training.weight_sync import WeightSync, sync_option, whole_update
from posttrain.types import Request, Sampling

__all__ = [
    "Producer",
    "RolloutJob",
    "RolloutService",
    "RolloutWorkerProtocol",
    "WeightTransferProtocol",
    "warn_of_reward_models",
]

logger = logging.getLogger(__name__)


SCORE_BACKLOG = 16  # Groups that wait for the reward functions before writing waits too.
LOOK_S, REST_S = 0.05, 0.5


@dataclass
class RolloutJob:
    """Everything a worker needs, as it is sent to it.

    Attributes:
        engine: How to make the engine.
        setup: Tokenizer, sampling, tools and environments.
        rewards: Keywords for `RewardRunner`.
        scale_rewards: See `Scorer`.
        mask_truncated: See `Scorer`.
        threads: Of torch; None: all.
        segment_s: Seconds after which a call to the engine is interrupted, so that what is finished is handed over.
        slots: Rollouts of one call, at most.
    """

    engine: EngineSpec
    setup: EpisodeSetup
    rewards: dict[str, Any]
    scale_rewards: str = "population"
    mask_truncated: bool = False
    threads: int | None = None
    segment_s: float = 30.0
    slots: int = 256

    def run(self, link: Link) -> None:
        """Make the engine and the reward functions, then serve."""
        logging.basicConfig(level=logging.WARNING)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.engine.weights:
            link.on_orphaned = functools.partial(remove_weights, Path(self.engine.weights))
        handle = self.engine.make()
        try:
            producer = Producer(self, link, handle)
            link.ready()
            producer.work()
        finally:
            handle.engine.close()


@dataclass
class _Group:
    """A prompt under way in a call to the engine."""

    task: GroupTask
    version: int
    prompt_ids: list[int]
    written: list[Writing]
    began: float = field(default_factory=time.perf_counter)


class Producer:
    """Serves one link with one engine.

    An engine in this process runs on the main thread, all prompts in one call, which is interrupted when there are new
    weights, and now and then so that finished groups go out and new prompts come in. Calls to servers each have a thread.
    """

    def __init__(self, job: RolloutJob, link: Link, handle: EngineHandle) -> None:
        self.job, self.link, self.handle = job, link, handle
        writer = Writer(handle.engine, self.refresh)
        self.runner = EpisodeRunner(job.setup, writer)
        self.parallel = job.engine.kind == "server"
        rewards = RewardRunner(**job.rewards, environments=self.runner.probes)
        rewards.functions = self.runner.pooled(rewards.functions)
        rewards.start("cpu")
        self.scorer = Scorer(
            rewards, job.setup.tokenizer, scale_rewards=job.scale_rewards, mask_truncated=job.mask_truncated
        )
        self.active: list[_Group] = []
        self._calling: float | None = None
        self._loading, self._judging = threading.Lock(), threading.Lock()
        workers = max(1, job.slots) if self.parallel else 1
        self._calls = concurrent.futures.ThreadPoolExecutor(min(workers, 256), thread_name_prefix="rollouts")
        self._scoring = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._pending: set[concurrent.futures.Future] = set()
        if not self.parallel:
            threading.Thread(target=self._interrupter, daemon=True, name="interrupter").start()

    def refresh(self) -> None:
        """Load the newest weights, where they are newer than ours."""
        with self._loading:
            began = time.perf_counter()
            version, holders = self.link.version, self.link.holders
            if self.handle.refresh(version, holders):
                self.link.send("loaded", version=self.handle.version, seconds=time.perf_counter() - began)

    def work(self) -> None:
        """Until told to stop."""
        while not self.link.stopping.is_set():
            self.link.progress()
            if self.link.version:
                self.refresh()
            self._forget_cancelled()
            tasks = self._admit()
            if self.parallel:
                for task in tasks:
                    self._submit(self._calls, self._episodes, [task])
                self.link.wait(REST_S)
            elif self.runner.episodic:
                self._episodes(tasks)
            else:
                self._begin(tasks)
                self._segment()
            if not tasks and not self.active:
                self.link.wait(REST_S)

    def _admit(self) -> list[GroupTask]:
        """Tasks that are begun now: as many as the call has slots for, and at least one when nothing else is under way."""
        taken: list[GroupTask] = []
        busy = sum(len(group.written) for group in self.active)
        # One that came with newer weights waits until they are loaded, so that its version is theirs.
        while self.link.tasks and self.link.tasks[0].version <= self.handle.version:
            size = self.link.tasks[0].size
            if (busy or taken) and busy + sum(t.size for t in taken) + size > self.job.slots and not self.parallel:
                break
            task = self.link.tasks.popleft()
            if task.group_id in self.link.cancelled:
                continue
            taken.append(task)
            self.link.send("begun", group_id=task.group_id, version=self.handle.version)
        return taken

    def _forget_cancelled(self) -> None:
        self.active = [g for g in self.active if g.task.group_id not in self.link.cancelled]

    # One turn, on this thread ------------------------------------------------------------------------------------

    def _begin(self, tasks: list[GroupTask]) -> None:
        for task in tasks:
            try:
                prompt_ids, sampling = self.runner.prompt(task)
            except Exception as error:
                self._send(GroupResult(task.group_id, errors=[_text(error)] * task.size))
                continue
            written = writings([Request(prompt_ids, task.size, sampling)], sampling)
            self.active.append(_Group(task, self.handle.version, prompt_ids, written))

    def _segment(self) -> None:
        """One call to the engine for everything unfinished; what is finished then goes to be scored."""
        unfinished = [w for group in self.active for w in group.written if w.finish_reason is None]
        if not unfinished:
            return
        before = sum(len(w.token_ids) for w in unfinished)
        began = self._calling = time.perf_counter()
        try:
            self.runner.writer.advance(unfinished)
        except Exception as error:
            logger.warning("the engine failed: %s", error, exc_info=True)
            for group in self.active:
                self._send(GroupResult(group.task.group_id, errors=[_text(error)] * group.task.size))
            self.active = []
            return
        finally:
            self._calling = None
        spent = {"generate": time.perf_counter() - began}
        tokens = sum(len(w.token_ids) for w in unfinished) - before
        done = [g for g in self.active if all(w.finish_reason is not None for w in g.written)]
        self.active = [g for g in self.active if g not in done]
        for group in done:
            finished = self.runner.single_turn(group.task, group.version, [w.rollout() for w in group.written])
            self._submit(self._scoring, self._score, finished, group.task.size, spent, tokens)
            spent, tokens = {}, 0
        if tokens or spent:
            self.link.send("spent", seconds=spent, tokens=tokens)

    def _interrupter(self) -> None:
        while not self.link.stopping.is_set():
            time.sleep(LOOK_S)
            began = self._calling
            if began is None:
                continue
            cancelled = any(g.task.group_id in self.link.cancelled for g in list(self.active))
            long = time.perf_counter() - began > self.job.segment_s
            if long or cancelled or self.link.version > self.handle.version or self.link.stopping.is_set():
                self.handle.engine.interrupt()

    # Several turns -----------------------------------------------------------------------------------------------

    def _episodes(self, tasks: list[GroupTask]) -> None:
        """Whole episodes of some prompts, and their rewards, before anything else happens to their environments."""
        if not tasks or (self.parallel and tasks[0].group_id in self.link.cancelled):
            return
        version = self.handle.version
        began = self._calling = time.perf_counter()
        try:
            groups = self.runner.episodes(tasks, version)
        except Exception as error:
            logger.warning("episodes failed: %s", error, exc_info=True)
            groups = [Finished(t.group_id, version, [], [], [], errors=[_text(error)] * t.size) for t in tasks]
        finally:
            self._calling = None
        spent = {"generate": time.perf_counter() - began}
        with self.runner.holding(groups):
            for group, task in zip(groups, tasks, strict=True):
                tokens = sum(len(rollout.token_ids) for rollout in group.rollouts)
                self._score(group, task.size, spent, tokens)
                spent = {}

    # Scoring -----------------------------------------------------------------------------------------------------

    def _submit(self, where: concurrent.futures.Executor, *call: Any) -> None:
        if where is self._scoring and len(self._pending) >= SCORE_BACKLOG:
            concurrent.futures.wait(self._pending, return_when=concurrent.futures.FIRST_COMPLETED)
        self._pending = {future for future in self._pending if not future.done()}
        self._pending.add(where.submit(*call))

    def _score(self, group: Finished, size: int, spent: dict[str, float], tokens: int) -> None:
        self.link.progress()
        began = time.perf_counter()
        errors = list(group.errors)
        trajectories, alone = [], 0
        if len(group.rollouts) >= min(2, size):
            try:
                with self._judging:  # Calls to servers end on many threads.
                    trajectories = self.scorer(group)
            except Exception as error:
                logger.warning("scoring failed: %s", error, exc_info=True)
                errors += [_text(error)] * len(group.rollouts)
        else:
            alone = len(group.rollouts)
        seconds = {**spent, "score": time.perf_counter() - began}
        untrainable = size - len(errors) - len(trajectories) - alone
        self._send(GroupResult(group.group_id, trajectories, errors, untrainable, alone, seconds, tokens))

    def _send(self, result: GroupResult) -> None:
        try:
            self.link.send("result", result=result)
        except OSError:
            os._exit(0)  # The trainer is gone.


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


BIG_MODEL = 50_000_000  # Parameters of a reward model that is slow without the accelerator.
LONGEST_PROMPT = 2  # Completions' limit times this is what a rollout reserves where the context is unknown.


@runtime_checkable
class RolloutWorkerProtocol(Protocol):
    """What the trainer asks of whoever writes rollouts."""

    rollout_buffer: Any  # With ``get(timeout)``, which raises `queue.Empty`; holds samples or trajectories.

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, version: int) -> None: ...
    def check_health(self, stale_after_s: float | None = None) -> None: ...


@runtime_checkable
class WeightTransferProtocol(Protocol):
    """What the trainer asks of whoever takes its weights to the engines; `send_weights` must read every tensor."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def warn_of_reward_models(functions: Any) -> None:
    """Reward models run where the workers are: on the CPU."""
    for function in functions if isinstance(functions, list | tuple) else [functions]:
        size = sum(p.numel() for p in function.parameters()) if isinstance(function, nn.Module) else 0
        if size > BIG_MODEL or isinstance(function, str):
            logger.warning(
                "the reward model %s runs in the rollout workers, on the CPU: slow. Serve it, and let a function ask the "
                "server.", function if isinstance(function, str) else f"of {size / 1e6:.0f}M parameters",
            )  # fmt: skip


class RolloutService:
    """Has the rollout workers and their weights in its care; only the main process has workers.

    Args:
        args: Of the trainer.
        accelerator: Of the run.
        given: What the trainer was given: ``rollout_worker``, ``weight_transfer``, ``engine_factory``, reward functions, tools.
        source: Prompts.
        ledger: Counts rollouts.
        tokenizer: Of the policy.
        pad_token_id: Of the policy.
        sync: Checks servers; knows the context of the model.
        model: The policy as it is now.
        wrapped: The same as the run wraps it.
        sampling: Settings of the workers' engines.
        step: Optimiser steps that were made.
        log: Takes metrics.
    """

    def __init__(
        self,
        args: AsyncGRPOConfig,
        accelerator: Any,
        given: dict[str, Any],
        *,
        source: TaskSource,
        ledger: Ledger,
        tokenizer: Any,
        pad_token_id: int,
        sync: WeightSync,
        model: Callable[[], Any],
        wrapped: Callable[[], Any],
        sampling: Callable[[], Sampling],
        step: Callable[[], int],
        log: Callable[[dict[str, Metric]], None],
    ) -> None:
        self.args, self.accelerator, self.given = args, accelerator, given
        self.source, self.ledger = source, ledger
        self.tokenizer, self.pad_token_id, self.sync = tokenizer, pad_token_id, sync
        self.model, self.wrapped, self.sampling, self.step, self.log = model, wrapped, sampling, step, log
        self.worker: Any = None
        self.transfer: Any = None
        self.version = 0
        self._serving = False
        # Step after which weights were pushed last.
        self._sent_at = -1

    @property
    def owns_workers(self) -> bool:
        """Whether the workers are ours, so that every rollout can be accounted for from its beginning."""
        return isinstance(self.worker, WorkerPool)

    # Start and stop ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Push the weights as they are now, then start the workers; every rank must call it."""
        if self._serving:
            return
        self._serving = True
        self.transfer = self.given["weight_transfer"] or self.make_transfer()
        if hasattr(self.transfer, "version"):
            self.transfer.version = self.version
        parallel.run_and_share(self._on_main(self.transfer.init_weight_transfer), self.accelerator)
        if self._engine_kind == "server":
            self.sync.check_engine(getattr(self.transfer, "engine", None))
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
        ends = {"workers": getattr(self.worker, "stop", None), "weights": getattr(self.transfer, "destroy", None)}
        for name, end in ends.items() if self._is_main else ():
            try:
                end() if end is not None else None
            except Exception:
                logger.exception("the %s could not be closed", name)
        for place in ("writing", "waiting", "held"):  # Nothing is left there unless an error ended the run.
            self.ledger.drop(getattr(self.ledger, place), "unfinished", place)

    # Weights -----------------------------------------------------------------------------------------------------

    def push_weights(self, again: bool = False) -> None:
        """The next version; every rank must call it, since reading sharded weights is a collective.

        Args:
            again: The same version, to servers that lack it; the weights must not have moved since.

        Raises:
            WeightSyncError: It did not arrive; on every rank.
        """
        began = time.perf_counter()
        names = getattr(self.transfer, "checkpoint_names", False)
        tensors = Weights(self.wrapped(), checkpoint_names=names)
        tries = sync_option(self.args, "vllm_sync_retries") + 1 if self._engine_kind == "server" else 1
        whole_update(lambda: parallel.run_and_share(lambda: self._send(tensors, again), self.accelerator), tries)
        self.version += not again
        self._sent_at = self.step()
        if self.worker is not None:
            if self.owns_workers:
                self.worker.holders = getattr(self.transfer, "holders", None)
            self.worker.update_model_version(self.version)
        seconds = mean(time.perf_counter() - began)
        self.log({"weight_sync_time_s": seconds})

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
        self.push_weights(again=self._sent_at == self.step())

    def make_transfer(self) -> Any:
        """Shared memory for engines that hold a copy, the servers' own way for servers."""
        if self._engine_kind != "server":
            return SharedWeights()
        from posttrain.rollouts.server.engine import ServerEngine, ServerTransfer

        args, urls = self.args, self.args.server_urls
        waits = {"connection_timeout": args.vllm_server_timeout, "patience": args.vllm_server_timeout}
        options = self._server_options() | waits
        return ServerTransfer(functools.partial(ServerEngine, urls if len(urls) > 1 else urls[0], **options))

    # Workers -----------------------------------------------------------------------------------------------------

    @property
    def _engine_kind(self) -> str:
        return "custom" if self.given["engine_factory"] is not None else self.args.resolved_engine

    def _server_options(self) -> dict[str, Any]:
        args = self.args
        key = getattr(args, "vllm_server_api_key", None)
        return {"request_timeout": float(args.request_timeout), "sync_timeout": args.sync_timeout_s, "api_key": key}

    def _following(self) -> Callable[[], RolloutEngine]:
        from posttrain.rollouts.server.engine import FollowingEngine

        waits = {"patience": self.args.vllm_server_timeout, "news_timeout": self.args.sync_timeout_s}
        return functools.partial(FollowingEngine, **self._server_options(), **waits)

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
        return self.pool_class()(
            self.make_job(),
            self.source,
            settings,
            buffer=RolloutBuffer(args.queue_maxsize, args.queue_max_tokens),
            ledger=self.ledger,
            folder=Path(args.output_dir, "rollout_workers"),
        )

    def pool_class(self) -> type[WorkerPool]:
        """Where workers are placed."""
        return WorkerPool

    def make_job(self) -> RolloutJob:
        """What is sent to every worker."""
        args = self.args
        shared = args.worker_threads or max(1, (os.cpu_count() or 1) // (args.num_rollout_workers + 1))
        return RolloutJob(
            engine=self._engine_spec(),
            setup=self._episode_setup(),
            rewards={
                "reward_funcs": self.given["reward_funcs"],
                "reward_weights": args.reward_weights,
                "processing_classes": self.given["reward_processing_classes"],
                "transforms": args.reward_transform,
                "timeout": args.reward_timeout,
                "model_options": reward_model_options(args),
            },
            scale_rewards=args.scale_rewards,
            mask_truncated=args.mask_truncated_completions,
            threads=shared,
            segment_s=args.worker_segment_s,
            slots=max(args.num_generations, -(-args.max_inflight_tasks // args.num_rollout_workers)),
        )

    def _engine_spec(self) -> EngineSpec:
        kind, inner = self._engine_kind, causal_lm(self.model())
        factory = self._following() if kind == "server" else self.given["engine_factory"]
        return EngineSpec(
            kind,
            config=inner.config,
            dtype=str(next(inner.parameters()).dtype).removeprefix("torch."),
            pad_token_id=self.pad_token_id,
            trust_remote_code=self.args.trust_remote_code,
            weights=str(self.transfer.folder) if isinstance(self.transfer, SharedWeights) else "",
            factory=factory,
        )

    def _episode_setup(self) -> EpisodeSetup:
        args, rounds = self.args, self.args.max_tool_calling_iterations
        contexts = [self.sync.context, getattr(self.transfer, "context", None)]
        return EpisodeSetup(
            tokenizer=self.tokenizer,
            sampling=self.sampling(),
            context=min((c for c in contexts if c), default=None),
            template_kwargs=dict(args.chat_template_kwargs or {}),
            tools=list(self.given["tools"] or ()),
            environment_factory=self.given["environment_factory"],
            max_iterations=MAX_ITERATIONS if rounds is None else None if rounds == -1 else rounds,
            max_output_tokens=args.max_tool_output_tokens,
            tool_workers=args.tool_workers,
            tool_timeout=args.tool_timeout,
            environment_retries=args.environment_retries,
        )
