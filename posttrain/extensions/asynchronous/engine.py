"""The rollout engine of a worker process: its recipe, its weights, and completions that go on under newer weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.errors import ConfigError, RolloutError, RolloutInterrupted, check_choice
from posttrain.models.forward import plain_logps
from posttrain.models.vision import install_pictures
from posttrain.rollouts.base import RolloutEngine, require_engine
from posttrain.rollouts.engines import IN_WORKERS, create_engine
from posttrain.rollouts.shared_weights import as_dtype, copy_into, read_weights
from posttrain.types import FinishReason, Request, Rollout, Sampling


@dataclass(slots=True)
class EngineRecipe:
    """How a worker makes its engine.

    Attributes:
        kind: ``native`` or ``hf``: the worker holds a copy of the model; ``server``: it asks rollout servers, which get their
            weights from the trainer; ``custom``: ``factory`` makes it, and `load_weights` gives it what the trainer shares.
        config: Of the model, for copies.
        processor: Of a model that sees pictures; None: it reads text alone.
        dtype: Of the copy, as ``torch`` calls it.
        pad_token_id: Of the tokenizer.
        trust_remote_code: For models whose code is in their repository.
        weights: Folder of a `posttrain.rollouts.shared_weights.SharedWeights`.
        factory: ``() -> RolloutEngine``, picklable.
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
            raise ConfigError(f"worker_engine={self.kind!r} needs a function that makes the engine.")


class WorkerEngine:
    """The engine of a worker, and how it comes by newer weights.

    Args:
        spec: How to make it.

    Attributes:
        engine: Any rollout engine.
        version: Of the weights it has; 0 before the first.
        scored: Log-probs of the probe sequences that came with the newest weights; None: none came.
    """

    def __init__(self, spec: EngineRecipe) -> None:
        self.spec, self.version, self.holders = spec, 0, None
        self.scored: list[list[float]] | None = None
        # A copy of the policy; None where the engine keeps its own weights, or servers have them.
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
        """Newer weights, where they are wanted; whether any were loaded.

        Args:
            wanted: Least version that will do.
            holders: Which servers hold it, where the engine asks servers.
        """
        if self.spec.kind == "server" and holders is not None and holders is not self.holders:
            self.engine.set_servers(holders)  # Also without a newer version: servers may have come.
            self.holders = holders
        if self.version >= wanted:
            return False
        self.version = self._load(wanted)
        return True

    def _load(self, wanted: int) -> int:
        if not self.spec.weights:
            return wanted  # The trainer pushed them to the servers before it said so.
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


# A continuation draws other numbers than its beginning and its neighbours.
SEED_STRIDE, INDEX_STRIDE = 1_000_003, 10_007


@dataclass(slots=True)
class PartialCompletion:
    """One completion as it grows, perhaps under several versions of the weights.

    Attributes:
        prompt_ids: What it continues.
        pictures: In it.
        sampling: Of the whole completion.
        index: Among the completions of its call.
        token_ids: So far.
        logp: One a token.
        processed_logp: Under the distribution they were drawn from, where that is another.
        top_logps: The most likely tokens of each step, where they were asked for.
        spans: Runs of (version, tokens).
        finish_reason: None while it is being written.
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
        """What is still to be written."""
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
        """What one call to the engine added."""
        count = len(rollout.token_ids)
        if len(rollout.logp) != count:
            raise RolloutError(
                f"the engine returned {len(rollout.logp)} log-probs for {count} tokens. Asynchronous training needs one for "
                "every sampled token."
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
        """The finished completion; ``version`` is that of its oldest token."""
        assert self.finish_reason is not None
        oldest = min((version for version, _ in self.spans), default=0)
        drawn = self.processed_logp if self.processed else None
        spans = self.spans if len(self.spans) > 1 else None
        more = {"processed_logp": drawn, "top_logps": self.top_logps or None, "spans": spans, "pictures": self.pictures}
        return Rollout(self.prompt_ids, self.token_ids, self.logp, self.finish_reason, oldest, **more)


def begin_completions(requests: Sequence[Request], sampling: Sampling) -> list[PartialCompletion]:
    """Every completion of some requests, nothing written yet."""
    everyone = [request for request in requests for _ in range(request.n)]
    return [
        PartialCompletion(list(r.prompt_ids), r.sampling or sampling, index, pictures=r.pictures)
        for index, r in enumerate(everyone)
    ]


class ResumableGenerator:
    """Drives an engine that may be interrupted between two tokens.

    Args:
        engine: Any rollout engine. One that is interrupted returns what it has with ``abort``, or raises
            `RolloutInterrupted` with it.
        refresh: Called before every call to the engine: loads newer weights where there are any.
    """

    def __init__(self, engine: RolloutEngine, refresh: Callable[[], None] = lambda: None) -> None:
        self.engine, self.refresh = engine, refresh

    def advance(self, unfinished: Sequence[PartialCompletion]) -> None:
        """One call to the engine for all of them; it may end before they do."""
        self.refresh()
        requests: list[Request] = []
        common = unfinished[0].sampling
        for (fresh, _), members in itertools.groupby(unfinished, key=_shared):
            chosen = list(members)
            if fresh:
                own = chosen[0].sampling
                # The call's own sampling numbers its draws over all requests; equal ones of requests would repeat them.
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
                f"the engine returned {len(rollouts)} completions for {len(unfinished)} that were asked for."
            )
        for completion, rollout in zip(unfinished, rollouts, strict=True):
            completion.add(rollout)

    def finish(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """All completions of all requests, as `RolloutEngine.generate` returns them, whatever happens to the weights."""
        everything = begin_completions(requests, sampling)
        while unfinished := [completion for completion in everything if completion.finish_reason is None]:
            self.advance(unfinished)
        return [completion.rollout() for completion in everything]


def _shared(completion: PartialCompletion) -> tuple[bool, tuple[Any, ...] | int]:
    """Completions with nothing written share their prompt's request; begun ones stand alone."""
    if completion.token_ids:
        return False, id(completion)
    return True, (id(completion.sampling), *completion.pictures, *completion.prompt_ids)
