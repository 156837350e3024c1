"""Adapters on quantized weights (QLoRA): checks before the model is loaded, and preparation of the model for training.

bitsandbytes packs weights into 4 or 8 bits. Packed weights cannot be updated, so only an adapter can be trained.

Reference: QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
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

# Bits of memory per quantized weight, including its scales. 4-bit weights have one float32 scale per 64 weights. With double
# quantization, each of these scales has 8 bits, and 256 scales share one float32 scale. 8-bit weights have one scale per
# row, which is neglected.
SCALES = {(4, False): 4 + 32 / 64, (4, True): 4 + 8 / 64 + 32 / (64 * 256), (8, False): 8.0, (8, True): 8.0}
# Parameters that `prepare_adapter` does not cast. Rounding would lose small updates of DoRA's magnitudes. Heads receive
# inputs in the dtype of their weights.
KEPT = ("lora_magnitude_vector", "modules_to_save", "trainable_tokens")


def bits_of(model: nn.Module) -> int | None:
    """Return the number of bits, 4 or 8, to which bitsandbytes has quantized a model's weights. Return None for other models
    and for a model's name.
    """
    for name, bits in (("is_loaded_in_4bit", 4), ("is_loaded_in_8bit", 8)):
        if getattr(model, name, False) is True:
            return bits
    return None


def quantized_bits(settings: Any) -> int | None:
    """Return the number of bits that a ``quantization_config`` (object or dict) requests: 4, 8 or None.

    >>> quantized_bits({"load_in_4bit": True}), quantized_bits(None)
    (4, None)
    """
    return 4 if _setting(settings, "load_in_4bit") else 8 if _setting(settings, "load_in_8bit") else None


def _setting(settings: object, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def weight_bits(settings: Any) -> float | None:
    """Return the number of bits of memory per quantized weight, including scales. Return None without quantization.

    >>> weight_bits({"load_in_4bit": True}), weight_bits({"load_in_4bit": True, "bnb_4bit_use_double_quant": True})
    (4.5, 4.126953125)
    """
    bits = quantized_bits(settings)
    if bits is None:
        return None
    return SCALES[bits, bool(_setting(settings, "bnb_4bit_use_double_quant"))]


def check_quantised(
    model: str | nn.Module, args: PostTrainingConfig, peft_config: PeftConfig | None, quantization_config: Any
) -> None:
    """Raise an error if the model's weights are quantized and the run cannot train such a model. This check runs before any
    weight is read.

    Args:
        model: Argument ``model`` of the trainer, a name or an object.
        args: The trainer's config.
        peft_config: Config of an adapter, or None.
        quantization_config: Argument ``quantization_config`` of the trainer. None: the config in ``model_init_kwargs`` is
            used.

    Raises:
        ConfigError: The model has no adapter to train, or the run shards parameters (FSDP, ZeRO-3).
        MissingDependencyError: bitsandbytes is not installed.
    """
    init = args.model_init_kwargs or {}
    named = quantization_config if quantization_config is not None else init.get("quantization_config")
    if named is None and isinstance(model, str):
        named = _packed_already(model, init.get("revision"))
    bits = quantized_bits(named) if isinstance(model, str) else bits_of(model)
    if bits is None:
        return
    if peft_config is None and not adapters_of(model):
        raise ConfigError(
            f"the model's weights are quantized to {bits} bits, so they cannot be trained, and there is no adapter "
            "(peft_config=None). Fix: set peft_config=LoraConfig(r=16, target_modules='all-linear') (--use_peft), or load the "
            "model without quantization_config."
        )
    deepspeed = getattr(args, "hf_deepspeed_config", None)
    fsdp = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if fsdp or (deepspeed is not None and deepspeed.is_zero3()):
        raise ConfigError(
            f"{'FSDP' if fsdp else 'ZeRO-3'} is not supported with weights that are quantized to {bits} bits, because sharding "
            "packed weights is not tested. Fix: use DDP (each process then has all packed weights), or load the model without "
            "quantization_config."
        )
    require("bitsandbytes", f"a model with {bits}-bit weights")


def _packed_already(model: str, revision: str | None) -> Any:
    """Return the ``quantization_config`` of a quantized checkpoint. Return None for checkpoints that are not quantized or
    cannot be read.
    """
    # Ignore errors that a wrong model name causes. Loading the model raises an error with a clearer message later.
    with contextlib.suppress(OSError, ValueError):
        return PretrainedConfig.get_config_dict(model, revision=revision)[0].get("quantization_config")
    return None


def packing_of(config: PretrainedConfig | None) -> Any:
    """Return the ``quantization_config`` of a model's config, or None."""
    return getattr(config, "quantization_config", None)


def is_packed(weight: Any) -> bool:
    """Return whether bitsandbytes has packed a tensor into 4 or 8 bits. Return False if the argument is not a tensor."""
    kind = type(weight).__name__
    return kind == "Params4bit" or (kind == "Int8Params" and weight.dtype == torch.int8)


def dequantized_weight(layer: nn.Module) -> torch.Tensor:
    """Return the weight of a layer, dequantized if necessary. bitsandbytes dequantizes 4-bit weights to the dtype in which
    the model was loaded, and 8-bit weights to float32.
    """
    from peft.utils.integrations import dequantize_bnb_weight, dequantize_module_weight

    weight: Any = layer.weight
    if is_packed(weight):
        # On a CPU, `dequantize_module_weight` assigns a new weight without scales to an 8-bit layer.
        return dequantize_bnb_weight(weight, state=getattr(layer, "state", None)).detach()
    return dequantize_module_weight(layer).detach()


@contextlib.contextmanager
def unrounded_inputs(model: nn.Module) -> Iterator[None]:
    """Make 8-bit layers compute with dequantized weights and unrounded inputs inside the context.

    Outside the context, bitsandbytes also quantizes the inputs of these layers to 8 bits (LLM.int8). With SmolLM2-135M, this
    changes the log-probs of random tokens by 0.27 nats on average.
    """
    weights = [(layer, layer._parameters.get("weight")) for layer in model.modules()]
    layers = [layer for layer, w in weights if is_packed(w) and type(w).__name__ == "Int8Params"]
    handles = [layer.register_forward_hook(_dequantized_product) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _dequantized_product(layer: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """Replace the output of an 8-bit layer by a product with its dequantized weight, as a forward hook."""
    bias = None if layer.bias is None else layer.bias.to(output.dtype)
    return nn.functional.linear(inputs[0].to(output.dtype), dequantized_weight(layer).to(output.dtype), bias)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of matrix products with quantized weights. For 4-bit weights, the dtype is read from the quantization
    config. Otherwise, the dtype is bfloat16.
    """
    settings = packing_of(config_of(model))
    named = getattr(settings, "bnb_4bit_compute_dtype", None) if bits_of(model) == 4 else None
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def prepare_adapter(model: nn.Module) -> None:
    """Cast the trained adapter weights of a quantized model to the dtype of its matrix products, and log the dtypes.

    The other steps of peft's ``prepare_model_for_kbit_training`` are not needed. peft has already frozen the base model, and
    `posttrain.models.load.wrap_with_peft` has enabled gradients through checkpointed layers. Norms and embeddings keep their
    dtype, because adapters train equally well with 16-bit norms, and 16-bit norms need less memory.
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
        "%d-bit weights: the base model is frozen, %d weights of the adapter are trained in %s, and products are computed in %s. "
        "Norms and embeddings keep %s.",
        bits, cast, str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch."),
        sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype.is_floating_point}),
    )  # fmt: skip
