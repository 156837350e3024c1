"""`ENGINES`: rollout engines by name. Each engine has a function that creates it and a function that checks whether it
supports a model.

Other packages can register engines under the entry point group ``posttrain.engines`` (see `docs/extend.md`).

`create_engine` creates an engine, and `complete` completes prompts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from posttrain import plugins
from posttrain.data.chat import terminal_token_ids, tokenize_prompts
from posttrain.errors import ConfigError, MissingDependencyError, check_choice
from posttrain.models.architecture import generation_config_of
from posttrain.models.heads import causal_lm
from posttrain.models.load import resolve_pad_token
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.shared_memory import remove_orphans
from posttrain.types import Request, Sampling

if TYPE_CHECKING:
    from posttrain.rollouts.native.layers import Products
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


def _native_refusal(model: nn.Module) -> str | None:
    from posttrain.rollouts.native.engine import native_is_exact

    return native_is_exact(model)


def _native(model: nn.Module, pad_token_id: int, cache: str | None, products: Products = "exact") -> RolloutEngine:
    from posttrain.rollouts.native.engine import NativeEngine

    reason = _native_refusal(model)
    if reason is not None:
        raise ConfigError(
            f"rollout_engine='native' does not compute {type(causal_lm(model)).__name__} exactly: {reason}. Fix: set "
            "rollout_engine='hf', or 'auto', which selects an exact engine (posttrain serve: --engine hf)."
        )
    return NativeEngine(model, pad_token_id=pad_token_id, products=products)


def _hf(model: nn.Module, pad_token_id: int, cache: str | None) -> RolloutEngine:
    from posttrain.rollouts.hf import HFEngine

    return HFEngine(model, pad_token_id=pad_token_id, cache_implementation=cache)


def _paged_refusal(model: nn.Module) -> str | None:
    from posttrain.rollouts.paged import paged_refusal

    return paged_refusal(model)


def _paged(model: nn.Module, pad_token_id: int, cache: str | None) -> RolloutEngine:
    from posttrain.rollouts.paged import PagedEngine

    return PagedEngine(model, pad_token_id=pad_token_id)


def _vllm_refusal(model: nn.Module) -> str | None:
    try:
        return plugins.module("extensions.vllm.engine").vllm_refusal(model)
    except MissingDependencyError as error:
        return str(error)


@dataclass(frozen=True)
class EngineSpec:
    """Rollout engine that a config can select.

    Attributes:
        make: Function that creates an engine on the model's own weights. Its arguments are the model, the pad token id and
            transformers' ``cache_implementation``. None: the engine has a copy of the weights, and a trainer pushes new
            weights to it (`posttrain.loop.weight_sync`).
        refuses: Function of a model. It returns None if the engine samples from exactly this model's distribution.
            Otherwise, it returns the reason why the engine does not.
        vllm_mode: Value of the option ``vllm_mode`` that selects this engine together with ``use_vllm=True``.
        exact: Whether the engine computes log-probs with unrounded weights. If not, the loss must correct for the difference
            to the trainer's log-probs.
        in_workers: Whether rollout workers can use the engine. If ``make`` is also set, the rollout server can also use it.
    """

    make: Callable[[nn.Module, int, str | None], RolloutEngine] | None = None
    refuses: Callable[[nn.Module], str | None] = lambda _: None
    vllm_mode: Literal["server", "colocate"] | None = None
    exact: bool = True
    in_workers: bool = False


ENGINES = {
    **{name: EngineSpec(functools.partial(plugins.call, entry)) for name, entry in plugins.entries("engines").items()},
    "native": EngineSpec(_native, _native_refusal, in_workers=True),
    "hf": EngineSpec(_hf, in_workers=True),
    "paged": EngineSpec(_paged, _paged_refusal),
    "native_bf16": EngineSpec(functools.partial(_native, products="bfloat16"), _native_refusal, exact=False),
    "server": EngineSpec(vllm_mode="server", in_workers=True),
    "vllm": EngineSpec(None, _vllm_refusal, vllm_mode="colocate"),
}
IN_PROCESS = tuple(name for name, spec in ENGINES.items() if spec.make is not None)
EXACT = tuple(name for name in IN_PROCESS if ENGINES[name].exact)
IN_WORKERS = tuple(name for name, spec in ENGINES.items() if spec.in_workers)
# Order in which "auto" tries engines. On an H200, a decoding step of a 0.5B model took 29 to 34 ms with the native engine and
# about 62 ms with continuous batching.
ON_GPU, ON_CPU = ("vllm", "native", "paged", "hf"), ("native", "hf")

# Engines that "auto" selects only for a trainer, with the reason why each needs a trainer.
UNCONFIGURED = {
    "vllm": "it has a copy of the weights, and without a trainer no weights are pushed",
    "paged": "it does not support all sampling settings, and the settings of later calls are unknown",
}


def choose_engine(model: nn.Module, refused: Mapping[str, str] | None = None) -> str:
    """Select the engine for ``rollout_engine="auto"``, for this model and device. Log the reasons in one line.

    On a GPU, the order is: vLLM in the trainer's process, the native engine, transformers' continuous batching,
    transformers' ``generate``. On a CPU, it is: the native engine, transformers' ``generate``.

    An engine is skipped if its results for this model are not exact, or if ``refused`` contains its name.

    Args:
        model: Causal language model to sample from.
        refused: Engines that the caller cannot use. The key is the engine's name, and the value is the reason.

    Returns:
        ``vllm``, ``paged``, ``native`` or ``hf``.
    """
    device = next(model.parameters()).device.type
    reasons: dict[str, str] = {}
    for name in ON_GPU if device == "cuda" else ON_CPU:
        reason = (refused or {}).get(name) or ENGINES[name].refuses(model)
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
    """Create an engine that samples from the weights of ``model`` without copying them.

    Args:
        name: One of `IN_PROCESS`, or ``auto``. In this function, ``auto`` selects ``native`` or ``hf``. In a trainer on a
            GPU, `choose_engine` selects the engine.
        model: A causal language model.
        pad_token_id: Pad token of the tokenizer.
        folder: Folder to which the engine may write the prompts of a failed call. None: they are not written.
        cache: transformers' ``cache_implementation``. Only the engine ``hf`` uses it.

    Raises:
        ConfigError: The name is unknown, or ``native`` is not exact for this model.
    """
    check_choice("rollout_engine", name, ("auto", *IN_PROCESS))
    # Remove files in shared memory that belong to killed runs.
    remove_orphans()
    if name == "auto":
        name = choose_engine(model, UNCONFIGURED)
    make = ENGINES[name].make
    assert make is not None
    engine = make(model, pad_token_id, cache)
    engine.folder = None if folder is None else Path(folder)
    if cache is not None and name != "hf":
        logger.warning(
            "cache_implementation=%r is ignored: rollout_engine=%r has its own cache. Only 'hf' uses it.", cache, name
        )
    return engine


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
    """Complete prompts with a model. With the default temperature 0, decoding is greedy.

    Args:
        model: transformers causal language model. Its training mode and settings are not changed.
        tokenizer: Tokenizer of the model.
        prompts: Strings, or lists of messages.
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: Sampling temperature. 0: greedy decoding.
        n: Number of completions per prompt.
        seed: Seed of the sampling.
        engine: ``native``, ``hf`` or ``auto``.

    Returns:
        List with ``n`` texts per prompt, in the order of the prompts. The texts contain no special tokens.

    Raises:
        ConfigError: ``n`` is above 1 and ``temperature`` is 0, so all texts of a prompt would be identical.
    """
    if n > 1 and temperature == 0:
        raise ConfigError(
            f"temperature=0 samples n={n} identical texts per prompt. Fix: set temperature above 0, or n=1."
        )
    ids = tokenize_prompts([{"prompt": prompt} for prompt in prompts], tokenizer)
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_token_ids=terminal_token_ids(tokenizer, generation_config_of(model)),
        seed=seed,
    )
    runner = create_engine(engine, model, pad_token_id=resolve_pad_token(tokenizer))
    rollouts = runner.generate([Request(prompt, n) for prompt in ids], sampling)
    return tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
