"""Which rollout engine a name stands for: `create_engine` makes it, `choose_engine` decides what "auto" means."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from posttrain.errors import ConfigError, did_you_mean
from posttrain.models.heads import causal_lm
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine, native_is_exact
from posttrain.rollouts.paged import PagedEngine, paged_refusal
from posttrain.rollouts.server.replies import remove_orphans
from posttrain.rollouts.vllm import vllm_refusal

__all__ = ["choose_engine", "create_engine"]

logger = logging.getLogger(__name__)

NAMES = ("auto", "native", "native_bf16", "hf", "paged")
# What "auto" cannot choose without a trainer's config.
UNCONFIGURED = {
    "vllm": "it would sample from a copy of the weights that nobody pushes to",
    "paged": "it does not follow every sampling setting, and those of the calls are not known yet",
}


def choose_engine(model: nn.Module, refused: Mapping[str, str] | None = None) -> str:
    """What ``rollout_engine="auto"`` stands for on this model and its device; logs the choice and the reasons in one line.

    On a GPU: vLLM in the trainer's process, else transformers' continuous batching, else the native engine, whose decoding is
    not captured in CUDA graphs. On a CPU: the native engine. Where that is not exact: transformers' ``generate``.

    Args:
        model: A causal language model, the one to sample from.
        refused: Engines that the caller cannot use, with the reasons.

    Returns:
        ``vllm``, ``paged``, ``native`` or ``hf``.
    """
    device = next(model.parameters()).device.type
    refusals: dict[str, Callable[[nn.Module], str | None]] = {"native": native_is_exact, "hf": lambda _: None}
    if device == "cuda":
        refusals = {"vllm": vllm_refusal, "paged": paged_refusal} | refusals
    reasons: dict[str, str] = {}
    for name, ask in refusals.items():
        reason = (refused or {}).get(name) or ask(model)
        if reason is None:
            break
        reasons[name] = reason
    why = "".join(f"; not {other}: {reason.rstrip('.')}" for other, reason in reasons.items())
    level = logging.WARNING if name == "hf" else logging.INFO
    logger.log(level, "rollout_engine='auto': %s, for a model on %s%s.", name, device, why)
    return name


def create_engine(
    name: str,
    model: nn.Module,
    *,
    pad_token_id: int,
    folder: str | None = None,
    cache: str | None = None,
) -> RolloutEngine:
    """Make an engine that samples with the weights of ``model`` itself.

    Args:
        name: One of `NAMES`; ``auto`` is ``native`` or ``hf`` here (see `choose_engine` for trainers on a GPU).
        model: A causal language model.
        pad_token_id: Of the tokenizer.
        folder: Where the prompts of a failed call are written, by engines that do so.
        cache: transformers' ``cache_implementation``, which the engine ``hf`` alone has.

    Raises:
        ConfigError: An unknown name; ``native`` on a model for which it is not exact.
    """
    if name not in NAMES:
        raise ConfigError(
            f"rollout_engine={name!r} is not known{did_you_mean(name, NAMES)}. Choose one of {', '.join(NAMES)}."
        )
    # A run that was killed leaves its weights in shared memory; the next one that samples removes them.
    remove_orphans()
    if name == "auto":
        name = choose_engine(model, UNCONFIGURED)
    engine = _made(name, model, pad_token_id, cache)
    engine.folder = None if folder is None else Path(folder)
    if cache is not None and name != "hf":
        logger.warning(
            "cache_implementation=%r is ignored: rollout_engine=%r has a cache of its own; 'hf' reads it.", cache, name
        )
    return engine


def _made(name: str, model: nn.Module, pad_token_id: int, cache: str | None) -> RolloutEngine:
    if name == "hf":
        return HFEngine(model, pad_token_id=pad_token_id, cache_implementation=cache)
    if name == "paged":
        return PagedEngine(model, pad_token_id=pad_token_id)
    reason = native_is_exact(model)
    if reason is not None:
        raise ConfigError(
            f"rollout_engine='native' does not say of {type(causal_lm(model)).__name__} what its own forward says: {reason}. "
            "Fix: rollout_engine='hf', or 'auto', which chooses by this."
        )
    return NativeEngine(model, pad_token_id=pad_token_id, products="bfloat16" if name == "native_bf16" else "exact")
