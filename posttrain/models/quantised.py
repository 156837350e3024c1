"""Adapters on quantised weights (QLoRA): what is refused, and what is done once to a model before it is trained.

Weights that bitsandbytes packed into 4 or 8 bits are read and never written: only an adapter beside them can learn.

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

# Bits of one quantised weight with its scales: a float32 scale for 64 weights; doubly quantised, 8 bits for 64 weights and a
# float32 scale for 256 of those; of 8-bit weights one scale a row, which is not counted.
SCALES = {(4, False): 4 + 32 / 64, (4, True): 4 + 8 / 64 + 32 / (64 * 256), (8, False): 8.0, (8, True): 8.0}
# Trained beside an adapter in their own dtype: DoRA's updates would round away, heads get states of their own dtype.
KEPT = ("lora_magnitude_vector", "modules_to_save", "trainable_tokens")


def bits_of(model: nn.Module) -> int | None:
    """4 or 8 where bitsandbytes packed the weights of a model; None of any other model, and of the name of one."""
    for name, bits in (("is_loaded_in_4bit", 4), ("is_loaded_in_8bit", 8)):
        if getattr(model, name, False) is True:
            return bits
    return None


def bits_asked(settings: Any) -> int | None:
    """4 or 8 as a ``quantization_config`` asks for, an object or a dict; None without one, or of another library.

    >>> bits_asked({"load_in_4bit": True}), bits_asked(None)
    (4, None)
    """
    return 4 if _setting(settings, "load_in_4bit") else 8 if _setting(settings, "load_in_8bit") else None


def _setting(settings: object, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def weight_bits(settings: Any) -> float | None:
    """Bits of memory that one quantised weight takes, its scales included; None where nothing is quantised.

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
    """Refuse quantised weights that could not be trained, before anything is read.

    Args:
        model: As it was given, a name or an object.
        args: The trainer's config.
        peft_config: Of an adapter, or None.
        quantization_config: As it was given; ``model_init_kwargs`` may hold one instead.

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
    """``quantization_config`` of a checkpoint that was saved packed; None of any other, and of one that cannot be read."""
    # Loading says better what is wrong with a name.
    with contextlib.suppress(OSError, ValueError):
        return PretrainedConfig.get_config_dict(model, revision=revision)[0].get("quantization_config")
    return None


def packing_of(config: PretrainedConfig | None) -> Any:
    """How a library packed the weights that this config is of; None where none did."""
    return getattr(config, "quantization_config", None)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """What products with quantised weights are computed in: the config's word of 4-bit weights, else bfloat16."""
    settings = packing_of(config_of(model))
    named = getattr(settings, "bnb_4bit_compute_dtype", None) if bits_of(model) == 4 else None
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def prepare_adapter(model: nn.Module) -> None:
    """The rest of ``prepare_model_for_kbit_training`` for an adapter that is on its quantised model; told once, in one line.

    peft froze the base, and gradients pass its embeddings where layers are recomputed (`posttrain.models.load.wrap_with_peft`).
    Here trained weights of the adapter take the dtype that the products have. Norms and embeddings keep the dtype they were
    loaded in: in 16 bits they train adapters as well, in less memory.
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
