"""What a rollout engine is, and how one is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from posttrain.errors import ConfigError, RolloutError, did_you_mean
from posttrain.models.attention import rope_limits
from posttrain.models.heads import causal_lm, learns_prompts, unwrapped
from posttrain.types import Request, Rollout, Sampling

__all__ = [
    "RolloutEngine",
    "check_followed",
    "check_requests",
    "check_rope",
    "create_engine",
    "keeping",
    "refuse_virtual_tokens",
]

logger = logging.getLogger(__name__)


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions. Every engine passes the same contract tests."""

    name: str

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """All completions of request 0, then of request 1, and so on."""
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; engines that run on the trainer's own only note the version."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it is not used again."""
        ...


def check_requests(
    requests: Sequence[Request], sampling: Sampling, context: int | None, vocabulary: int | None
) -> None:
    """Refuse what no engine could do, naming the request; one's own sampling settings go before those of the call.

    Raises:
        RolloutError: No token in a prompt, an id outside the vocabulary, or a prompt that leaves no room in the context.
    """
    for index, request in enumerate(requests):
        length, most = len(request.prompt_ids), (request.sampling or sampling).max_new_tokens
        if length == 0:
            raise RolloutError(f"request {index} has an empty prompt; give it at least one token (a bos token, say).")
        if context is not None and length + most > context:
            raise RolloutError(
                f"request {index}: a prompt of {length} tokens and max_new_tokens={most} do not fit the "
                f"model's context of {context} tokens."
            )
        if vocabulary is not None and max(request.prompt_ids) >= vocabulary:
            raise RolloutError(
                f"request {index} holds token id {max(request.prompt_ids)}, and the model has {vocabulary}: the tokenizer "
                "belongs to another model."
            )
        one = request.sampling or sampling
        named = {token for token, _ in one.logit_bias} | (set(one.stop_token_ids) if one.min_new_tokens else set())
        if vocabulary is not None and named and not (min(named) >= 0 and max(named) < vocabulary):
            raise RolloutError(
                f"request {index}: logit_bias (or stop_token_ids with min_new_tokens) names token ids {sorted(named)[:8]}, and "
                f"the model has {vocabulary}. Fix: give ids in [0, {vocabulary})."
            )


def check_rope(requests: Sequence[Request], sampling: Sampling, model: nn.Module, engine: str) -> None:
    """Refuse requests that may reach beyond the length where longrope changes the frequencies of a whole pass.

    Raises:
        RolloutError: One may; names the request.
    """
    switch, _ = rope_limits(model)
    for index, request in enumerate(requests):
        length, most = len(request.prompt_ids), (request.sampling or sampling).max_new_tokens
        if switch is not None and length + most > switch:
            raise RolloutError(
                f"request {index}: a prompt of {length} tokens and max_new_tokens={most} may reach beyond {switch} tokens, where "
                f"rope_type='longrope' changes the rotary frequencies of a whole pass: in {engine} log-probs would depend on "
                f"what is sampled beside it. Fix: at most {switch} tokens in all, or rollout_engine='hf', which samples such "
                "requests one by one."
            )


def refuse_virtual_tokens(model: nn.Module, engine: str) -> None:
    """Refuse a model that learns prompts, for an engine that runs the layers below the adapter.

    Raises:
        ConfigError: It does.
    """
    if learns_prompts(model):
        kind = str(unwrapped(model).active_peft_config.peft_type).rsplit(".", 1)[-1]  # type: ignore[union-attr]
        raise ConfigError(
            f"{engine} runs the layers below the adapter, and would sample without the virtual tokens of {kind}. Fix: "
            "rollout_engine='hf', which samples through the adapter"
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
    for one in (sampling, *(r.sampling for r in requests if r.sampling is not None)):
        for name in unknown:
            if (getattr(one, name) or defaults[name]) != defaults[name]:
                raise ConfigError(
                    f"{name}={getattr(one, name)!r}: {engine} would leave it out. {fix}: {name} is {defaults[name]!r} by "
                    "default."
                )
        if replace(one, **{name: getattr(sampling, name) for name in own}) != sampling:
            raise ConfigError(f"{engine} samples all requests of a call alike, and one has settings of its own. {fix}.")


def _native(model: nn.Module, **options: Any) -> RolloutEngine:
    from posttrain.rollouts.native.engine import NativeEngine
    from posttrain.rollouts.native.probe import native_is_exact

    reason = native_is_exact(model)
    if reason is not None:
        raise ConfigError(
            f"rollout_engine='native' does not say of {type(causal_lm(model)).__name__} what its own forward says: {reason}. "
            "Fix: rollout_engine='hf', or 'auto', which chooses by this."
        )
    return NativeEngine(model, **options)


def _native_bf16(model: nn.Module, **options: Any) -> RolloutEngine:
    return _native(model, products="bfloat16", **options)


def _hf(model: nn.Module, **options: Any) -> RolloutEngine:
    from posttrain.rollouts.hf import HFEngine

    return HFEngine(model, **options)


def _paged(model: nn.Module, **options: Any) -> RolloutEngine:
    from posttrain.rollouts.paged import PagedEngine

    return PagedEngine(model, **options)


def _auto(model: nn.Module, **options: Any) -> RolloutEngine:
    from posttrain.rollouts.native.probe import native_is_exact

    reason = native_is_exact(model)
    if reason is None:
        logger.info("rollout_engine='auto': native, in process on the trainer's own weights.")
        return _native(model, **options)
    logger.warning(
        "rollout_engine='auto': hf (transformers generate), because the native engine is not exact here: %s.", reason
    )
    return _hf(model, **options)


ENGINES: dict[str, Callable[..., RolloutEngine]] = {
    "auto": _auto,
    "native": _native,
    "native_bf16": _native_bf16,
    "hf": _hf,
    "paged": _paged,
}


def create_engine(
    name: str, model: nn.Module, *, pad_token_id: int, folder: str | None = None, cache: str | None = None
) -> RolloutEngine:
    """Make the engine called ``name`` on ``model``; it writes the prompts of a failed call to ``folder``, if it can.

    ``cache`` is transformers' ``cache_implementation``, which the engine hf alone has.

    Raises:
        ConfigError: An unknown name.
    """
    if name not in ENGINES:
        raise ConfigError(
            f"rollout_engine={name!r} is not known{did_you_mean(name, ENGINES)}. Choose one of {', '.join(ENGINES)}."
        )
    engine: Any = ENGINES[name](model, pad_token_id=pad_token_id)
    if folder is not None and hasattr(engine, "folder"):
        engine.folder = Path(folder)
    if cache is not None and hasattr(engine, "cache_implementation"):
        engine.cache_implementation = cache
    elif cache is not None:
        logger.warning(
            "cache_implementation=%r is ignored: rollout_engine=%r has a cache of its own; 'hf' reads it.",
            cache,
            engine.name,
        )
    return engine


def keeping(engine: Any) -> AbstractContextManager[None]:
    """Inside, an engine that can keeps keys and values from one call to the next, for the turns of an episode."""
    return engine.keeping() if hasattr(engine, "keeping") else nullcontext()
