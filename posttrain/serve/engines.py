"""Engines of the server by name: each is made in the worker that runs it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

from posttrain.errors import ConfigError, did_you_mean
from posttrain.integrations import is_available
from posttrain.models.load import create_model_from_path, load_tokenizer, resolve_pad_token
from posttrain.serve.backends import Backend, BatchBackend
from posttrain.serve.config import ServeConfig

__all__ = ["ENGINES", "create_backend", "engine_name"]

logger = logging.getLogger(__name__)


def _model(config: ServeConfig, rank: int) -> tuple[Any, Any, int]:
    """Model, tokenizer and pad id, on this rank's device."""
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code, revision=config.revision)
    extra = {"revision": config.revision} if config.revision else {}
    model = create_model_from_path(
        config.model, dtype=config.dtype, trust_remote_code=config.trust_remote_code, **extra
    ).eval()
    model.requires_grad_(False)
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        _own_memory(model)
    return model.to(device), tokenizer, resolve_pad_token(tokenizer)


def _own_memory(model: Any) -> None:
    """Weights were mapped from the checkpoint's file: whoever writes to it would change what is served.

    And a page that is first written in a push costs more than all the rest of its way (measured, 135M parameters in
    float32: 0.38 s of processor time for the first copy, 0.06 s for the second).
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _native(config: ServeConfig, rank: int) -> Backend:
    from posttrain.serve.native import NativeBackend

    model, tokenizer, pad = _model(config, rank)
    return NativeBackend(
        model,
        tokenizer=tokenizer,
        pad_token_id=pad,
        max_slots=config.max_num_seqs,
        max_lora_rank=config.max_lora_rank,
        keep=bool(config.enable_prefix_caching),
    )


class _HFBackend(BatchBackend):
    """transformers ``generate`` on weights that are replaced in place."""

    def __init__(self, model: Any, tokenizer: Any, pad: int) -> None:
        from posttrain.rollouts.hf import HFEngine
        from posttrain.serve.weights import ServedWeights

        super().__init__(HFEngine(model, pad_token_id=pad), tokenizer=tokenizer)
        self.weights = ServedWeights(model)
        self.model = model

    def begin_update(self, adapter: dict[str, Any] | None) -> None:
        super().begin_update(adapter)
        self.weights.begin(None)

    def load(self, tensors: Any) -> tuple[int, list[str]]:
        return self.weights.load(tensors)

    def end_update(self, version: int) -> list[str]:
        self.engine.load_weights((), version)
        return self.weights.missing()

    def info(self) -> dict[str, Any]:
        from posttrain.serve.weights import described

        return super().info() | described(self.model)


def _hf(config: ServeConfig, rank: int) -> Backend:
    return _HFBackend(*_model(config, rank))


def _vllm(config: ServeConfig, rank: int) -> Backend:
    from posttrain.serve.vllm import create_vllm_backend

    return create_vllm_backend(config, rank)


ENGINES: dict[str, Callable[[ServeConfig, int], Backend]] = {"native": _native, "hf": _hf, "vllm": _vllm}


def engine_name(config: ServeConfig) -> str:
    """Which engine ``config`` means; what it cannot do is refused before anything is loaded.

    Raises:
        ConfigError: An unknown engine, or options that it cannot follow.
    """
    name = config.engine
    if name == "auto":
        name = "vllm" if is_available("vllm") and importlib.util.find_spec("posttrain.serve.vllm") else "native"
        logger.info("engine='auto': %s.", name)
    if ":" in name:  # module:function, for engines of one's own.
        return name
    if name not in ENGINES:
        raise ConfigError(
            f"engine={name!r} is not known{did_you_mean(name, ENGINES)}. Choose auto, {', '.join(ENGINES)}, or module:function."
        )
    if name != "vllm" and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} needs --engine vllm: the {name} engine runs on one device. "
            f"--data_parallel_size {config.tensor_parallel_size} starts that many copies."
        )
    if name == "vllm" and config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size}: vllm >= 0.14 refuses data parallelism of dense models. Start one "
            "server a GPU and give the trainer all their addresses (vllm_server_base_url)."
        )
    return name


def create_backend(name: str, config: ServeConfig, rank: int) -> Backend:
    """The backend called ``name``, loaded; runs in the worker."""
    if ":" in name:
        module, _, function = name.partition(":")
        return getattr(importlib.import_module(module), function)(config, rank)
    return ENGINES[name](config, rank)
