"""The rollout engine of a worker process. This module creates the engine, loads new weights, and continues completions
after new weights arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.errors import ConfigError, RolloutError, RolloutInterrupted, check_choice
from posttrain.extensions.images.encoder import install_pictures
from posttrain.models.forward import plain_logps
from posttrain.rollouts.base import RolloutEngine, require_engine
from posttrain.rollouts.engines import IN_WORKERS, create_engine
from posttrain.rollouts.shared_weights import as_dtype, copy_into, read_weights
from posttrain.types import FinishReason, Request, Rollout, Sampling


@dataclass(slots=True)
class EngineRecipe:
    """Picklable settings from which a worker creates its engine.

    Attributes:
        kind: Kind of the engine. ``native`` or ``hf``: an in-process engine on the worker's copy of the model. ``server``:
            the worker sends requests to rollout servers, and the trainer pushes weights to these servers. ``custom``:
            ``factory`` creates the engine, and the worker passes new weights to the engine's `load_weights`.
        config: Model config from which the copy of the model is created, for ``native`` and ``hf``.
        processor: Processor of a model with image inputs. None: the model supports text only.
        dtype: Name of the ``torch`` dtype of the model copy, for example ``bfloat16``.
        pad_token_id: Id of the tokenizer's pad token.
        trust_remote_code: Whether code in the model's repository may run.
        weights: Folder of the `posttrain.rollouts.shared_weights.SharedWeights` from which the worker reads weights. Empty
            for servers.
        factory: Picklable function without arguments that returns the engine, for ``server`` and ``custom``.
    """

    kind: str
    config: Any = None
    dtype: str = "float32"
    pad_token_id: int = 0
    trust_remote_code: bool = False
    weights: str = ""
    factory: Callable[[], RolloutEngine] | None = None
    processor: Any = None

    def __post_init__(self) -> None:
        check_choice("worker_engine", self.kind, (*IN_WORKERS, "custom"))
        if self.kind in ("server", "custom") and self.factory is None:
            raise ConfigError(f"worker_engine={self.kind!r} needs a function that creates the engine.")


class WorkerEngine:
    """The engine of a worker. Call `refresh` to load newer weights.

    Args:
        spec: Settings from which the engine is created.

    Attributes:
        engine: Any rollout engine.
        version: Version of the engine's weights. 0: no weights have been loaded.
        scored: Log-probs of the probe sequences under the newest weights. The trainer compares them with its own log-probs.
            None: no probe sequences were sent with these weights.
    """

    def __init__(self, spec: EngineRecipe) -> None:
        self.spec, self.version, self.holders = spec, 0, None
        self.scored: list[list[float]] | None = None
        # Copy of the policy. It is None if the weights are in a custom engine or on servers.
        self.model: Any = None
        if spec.factory is not None:
            self.engine: Any = require_engine(spec.factory(), "engine_factory")
            return
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        kind = AutoModelForCausalLM if spec.processor is None else AutoModelForImageTextToText
        self.model = kind.from_config(
            spec.config, dtype=as_dtype(spec.dtype), trust_remote_code=spec.trust_remote_code
        ).eval()
        if spec.processor is not None:
            install_pictures(self.model, spec.processor)
        self.engine = create_engine(spec.kind, self.model, pad_token_id=spec.pad_token_id)

    def refresh(self, wanted: int, holders: Any = None) -> bool:
        """Load newer weights if the engine's version is below ``wanted``. Return whether weights were loaded.

        Args:
            wanted: Minimum version that the engine must have.
            holders: Servers that have version ``wanted``, if the engine uses servers.
        """
        if self.spec.kind == "server" and holders is not None and holders is not self.holders:
            # Update the servers even without a new version, because servers may have joined after the last push.
            self.engine.set_servers(holders)
            self.holders = holders
        if self.version >= wanted:
            return False
        self.version = self._load(wanted)
        return True

    def _load(self, wanted: int) -> int:
        if not self.spec.weights:
            return wanted  # The trainer has already pushed this version to the servers.
        weights, version, probe = read_weights(self.spec.weights, wanted)
        if self.model is not None:
            copy_into(self.model, weights)
        self.engine.load_weights(weights.items() if self.model is None else (), version)
        self.scored = None
        if probe and self.model is not None:
            self.scored = plain_logps(self.model, probe)
        elif probe and self.engine.capabilities.scores_sequences:
            (self.scored,) = self.engine.score(probe, [1] * len(probe)).values()
        return version


# Constants that change the seed of each engine call. A completion that continues after an interruption must not reuse the
# random numbers of its first tokens or of other completions.
SEED_STRIDE, INDEX_STRIDE = 1_000_003, 10_007


@dataclass(slots=True)
class PartialCompletion:
    """A completion in progress. Its tokens may be sampled with several versions of the weights.

    Attributes:
        prompt_ids: Token ids of the prompt.
        pictures: Images in the prompt.
        sampling: Sampling settings of the whole completion.
        index: Index of this completion among all completions of the engine call.
        token_ids: Token ids that were sampled so far.
        logp: Log-probs, one per token.
        processed_logp: Log-probs of the tokens after truncation. If the engine does not return them, they equal
            ``logp``.
        top_logps: Most likely tokens at each position and their log-probs, if requested.
        spans: Versions of the weights that sampled the tokens, as (version, number of consecutive tokens).
        finish_reason: Reason why the completion ended. None: the completion is in progress.
    """

    prompt_ids: list[int]
    sampling: Sampling
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    processed_logp: list[float] = field(default_factory=list)
    top_logps: list[list[tuple[int, float]]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    processed: bool = False
    pictures: Sequence[Any] = ()

    def request(self) -> Request:
        """Return an engine request that continues the completion after its last token."""
        written, own = len(self.token_ids), self.sampling
        seed = None if own.seed is None else (own.seed + written * SEED_STRIDE + self.index * INDEX_STRIDE) % 2**63
        left = replace(
            own,
            max_new_tokens=own.max_new_tokens - written,
            min_new_tokens=max(0, own.min_new_tokens - written),
            seed=seed,
        )
        return Request(self.prompt_ids + self.token_ids, 1, left, self.pictures, written)

    def add(self, rollout: Rollout) -> None:
        """Append the tokens and log-probs that one engine call returned."""
        count = len(rollout.token_ids)
        if len(rollout.logp) != count:
            raise RolloutError(
                f"the engine returned {len(rollout.logp)} log-probs for {count} tokens. Asynchronous training needs "
                "one for every sampled token."
            )
        self.token_ids += rollout.token_ids
        self.logp += rollout.logp
        self.processed_logp += rollout.processed_logp or rollout.logp
        self.processed = self.processed or rollout.processed_logp is not None
        self.top_logps += rollout.top_logps or []
        for version, tokens in rollout.spans or [(rollout.version, count)]:
            if self.spans and self.spans[-1][0] == version:
                tokens += self.spans.pop()[1]
            if tokens:
                self.spans.append((version, tokens))
        if rollout.finish_reason != "abort":
            self.finish_reason = rollout.finish_reason
        elif len(self.token_ids) >= self.sampling.max_new_tokens:
            self.finish_reason = "length"

    def rollout(self) -> Rollout:
        """Return the finished completion. The rollout's ``version`` is the version of the weights that sampled its
        first token.
        """
        assert self.finish_reason is not None
        oldest = min((version for version, _ in self.spans), default=0)
        drawn = self.processed_logp if self.processed else None
        spans = self.spans if len(self.spans) > 1 else None
        more = {"processed_logp": drawn, "top_logps": self.top_logps or None, "spans": spans, "pictures": self.pictures}
        return Rollout(self.prompt_ids, self.token_ids, self.logp, self.finish_reason, oldest, **more)


def begin_completions(requests: Sequence[Request], sampling: Sampling) -> list[PartialCompletion]:
    """Create one empty `PartialCompletion` for each completion that the requests ask for."""
    everyone = [request for request in requests for _ in range(request.n)]
    return [
        PartialCompletion(list(r.prompt_ids), r.sampling or sampling, index, pictures=r.pictures)
        for index, r in enumerate(everyone)
    ]


class ResumableGenerator:
    """Generates completions with an engine that may be interrupted between two tokens, and continues interrupted completions.

    Args:
        engine: Any rollout engine. When it is interrupted, it returns unfinished completions with the reason ``abort``, or
            raises `RolloutInterrupted` with them.
        refresh: Function that loads newer weights. It is called before every engine call.
    """

    def __init__(self, engine: RolloutEngine, refresh: Callable[[], None] = lambda: None) -> None:
        self.engine, self.refresh = engine, refresh

    def advance(self, unfinished: Sequence[PartialCompletion]) -> None:
        """Run one engine call for all unfinished completions. The call may end before the completions are finished."""
        self.refresh()
        requests: list[Request] = []
        common = unfinished[0].sampling
        for (fresh, _), members in itertools.groupby(unfinished, key=_shared):
            chosen = list(members)
            if fresh:
                own = chosen[0].sampling
                # Set the settings per request only if they differ from the settings of the call. With settings per request,
                # all requests would use the same seed.
                sampling = None if own is common else own
                requests.append(Request(chosen[0].prompt_ids, len(chosen), sampling, chosen[0].pictures))
            else:
                requests += [completion.request() for completion in chosen]
        try:
            rollouts = self.engine.generate(requests, common)
        except RolloutInterrupted as interrupted:
            rollouts = interrupted.rollouts
        if len(rollouts) != len(unfinished):
            raise RolloutError(
                f"the engine returned {len(rollouts)} completions, but {len(unfinished)} were requested."
            )
        for completion, rollout in zip(unfinished, rollouts, strict=True):
            completion.add(rollout)

    def finish(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Call `advance` until all completions are finished, and return them. The result has the form of
        `RolloutEngine.generate`, but the weights may change between two engine calls.
        """
        everything = begin_completions(requests, sampling)
        while unfinished := [completion for completion in everything if completion.finish_reason is None]:
            self.advance(unfinished)
        return [completion.rollout() for completion in everything]


def _shared(completion: PartialCompletion) -> tuple[bool, tuple[Any, ...] | int]:
    """Return the key by which completions are grouped into requests. All completions of a prompt that have no tokens yet
    have the same key. Every other completion has a unique key, because it continues after its own tokens.
    """
    if completion.token_ids:
        return False, id(completion)
    return True, (id(completion.sampling), *completion.pictures, *completion.prompt_ids)
