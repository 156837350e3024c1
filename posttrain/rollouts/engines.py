"""Engines by their names: which can sample a model exactly, and how each is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.data.chat import terminal_token_ids, tokenize_prompts
from posttrain.errors import ConfigError, check_choice
from posttrain.models.heads import causal_lm
from posttrain.models.load import resolve_pad_token
from posttrain.rollouts.base import RolloutEngine
from posttrain.types import Request, Sampling

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

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
    from posttrain.rollouts.native.engine import native_is_exact

    device = next(model.parameters()).device.type
    refusals: dict[str, Callable[[nn.Module], str | None]] = {"native": native_is_exact, "hf": lambda _: None}
    if device == "cuda":
        from posttrain.rollouts.paged import paged_refusal
        from posttrain.rollouts.vllm import vllm_refusal

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
    name: str, model: nn.Module, *, pad_token_id: int, folder: str | None = None, cache: str | None = None
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
    check_choice("rollout_engine", name, NAMES)
    if any(Path("/dev/shm").glob("posttrain-*")):
        # A run that was killed leaves its weights in shared memory; the next one that samples removes them.
        from posttrain.rollouts.server.weight_sync import remove_orphans

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
    """The engine of a name, imported only now: engines import this module."""
    if name == "hf":
        from posttrain.rollouts.hf import HFEngine

        return HFEngine(model, pad_token_id=pad_token_id, cache_implementation=cache)
    if name == "paged":
        from posttrain.rollouts.paged import PagedEngine

        return PagedEngine(model, pad_token_id=pad_token_id)
    from posttrain.rollouts.native.engine import NativeEngine, native_is_exact

    reason = native_is_exact(model)
    if reason is not None:
        raise ConfigError(
            f"rollout_engine='native' does not say of {type(causal_lm(model)).__name__} what its own forward says: {reason}. "
            "Fix: rollout_engine='hf', or 'auto', which chooses by this."
        )
    return NativeEngine(model, pad_token_id=pad_token_id, products="bfloat16" if name == "native_bf16" else "exact")


def complete(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    n: int = 1,
    seed: int | None = 0,
    engine: str = "auto",
) -> list[str]:
    """Complete prompts with a model as it is now, greedily unless a temperature is given.

    Args:
        model: A transformers causal language model (training mode and settings are left as they are).
        tokenizer: Its tokenizer.
        prompts: Strings, or lists of messages.
        max_new_tokens: Most tokens of a completion.
        temperature: 0 is greedy.
        n: Completions per prompt.
        seed: Of the sampling.
        engine: ``native``, ``hf`` or ``auto``.

    Returns:
        ``n`` texts a prompt, in order, without special tokens.
    """
    ids = tokenize_prompts([{"prompt": prompt} for prompt in prompts], tokenizer)
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_token_ids=terminal_token_ids(tokenizer, getattr(model, "generation_config", None)),
        seed=seed,
    )
    runner = create_engine(engine, model, pad_token_id=resolve_pad_token(tokenizer))
    rollouts = runner.generate([Request(prompt, n) for prompt in ids], sampling)
    return tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
