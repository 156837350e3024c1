"""Weight sync: engines are made, get the weights that moved, are proven to hold them, and are asked for rollouts."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from posttrain.checks.registry import codes_of, finding
from posttrain.errors import ConfigError, RolloutServerError, WeightSyncError
from posttrain.loop.checks import Checks
from posttrain.loop.online_config import VllmSyncFields
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.base import Capabilities, RolloutEngine, create_engine
from posttrain.rollouts.server.engine import ServerEngine
from posttrain.rollouts.server.pool import AWAY
from posttrain.rollouts.server.replies import derived_seed, ranked, sampling_body, shape_of
from posttrain.rollouts.workers.shared_weights import Weights
from posttrain.types import Finding, Request, Rollout, Row, Sampling

logger = logging.getLogger(__name__)


SEQUENCES, LENGTH, LONGEST = 4, 64, 2048  # Of the parity probe, in tokens.
# Nats a token, mean and 99th percentile. Measured on 4 x 63 random tokens with SmolLM2-135M: float32 on both sides below 1e-3;
# bfloat16 against float32 0.054 and 0.31, bfloat16 on both sides 0.085 and 0.48 (likely tokens lie ten times closer).
GAPS = {"float32": (0.02, 0.5), "float16": (0.05, 0.5), "bfloat16": (0.15, 1.0)}
GAPS_QUANTISED, FAR_SHARE = (0.3, 2.0), 0.99
SAME_MODE = (
    1e-3  # Log-probs at two temperatures that differ by less are of one distribution: the temperature is not in them.
)
PROBE_TOP = 5


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs of a server; None or 0 where it does not matter.

    Attributes:
        shape: Architecture, hidden size, layers and key-value heads of the policy, by the names that servers use.
        completion: Most tokens of a completion.
        at_once: Completions of one generation.
        truncated: Whether sampling leaves tokens out or penalises them.
        devices: UUIDs of the trainer's accelerators.
    """

    model: str
    revision: str | None
    shape: Mapping[str, Any]
    vocabulary: int
    completion: int
    at_once: int
    temperature: float
    truncated: bool
    devices: tuple[str, ...] = ()


def needs_of(model: Any, args: Any) -> Needs:
    """What a trainer with this model and these arguments needs."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    text = base.config.get_text_config()
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    truncated = args.top_p < 1 or args.top_k > 0 or bool(args.min_p) or args.repetition_penalty != 1
    return Needs(
        model=str(base.config.name_or_path),
        revision=(getattr(args, "model_init_kwargs", None) or {}).get("revision"),
        shape={
            "architectures": [type(base).__name__],
            **shape_of(text),
        },
        vocabulary=text.vocab_size,
        completion=args.max_completion_length,
        at_once=args.generation_batch_size or 0,
        temperature=args.temperature,
        truncated=truncated,
        devices=tuple(uuids),
    )


def check_info(url: str, info: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    """What a server says of itself against what the run needs."""
    yield from _model(url, info, needs)
    yield from _flags(url, info, needs)
    yield from _seeds(url, info, needs)


def _model(url: str, info: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    differing = {
        name: (info.get(name), value)
        for name, value in needs.shape.items()
        if value is not None and info.get(name) is not None and info[name] != value
    }
    if differing:
        theirs = ", ".join(f"{name}={pair[0]}" for name, pair in differing.items())
        ours = ", ".join(f"{name}={pair[1]}" for name, pair in differing.items())
        yield finding(
            "PT-S001", "error", f"the server serves {info.get('model')} with {theirs}, and the trainer has {ours}.", url,
            "weights of one cannot be loaded into the other, and completions would come from another policy.",
            f"start the server with the model that is trained: posttrain serve --model {needs.model or 'MODEL'}.",
        )  # fmt: skip
    vocabulary = info.get("vocab_size")
    if vocabulary is not None and vocabulary < needs.vocabulary:
        yield finding(
            "PT-S002", "error", f"the server's vocabulary has {vocabulary} tokens, the trainer's {needs.vocabulary}.", url,
            "prompts with tokens that were added for training cannot be sent, and the embeddings do not fit.",
            "save the trained model with its new tokens and serve that.",
        )  # fmt: skip
    revision = info.get("revision")
    if revision and needs.revision and revision != needs.revision:
        yield finding(
            "PT-S003", "warning", f"the server loaded revision {revision}, the trainer {needs.revision}.", url,
            "their tokenizers and configs may differ; the weights are pushed in any case.",
            f"start the server with --revision {needs.revision}.",
        )  # fmt: skip


def _flags(url: str, info: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    length, dash = info.get("max_model_len"), "-" if info.get("engine") == "vllm" else "_"
    if length is not None and length <= needs.completion:
        yield finding(
            "PT-S010", "error",
            f"max_model_len={length} of the server holds no prompt beside max_completion_length={needs.completion}.", url,
            "every request would be refused, or every completion cut.",
            f"restart it: {_restart(info, needs)} --max{dash}model{dash}len {needs.completion + 512}.",
        )  # fmt: skip
    if info.get("takes_no_weights"):
        yield finding(
            "PT-S012", "error", f"the server takes no weights: {info['takes_no_weights']}.", url,
            "it would sample from the weights it started with for the whole run.", f"restart it: {_restart(info, needs)}.",
        )  # fmt: skip
    shared = sorted(set(info.get("device_uuids") or ()) & set(needs.devices))
    if shared:
        yield finding(
            "PT-S013", "error", f"server and trainer both use accelerator {', '.join(shared)}.", url,
            "they cannot form a group to send weights, and share its memory.",
            "give each its own with CUDA_VISIBLE_DEVICES, or set vllm_mode='colocate'.",
        )  # fmt: skip
    slots = info.get("max_num_seqs")
    if slots and needs.at_once > 4 * slots:
        yield finding(
            "PT-S014", "info", f"the server writes {slots} completions at once, and a generation has {needs.at_once}.", url,
            "most of them wait for most of the time.", "raise --max_num_seqs, or add servers.",
        )  # fmt: skip
    quantised = info.get("quantization") or info.get("quantisation")
    if quantised:
        yield finding(
            "PT-S015", "warning", f"the server runs {quantised} weights.", url,
            "rollouts come from a rounded policy; the correction for it costs effective samples.",
            "serve full weights, or watch sampling/sampling_logp_difference.",
        )  # fmt: skip


def _seeds(url: str, info: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    if info.get("device") == "cpu" and info.get("chunked_prefill"):
        yield finding(
            "PT-S017", "error", "the server is a vLLM on a CPU that reads long prompts, or many at once, in pieces.", url,
            "every request of a run has a seed, and this build cannot take one back after a piece: its engine would end with "
            "'CPU Generator does not use offset'.",
            f"restart it: {_restart(info, needs)} (or vllm serve with --no-enable-chunked-prefill).",
        )  # fmt: skip


def _restart(info: Mapping[str, Any], needs: Needs) -> str:
    """The command that starts this kind of server."""
    command = "posttrain vllm-serve" if info.get("engine") == "vllm" else "posttrain serve"
    return f"{command} --model {needs.model or 'MODEL'}"


def probe_logprobs(client: Any, needs: Needs) -> Iterator[Finding]:
    """One prompt at two temperatures: whether log-probs are of the distribution that is sampled from (two tiny requests)."""
    prompt = [min(7, needs.vocabulary - 1)]
    settings = [Sampling(1, temperature, top_logps=PROBE_TOP) for temperature in (0.5, 1.0)]
    try:
        choices = [client.complete([prompt], seeds=[0], **sampling_body(one))[0] for one in settings]
    except WeightSyncError:
        return  # Its weights are not whole: it samples nothing before the first push.
    pairs = [{i: v for i, v in ranked(choice)[0] if math.isfinite(v)} for choice in choices]
    common = pairs[0].keys() & pairs[1].keys()
    if not common or max(abs(pairs[0][i] - pairs[1][i]) for i in common) >= SAME_MODE:
        return
    url = str(getattr(client, "base_url", "server"))
    yield finding(
        "PT-S011", "error" if needs.temperature != 1.0 else "warning",
        f"the server's log-probs are the same at temperatures 0.5 and 1.0, and this run samples at {needs.temperature}.", url,
        "importance ratios compare log-probs of two distributions unless it samples at 1.0 from the whole distribution.",
        f"restart it: posttrain vllm-serve --model {needs.model} (or vllm serve with --logprobs-mode processed_logprobs).",
    )  # fmt: skip


def probe_sequences(vocabulary: int, context: int | None, window: int | None = None) -> list[list[int]]:
    """The token ids of the parity probe, the same in every run: 4 sequences of at most 64 tokens.

    The last one reaches 64 tokens beyond a sliding window of at most `LONGEST`, as far as the context goes.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(LENGTH, context or LENGTH)
    found = torch.randint(0, vocabulary, (SEQUENCES, length), generator=generator).tolist()
    beyond = 0 if window is None or window > LONGEST else window + LENGTH - length
    more = max(0, min(beyond, context - length if context else beyond))
    found[-1] += torch.randint(0, vocabulary, (more,), generator=generator).tolist()
    return found


def check_parity(
    where: str, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, dtype: Any, version: int,
    computed: Any = "float32",
) -> Finding | None:  # fmt: skip
    """Log-probs of the same tokens on both sides.

    Args:
        where: The server.
        ours: One list of log-probs a sequence, by the trainer.
        theirs: By the server.
        dtype: Of the server's weights; None is held to the widest bound.
        version: Of the weights.
        computed: What the trainer's forward pass computes in; the narrower of both sides sets the bounds.
    """
    gaps = [abs(a - b) for mine, its in zip(ours, theirs, strict=True) for a, b in zip(mine, its, strict=True)]
    sides = [GAPS.get(str(side).removeprefix("torch."), GAPS_QUANTISED) for side in (dtype, computed)]
    limit, far_limit = max(sides)
    average = statistics.fmean(gaps)
    far = sorted(gaps)[min(int(FAR_SHARE * len(gaps)), len(gaps) - 1)]
    if average <= limit and far <= far_limit:  # False for NaN.
        return None
    return finding(
        "PT-S004", "error",
        f"the server's weights differ from the trainer's after version {version} was pushed: mean log-prob gap {average:.3g} "
        f"over {len(gaps)} tokens (limit {limit}), 99th percentile {far:.3g} (limit {far_limit}).", where,
        "rollouts would come from another policy. Causes: weights that are read from disk again after sleeping, names that the "
        "engine ignores, an adapter that is not merged, another trainer that pushes to this server.",
        "restart the server with the model that is trained, and give every trainer its own.",
    )  # fmt: skip


def check_negative_control(where: str, before: Finding | None) -> Finding | None:
    """A resumed run's server should not have its weights before they are pushed: otherwise a push proves nothing."""
    if before is not None:
        return None
    return finding(
        "PT-S005", "warning", "the server's log-probs equalled the trainer's before the weights of this resumed run were pushed.",
        where, "either it has them already, or training has hardly moved them: that a push arrives cannot be seen from here.",
        "look at reward and sampling/sampling_logp_difference over the next steps.",
    )  # fmt: skip


Asked = tuple[Sequence[Request], Sampling]


class NonMainRankEngine(RolloutEngine):
    """Stand-in engine on ranks > 0: rank 0 owns the client and sends the requests of all ranks."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.name, self.capabilities = name, capabilities

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Rank 0 does this."""
        raise AssertionError("rank 0 asks the servers for all ranks")

    def load_weights(self, named_tensors: Any, version: int) -> None:
        """Rank 0 does this."""
        raise AssertionError("rank 0 pushes weights to the servers for all ranks")

    def close(self) -> None:
        """Nothing is held."""


def training_engine(model: Any, args: Any, *, tokenizer: Any, pad_token_id: int) -> Any:
    """The engine in process that the config names, on a model.

    It gets the tokenizer that guides and stop strings speak of, and the settings of transformers' continuous batching,
    which is for text.

    Args:
        model: That samples.
        args: With ``rollout_engine`` and its options.
        tokenizer: Of the policy.
        pad_token_id: Of the policy.

    Raises:
        ConfigError: Continuous batching with a processor.
    """
    options = {"folder": args.output_dir, "cache": getattr(args, "cache_implementation", None)}
    engine: Any = create_engine(args.rollout_engine, model, pad_token_id=pad_token_id, **options)
    if engine.tokenizer is None:
        engine.tokenizer = tokenizer
    if engine.name != "paged":
        return engine
    if hasattr(tokenizer, "tokenizer"):
        raise ConfigError(
            "use_transformers_continuous_batching=True with a processor: it generates from text alone. Give a tokenizer, or "
            "use another rollout_engine."
        )
    engine.settings = dict(args.transformers_continuous_batching_config or {})
    return engine


def vllm_engine(model: Any, args: Any, accelerator: Any) -> Any:
    """The engine of ``use_vllm=True``: in process, or one that asks servers (a stand-in on ranks other than 0)."""
    if args.vllm_mode != "server":
        from posttrain.rollouts.vllm import VLLMEngine

        return VLLMEngine.for_training(model, args, accelerator)
    from posttrain.rollouts.server.engine import ServerEngine

    urls = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"

    def connect() -> Any:
        if not accelerator.is_main_process:
            return None
        return ServerEngine(
            urls,
            connection_timeout=args.vllm_server_timeout,
            request_timeout=args.vllm_request_timeout,
            sync_timeout=args.vllm_sync_timeout,
            bucket_mb=args.vllm_weight_bucket_mb,
            patience=args.vllm_server_timeout,
            api_key=args.vllm_server_api_key,
        )

    engine = parallel.run_and_share(connect, accelerator)
    facts = [] if engine is None else [engine.capabilities]
    shared = parallel.all_gather_objects(facts, accelerator)[0]
    return engine or NonMainRankEngine("server", shared)


def sync_option(args: Any, name: str) -> Any:
    """A field of `VllmSyncFields`, of configs without them its default."""
    return getattr(args, name, getattr(VllmSyncFields, name))


def whole_update(push: Callable[[], None], tries: int) -> None:
    """One push, the whole of it anew where it failed midway.

    Raises:
        WeightSyncError: The last of ``tries`` failed too.
    """
    for tried in range(1, tries + 1):
        try:
            return push()
        except WeightSyncError as error:
            if tried == tries:
                raise
            logger.warning("%s Trying the whole update again.", error)


class WeightSync:
    """Stands between an online trainer and its engine: pushes weights that moved, proves that they arrived, asks for rollouts.

    Engines that share the trainer's weights are asked on every rank. Engines with a copy of the weights get new ones
    first, wherever those have moved. Of a collective engine the main process alone sends the requests of all ranks.

    Args:
        engine: That samples.
        args: Of the trainer.
        accelerator: Of the run.
        model: The policy as it is now; sharded training replaces it.
        wrapped: The same as the run wraps it.
        step: Optimiser steps that were made.
        inference: Context manager of the policy in eval mode, without gradients.
        log: Takes metrics.
        checks: Reports findings; raises where one is refused.
    """

    def __init__(
        self,
        engine: Any,
        args: Any,
        accelerator: Any,
        *,
        model: Callable[[], Any],
        wrapped: Callable[[], Any],
        step: Callable[[], int],
        inference: Callable[[], AbstractContextManager[Any]],
        log: Callable[[dict[str, Metric]], None],
        checks: Checks,
    ) -> None:
        self.engine, self.args, self.accelerator = engine, args, accelerator
        self.model, self.wrapped, self.step, self.inference, self.log = model, wrapped, step, inference, log
        self.checks = checks
        self.retries: int = sync_option(args, "vllm_sync_retries")
        self._pushed_at: tuple[int, int] | None = None
        self._pushes = 0
        self._checked_at = 0

    @property
    def needs_weight_sync(self) -> bool:
        """Whether the engine samples with a copy of the weights."""
        return self.engine.capabilities.needs_weight_sync

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion, of the model and of the engine."""
        model = getattr(self.model().config.get_text_config(), "max_position_embeddings", None)
        limits = [model, self.engine.capabilities.context]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_engine(self, engine: Any) -> None:
        """Compare what servers say of themselves with what this run needs, before anything is generated.

        Args:
            engine: Any engine that asks servers; every process calls it, the main one with the engine.
        """
        if self.args.preflight == "off":
            return
        with self.checks.preflight.record_check("config", codes_of("S", "config")):
            found = parallel.run_and_share(lambda: self._engine_findings(engine), self.accelerator)
            self.checks.report(parallel.all_gather_objects(list(found), self.accelerator))

    def _engine_findings(self, engine: Any) -> list[Any]:
        if not self.accelerator.is_main_process or not isinstance(engine, ServerEngine):
            return []
        needs = needs_of(self.accelerator.unwrap_model(self.model()), self.args)
        return [f for s in engine.fleet.live for f in check_info(s.url, s.info, needs)] + [
            f for s in engine.fleet.live for f in probe_logprobs(s.client, needs)
        ]

    # Asking it -------------------------------------------------------------------------------------------------------

    def ask(self, batches: Sequence[Asked]) -> list[list[Rollout]]:
        """Rollouts of each ``(requests, sampling)`` of this process; every process calls it, with an empty list too."""
        engine = self.engine
        if not self.needs_weight_sync:
            whole = parallel.whole_parameters(self.wrapped(), self.accelerator)
            with self.inference(), whole:
                return [engine.generate(requests, sampling) for requests, sampling in batches]
        for tried in range(self.retries + 1):
            self.push_if_due()
            try:
                if not engine.capabilities.main_process_only:
                    return [engine.generate(requests, sampling) for requests, sampling in batches]
                return self._ask_main(batches)
            except WeightSyncError as error:  # On every process: they share it.
                if tried == self.retries:
                    raise
                logger.warning("%s Pushing the weights again.", error)
                self._pushed_at = None
        raise AssertionError("unreachable")

    def _ask_main(self, batches: Sequence[Asked]) -> list[list[Rollout]]:
        """Everything to the main process, one call to the engine, and each process its own."""
        mine = [_seeded(requests, sampling) for requests, sampling in batches]
        asked = parallel.gather_objects(mine, self.accelerator)

        def answer() -> list[list[list[Rollout]]]:
            flat = [request for rank in asked for batch in rank for request in batch]
            stream = iter(self.engine.generate(flat, Sampling(1)) if flat else [])
            return [[[next(stream) for r in batch for _ in range(r.n)] for batch in rank] for rank in asked]

        shares = parallel.run_and_share(lambda: answer() if self.accelerator.is_main_process else [], self.accelerator)
        return parallel.scatter_objects(shares, self.accelerator)

    def rest(self) -> None:
        """Training wants the memory: an engine that can sleeps until the next generation, tool turns and all, begins."""
        if self.needs_weight_sync:
            self.engine.sleep()

    def forget_push(self) -> None:
        """The weights were replaced as a whole: push them before the next generation."""
        self._pushed_at = None

    # Weights ---------------------------------------------------------------------------------------------------------

    def push_if_due(self) -> None:
        """Send the weights where they have moved since the last time, or where a server lacks them."""
        here = (self.step(), self._moved())
        due = here != self._pushed_at or self.engine.needs_weights()
        if parallel.all_reduce_sum([float(due)], self.accelerator)[0] == 0:
            return
        if self._pushes == 0 and self.step() > 0:
            self._negative_control()
        again = parallel.all_reduce_sum([float(here != self._pushed_at)], self.accelerator)[0] == 0
        self._pushes += 0 if again else 1
        whole_update(self._push, self.retries + 1)
        self._pushed_at = here
        every = sync_option(self.args, "weight_parity_every")
        if self._checked_at == 0 or again or (every and self._pushes - self._checked_at >= every):
            try:
                self._check_parity()
                self._checked_at = self._pushes
            except AWAY as error:  # Generation waits for it; then it is pushed to, and compared, anew.
                logger.warning("%s Its weights are compared after the next push.", error)
                self._pushed_at, self._checked_at = None, 0

    def _moved(self) -> int:
        """A number that changes when anybody writes into the weights; 0 where gathering shards writes into them anyway."""
        if parallel.shards_parameters(self.accelerator):
            return 0
        return sum(parameter._version for parameter in self.model().parameters())

    def _push(self) -> None:
        engine, begin = self.engine, time.perf_counter()
        can = engine.capabilities
        weights = Weights(self.wrapped(), dtype=can.dtype, checkpoint_names=can.checkpoint_names)

        def send() -> None:
            if engine.capabilities.main_process_only and not self.accelerator.is_main_process:
                for _ in weights if parallel.shards_parameters(self.accelerator) else ():
                    pass  # Where parameters are sharded, the main process cannot read them alone.
            else:
                engine.load_weights(weights, self._pushes)

        parallel.run_and_share(send, self.accelerator)
        self.log({"weight_sync_time_s": mean(time.perf_counter() - begin)})

    def _check_parity(self) -> None:
        """Log-probs of fixed sequences on both sides; once more after a second push where they differ.

        Raises:
            WeightSyncError: They differ still.
        """
        if self.args.preflight == "off" or not self.engine.capabilities.scores_sequences:
            return
        with self.checks.preflight.record_check("first_batch", ("PT-S004",)):
            found = self._parity_finding()
            if found is None or found.severity != "error":
                self.checks.report([found])
                return
        logger.warning("%s: %s Pushing once more.", found.code, found.what)
        self.engine.mark_stale()
        self._pushes += 1
        self._push()
        found = self._parity_finding()
        if found is not None:
            self.checks.keep([found])
            raise WeightSyncError(
                f"{found.code}: {found.what} {found.why} Do: {found.fix}", phase="parity", version=self._pushes
            )

    def _negative_control(self) -> None:
        """Before the first push of a resumed run."""
        can = self.engine.capabilities
        if self.args.preflight == "off" or not can.scores_sequences or not can.main_process_only:
            return
        with self.checks.preflight.record_check("first_batch", ("PT-S005",)):
            try:
                before = self._parity_finding()
            except RolloutServerError:
                return  # Its weights are not whole: nothing is equal to them.
            self.checks.report([check_negative_control(self.engine.name, before)])

    def _parity_finding(self) -> Any:
        """What the comparison says, on every process."""
        model = self.model()
        text = model.config.get_text_config()
        sequences = probe_sequences(text.vocab_size, self.context, getattr(text, "sliding_window", None))
        rows = [Row(ids[:1], [ids[1:]], [[1] * (len(ids) - 1)]) for ids in sequences]
        with self.inference() as policy:
            ours = [logp.float().cpu().tolist() for logp in sequence_logps(policy, rows)]

        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(str(self.accelerator.mixed_precision))
        kinds = {"dtype": self.engine.capabilities.dtype, "computed": mixed or getattr(model, "dtype", "float32")}

        def compare() -> Any:
            if not self.accelerator.is_main_process and self.engine.capabilities.main_process_only:
                return None
            found = [
                check_parity(where, ours, theirs, version=self._pushes, **kinds)
                for where, theirs in self.engine.score(sequences, [1] * len(sequences)).items()
            ]
            return next((f for f in found if f is not None), None)

        mine = parallel.run_and_share(compare, self.accelerator)
        shared = [f for f in parallel.all_gather_objects([mine], self.accelerator) if f is not None]
        return shared[0] if shared else None


def _seeded(requests: Sequence[Request], sampling: Sampling) -> list[Request]:
    """Requests that bring their own sampling, so that those of all processes can go together."""
    return [
        r if r.sampling is not None else replace(r, sampling=replace(sampling, seed=derived_seed(sampling.seed, i)))
        for i, r in enumerate(requests)
    ]
