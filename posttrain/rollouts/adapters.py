"""Transfer of a LoRA adapter, without merging, to engines that already have the base model. Adapter files have peft's
format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from posttrain.errors import ConfigError, ModelError
from posttrain.models.heads import adapter_kind, adapters_of, unwrapped
from posttrain.models.parallel import flattens_parameters, gathered, whole_tensor
from posttrain.models.reference import moves_base
from posttrain.rollouts.shared_memory import write_tensors
from posttrain.rollouts.shared_weights import Weights, checkpoint_weights, clean_name, plain_lora, renamed

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Number of elements of each parameter that are compared to detect changes of weights. Autograd's version counter misses some
# of these changes.
SAMPLES = 64
# Fields of peft's ``LoraConfig`` with their neutral values. With these values, an adapter is a product ``scale B A`` with
# one rank and one scale.
MORE = {
    "bias": "none", "use_dora": False, "lora_bias": False, "use_qalora": False, "rank_pattern": {}, "alpha_pattern": {},
    "modules_to_save": None, "trainable_token_indices": None, "target_parameters": None, "layer_replication": None,
}  # fmt: skip


def fingerprint(model: nn.Module) -> tuple[tuple, tuple]:
    """Return a pair of values: one that changes when base weights change, and one that changes when LoRA matrices, active
    adapters or their scales change.

    Autograd counts writes to a tensor, but not writes through ``.data`` or by other kernels. Therefore, some elements of
    each parameter are part of the value.
    """
    named = list(model.named_parameters())
    flat = [parameter.detach().flatten() for _, parameter in named]
    samples = [numbers[:: max(1, numbers.numel() // SAMPLES)].double().sum() for numbers in flat]
    sums = torch.stack(samples).tolist() if samples else []
    weights = [(".lora_" in name, p.data_ptr(), p._version, x) for (name, p), x in zip(named, sums, strict=True)]
    base, lora = (tuple(weight for weight in weights if weight[0] is kind) for kind in (False, True))
    return base, (lora, adapter_states(model))


def adapter_states(model: nn.Module) -> tuple:
    """Return, for each layer with adapters, which adapters are active and merged, and their scales."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (m for m in model.modules() if isinstance(m, BaseTunerLayer))
    return tuple(
        (str(m.active_adapters), m.disable_adapters, str(m.merged_adapters), str(vars(m).get("scaling")))
        for m in layers
    )


def adapter_obstacle(model: nn.Module, layers: Sequence[str] = ()) -> str | None:
    """Return the reason why the trained weights cannot be sent as a LoRA adapter. Return None if they can be sent.

    Args:
        model: The trained model, with or without wrappers.
        layers: Names of the layers for which the engine supports adapters. A name is the last component of the module's
            path, e.g. ``q_proj``. Empty: all linear layers.
    """
    bare: Any = unwrapped(model)
    configs = adapters_of(bare)
    if not configs:
        return "the model has no adapter"
    if vars(bare).get("_hf_peft_config_loaded"):
        return "its adapter was added by transformers' add_adapter"
    if len(active := list(bare.active_adapters)) != 1:
        return f"{len(active)} adapters are active"
    config = configs[active[0]]
    kind = adapter_kind(config)
    if kind != "LORA":
        return f"its adapter is {kind}"
    for name, neutral in MORE.items():
        value = getattr(config, name, neutral)
        if value != neutral and (value or neutral):  # An empty collection is equivalent to None.
            return f"its adapter has {name}={value!r}"
    if moves_base(config):
        return f"init_lora_weights={config.init_lora_weights!r} changed the base model"
    if flattens_parameters(model):
        return "its parameters are flattened"
    scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    return _odd_layer(bare, layers, active[0], scale)


def _odd_layer(bare: Any, layers: Sequence[str], adapter: str, scale: float) -> str | None:
    """Return the reason why the adapter of a layer cannot be sent, or None. Possible reasons are an unsupported type of
    adapter, or a trained weight of the base model.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = bare.get_base_model()
    head, converted = base.get_output_embeddings(), renamed(base)
    for name, layer in base.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if layer is head or not plain_lora(layer) or not isinstance(layer.get_base_layer(), nn.Linear):
            return f"{name} is not a linear layer with a plain adapter"
        if layer.disable_adapters or layer.merged or layer.scaling.get(adapter, scale) != scale:
            return f"the adapter of {name} is disabled, merged or has another scale than its config"
        weight = f"{clean_name(name)}.weight"
        if converted and list(checkpoint_weights(base, {weight: layer.get_base_layer().weight})) != [weight]:
            return f"{name} has a different name in the model's checkpoint"
        if layers and name.rsplit(".", 1)[-1] not in layers:
            return f"{name} has an adapter, but the engine supports adapters only on {', '.join(layers)}"
    trained = (n for n, p in bare.named_parameters() if p.requires_grad and ".lora_" not in n)
    odd = next(trained, None)
    return None if odd is None else f"{odd} of the base model is trained too"


class AdapterWeights:
    """Tensors of a model's LoRA adapter, as an iterable of pairs (peft's name, tensor).

    If parameters are sharded, iteration is a collective operation. All ranks must iterate, even if only one rank sends.

    Args:
        model: Model with an adapter that can be sent (`adapter_obstacle` returns None).
        dtype: Dtype to which tensors are cast. None: tensors are not cast.
        most: Maximum rank that the engine supports.

    Attributes:
        rank: Rank of the adapter.
        nbytes: Number of bytes of the tensors that the last iteration yielded.

    Raises:
        ConfigError: The rank is above ``most``.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None, most: int) -> None:
        self.model, self.dtype, self.nbytes = model, dtype, 0
        bare: Any = unwrapped(model)
        self.name = bare.active_adapters[0]
        config = bare.peft_config[self.name]
        self.rank = int(config.r)
        if self.rank > most:
            raise ConfigError(
                f"the adapter has rank {self.rank}, but the rollout engine supports ranks up to {most}. Fix: start "
                f"the server with --max-lora-rank {self.rank} (vLLM supports 8, 16, 32, 64 and so on), or set "
                "adapter_sync='merged'."
            )
        options = config.to_dict() | {"inference_mode": True}
        self.config = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in options.items()
            if name
            in ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "bias", "inference_mode", "task_type")
        }

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        bare, ending, self.nbytes = unwrapped(self.model), f".{self.name}.weight", 0
        for name, parameter in bare.named_parameters():
            if ".lora_" in name and name.endswith(ending):
                with torch.no_grad(), gathered([parameter]):
                    tensor = whole_tensor(parameter.detach()).to(self.dtype or parameter.dtype, copy=True)
                self.nbytes += tensor.nbytes
                yield clean_name(name).removesuffix(ending) + ".weight", tensor

    def base(self, checkpoint_names: bool) -> Weights:
        """Return the frozen weights of the base model, without the adapter."""
        return Weights(self.model, dtype=self.dtype, checkpoint_names=checkpoint_names, adapters=False)

    def write(self, folder: Path) -> None:
        """Write the adapter's config and weights to a folder in peft's format. The folder is created if it does not exist.

        Raises:
            OSError: The disk is full.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(self, folder / TENSORS)
        (folder / CONFIG).write_text(json.dumps(self.config, default=str), encoding="utf-8")


def read_adapter(folder: Path) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
    """Read an adapter from a folder. Return its scale, and a dict that maps the name of each weight to its matrices A
    ``(r, in)`` and B ``(out, r)``.

    Raises:
        ModelError: The folder does not contain a LoRA adapter in peft's format.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
        scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        halves = [
            {name.removeprefix("base_model.model.").removesuffix(f".lora_{half}.weight"): t for name, t in tensors.items() if
             f".lora_{half}." in name}
            for half in "AB"
        ]  # fmt: skip
        if halves[0].keys() != halves[1].keys() or len(tensors) != 2 * len(halves[0]):
            raise ModelError(
                f"{folder} contains tensors that are not pairs of lora_A and lora_B: {sorted(tensors)[:3]}."
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder} does not contain a LoRA adapter in peft's format: {error!r}.") from error
    return scale, {f"{name}.weight": (a, halves[1][name]) for name, a in halves[0].items()}
