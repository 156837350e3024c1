"""Interface of rollout engines: `RolloutEngine`, its `Capabilities`, and `ScriptedEngine` for tests."""

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
    """Properties of a rollout engine. They determine how trainers use the engine.

    The defaults are safe for an unknown engine. For example, the loss corrects the log-probs of such an engine by importance
    sampling.

    Attributes:
        in_process: Whether the engine runs in the trainer's process.
        shares_weights: Whether the engine samples from the trainer's own weights. If so, its log-probs need no correction.
        needs_weight_sync: Whether the engine has a copy of the weights. If so, every new version must be pushed with
            `load_weights`.
        main_process_only: Whether only the main process calls the engine. It then sends the requests of all processes and
            pushes the weights.
        has_logprobs: Whether the log-probs come from a model. `ScriptedEngine` returns placeholders instead.
        logprobs_match_training: Whether the engine's log-probs equal the log-probs of the training forward pass up to 1e-4
            nats. This requires float32 in engine and trainer.
        scores_sequences: Whether the engine supports `RolloutEngine.score`, which returns the log-probs of given sequences.
        prefix_cache: Whether `RolloutEngine.prefix_cache` keeps the KV cache between calls.
        sleeps: Whether `RolloutEngine.sleep` releases device memory until the next push or call.
        checkpoint_names: Whether weights are pushed under the names in the checkpoint instead of the model's parameter
            names.
        pictures: Whether prompts may contain images (`Request.pictures`).
        unsupported: Fields of `Sampling` that the engine does not support. Values other than the default are rejected.
        per_request_sampling: Whether the `Sampling` of a request may differ from the call's `Sampling`.
        context: Maximum number of tokens of prompt and completion. None: the model's context length.
        dtype: Dtype of the engine's copy of the weights. None: the dtype is unknown, or there is no copy.
        adapter_rank: Maximum rank of a LoRA adapter that can be pushed without merging
            (`posttrain.rollouts.adapters.AdapterWeights`). None: adapters are merged before weights are pushed.
        adapter_layers: Names of the layers for which adapters are supported. A name is the last component of the module's
            path, e.g. ``q_proj``. Empty: all linear layers.
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
    """Base class of engines that sample completions. An engine must pass the tests in tests/rollouts/test_contract.py.

    A subclass must define `generate`, `load_weights` and `close`, and set ``capabilities``. All other methods are
    optional.

    Attributes:
        name: Name of the engine in messages and records.
        capabilities: Properties of the engine. They are a class attribute, or a property if they depend on the model or on
            servers.
        version: Version of the weights that were loaded last.
        tokenizer: Tokenizer for stop strings and structured outputs. If the engine has no tokenizer, the trainer sets this
            attribute to the policy's tokenizer.
        folder: Folder to which the engine may write the prompts of a failed call. None: they are not written.
    """

    name: str = "custom"
    capabilities: Capabilities = Capabilities()
    version: int = 0
    tokenizer: Any = None
    folder: Path | None = None

    @abc.abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Sample the completions of all requests. The result is a list with all completions of the first request, then all
        completions of the second request, and so on.
        """

    @abc.abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load new weights. An engine that uses the trainer's own weights only stores the version."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources. The engine cannot be used afterwards."""

    def prefix_cache(self) -> AbstractContextManager[None]:
        """Return a context manager, inside which the engine keeps its KV cache between calls. This saves time for the turns
        of an episode.
        """
        return nullcontext()

    def interrupt(self) -> None:  # noqa: B027
        """Stop the running call from another thread. Unfinished completions get the finish reason ``abort``."""

    def sleep(self) -> None:  # noqa: B027
        """Release device memory until weights are pushed or completions are requested."""

    def needs_weights(self) -> bool:
        """Return whether the last version must be pushed again, for example because a server was restarted."""
        return False

    def mark_stale(self) -> None:  # noqa: B027
        """Mark all copies of the weights as outdated. The next push then updates all of them."""

    def findings(self, model: nn.Module, args: Any) -> list[Finding]:
        """Return findings about problems that this engine would cause in a run. The main process calls this method before
        the first generation.

        Args:
            model: The policy.
            args: Config of the run.
        """
        return []

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, list[list[float]]]:
        """Return the log-probs of the tokens after each prompt. The result has one item per copy of the weights (for
        example, per server). Each item has one list of log-probs per sequence.
        """
        raise NotImplementedError(f"the engine {self.name!r} cannot score given sequences.")


def require_engine(engine: object, argument: str = "rollout_engine") -> RolloutEngine:
    """Check that a user's engine object is a `RolloutEngine`, and return it.

    Args:
        engine: Object that was passed as the engine.
        argument: Name of the argument, used in the error message.

    Raises:
        ConfigError: The object is not an instance of a subclass of `RolloutEngine`. Objects that only have the same methods
            are rejected.
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
    """Raise an error for prompt learning. This engine runs the base model, without the adapter's virtual tokens.

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
    """Raise an error for a model with image inputs, because the engine supports only text.

    Raises:
        ConfigError: The model was prepared for images.
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
    """Raise an error for sampling settings that an engine would silently ignore.

    Args:
        requests: Requests of the call.
        sampling: Sampling settings of the call.
        engine: Name of the engine, used in the error message.
        unknown: Fields of `Sampling` that the engine does not support. Only their defaults are accepted.
        own: Fields of `Sampling` whose values may differ between a request and the call.
        fix: Advice for the error message.

    Raises:
        ConfigError: An unsupported field is set, or a request differs from the call in a field that is not in ``own``.
    """
    defaults = {field.name: field.default for field in fields(Sampling)}
    defaults |= {"min_p": 0}  # min_p=None and min_p=0 both disable min-p sampling.
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
    """Engine for tests that returns scripted completions. They are truncated and get finish reasons as in a real engine.

    Args:
        script: List of completions (lists of token ids), which are returned in turn. After the last completion, the list
            starts again. Alternatively, a function of ``(prompt_ids, index)``, where ``index`` counts the completions of one
            request.
        logp: Log-prob of every token.

    Attributes:
        requests: All requests so far, in the order of the calls.
        version: Version of the weights that were loaded last.

    >>> engine = ScriptedEngine([[5, 2], [6, 7, 8]])
    >>> sampling = Sampling(max_new_tokens=2, stop_token_ids=(2,))
    >>> [(r.token_ids, r.finish_reason) for r in engine.generate([Request([1], n=2)], sampling)]
    [([5, 2], 'stop'), ([6, 7], 'length')]
    """

    name = "scripted"
    # The log-probs are placeholders, so the trainer must not compare them with its own log-probs.
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
        """Return the next scripted completions. Each completion is truncated after its first stop token and at
        ``max_new_tokens`` tokens.
        """
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
        """Store the version. There are no weights to load."""
        self.version = version

    def close(self) -> None:
        """Do nothing, because the engine has no resources."""


@runtime_checkable
class WeightTransferProtocol(Protocol):
    """Methods through which the trainer sends weights to engines. `send_weights` must read every tensor, because reading can
    be a collective operation.
    """

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class WeightTransfer:
    """Additional methods that report the state of a weight transfer. Their default results are those of a transfer without
    servers.

    Attributes:
        version: Version of the weights that were sent last.
        engine: Engine that requests completions from servers, or None without servers.
    """

    version = 0
    engine: RolloutEngine | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engines that receive these weights. Each capability holds for all of these engines."""
        return Capabilities()

    @property
    def holders(self) -> Any:
        """Servers that have the latest version of the weights. None: all engines read the weights without a server."""
        return None

    def missing_weights(self) -> bool:
        """Return whether an engine does not have the latest version of the weights."""
        return False

    def failure_reason(self) -> str:
        """Return the reason why some engines receive no requests, or an empty string if there is no reason."""
        return ""
