"""Adapters on quantized weights (QLoRA): checks before loading, and preparation of the model for training.

Weights that bitsandbytes packed into 4 or 8 bits are read-only, so only an adapter can be trained.

Reference: QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig

from posttrain.errors import ConfigError
from posttrain.integrations import require
from posttrain.models.architecture import config_of
from posttrain.models.heads import adapters_of

if TYPE_CHECKING:
    from peft import PeftConfig

    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)

# Bits per quantized weight, including scales. 4 bits: one float32 scale per 64 weights. With double quantization: an 8-bit scale
# per 64 weights, and a float32 scale per 256 of those. 8 bits: one scale per row, which is not counted.
SCALES = {(4, False): 4 + 32 / 64, (4, True): 4 + 8 / 64 + 32 / (64 * 256), (8, False): 8.0, (8, True): 8.0}
# Parameters that keep their dtype: DoRA's updates would be rounded away, and heads receive states in their own dtype.
KEPT = ("lora_magnitude_vector", "modules_to_save", "trainable_tokens")


def bits_of(model: nn.Module) -> int | None:
    """Return 4 or 8 if bitsandbytes packed the model's weights. Return None for other models and for model names."""
    for name, bits in (("is_loaded_in_4bit", 4), ("is_loaded_in_8bit", 8)):
        if getattr(model, name, False) is True:
            return bits
    return None


def bits_asked(settings: Any) -> int | None:
    """Return the bits that a ``quantization_config`` (object or dict) requests: 4 or 8, or None if it requests neither.

    >>> bits_asked({"load_in_4bit": True}), bits_asked(None)
    (4, None)
    """
    return 4 if _setting(settings, "load_in_4bit") else 8 if _setting(settings, "load_in_8bit") else None


def _setting(settings: object, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def weight_bits(settings: Any) -> float | None:
    """Return the bits of memory per quantized weight, including its scales, or None without quantization.

    >>> weight_bits({"load_in_4bit": True}), weight_bits({"load_in_4bit": True, "bnb_4bit_use_double_quant": True})
    (4.5, 4.126953125)
    """
    bits = bits_asked(settings)
    if bits is None:
        return None
    return SCALES[bits, bool(_setting(settings, "bnb_4bit_use_double_quant"))]


def check_quantised(
    model: str | nn.Module, args: PostTrainingConfig, peft_config: PeftConfig | None, quantization_config: Any
) -> None:
    """Raise before any weight is read if quantized weights cannot be trained.

    Args:
        model: The trainer's ``model`` argument, a name or an object.
        args: The trainer's config.
        peft_config: Config of an adapter, or None.
        quantization_config: The trainer's argument. ``model_init_kwargs`` may contain one instead.

    Raises:
        ConfigError: There is no adapter, or the run shards parameters (FSDP, ZeRO-3).
        MissingDependencyError: bitsandbytes is not installed.
    """
    init = args.model_init_kwargs or {}
    named = quantization_config if quantization_config is not None else init.get("quantization_config")
    if named is None and isinstance(model, str):
        named = _packed_already(model, init.get("revision"))
    bits = bits_asked(named) if isinstance(model, str) else bits_of(model)
    if bits is None:
        return
    if peft_config is None and not adapters_of(model):
        raise ConfigError(
            f"the model's weights are quantised to {bits} bits and there is no adapter (peft_config=None): packed weights cannot "
            "be trained. Fix: peft_config=LoraConfig(r=16, target_modules='all-linear') (--use_peft), or load the model "
            "without quantization_config."
        )
    deepspeed = getattr(args, "hf_deepspeed_config", None)
    fsdp = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if fsdp or (deepspeed is not None and deepspeed.is_zero3()):
        raise ConfigError(
            f"the model's weights are quantised to {bits} bits and {'FSDP' if fsdp else 'ZeRO-3'} would cut them into shards: no "
            "run has shown that packed weights come back whole. Fix: DDP (each process holds the packed weights), or shard "
            "the model without quantization_config."
        )
    require("bitsandbytes", f"a model of {bits} bits a weight")


def _packed_already(model: str, revision: str | None) -> Any:
    """Return the ``quantization_config`` of a quantized checkpoint. Return None for other or unreadable checkpoints."""
    # Loading the model later raises a clearer error for a wrong name.
    with contextlib.suppress(OSError, ValueError):
        return PretrainedConfig.get_config_dict(model, revision=revision)[0].get("quantization_config")
    return None


def packing_of(config: PretrainedConfig | None) -> Any:
    """Return the ``quantization_config`` of a model's config, or None."""
    return getattr(config, "quantization_config", None)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of products with quantized weights: the config's dtype for 4-bit weights, otherwise bfloat16."""
    settings = packing_of(config_of(model))
    named = getattr(settings, "bnb_4bit_compute_dtype", None) if bits_of(model) == 4 else None
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def prepare_adapter(model: nn.Module) -> None:
    """Cast the trained adapter weights of a quantized model to the dtype of its products, and log one line.

    This replaces the rest of ``prepare_model_for_kbit_training``: peft has frozen the base, and
    `posttrain.models.load.wrap_with_peft` has enabled gradients through recomputed layers. Norms and embeddings keep the dtype
    they were loaded in: in 16 bits, adapters train equally well with less memory.
    """
    bits = bits_of(model)
    if bits is None:
        return
    dtype, cast = compute_dtype(model), 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in KEPT):
            parameter.data = parameter.data.to(dtype)
            cast += parameter.numel()
    logger.info(
        "%d-bit weights: the base is frozen, %d weights of the adapter are trained in %s, products are computed in %s; norms "
        "and embeddings keep %s.",
        bits, cast, str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch."),
        sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype.is_floating_point}),
    )  # fmt: skip
