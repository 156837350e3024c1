"""Engines that sample with a copy of the weights: made here, given new weights when those have moved, asked by one process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from posttrain.checks import server as checks
from posttrain.checks.registry import codes_of
from posttrain.errors import ConfigError, RolloutServerError, WeightSyncError
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.forward import sequence_logps
from posttrain.models.merged import adapter_weights
from posttrain.rollouts.base import RolloutEngine, create_engine
from posttrain.rollouts.server.engine import AWAY
from posttrain.rollouts.server.replies import derived_seed
from posttrain.rollouts.workers.shared_weights import Weights
from posttrain.training.online_config import VllmSyncFields
from posttrain.types import Request, Rollout, Row, Sampling

__all__ = ["FarRolloutMixin"]

logger = logging.getLogger(__name__)

Asked = tuple[Sequence[Request], Sampling]


class NonMainRankEngine:
    """What the other processes have in place of the engine that the main process asks for all of them."""

    in_process = False
    holds_copy = True
    collective = True

    def __init__(self, name: str, facts: dict[str, Any]) -> None:
        self.name = name
        self.__dict__.update(facts)

    def close(self) -> None:
        """Nothing is held."""


class FarRolloutMixin:
    """The part of `OnlineTrainer` that stands between it and engines of any place."""

    args: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    state: Any
    engine: Any
    pad_token_id: int
    _pushed_at: Any = None
    _pushes = 0
    _checked_at = 0
    _sends_adapter: bool | None = None

    # Which engine ----------------------------------------------------------------------------------------------------

    def make_engine(self, given: RolloutEngine | None) -> Any:
        """The engine object that was given, or the one that the config names."""
        args = self.args
        if given is not None:
            return given
        bare = self.accelerator.unwrap_model(self.model)
        if not getattr(args, "use_vllm", False):
            return self.engine_on(bare)
        if args.vllm_mode == "server":
            return self._server_engine()
        from posttrain.rollouts.vllm import VLLMEngine

        return VLLMEngine.for_training(bare, args, self.accelerator)

    def engine_on(self, model: Any) -> Any:
        """The engine in process that the config names, on a model, with all that the config says of it.

        It gets the tokenizer that guides and stop strings speak of, and the settings of transformers' continuous batching,
        which is for text.
        """
        options = {"folder": self.args.output_dir, "cache": getattr(self.args, "cache_implementation", None)}
        engine: Any = create_engine(self.args.rollout_engine, model, pad_token_id=self.pad_token_id, **options)
        if getattr(engine, "tokenizer", self) is None:
            engine.tokenizer = self.processing_class  # type: ignore[attr-defined]
        if engine.name != "paged":
            return engine
        if hasattr(self.processing_class, "tokenizer"):  # type: ignore[attr-defined]
            raise ConfigError(
                "use_transformers_continuous_batching=True with a processor: it generates from text alone. Give a tokenizer, or "
                "use another rollout_engine."
            )
        engine.settings = dict(self.args.transformers_continuous_batching_config or {})
        return engine

    def _server_engine(self) -> Any:
        from posttrain.rollouts.server.engine import ServerEngine

        args = self.args
        urls = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"

        def connect() -> Any:
            if not self.accelerator.is_main_process:
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

        engine = parallel.run_and_share(connect, self.accelerator)
        names = ("context", "dtype", "checkpoint_names", "can_score")
        facts = [] if engine is None else [{name: getattr(engine, name) for name in names}]
        shared = parallel.all_gather_objects(facts, self.accelerator)[0]
        return engine or NonMainRankEngine("server", shared)

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion, of the model and of the engine."""
        limits = [super().context, getattr(getattr(self, "engine", None), "context", None)]  # type: ignore[misc]
        return min((limit for limit in limits if limit is not None), default=None)

    def _far(self, name: str) -> Any:
        """A field of `VllmSyncFields`, of configs without them its default."""
        return getattr(self.args, name, getattr(VllmSyncFields, name))

    @property
    def _is_far(self) -> bool:
        return getattr(self.engine, "holds_copy", False)

    def check_engine(self) -> None:
        """Compare what the engine says of itself with what this run needs, before anything is generated."""
        if self._is_far:
            self.check_servers(self.engine)

    def check_servers(self, engine: Any) -> None:
        """The same for any engine that asks servers; every process calls it, the main one with the engine."""
        if self.args.preflight == "off":
            return
        with self.preflight.looking("config", codes_of("S", "config")):  # type: ignore[attr-defined]
            found = parallel.run_and_share(lambda: self._engine_findings(engine), self.accelerator)
            self.tell(parallel.all_gather_objects(list(found), self.accelerator))  # type: ignore[attr-defined]

    def _engine_findings(self, engine: Any) -> list[Any]:
        if not self.accelerator.is_main_process or not hasattr(engine, "fleet"):
            return []
        needs = checks.needs_of(self.accelerator.unwrap_model(self.model), self.args)
        return [f for s in engine.fleet.live for f in checks.check_info(s.url, s.info, needs)] + [
            f for s in engine.fleet.live for f in checks.probe_logprobs(s.client, needs)
        ]

    # Asking it -------------------------------------------------------------------------------------------------------

    def ask_engine(self, batches: Sequence[Asked]) -> list[list[Rollout]]:
        """Rollouts of each ``(requests, sampling)`` of this process; every process calls it, with an empty list too."""
        engine = self.engine
        if not self._is_far:
            whole = parallel.whole_parameters(self.model_wrapped, self.accelerator)
            with self.inference(), whole:  # type: ignore[attr-defined]
                return [engine.generate(requests, sampling) for requests, sampling in batches]
        for tried in range(self._far("vllm_sync_retries") + 1):
            self.push_if_due()
            try:
                if not engine.collective:
                    return [engine.generate(requests, sampling) for requests, sampling in batches]
                return self._ask_main(batches)
            except WeightSyncError as error:  # On every process: they share it.
                if tried == self._far("vllm_sync_retries"):
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

    def rest_engine(self) -> None:
        """Training wants the memory: an engine that can sleeps until the next generation, tool turns and all, begins."""
        if self._is_far:
            getattr(self.engine, "rest", bool)()

    # Weights ---------------------------------------------------------------------------------------------------------

    def push_if_due(self) -> None:
        """Send the weights where they have moved since the last time, or where a server lacks them."""
        here = (self.state.global_step, self._moved())
        wanting = getattr(self.engine, "needs_weights", bool)()
        due = here != self._pushed_at or bool(wanting)
        if parallel.all_reduce_sum([float(due)], self.accelerator)[0] == 0:
            return
        if self._pushes == 0 and self.state.global_step > 0:
            self._negative_control()
        again = parallel.all_reduce_sum([float(here != self._pushed_at)], self.accelerator)[0] == 0
        self._pushes += 0 if again else 1
        self.whole_update(self._push, self._far("vllm_sync_retries") + 1)
        self._pushed_at = here
        every = self._far("weight_parity_every")
        if self._checked_at == 0 or again or (every and self._pushes - self._checked_at >= every):
            try:
                self._check_parity()
                self._checked_at = self._pushes
            except AWAY as error:  # Generation waits for it; then it is pushed to, and compared, anew.
                logger.warning("%s Its weights are compared after the next push.", error)
                self._pushed_at, self._checked_at = None, 0

    def whole_update(self, push: Callable[[], None], tries: int) -> None:
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

    def _moved(self) -> int:
        """A number that changes when anybody writes into the weights; 0 where gathering shards writes into them anyway."""
        if parallel.shards_parameters(self.accelerator):
            return 0
        return sum(parameter._version for parameter in self.model.parameters())

    def _push(self) -> None:
        engine, begin = self.engine, time.perf_counter()
        adapter = self._adapter_alone()
        weights = Weights(
            self.model_wrapped,
            dtype=engine.dtype,
            checkpoint_names=engine.checkpoint_names and not adapter,
            adapter_only=adapter,
        )

        def send() -> None:
            if engine.collective and not self.accelerator.is_main_process:
                for _ in weights if parallel.shards_parameters(self.accelerator) else ():
                    pass  # Where parameters are sharded, the main process cannot read them alone.
            else:
                engine.load_weights(weights, self._pushes)

        parallel.run_and_share(send, self.accelerator)
        self.log_metrics_now({"weight_sync_time_s": mean(time.perf_counter() - begin)})  # type: ignore[attr-defined]

    def _adapter_alone(self) -> bool:
        """Whether the adapter is sent by itself; decided once, for a server whose base was replaced has none to add it to."""
        if self._sends_adapter is None:
            choice, engine = self._far("vllm_lora_sync"), self.engine
            found = adapter_weights(self.model) if choice != "merge" and hasattr(self.model, "peft_config") else None
            rank = engine.lora_rank() if hasattr(engine, "lora_rank") else 0
            fits = found is not None and found[0]["r"] <= rank and (choice == "adapter" or engine.pristine)
            self._sends_adapter = any(parallel.all_gather_objects([fits], self.accelerator))
        return self._sends_adapter

    def _check_parity(self) -> None:
        """Log-probs of fixed sequences on both sides; once more after a second push where they differ.

        Raises:
            WeightSyncError: They differ still.
        """
        if self.args.preflight == "off" or not self.engine.can_score:
            return
        with self.preflight.looking("first_batch", ("PT-S004",)):  # type: ignore[attr-defined]
            found = self._parity_finding()
            if found is None or found.severity != "error":
                self.tell([found])  # type: ignore[attr-defined]
                return
        logger.warning("%s: %s Pushing once more.", found.code, found.what)
        getattr(self.engine, "forget", bool)()
        self._pushes += 1
        self._push()
        found = self._parity_finding()
        if found is not None:
            self.record.add_findings([found])  # type: ignore[attr-defined]
            raise WeightSyncError(
                f"{found.code}: {found.what} {found.why} Do: {found.fix}", phase="parity", version=self._pushes
            )

    def _negative_control(self) -> None:
        """Before the first push of a resumed run."""
        if self.args.preflight == "off" or not self.engine.can_score or not self.engine.collective:
            return
        with self.preflight.looking("first_batch", ("PT-S005",)):  # type: ignore[attr-defined]
            try:
                before = self._parity_finding()
            except RolloutServerError:
                return  # Its weights are not whole: nothing is equal to them.
            self.tell([checks.check_negative_control(self.engine.name, before)])  # type: ignore[attr-defined]

    def _parity_finding(self) -> Any:
        """What the comparison says, on every process."""
        text = self.model.config.get_text_config()
        sequences = checks.probe_sequences(text.vocab_size, self.context, getattr(text, "sliding_window", None))
        rows = [Row(ids[:1], [ids[1:]], [[1] * (len(ids) - 1)]) for ids in sequences]
        with self.inference() as policy:  # type: ignore[attr-defined]
            ours = [logp.float().cpu().tolist() for logp in sequence_logps(policy, rows)]

        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(str(self.accelerator.mixed_precision))
        kinds = {"dtype": self.engine.dtype, "computed": mixed or getattr(self.model, "dtype", "float32")}

        def compare() -> Any:
            if not self.accelerator.is_main_process and self.engine.collective:
                return None
            found = [
                checks.check_parity(where, ours, theirs, version=self._pushes, **kinds)
                for where, theirs in self.engine.score(sequences, [1] * len(sequences)).items()
            ]
            return next((f for f in found if f is not None), None)

        mine = parallel.run_and_share(compare, self.accelerator)
        shared = [f for f in parallel.all_gather_objects([mine], self.accelerator) if f is not None]
        return shared[0] if shared else None

    # When it fails ---------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; a generation that fails leaves the position in the window as it was, for the checkpoint."""
        names = ("_step", "_generations", "_buffer", "_buffer_born")
        before = {name: getattr(self, name) for name in names if hasattr(self, name)}
        try:
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        except RolloutServerError:
            self.__dict__.update(before)
            raise

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; where the rollout servers fail for good, save a checkpoint before the error ends the run."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except RolloutServerError as error:
            if self.state.global_step > 0:
                self._save_checkpoint(self.model_wrapped, trial=None)  # type: ignore[attr-defined]
                error.add_note(
                    f"A checkpoint of step {self.state.global_step} was saved in {self.args.output_dir}; go on with "
                    "resume_from_checkpoint=True once the servers are back."
                )
            raise

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        self._pushed_at = None


def _seeded(requests: Sequence[Request], sampling: Sampling) -> list[Request]:
    """Requests that bring their own sampling, so that those of all processes can go together."""
    return [
        r if r.sampling is not None else replace(r, sampling=replace(sampling, seed=derived_seed(sampling.seed, i)))
        for i, r in enumerate(requests)
    ]
