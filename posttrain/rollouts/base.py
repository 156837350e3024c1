"""The interface of rollout engines: `RolloutEngine`, its `Capabilities`, and `ScriptedEngine` for tests."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError
from posttrain.models.heads import adapter_kind, learns_prompts, picture_encoder, unwrapped
from posttrain.types import Finding, Request, Rollout, Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a rollout engine. Trainers use only these to treat engines differently.

    The defaults are safe for an unknown engine. For example, its log-probs get the importance-sampling correction.

    Attributes:
        in_process: The engine runs in the trainer's process.
        shares_weights: The engine samples with the trained weights themselves, so its log-probs need no correction.
        needs_weight_sync: The engine has a copy of the weights. Each new version must be pushed with `load_weights`.
        main_process_only: The main process sends the requests of all processes, and pushes the weights.
        has_logprobs: The engine returns real log-probs. `ScriptedEngine` returns placeholders.
        logprobs_match_training: Log-probs equal those of the training forward pass up to 1e-4 nats (float32
            throughout).
        scores_sequences: `RolloutEngine.score` is supported: it returns the log-probs of given sequences.
        prefix_cache: `RolloutEngine.prefix_cache` keeps the KV cache between calls.
        sleeps: `RolloutEngine.sleep` releases device memory until the next push or call.
        checkpoint_names: Weights are pushed under the names in checkpoints instead of the model's parameter names.
        pictures: Prompts may contain images (`Request.pictures`).
        unsupported: Fields of `Sampling` that are rejected unless they have their defaults.
        per_request_sampling: A request may have a `Sampling` that differs from that of the call.
        context: Maximum number of tokens of prompt and completion. None: the model's context length.
        dtype: Dtype of the engine's copy of the weights. None: unknown, or there is no copy.
        adapter_rank: Maximum rank of a LoRA adapter that can be pushed without merging
            (`posttrain.rollouts.adapters.AdapterWeights`). None: weights are pushed merged.
        adapter_layers: Last names of the layers for which adapters are supported. Empty: all linear layers.
    """

    in_process: bool = False
    shares_weights: bool = False
    needs_weight_sync: bool = False
    main_process_only: bool = False
    has_logprobs: bool = True
    logprobs_match_training: bool = False
    scores_sequences: bool = False
    prefix_cache: bool = False
    sleeps: bool = False
    checkpoint_names: bool = False
    pictures: bool = False
    unsupported: tuple[str, ...] = ()
    per_request_sampling: bool = True
    context: int | None = None
    dtype: torch.dtype | None = None
    adapter_rank: int | None = None
    adapter_layers: tuple[str, ...] = ()


class RolloutEngine(abc.ABC):
    """Base class of engines that sample completions. Every engine passes tests/rollouts/test_contract.py.

    A subclass defines `generate`, `load_weights` and `close`, and sets ``capabilities``. The other methods are
    optional.

    Attributes:
        name: Name of the engine in messages and records.
        capabilities: See `Capabilities`. It is a class attribute, or a property if it depends on the model or on
            servers.
        version: Version of the weights that were loaded last.
        tokenizer: Tokenizer for stop strings and structured outputs. A trainer sets it if it is None.
        folder: Folder for the prompts of a failed call, if the engine writes them. None: they are not written.
    """

    name: str = "custom"
    capabilities: Capabilities = Capabilities()
    version: int = 0
    tokenizer: Any = None
    folder: Path | None = None

    @abc.abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Return all completions of the first request, then of the second request, and so on."""

    @abc.abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load new weights. Engines that share the trainer's weights only store the version."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources. The engine cannot be used afterwards."""

    def prefix_cache(self) -> AbstractContextManager[None]:
        """Return a context in which the engine keeps its KV cache between calls, for the turns of an episode."""
        return nullcontext()

    def interrupt(self) -> None:  # noqa: B027
        """End the running call from another thread. Unfinished completions get the finish reason ``abort``."""

    def sleep(self) -> None:  # noqa: B027
        """Release device memory until the next push or call."""

    def needs_weights(self) -> bool:
        """Return whether the last version must be pushed again, for example because a server restarted."""
        return False

    def mark_stale(self) -> None:  # noqa: B027
        """Mark the weights of every copy as outdated, so that the next push reaches all of them."""

    def findings(self, model: nn.Module, args: Any) -> list[Finding]:
        """Return findings about problems that a run with this engine would have. The main process calls this method
        before the first generation.

        Args:
            model: Policy.
            args: Config of the run.
        """
        return []

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, list[list[float]]]:
        """Return the log-probs of given tokens after their prompts. The result has one entry per copy of the weights,
        with one list per sequence.
        """
        raise NotImplementedError(f"the engine {self.name!r} cannot score given sequences.")


def require_engine(engine: object, argument: str = "rollout_engine") -> RolloutEngine:
    """Validate that a user's engine is a `RolloutEngine`, and return it.

    Args:
        engine: The object.
        argument: Name of the argument, for the message.

    Raises:
        ConfigError: The object is not a `RolloutEngine`, even if it has the same methods.
    """
    if isinstance(engine, RolloutEngine):
        return engine
    methods = ("generate", "load_weights", "close")
    missing = [name for name in methods if not callable(getattr(engine, name, None))]
    raise ConfigError(
        f"{argument} is a {type(engine).__name__}, which is not a "
        f"posttrain.RolloutEngine{f' and has no method {missing}' if missing else ''}. The trainer reads "
        "engine.capabilities to decide whether log-probs are corrected and weights are pushed. Fix: subclass "
        f"posttrain.RolloutEngine (three methods: {', '.join(methods)})."
    )


def refuse_virtual_tokens(model: nn.Module, engine: str) -> None:
    """Reject prompt learning for an engine that runs the model without the adapter's wrapper.

    Raises:
        ConfigError: The model uses prompt learning.
    """
    if learns_prompts(model):
        kind = adapter_kind(unwrapped(model).active_peft_config)  # type: ignore[union-attr]
        raise ConfigError(
            f"{engine} runs the base model and would sample without the virtual tokens of {kind}. Fix: set "
            "rollout_engine='hf', which samples through the adapter"
        )


def refuse_pictures(model: nn.Module, engine: str) -> None:
    """Reject a model with image inputs for an engine that supports text only.

    Raises:
        ConfigError: `posttrain.models.vision.install_pictures` prepared the model for images.
    """
    if picture_encoder(model) is not None:
        raise ConfigError(f"{engine} supports text only, but the rows have images. Fix: set rollout_engine='auto'")


def check_followed(
    requests: Sequence[Request],
    sampling: Sampling,
    engine: str,
    unknown: Collection[str],
    own: Collection[str] = (),
    fix: str = "Use rollout_engine='native'",
) -> None:
    """Reject sampling settings that an engine would ignore.

    Args:
        requests: Requests of the call.
        sampling: Sampling settings of the call.
        engine: Name of the engine for the message.
        unknown: Fields of `Sampling` that the engine does not support unless they have their defaults.
        own: Fields that may differ between a request and the call.
        fix: Suggested alternative, for the message.

    Raises:
        ConfigError: An unsupported field is set, or a request differs from the call in another field.
    """
    defaults = {field.name: field.default for field in fields(Sampling)}
    defaults |= {"min_p": 0}  # Both min_p=None and min_p=0 disable min-p.
    for settings in (sampling, *(r.sampling for r in requests if r.sampling is not None)):
        for name in unknown:
            value = getattr(settings, name)
            if (value or defaults[name]) != defaults[name]:
                raise ConfigError(
                    f"{name}={value!r} is not supported by {engine}. {fix}: the default of {name} is "
                    f"{defaults[name]!r}."
                )
        if replace(settings, **{name: getattr(sampling, name) for name in own}) != sampling:
            raise ConfigError(
                f"{engine} uses the same settings for all requests of a call, but one request has its own settings. "
                f"{fix}."
            )


class ScriptedEngine(RolloutEngine):
    """Engine that returns scripted completions, truncated and finished like those of a real engine.

    Args:
        script: A list of token-id lists, used in turn and repeated; or a function of ``(prompt_ids, index)``, where
            ``index`` counts the completions of one request.
        logp: Log-prob of every token.

    Attributes:
        requests: All requests so far, in order.
        version: Version of the weights that were loaded last.

    >>> engine = ScriptedEngine([[5, 2], [6, 7, 8]])
    >>> sampling = Sampling(max_new_tokens=2, stop_token_ids=(2,))
    >>> [(r.token_ids, r.finish_reason) for r in engine.generate([Request([1], n=2)], sampling)]
    [([5, 2], 'stop'), ([6, 7], 'length')]
    """

    name = "scripted"
    # The log-probs are placeholders, so they must not be compared with the trainer's.
    capabilities = Capabilities(in_process=True, shares_weights=True, has_logprobs=False)

    def __init__(
        self, script: Sequence[Sequence[int]] | Callable[[Sequence[int], int], Sequence[int]], logp: float = -1.0
    ):
        self.script, self.logp = script, logp
        self.requests: list[Request] = []
        self._next = 0

    def _line(self, request: Request, index: int) -> list[int]:
        if callable(self.script):
            return list(self.script(request.prompt_ids, index))
        line = list(self.script[self._next % len(self.script)])
        self._next += 1
        return line

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Return scripted completions, truncated after the first stop token and at ``max_new_tokens``."""
        rollouts = []
        for request in requests:
            self.requests.append(request)
            for index in range(request.n):
                ids = self._line(request, index)[: sampling.max_new_tokens]
                stops = [i for i, token in enumerate(ids) if token in sampling.stop_token_ids]
                ids = ids[: stops[0] + 1] if stops else ids
                reason: Any = "stop" if stops else "length"
                rollouts.append(Rollout(list(request.prompt_ids), ids, [self.logp] * len(ids), reason, self.version))
        return rollouts

    def load_weights(self, named_tensors: Iterable[Any], version: int) -> None:
        """Store the version only."""
        self.version = version

    def close(self) -> None:
        """Do nothing, because there are no resources."""


@runtime_checkable
class WeightTransferProtocol(Protocol):
    """Methods that send the trainer's weights to engines. `send_weights` must read every tensor."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class WeightTransfer:
    """State of a weight transfer, in addition to `WeightTransferProtocol`. The defaults are for transfers without
    servers.

    Attributes:
        version: Version of the weights that were sent last.
        engine: Engine that requests completions from servers, or None without servers.
    """

    version = 0
    engine: RolloutEngine | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that all receiving engines have."""
        return Capabilities()

    @property
    def holders(self) -> Any:
        """Servers that have the last version of the weights. None: every engine can read it."""
        return None

    def missing_weights(self) -> bool:
        """Return whether an engine lacks the last version."""
        return False

    def failure_reason(self) -> str:
        """Return why engines get no requests, or "" if nothing is wrong."""
        return ""
