"""A trained model's weights under the names of its checkpoint, adapters added to copies: the live base is only read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.models.heads import learns_prompts, unwrapped
from posttrain.models.parallel import gathered, whole_tensor

__all__ = ["adapter_weights", "clean_name", "merged_weights", "plain_lora"]

# What parallelism, compilation and checkpointing put into names.
WRAPPERS = ("module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
Getter = Callable[[], Tensor]


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers added.

    >>> clean_name("module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    for wrapper in WRAPPERS:
        inside = "." + wrapper
        while inside in name:
            name = name.replace(inside, ".")
        while name.startswith(wrapper):
            name = name.removeprefix(wrapper)
    return name


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Getter]]:
    """Names as in the base model's checkpoint, each with a function that computes its tensor: the weight itself, or
    ``W + scale B A`` as a new tensor. Tied weights come once, under the name of their source.

    Args:
        model: A transformers or peft model, wrapped or not.

    Raises:
        ModelError: Its adapter is virtual tokens, which are no weights of the base model.
    """
    bare = unwrapped(model)
    if learns_prompts(model):
        raise ModelError(
            f"the virtual tokens of {bare.active_peft_config.peft_type} cannot be added to weights, so another engine or process "
            "would sample from the base model without them. Fix: rollout_engine='hf', in the trainer's process; or LoRA."
        )
    base: Any = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    tied = {clean_name(name) for name in getattr(base, "all_tied_weights_keys", None) or {}}
    seen: set[int] = set()
    for name, getter, identity in _walk(base, ""):
        name = clean_name(name)
        if name in tied or identity in seen:
            continue
        seen.add(identity)
        yield name, getter


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Getter, int]]:
    """Depth first; an adapted layer is one leaf."""
    special = _adapted(module, prefix)
    if special is not None:
        yield from special
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, _itself(parameter), id(parameter)
    hidden = module._non_persistent_buffers_set
    for name, buffer in module.named_buffers(recurse=False):
        if name not in hidden:
            yield prefix + name, _itself(buffer), id(buffer)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.")


def _itself(tensor: Tensor) -> Getter:
    def read() -> Tensor:
        with gathered([tensor]):
            whole = whole_tensor(tensor.detach())
            return whole.clone() if hasattr(tensor, "ds_id") else whole

    return read


def _adapted(module: Any, prefix: str) -> Iterator[tuple[str, Getter, int]] | None:
    """The parameters of a layer that peft replaced; None for every other module."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, TrainableTokensWrapper):
        return _tokens(module.token_adapter, prefix)
    if isinstance(module, ModulesToSaveWrapper):
        names = [n for n in module.active_adapters if n in module.modules_to_save]
        return _walk(module.modules_to_save[names[0]] if names else module.original_module, prefix)
    if isinstance(module, BaseTunerLayer):
        return _tokens(module, prefix) if hasattr(module, "trainable_tokens_delta") else _layer(module, prefix)
    return None


def _tokens(layer: Any, prefix: str) -> Iterator[tuple[str, Getter, int]]:
    base = layer.get_base_layer()

    def merged() -> Tensor:
        with gathered(layer.parameters()):
            return whole_tensor(layer.get_merged_weights(layer.active_adapters).detach())

    yield f"{prefix}weight", merged, id(base.weight)


def _layer(layer: Any, prefix: str) -> Iterator[tuple[str, Getter, int]]:
    base = layer.get_base_layer()
    while hasattr(base, "get_base_layer"):
        base = base.get_base_layer()
    for name, parameter in base.named_parameters(recurse=False):
        changed = name == "weight" or _changes_bias(layer)
        yield prefix + name, _merged(layer, base, name) if changed else _itself(parameter), id(parameter)


def _changes_bias(layer: Any) -> bool:
    return (
        any(getattr(layer, "lora_bias", {}).values()) if hasattr(layer, "lora_bias") else not hasattr(layer, "lora_A")
    )


def _merged(layer: Any, base: Any, name: str) -> Getter:
    def compute() -> Tensor:
        with gathered(layer.parameters()):
            if plain_lora(layer) and name == "weight":
                return whole_tensor(_plus_delta(layer, base))
            twin = copy.deepcopy(layer)  # peft merges in place: into a copy that is thrown away.
            twin.merge()
            return whole_tensor(getattr(twin.get_base_layer(), name).detach())

    return compute


def plain_lora(layer: Any) -> bool:
    """Whether a layer's adapters are ``scale B A`` and nothing else (no DoRA, no trained bias)."""
    names = getattr(layer, "active_adapters", [])
    if (
        not hasattr(layer, "lora_A")
        or not hasattr(layer, "get_delta_weight")
        or not isinstance(layer.lora_A, nn.ModuleDict)
    ):
        return False
    return not any(_variant(layer, n) or getattr(layer, "lora_bias", {}).get(n, False) for n in names)


def _variant(layer: Any, name: str) -> bool:
    """DoRA and its kin, which are more than a product of two matrices."""
    return bool(getattr(layer, "use_dora", {}).get(name)) or name in getattr(layer, "lora_variant", {})


def _plus_delta(layer: Any, base: Any) -> Tensor:
    """``W + sum of scale B A`` of the active adapters, added in float32 and rounded once."""
    from peft.utils.integrations import dequantize_module_weight

    with torch.no_grad():
        weight = dequantize_module_weight(base).detach()
        total = weight.to(torch.float32, copy=True)
        names = [] if layer.disable_adapters else [n for n in layer.active_adapters if n in layer.lora_A]
        for name in names:
            total += _delta(layer, name).to(total)
        return total.to(weight.dtype)


def _delta(layer: Any, name: str) -> Tensor:
    """``scale B A``; peft rounds it to the adapter's dtype, which a sum in float32 has no need of."""
    a, b = layer.lora_A[name], layer.lora_B[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear:
        return layer.get_delta_weight(name)
    delta = layer.scaling[name] * (b.weight.detach().float() @ a.weight.detach().float())
    return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


def adapter_weights(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The adapter alone: ``{r, alpha, target_modules}`` and its tensors by peft's names; None where it is more than LoRA
    on linear layers (DoRA, trained biases, whole modules or tokens, ranks that differ), which must be merged.
    """
    from peft import get_peft_model_state_dict

    bare: Any = unwrapped(model)
    configs = getattr(bare, "peft_config", None)
    names = getattr(bare, "active_adapters", []) if configs else []
    if not configs or len(names) != 1:
        return None
    config = configs[names[0]]
    extra = ("modules_to_save", "trainable_token_indices", "target_parameters", "rank_pattern", "alpha_pattern")
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or config.use_dora or config.bias != "none":
        return None
    if any(getattr(config, name, None) for name in (*extra, "use_rslora", "lora_bias")):
        return None
    state = get_peft_model_state_dict(bare, adapter_name=names[0])
    if any("embedding" in name for name in state):
        return None
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in state})
    if not targets:
        raise ModelError(f"the adapter {names[0]!r} has no LoRA tensors to send.")
    return {"r": config.r, "alpha": config.lora_alpha, "target_modules": targets}, state
