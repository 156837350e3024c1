"""`WeightSync`: pushes changed weights to the rollout engine, verifies that they arrived, and requests rollouts. The module
also has functions that create engines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.checks.registry import codes_of
from posttrain.checks.server import Parity, Probe, check_negative_control, mean_gap, probe_sequences
from posttrain.data.chat import inner_tokenizer
from posttrain.data.formats import warn_once
from posttrain.errors import ConfigError, RolloutServerError, ServerBusy, ServerUnreachable, WeightSyncError
from posttrain.loop.run import Run
from posttrain.methods.online_config import resolve_auto
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.architecture import context_length, sliding_window
from posttrain.models.forward import plain_logps
from posttrain.models.heads import adapters_of
from posttrain.models.probe import rounded_otherwise
from posttrain.models.quantised import unrounded_inputs
from posttrain.rollouts.adapters import AdapterWeights, adapter_obstacle, adapter_states, fingerprint
from posttrain.rollouts.base import Capabilities, RolloutEngine, require_engine
from posttrain.rollouts.engines import create_engine
from posttrain.rollouts.sampling import derived_seed
from posttrain.rollouts.shared_weights import Weights, check_mergeable
from posttrain.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from posttrain.methods.config import PostTrainingConfig
    from posttrain.rewards.runner import RewardRunner
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


RequestBatch = tuple[Sequence[Request], Sampling]


def training_engine(model: nn.Module, args: PostTrainingConfig, *, tokenizer: Tokenizer, pad_token_id: int) -> Any:
    """Create the in-process engine that the config selects, for the given model.

    The engine receives the tokenizer, for guided decoding and stop strings. An engine with transformers' continuous batching
    also receives its settings. Continuous batching supports only text.

    Args:
        model: Model from which the engine samples.
        args: The trainer's config with ``rollout_engine`` and its options.
        tokenizer: Tokenizer of the policy.
        pad_token_id: Padding token of the policy.

    Raises:
        ConfigError: Continuous batching is set, but the run has a processor for images.
    """
    options = {"folder": args.output_dir, "cache": args.cache_implementation}
    engine: Any = create_engine(args.rollout_engine, model, pad_token_id=pad_token_id, **options)
    if engine.tokenizer is None:
        engine.tokenizer = tokenizer
    if engine.name != "paged":
        return engine
    if inner_tokenizer(tokenizer) is not tokenizer:
        raise ConfigError(
            "use_transformers_continuous_batching=True does not work with a processor, because continuous batching supports "
            "only text. Pass a tokenizer, or use another rollout_engine."
        )
    engine.settings = dict(args.transformers_continuous_batching_config or {})
    return engine


def engine_of(
    run: Run, given: RolloutEngine | None, rewards: RewardRunner, engine_on: Callable[[nn.Module], Any] | None = None
) -> Any:
    """Return the engine that the user passed. If the user passed no engine, create the one that the config selects.

    Args:
        run: Run of a method that samples.
        given: Engine object that the user passed, or None.
        rewards: The reward functions.
        engine_on: Function that creates an in-process engine for a model. None: `training_engine`.
    """
    args = run.args
    if given is not None:
        engine = require_engine(given)
        engine.tokenizer = run.tokenizer if engine.tokenizer is None else engine.tokenizer
        return engine
    bare = run.accelerator.unwrap_model(run.model)
    resolve_auto(args, bare, run.tokenizer)
    if args.use_vllm:
        engine = vllm_engine(bare, args, run.accelerator)
    elif engine_on is None:
        engine = training_engine(bare, args, tokenizer=run.tokenizer, pad_token_id=run.pad_token_id)
    else:
        engine = engine_on(bare)
    return run.vision.check_engine(engine, rewards.functions)


def vllm_engine(model: nn.Module, args: PostTrainingConfig, accelerator: Accelerator) -> Any:
    """Create the engine for ``use_vllm=True``. The engine runs vLLM in this process, or sends requests to servers."""
    check_mergeable(model)
    if args.vllm_mode != "server":
        return plugins.module("extensions.vllm.engine").VLLMEngine.for_training(model, args, accelerator)
    return plugins.module("extensions.server.engine").ServerEngine.for_training(model, args, accelerator)


def whole_update(push: Callable[[], None], tries: int) -> None:
    """Push all weights. If a push fails, repeat it from the beginning.

    Raises:
        WeightSyncError: The push failed ``tries`` times.
    """
    for tried in range(1, tries + 1):
        try:
            return push()
        except WeightSyncError as error:
            if tried == tries:
                raise
            logger.warning("%s Trying the whole update again.", error)


class WeightSync:
    """Connects an online trainer with its engine. It pushes changed weights, checks that they arrived, and requests
    rollouts.

    If the engine shares the trainer's weights, every rank calls the engine. If the engine has a copy of the weights, changed
    weights are pushed before each call. If only the main process may call the engine, the requests of all ranks are gathered
    on the main process.

    Args:
        engine: Engine that samples completions.
        run: Run whose weights are pushed.
    """

    def __init__(self, engine: Any, run: Run) -> None:
        self.engine, self.run, self.args, self.accelerator = engine, run, run.args, run.accelerator
        if self.needs_weight_sync:
            check_mergeable(run.model)
        self.retries: int = run.args.vllm_sync_retries
        self._pushed_at: tuple[int, tuple, tuple] | None = None
        self._base_at: tuple | None = None  # Base weights at the last push of an adapter.
        self._pushes = 0
        self.parity = Parity(run.args.weight_parity_every)
        # Maximum adapter rank of the engine and the layers whose adapters it supports. None: not known yet.
        self._supported: tuple[int | None, tuple[str, ...]] | None = None

    @property
    def needs_weight_sync(self) -> bool:
        """Whether the engine has its own copy of the weights."""
        return self.engine.capabilities.needs_weight_sync

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and completion that both the model and the engine support."""
        limits = [context_length(self.run.model.config.get_text_config()), self.engine.capabilities.context]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_engine(self, engine: Any) -> None:
        """Check that the servers of an engine meet the requirements of this run. This check runs before the first
        generation.

        Args:
            engine: Engine that sends requests to servers. All processes call this method, but only the main process has
                the engine.
        """
        if self.args.preflight == "off":
            return
        with self.run.checks.preflight.record_check("config", codes_of("S", "config")):
            with parallel.failing_together(self.accelerator):
                findings = self._engine_findings(engine)
            self.run.checks.report(parallel.all_gather_objects(list(findings), self.accelerator))

    def _engine_findings(self, engine: Any) -> list[Any]:
        if not self.accelerator.is_main_process:
            return []
        return engine.findings(self.accelerator.unwrap_model(self.run.model), self.args)

    # Requests
    # ----------------------------------------------------------------------------------------------------------

    def ask(self, batches: Sequence[RequestBatch]) -> list[list[Rollout]]:
        """Request rollouts for each pair ``(requests, sampling)`` of this process. All processes must call this method. A
        process without requests passes an empty list.
        """
        engine = self.engine
        if not self.needs_weight_sync:
            whole = parallel.whole_parameters(self.run.progress.wrapped, self.accelerator)
            with self.run.inference(), whole:
                return [engine.generate(requests, sampling) for requests, sampling in batches]
        for tried in range(self.retries + 1):
            self.push_if_due()
            try:
                if not engine.capabilities.main_process_only:
                    return [engine.generate(requests, sampling) for requests, sampling in batches]
                return self._request_on_main(batches)
            # All processes raise this error, because each process receives the errors of all processes.
            except WeightSyncError as error:
                if tried == self.retries:
                    raise
                logger.warning("%s Pushing the weights again.", error)
                self._pushed_at = None
        raise AssertionError("unreachable")

    def _request_on_main(self, batches: Sequence[RequestBatch]) -> list[list[Rollout]]:
        """Gather the requests of all processes on the main process and call the engine there once. Return the rollouts of
        this process.
        """
        mine = [_seeded(requests, sampling) for requests, sampling in batches]
        gathered = parallel.gather_objects(mine, self.accelerator)

        def answer() -> list[list[list[Rollout]]]:
            flat = [request for rank in gathered for batch in rank for request in batch]
            stream = iter(self.engine.generate(flat, Sampling(1)) if flat else [])
            return [[[next(stream) for r in batch for _ in range(r.n)] for batch in rank] for rank in gathered]

        with parallel.failing_together(self.accelerator):
            shares = answer() if self.accelerator.is_main_process else []
        return parallel.scatter_objects(shares, self.accelerator)

    def rest(self) -> None:
        """Put the engine to sleep, so that it releases its memory for training. The engine wakes up at the next
        generation.
        """
        if self.needs_weight_sync:
            self.engine.sleep()

    def forget_push(self) -> None:
        """Request a push of all weights before the next generation, even if the weights look unchanged. Call this method
        after all weights were replaced.
        """
        self._pushed_at = None

    # Weights ---------------------------------------------------------------------------------------------------------

    def push_if_due(self) -> None:
        """Push the weights if they changed since the last push, or if a server does not have the last version."""
        base, adapters = self._state()
        here = (self.run.progress.state.global_step, base, adapters)
        due = here != self._pushed_at or self.engine.needs_weights()
        if parallel.all_reduce_sum([float(due)], self.accelerator)[0] == 0:
            return
        if self._pushes == 0 and self.run.progress.state.global_step > 0:
            self._negative_control()
        again = parallel.all_reduce_sum([float(here != self._pushed_at)], self.accelerator)[0] == 0
        self._pushes += 0 if again else 1
        whole_update(lambda: self._push(base), self.retries + 1)
        self._pushed_at = here
        if self.parity_due(again):
            try:
                with self.parity.timed():
                    self._check_parity()
            # The next generation waits for the server. After that, the weights are pushed again, and the log-probs are
            # compared again.
            except (
                ServerUnreachable,
                ServerBusy,
            ) as error:
                logger.warning("%s After the next push, the log-probs of server and trainer are compared again.", error)
                self._pushed_at, self.parity.ended = None, None

    def parity_due(self, again: bool = False) -> bool:
        """Return whether the log-probs of trainer and engine must be compared after this push. All ranks get the same
        result.

        Args:
            again: Whether the push repeats a version for a server that does not have it.
        """
        due = self.args.preflight != "off" and (again or self.parity.due())
        return parallel.all_reduce_sum([float(due)], self.accelerator)[0] > 0

    def _state(self) -> tuple[tuple, tuple]:
        """Return the `fingerprint` of the model. For sharded weights, return only the state of adapters, because each gather
        would change the fingerprint.
        """
        sharded = parallel.shards_parameters(self.accelerator)
        return ((), adapter_states(self.run.model)) if sharded else fingerprint(self.run.model)

    def _push(self, base: tuple | None = None) -> None:
        """Push the weights. ``base`` is the fingerprint of the base weights. None: they did not change since the last push."""
        engine, begin = self.engine, time.perf_counter()
        weights = self.outgoing(engine.capabilities)
        if isinstance(weights, AdapterWeights) and base is not None:
            if self._base_at not in (None, base):
                engine.mark_stale()  # The engine gets the base weights again, before the adapter.
            self._base_at = base

        def send() -> None:
            if engine.capabilities.main_process_only and not self.accelerator.is_main_process:
                # Reading sharded parameters is a collective operation, so this process must also read them.
                for _ in weights if parallel.shards_parameters(self.accelerator) else ():
                    pass
            else:
                engine.load_weights(weights, self._pushes)

        with parallel.failing_together(self.accelerator):
            send()
        self.run.log(
            {"perf/weight_sync_s": mean(time.perf_counter() - begin), "weight_sync_mb": mean(weights.nbytes / 1e6)}
        )

    def outgoing(self, can: Capabilities) -> Weights | AdapterWeights:
        """Return the weights to push: only the adapter if both model and engine support this, otherwise all weights. The
        choice is made at each push, because an adapter can be disabled or changed between pushes.

        Args:
            can: Capabilities of the engine. All processes use the main process's value.

        Raises:
            ConfigError: ``adapter_sync="adapter"`` is set, but the adapter cannot be pushed without merging, or the engine
                does not support the adapter's rank.
        """
        model, choice = self.run.progress.wrapped, self.args.adapter_sync
        if self._supported is None:
            (self._supported, *_) = parallel.all_gather_objects(
                [(can.adapter_rank, can.adapter_layers)], self.accelerator
            )
        rank, layers = self._supported
        missing = None if rank else "the engine does not support adapters (vLLM: --enable-lora, on this machine)"
        why = adapter_obstacle(model, layers) or missing
        if choice == "adapter" and why:
            raise ConfigError(
                f"adapter_sync='adapter': the adapter cannot be sent alone to {self.engine.name}: {why}. Fix: use "
                "adapter_sync='auto', which then sends merged weights."
            )
        if choice == "auto" and why and adapters_of(model):
            warn_once(logger, "The adapter is merged and all weights are pushed: %s.", why)
        if choice != "merged" and not why:
            return AdapterWeights(model, dtype=can.dtype, most=rank)
        return Weights(model, dtype=can.dtype, checkpoint_names=can.checkpoint_names)

    def _check_parity(self) -> None:
        """Compare the log-probs of fixed sequences between trainer and engine. If they differ, push the weights and compare
        a second time.

        Raises:
            WeightSyncError: The log-probs still differ after the second push.
        """
        if self.args.preflight == "off" or not self.engine.capabilities.scores_sequences:
            return
        with self.run.checks.preflight.record_check("first_batch", ("PT-S004",)):
            finding = self.parity_finding(self.engine, self._pushes)
            if finding is None or finding.severity != "error":
                self.run.checks.report([finding])
                return
        logger.warning("%s: %s Pushing the weights once more.", finding.code, finding.what)
        self.engine.mark_stale()
        self._pushes += 1
        self._push()
        finding = self.parity_finding(self.engine, self._pushes)
        self.refuse(finding, self._pushes)

    def refuse(self, finding: Any, version: int) -> None:
        """Record a finding and raise it as an error. Do nothing if ``finding`` is None."""
        if finding is not None:
            self.run.checks.keep([finding])
            raise WeightSyncError(
                f"{finding.code}: {finding.what} {finding.why} Fix: {finding.fix}", phase="parity", version=version
            )

    def _negative_control(self) -> None:
        """Check that the engine's old weights give other log-probs than the trainer's weights, before the first push of a
        resumed run. If the log-probs were equal, the comparison after the push would prove nothing.
        """
        can = self.engine.capabilities
        if self.args.preflight == "off" or not can.scores_sequences or not can.main_process_only:
            return
        with self.run.checks.preflight.record_check("first_batch", ("PT-S005",)):
            try:
                before = self.parity_finding(self.engine, self._pushes)
            except RolloutServerError:
                # The engine's weights are incomplete, so their log-probs cannot be compared.
                return
            self.run.checks.report([check_negative_control(self.engine.name, before)])

    def probe(self) -> Probe:
        """Return the sequences for the comparison of log-probs, with the trainer's log-probs. All ranks must call this
        method.

        bitsandbytes quantizes the inputs of 8-bit layers. Engines get dequantized weights and do not quantize inputs. The
        trainer's log-probs are therefore computed without quantized inputs. Otherwise, the rounding of inputs would hide
        wrong weights.
        """
        model = self.run.model
        text = model.config.get_text_config()
        sequences = probe_sequences(text.vocab_size, self.context, sliding_window(text))
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(str(self.accelerator.mixed_precision))
        with self.run.inference() as policy, unrounded_inputs(policy):
            logps = plain_logps(policy, sequences)
            with rounded_otherwise(policy):
                noise = mean_gap(logps, plain_logps(policy, sequences))
        return Probe(sequences, logps, str(mixed or model.dtype), noise)

    def parity_finding(self, engine: Any, version: int) -> Any:
        """Compare an engine's log-probs with the trainer's. Return the finding on every process, or None if the log-probs
        agree.

        Args:
            engine: Engine on the main process. None is passed on processes without an engine.
            version: Version of the weights that were pushed.
        """
        probe = self.probe()

        def compare() -> Any:
            if engine is None or (not self.accelerator.is_main_process and engine.capabilities.main_process_only):
                return None
            scored = engine.score(probe.sequences, [1] * len(probe.sequences))
            findings = [
                self.parity.compare(probe, where, theirs, dtype=engine.capabilities.dtype, version=version)
                for where, theirs in scored.items()
            ]
            return next((f for f in findings if f is not None), None)

        with parallel.failing_together(self.accelerator):
            mine = compare()
        shared = [f for f in parallel.all_gather_objects([mine], self.accelerator) if f is not None]
        return shared[0] if shared else None


def _seeded(requests: Sequence[Request], sampling: Sampling) -> list[Request]:
    """Store the sampling settings in each request, so that the requests of all processes can be sent in one call."""
    return [
        r if r.sampling is not None else replace(r, sampling=replace(sampling, seed=derived_seed(sampling.seed, i)))
        for i, r in enumerate(requests)
    ]
