"""`EngineSpec`: how a worker process makes its rollout engine, small enough to be sent to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import ConfigError, check_choice
from posttrain.rollouts.base import RolloutEngine, require_engine
from posttrain.rollouts.factory import create_engine
from posttrain.rollouts.workers.shared_weights import copy_into, read_weights, tensors_of

__all__ = ["WORKER_ENGINES", "EngineHandle", "EngineSpec"]

WORKER_ENGINES = ("native", "hf", "server", "custom")


@dataclass(slots=True)
class EngineHandle:
    """An engine in a worker, and how it comes by newer weights.

    Attributes:
        engine: Any rollout engine.
        load: Takes the least version wanted, returns that of the weights it has now.
        version: Of the weights it has; 0 before the first.
        holders: Which servers hold them, where it asks servers.
        set_servers: Tells an engine that asks servers which of them hold the current weights.
    """

    engine: RolloutEngine
    load: Callable[[int], int]
    version: int = 0
    holders: Any = None
    set_servers: Callable[[Any], None] | None = None

    def refresh(self, wanted: int, holders: Any = None) -> bool:
        """Newer weights, where they are wanted; whether any were loaded."""
        if self.set_servers is not None and holders is not None and holders is not self.holders:
            self.set_servers(holders)  # Also without a newer version: servers may have come.
            self.holders = holders
        if self.version >= wanted:
            return False
        self.version = self.load(wanted)
        return True


@dataclass(slots=True)
class EngineSpec:
    """A recipe.

    Attributes:
        kind: ``native`` or ``hf``: the worker holds a copy of the model; ``server``: it asks rollout servers, which get their
            weights from the trainer; ``custom``: ``factory`` makes it, and `load_weights` gives it what the trainer shares.
        config: Of the model, for copies.
        dtype: Of the copy, as ``torch`` calls it.
        pad_token_id: Of the tokenizer.
        trust_remote_code: For models whose code is in their repository.
        weights: Folder of a `posttrain.rollouts.workers.shared_weights.SharedWeights`.
        factory: ``() -> RolloutEngine``, picklable.
    """

    kind: str
    config: Any = None
    dtype: str = "float32"
    pad_token_id: int = 0
    trust_remote_code: bool = False
    weights: str = ""
    factory: Callable[[], RolloutEngine] | None = None

    def __post_init__(self) -> None:
        check_choice("worker_engine", self.kind, WORKER_ENGINES)
        if self.kind in ("server", "custom") and self.factory is None:
            raise ConfigError(f"worker_engine={self.kind!r} needs a function that makes the engine.")

    def make(self) -> EngineHandle:
        """The engine, without weights where they are still to come."""
        if self.factory is not None:
            return self._given(self.factory())
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(
            self.config, dtype=getattr(torch, self.dtype), trust_remote_code=self.trust_remote_code
        ).eval()
        engine = create_engine(self.kind, model, pad_token_id=self.pad_token_id)

        def load(wanted: int) -> int:
            weights, version = read_weights(self.weights, wanted)
            copy_into(model, weights)
            engine.load_weights((), version)
            return version

        return EngineHandle(engine, load)

    def _given(self, engine: Any) -> EngineHandle:
        require_engine(engine, "engine_factory")

        def take(wanted: int) -> int:
            weights, version = read_weights(self.weights, wanted)
            engine.load_weights(tensors_of(weights), version)
            return version

        def believe(wanted: int) -> int:
            return wanted  # The trainer pushed them to the servers before it said so.

        pushed = self.kind == "server" or not Path(self.weights or "/nonexistent").is_dir()
        set_servers = engine.set_servers if self.kind == "server" else None
        return EngineHandle(engine, believe if pushed else take, set_servers=set_servers)
