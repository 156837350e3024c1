"""The trainer's side of asynchronous rollouts: workers started, weights pushed, everything stopped however it ends."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from posttrain.algorithms.async_grpo.config import AsyncGRPOConfig
from posttrain.algorithms.async_grpo.episodes import EpisodeSetup
from posttrain.algorithms.async_grpo.producer import RolloutJob
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.models.forward import causal_lm
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.episodes.driver import MAX_ITERATIONS
from posttrain.rollouts.workers.engine_spec import EngineSpec
from posttrain.rollouts.workers.ledger import Ledger
from posttrain.rollouts.workers.processes import PoolSettings, WorkerPool
from posttrain.rollouts.workers.samples import RolloutBuffer, TaskSource
from posttrain.rollouts.workers.shared_weights import SharedWeights, Weights
from posttrain.training.scoring import reward_model_options
from posttrain.training.weight_sync import WeightSync, sync_option, whole_update
from posttrain.types import Sampling

__all__ = ["RolloutService", "RolloutWorkerProtocol", "WeightTransferProtocol", "warn_of_reward_models"]

logger = logging.getLogger(__name__)

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
        from posttrain.rollouts.server.remote import ServerEngine, ServerTransfer

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
        from posttrain.rollouts.server.remote import FollowingEngine

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
