"""vLLM behind the server: its scheduler is stepped between two commands, its weights are replaced as a checkpoint is loaded."""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import multiprocessing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from posttrain.integrations import require
from posttrain.rollouts.vllm import (
    VLLMEngine,
    as_rollout,
    check_supported,
    read_logps,
    sampling_params,
    sleep_available,
)
from posttrain.rollouts.vllm_worker import model_facts
from posttrain.serve.backends import Backend, Unsupported, failure_of
from posttrain.serve.config import ServeConfig
from posttrain.serve.jobs import Job, Score, Scored
from posttrain.types import Rollout

__all__ = ["VLLMBackend", "create_vllm_backend"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Piece:
    """One completion that is being written.

    Attributes:
        spans: Runs of (version, tokens).
    """

    job: Job
    place: int
    index: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def take(self, completion: Any, version: int) -> None:
        """What a step wrote."""
        logps, tops = read_logps(completion, self.job.asks[self.place].sampling)
        self.ids += completion.token_ids
        self.logps += logps
        self.tops += tops
        if self.spans and self.spans[-1][0] == version:
            version, count = self.spans.pop()
            self.spans.append((version, count + len(logps)))
        elif logps:
            self.spans.append((version, len(logps)))

    def rollout(self, reason: str | None, version: int) -> Rollout:
        """As it is now."""
        ask = self.job.asks[self.place]
        return as_rollout(
            ask.prompt_ids, self.ids, self.logps, self.tops, reason=reason, sampling=ask.sampling, version=version
        )


class VLLMBackend(Backend):
    """`VLLMEngine` behind the server: requests join what runs, and a pause holds them between two tokens.

    Args:
        engine: Loaded, in this process.
        tokenizer: Unused; texts are tokenised by the HTTP process.
        sleeps: Whether the engine was made to sleep.
    """

    name = "vllm"
    scores = True

    def __init__(self, engine: VLLMEngine, tokenizer: Any = None, *, sleeps: bool = False) -> None:
        super().__init__(tokenizer)
        self.engine, self.core, self.sleeps = engine, engine.llm.llm_engine, sleeps  # type: ignore[misc]
        self.most = self.core.vllm_config.scheduler_config.max_num_seqs
        self.live: dict[str, _Piece] = {}
        self.scored: dict[str, Any] = {}
        self.pushed: list[tuple[str, Tensor]] = []
        self._ids = itertools.count()

    # Generation ------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """See `Backend`."""
        return bool(self.waiting or self.live)

    @property
    def running(self) -> int:
        """See `Backend`."""
        return len(self.live)

    def advance(self) -> None:
        """One step of vLLM's scheduler, with what waits as far as there is room."""
        while self.waiting and len(self.live) < self.most:
            _, _, job, place = heapq.heappop(self.waiting)
            try:
                self._begin(job, place)
            except Exception as error:  # A pattern that does not compile, say.
                self.fail(job, failure_of(error, 400))
        if self.live:
            try:
                self._step()
            except Exception as error:
                self._lost(error)

    def _lost(self, error: Exception) -> None:
        """No memory, or a kernel that failed: what was being written is lost, what waits is not."""
        logger.exception("a step of vLLM failed")
        for job in {id(piece.job): piece.job for piece in self.live.values()}.values():
            self.fail(job, failure_of(error, 500, begun=True))

    def _begin(self, job: Job, place: int) -> None:
        ask = job.asks[place]
        check_supported(ask.sampling)
        vllm = require("vllm.sampling_params", "sampling")
        for index in range(ask.n):
            seed = None if ask.sampling.seed is None else ask.sampling.seed + ask.draws + index
            settings = sampling_params(ask.sampling, seed=seed, output_kind=vllm.RequestOutputKind.DELTA)
            self.live[self._add(ask.prompt_ids, settings)] = _Piece(job, place, index)

    def _add(self, ids: list[int], settings: Any) -> str:
        name = f"{next(self._ids)}"
        self.core.add_request(name, {"prompt_token_ids": list(ids)}, settings)
        return name

    def _step(self) -> None:
        """Take in what one step gave."""
        for output in self.core.step():
            if output.request_id in self.scored:
                self.scored[output.request_id] = output
            elif (piece := self.live.get(output.request_id)) is not None:
                (completion,) = output.outputs
                piece.take(completion, self.engine.version)
                if output.finished:
                    del self.live[output.request_id]
                    self._deliver(piece, completion.finish_reason)

    def _deliver(self, piece: _Piece, reason: str | None) -> None:
        if piece.spans:  # Also of one version, which may not be that of the job's end.
            piece.job.spans[piece.place, piece.index] = piece.spans
        self.deliver(piece.job, piece.place, piece.index, piece.rollout(reason, self.engine.version))

    def drop(self, job: Job) -> None:
        """See `Backend`."""
        self._taken(job)

    def cut(self, job: Job) -> None:
        """See `Backend`."""
        for piece in self._taken(job):
            self._deliver(piece, "abort")

    def _taken(self, job: Job) -> list[_Piece]:
        """A job's pieces, which vLLM goes on with no longer."""
        names = [name for name, piece in self.live.items() if piece.job is job]
        self.core.abort_request(names)
        return [self.live.pop(name) for name in names]

    # Weights ---------------------------------------------------------------------------------------------------------

    def begin_update(self, adapter: dict[str, Any] | None) -> None:
        """See `Backend`."""
        if adapter is not None:
            raise Unsupported("the vllm engine takes no adapters: merge it, and push whole weights.")
        self.pushed = []

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, list[str]]:
        """Kept until the end: vLLM loads a whole checkpoint."""
        pairs = [(name, tensor.clone()) for name, tensor in tensors]
        self.pushed += pairs
        return len(pairs), []

    def end_update(self, version: int) -> list[str]:
        """See `Backend`; completions that are being written go on under the new weights, with new keys and values."""
        pairs, self.pushed = self.pushed, []
        return self.engine.replace_weights(pairs, version)

    # Other -----------------------------------------------------------------------------------------------------------

    def score(self, items: list[Score], top: int, temperature: float) -> list[Scored]:
        """Log-probs of prompts, for which one token is generated and thrown away."""
        vllm = require("vllm.sampling_params", "scoring")
        settings = {"max_tokens": 1, "prompt_logprobs": top, "temperature": temperature, "ignore_eos": True}
        # The one token must fit: a sequence that fills the context is scored but for its last position.
        most = (self.engine.context or 10**9) - 1
        names = []
        for item in items:
            own = vllm.SamplingParams(detokenize=False, output_kind=vllm.RequestOutputKind.FINAL_ONLY, **settings)
            names.append(self._add(item.ids[:most], own))
        self.scored |= dict.fromkeys(names)
        try:
            while any(self.scored[name] is None for name in names):
                self._step()
            return [_scored(i, self.scored[n].prompt_logprobs, top) for i, n in zip(items, names, strict=True)]
        finally:
            left = [name for name in names if self.scored.pop(name, None) is None]
            if left:
                self.core.abort_request(left)

    def reset_cache(self) -> bool:
        """See `Backend`; what is being written computes its keys and values again."""
        return self.core.reset_prefix_cache(reset_running_requests=bool(self.live)) is not False

    def sleep(self, level: int) -> None:
        """See `Backend`."""
        self.engine.llm.sleep(level)

    def wake(self, tags: list[str] | None) -> None:
        """See `Backend`."""
        self.engine.llm.wake_up(tags)

    def info(self) -> dict[str, Any]:
        """See `Backend`."""
        facts = model_facts(self.core.vllm_config)
        return (
            super().info()
            | facts
            | {"context": facts["max_model_len"], "vllm_version": require("vllm", "it").__version__}
        )

    def close(self) -> None:
        """See `Backend`."""
        self.engine.close()


def _scored(item: Score, known: Any, top: int) -> Scored:
    """Entries by rank; what the engine has no entry for (the first token, the last of a full context) is NaN."""
    nan = float("nan")
    scored = Scored([], [], [])
    for t in range(item.begin, len(item.ids)):
        token, at = item.ids[t], known[t] if t < len(known) else None
        if at is None:
            scored.actual.append(nan)
            scored.ids.append([token] * top)
            scored.logps.append([nan] * top)
            continue
        ranked = sorted(at.items(), key=lambda pair: pair[1].rank)[:top]
        scored.actual.append(float(at[token].logprob))
        scored.ids.append([i for i, _ in ranked])
        scored.logps.append([float(entry.logprob) for _, entry in ranked])
    return scored


def create_vllm_backend(config: ServeConfig, rank: int) -> VLLMBackend:
    """The engine and its backend as the options say.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    sleeps = config.allow_sleep and sleep_available()
    if config.tensor_parallel_size > 1:
        # vLLM starts a process a shard, and Python lets no daemon start any; they end when this one does.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    engine = VLLMEngine.create(
        config.model,
        sleep_level=1 if sleeps else None,
        revision=config.revision,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        kv_cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        model_impl=config.vllm_model_impl,
        trust_remote_code=config.trust_remote_code,
        distributed_executor_backend=config.distributed_executor_backend,
        speculative_config=None if config.speculative_config is None else json.loads(config.speculative_config),
        max_num_seqs=config.max_num_seqs,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
    )
    return VLLMBackend(engine, sleeps=sleeps)
