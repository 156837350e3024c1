"""Rollout engines: what each is and can do, which one a name stands for, and a scripted one for tests."""

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
    """What a rollout engine can do and what it needs; trainers read nothing else to tell engines apart.

    The defaults are those of an engine of which nothing is known: its log-probs are corrected for as a foreign engine's.

    Attributes:
        in_process: It runs in the trainer's process.
        shares_weights: It samples with exactly the weights that are trained, so its log-probs need no correction.
        needs_weight_sync: It holds a copy of the weights, and each new version must be pushed with `load_weights`.
        main_process_only: The main process sends the requests of all processes, and pushes the weights.
        has_logprobs: Its log-probs are real; `ScriptedEngine` returns placeholders.
        logprobs_match_training: Its log-probs equal those of the training forward to 1e-4 nats (float32 throughout).
        scores_sequences: `RolloutEngine.score` gives the log-probs of given sequences.
        prefix_cache: `RolloutEngine.prefix_cache` keeps keys and values between calls.
        sleeps: `RolloutEngine.sleep` gives device memory back until the next push or call.
        checkpoint_names: It takes weights under the names of checkpoints instead of those of the model's parameters.
        pictures: Prompts may hold pictures (`Request.pictures`).
        unsupported: Fields of `Sampling` that it refuses unless they are at their defaults (guides, stop strings, ...).
        per_request_sampling: A request may bring a `Sampling` that differs from that of the call.
        context: Most tokens of prompt and completion; None: those of the model.
        dtype: Of its copy of the weights; None: unknown, or it has no copy.
        adapter_rank: Highest rank of a LoRA adapter that it takes alone (`posttrain.rollouts.adapters.AdapterWeights`); None: it
            takes merged weights.
        adapter_layers: Last names of the layers that it puts adapters on; empty: all linear ones.
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
    """Samples completions. Every engine passes the same contract tests (tests/rollouts/test_contract.py).

    A subclass defines `generate`, `load_weights` and `close`, and says in ``capabilities`` what else it can do. The methods
    below them have a default for engines that have nothing to do there.

    Attributes:
        name: What messages and records call it.
        capabilities: See `Capabilities`; a class attribute, or a property where it depends on the model or on servers.
        version: Of the weights that were loaded last.
        tokenizer: For stop strings and guides; a trainer sets it where it is None.
        folder: Where the prompts of a failed call are written, by engines that do so; None writes nothing.
    """

    name: str = "custom"
    capabilities: Capabilities = Capabilities()
    version: int = 0
    tokenizer: Any = None
    folder: Path | None = None

    @abc.abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """All completions of request 0, then of request 1, and so on."""

    @abc.abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; engines that share the trainer's weights only note the version."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the engine holds; it is not used again."""

    def prefix_cache(self) -> AbstractContextManager[None]:
        """Inside, an engine that can keeps keys and values from one call to the next, for the turns of an episode."""
        return nullcontext()

    def interrupt(self) -> None:  # noqa: B027
        """From another thread: end the running call early; unfinished completions get the finish reason ``abort``."""

    def sleep(self) -> None:  # noqa: B027
        """Give device memory back until the next push or call."""

    def needs_weights(self) -> bool:
        """Whether the version that was pushed last must be pushed again (a server restarted, weights slept away)."""
        return False

    def mark_stale(self) -> None:  # noqa: B027
        """Treat the weights of every copy as outdated, so that the next push reaches all of them."""

    def findings(self, model: nn.Module, args: Any) -> list[Finding]:
        """Return what would go wrong in a run with this engine. The main process calls it before anything is generated.

        Args:
            model: Policy.
            args: Config of the run.
        """
        return []

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, list[list[float]]]:
        """Log-probs of given tokens behind their prompts: by the name of each copy, one list a sequence."""
        raise NotImplementedError(f"the engine {self.name!r} does not score given sequences.")


def require_engine(engine: object, argument: str = "rollout_engine") -> RolloutEngine:
    """Return a user's engine object if it is a `RolloutEngine`.

    Args:
        engine: The object.
        argument: The name of the argument that it came by.

    Raises:
        ConfigError: It is something else, also where it has methods of the same names.
    """
    if isinstance(engine, RolloutEngine):
        return engine
    methods = ("generate", "load_weights", "close")
    missing = [name for name in methods if not callable(getattr(engine, name, None))]
    raise ConfigError(
        f"{argument} is a {type(engine).__name__}, which is no posttrain.RolloutEngine"
        f"{f' and has no method {missing}' if missing else ''}: the trainer reads engine.capabilities to know whether log-probs "
        "must be corrected and weights pushed. Fix: subclass posttrain.RolloutEngine (three methods: "
        f"{', '.join(methods)})."
    )


def refuse_virtual_tokens(model: nn.Module, engine: str) -> None:
    """Refuse a model that learns prompts, for an engine that runs the layers below the adapter.

    Raises:
        ConfigError: It does.
    """
    if learns_prompts(model):
        kind = adapter_kind(unwrapped(model).active_peft_config)  # type: ignore[union-attr]
        raise ConfigError(
            f"{engine} runs the layers below the adapter, and would sample without the virtual tokens of {kind}. Fix: "
            "rollout_engine='hf', which samples through the adapter"
        )


def refuse_pictures(model: nn.Module, engine: str) -> None:
    """Refuse a model whose rows have images, for an engine that samples from text alone.

    Raises:
        ConfigError: `posttrain.models.vision.install_pictures` prepared it.
    """
    if picture_encoder(model) is not None:
        raise ConfigError(
            f"{engine} samples from text alone here, and the rows have images. Fix: rollout_engine='auto'"
        )


def check_followed(
    requests: Sequence[Request],
    sampling: Sampling,
    engine: str,
    unknown: Collection[str],
    own: Collection[str] = (),
    fix: str = "Use rollout_engine='native'",
) -> None:
    """Refuse sampling settings that an engine would leave out.

    Args:
        requests: Of the call.
        sampling: Of the call.
        engine: What messages call it.
        unknown: Fields of `Sampling` it cannot follow unless they are at their defaults.
        own: Fields in which a request may differ from the call.
        fix: What else to do, for the message.

    Raises:
        ConfigError: One of them is set, or a request differs in another field.
    """
    defaults = {field.name: field.default for field in fields(Sampling)}
    defaults |= {"min_p": 0}  # None is off too.
    for settings in (sampling, *(r.sampling for r in requests if r.sampling is not None)):
        for name in unknown:
            value = getattr(settings, name)
            if (value or defaults[name]) != defaults[name]:
                raise ConfigError(
                    f"{name}={value!r}: {engine} would leave it out. {fix}: {name} is {defaults[name]!r} by default."
                )
        if replace(settings, **{name: getattr(sampling, name) for name in own}) != sampling:
            raise ConfigError(f"{engine} samples all requests of a call alike, and one has settings of its own. {fix}.")


class ScriptedEngine(RolloutEngine):
    """Returns scripted completions, cut and finished as a real engine would.

    Args:
        script: A list of token-id lists, used in turn and from the start again; or a function of ``(prompt_ids, index)``,
            where ``index`` counts the completions of one request.
        logp: What every token's log-prob is said to be.

    Attributes:
        requests: Every request seen, in order.
        version: Of the last weights loaded.

    >>> engine = ScriptedEngine([[5, 2], [6, 7, 8]])
    >>> sampling = Sampling(max_new_tokens=2, stop_token_ids=(2,))
    >>> [(r.token_ids, r.finish_reason) for r in engine.generate([Request([1], n=2)], sampling)]
    [([5, 2], 'stop'), ([6, 7], 'length')]
    """

    name = "scripted"
    # Its log-probs are placeholders: no run compares them with its own.
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
        """Scripted completions, cut after the first stop token and at ``max_new_tokens``."""
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
        """Only the version is kept."""
        self.version = version

    def close(self) -> None:
        """Nothing to free."""


@runtime_checkable
class WeightTransferProtocol(Protocol):
    """Methods that send the trainer's weights to engines. `send_weights` must read every tensor."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class WeightTransfer:
    """State of a weight transfer, in addition to the protocol. These defaults are for transfers without servers.

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
        """Servers that hold the last version. None: every engine can read it."""
        return None

    def missing_weights(self) -> bool:
        """Return whether an engine lacks the last version."""
        return False

    def failure_reason(self) -> str:
        """Return why engines get no requests, or "" if nothing is wrong."""
        return ""
