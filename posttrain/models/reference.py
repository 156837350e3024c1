"""Frozen reference policy: the base model without adapters, a frozen adapter, or a frozen copy of the model."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.data.chat import inner_tokenizer
from posttrain.errors import ConfigError, ModelError
from posttrain.models.architecture import config_of, get_config_model_id
from posttrain.models.heads import adapter_kind, adapters_of, causal_lm, output_layer, unwrapped
from posttrain.models.parallel import frozen_parameters, is_partitioned

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


REF_ADAPTER = "ref"
LAYERS = ("transformer.h.{layer}", "model.decoder.layers.{layer}", "gpt_neox.layers.{layer}", "model.layers.{layer}")


# LoRA initializations that do not change base weights. Other initializations, e.g. PiSSA, move a part of the base weights
# into the adapter.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")


def moves_base(config: Any) -> bool:
    """Return whether creating an adapter with a peft config changes weights of the base model."""
    return getattr(config, "init_lora_weights", True) not in PLAIN_STARTS


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


@contextmanager
def use_adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """Activate the adapter ``name`` inside the context. On exit, the previous adapter is restored, even after an
    exception.

    With ``name=None``, all adapters are disabled inside the context.
    """
    if not _is_peft(model):
        raise ModelError(f"use_adapter needs a peft model, not {type(model).__name__}.")
    previous, learns = model.active_adapter, [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        if name is None:
            with model.disable_adapter():
                yield
            return
        model.set_adapter(name)
        try:
            yield
        finally:
            model.set_adapter(previous)
    finally:
        # Restore requires_grad. When peft activates an adapter, it sets requires_grad=True on all of its parameters, even on
        # frozen ones.
        for parameter, learned in learns:
            if parameter.requires_grad != learned:
                parameter.requires_grad_(learned)


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set every dropout probability to 0, in dropout modules and in float attributes whose names contain "drop".

    The attributes of all modules and of the model's configs are set. The dropout of an adapter, e.g. ``lora_dropout``, is not
    changed, because it is an explicit setting of the user in the adapter's config.
    """
    holders: list[Any] = []
    added = _adapter_modules(model)
    for module in model.modules():
        if module in added:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        else:
            holders.append(module)
    config = config_of(model)
    if hasattr(config, "get_text_config"):
        holders += [config, config.get_text_config()]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)


def _adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that peft has added to a model: adapter layers without their base layers, and prompt encoders."""
    if not adapters_of(model):
        return set()
    from peft.tuners.tuners_utils import BaseTunerLayer

    added: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            added |= {part for path, part in module.named_modules() if "base_layer" not in path.split(".")}
        elif "prompt_encoder" in name.split("."):
            added.add(module)
    return added


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """Return a frozen deep copy of ``model`` in eval mode.

    ``model`` itself is changed only if layers are shared.

    Args:
        model: The policy.
        num_shared_layers: Number of layers, from the first, that are shared instead of copied. The embeddings are then shared
            too. The tensors of shared layers are the same objects in both models, so they are frozen in ``model`` too. None:
            no layers are shared.
        pattern: Path of a layer's parameters, with ``{layer}`` in place of the layer's index. A pattern is needed for
            models whose paths are not in `LAYERS`.

    Raises:
        ModelError: The parameters are sharded over processes, or no parameter matches the first layer that is not shared. In
            the second case, the whole model would be frozen.
    """
    shared = [] if num_shared_layers is None else _first_parameters(model, num_shared_layers, pattern)
    reference = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    return reference.requires_grad_(False).eval()


def check_reference(reference: object, model: nn.Module) -> None:
    """Raise an error if the reference is the policy itself, or has no language-model head.

    This check runs before any weight of the policy is read.
    """
    if reference is model:
        raise ConfigError(
            "ref_model is the model itself, so it would be trained too. Fix: remove ref_model to use a frozen copy."
        )
    inner = causal_lm(reference) if isinstance(reference, nn.Module) else None
    if output_layer(inner) is None:
        raise ModelError(
            f"ref_model is a {type(inner if inner is not None else reference).__name__}, which has no language-model head to "
            "compute log-probs. Fix: pass a causal language model, or remove ref_model."
        )


def log_own_checkpoint(model: nn.Module) -> None:
    """Warn if the initial model, which is also the reference, was loaded from a training checkpoint."""
    path = Path(name := get_config_model_id(config_of(model)))
    # A model that was created in memory has no path.
    if name and (path / "trainer_state.json").is_file():
        logger.warning(
            "the model was loaded from the training checkpoint %s, and without ref_model it is also the reference. To resume "
            "that run, pass its initial model and call train(resume_from_checkpoint=%r). Else pass ref_model.", path, str(path),
        )  # fmt: skip


def _check_vocabulary(model: nn.Module, reference: object) -> None:
    rows, theirs = (m.get_input_embeddings().weight.shape[0] for m in (model, reference))
    if rows != theirs:
        raise ModelError(
            f"the reference has {theirs} embeddings and the model has {rows}, so their log-probs cannot be compared. Fix: "
            "resize one of the models, or use a reference with the same tokenizer."
        )


def _check_own_weights(model: nn.Module, reference: nn.Module) -> None:
    """Raise an error if policy and reference share trained parameters, because training would then change the reference."""
    theirs = {id(parameter) for parameter in reference.parameters()}
    shared = [name for name, p in model.named_parameters() if p.requires_grad and id(p) in theirs]
    if shared:
        raise ConfigError(
            f"ref_model contains trained weights of the model: {shared[0]}. peft.get_peft_model changes its base model in place, "
            "so the base model contains the adapter too. Fix: remove ref_model, or load the reference a second time."
        )


def trained_outside(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters that do not belong to an adapter, by name."""
    named, parts = model.named_parameters(), [f".{adapter}." for adapter in adapters_of(model)]
    return {name: p for name, p in named if p.requires_grad and not any(part in f"{name}." for part in parts)}


def _check_frozen_base(model: nn.Module) -> None:
    """Raise an error if training would change base weights that policy and reference share."""
    biases = {getattr(config, "bias", None) for config in model.peft_config.values()} - {"none", None}
    if own := list(trained_outside(model)):
        what = f"bias={min(biases)!r} in its adapter" if biases else f"trained weights {own[:3]}"
        raise ModelError(
            f"the reference would share the base weights of this model, but {what} change in training and would change the "
            "reference too. Fix: load the model a second time and pass it as ref_model, or train only adapter weights."
        )


def _first_parameters(model: nn.Module, count: int, pattern: str | None) -> list[nn.Parameter]:
    """Return the parameters of the embeddings and of the first ``count`` layers, in the order in which they are registered."""
    named = list(model.named_parameters())
    if any(is_partitioned(parameter) for _, parameter in named):
        raise ModelError(
            "the model's parameters are sharded, so its layers cannot be shared. Fix: remove num_shared_layers."
        )
    for path in (pattern,) if pattern is not None else LAYERS:
        part = re.compile(rf"(^|\.){re.escape(path.replace('{layer}', str(count)))}\.")
        first = next((index for index, (name, _) in enumerate(named) if part.search(name)), None)
        if first is not None:
            break
    else:
        raise ModelError(
            f"num_shared_layers={count}: no parameter of {type(model).__name__} matches {pattern or LAYERS} at layer {count}, so "
            f"the whole model would be frozen. Fix: set pattern to the path of its layers, with {{layer}} for the index. Example "
            f"of its parameters: {named[len(named) // 2][0]!r}."
        )
    shared = [parameter for _, parameter in named[:first]]
    head = output_layer(model)
    if head is not None and any(head.weight is parameter for parameter in shared):
        logger.warning("the output layer is tied to the shared embeddings, so it is frozen too.")
    return shared


class Reference:
    """Frozen reference policy: the policy with its initial weights, or a separate model that the user passes.

    The reference is stored with as little memory as possible:

    - If the policy has a new adapter, the reference is the base model with adapters disabled.
    - If the adapter was already trained, or if it changed base weights (PiSSA, OLoRA), the reference is a frozen copy of the
      adapter.
    - Otherwise, and for a TRAINABLE_TOKENS adapter that was already trained, the reference is a frozen deep copy of ``model``
      **as passed**. The weights of this copy can differ from the weights on the Hub.

    Args:
        model: The policy.
        fresh_adapter: Whether the adapter is new, so that the base model equals the policy at the start of training.
        given: Reference model that the user passed. None: the reference is the policy with its initial weights.
        adapter: Name of an adapter of the policy that is the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fresh_adapter: bool = False,
        given: nn.Module | None = None,
        adapter: str | None = None,
    ) -> None:
        self.adapter = adapter if given is None else None
        self.copy: nn.Module | None = None
        model = unwrapped(model)  # DDP's wrapper hides the attributes of the adapter, so remove it.
        self.policy: Any = model if _is_peft(model) else None
        if given is not None:
            _check_vocabulary(model, given)
            _check_own_weights(model, given)
            self.copy = given.requires_grad_(False).eval()
        elif self.policy is None:
            self.copy = create_reference_model(model)
        else:
            _check_frozen_base(model)
            starts_at_base = fresh_adapter and not any(
                moves_base(config) for config in self.policy.peft_config.values()
            )
            if adapter is None and not starts_at_base:
                self._freeze_adapter(model)

    def _freeze_adapter(self, model: nn.Module) -> None:
        active = model.active_adapter
        if REF_ADAPTER in model.peft_config:
            raise ConfigError(
                f"the model has an adapter named {REF_ADAPTER!r}, which is the name of the frozen copy that the reference needs. "
                f"Fix: model.delete_adapter({REF_ADAPTER!r}), or load the adapter under another name. To use that adapter as the "
                "reference, load model and adapter a second time and pass them as ref_model."
            )
        if adapter_kind(model.active_peft_config) == "TRAINABLE_TOKENS":
            # peft does not support a second adapter with tied embeddings, so copy the whole model.
            self.copy = create_reference_model(model)
            return
        learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        config = copy.deepcopy(model.peft_config[active])
        if getattr(config, "target_modules_to_tie", None):
            raise ModelError(
                "the reference would be a frozen copy of this adapter, but peft cannot create a second adapter for tied layers "
                "(ensure_weight_tying=True). Fix: load model and adapter a second time and pass them as ref_model."
            )
        # Reset init_lora_weights and layer_replication. Otherwise, creating the copy of the adapter would change base
        # weights or replicate layers a second time.
        for name, neutral in (("init_lora_weights", True), ("layer_replication", None)):
            if hasattr(config, name):
                setattr(config, name, neutral)
        # Exclude tied modules from modules_to_save, because peft itself ties the copied embeddings to the output layer.
        if tied := getattr(config, "modules_to_tie", None):
            config.modules_to_save = [name for name in config.modules_to_save if name not in tied]
        model.add_adapter(REF_ADAPTER, config)
        model.set_adapter(active)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                twin = f".{REF_ADAPTER}." in name or name.endswith(f".{REF_ADAPTER}")
                before, _, behind = name.rpartition(f".{REF_ADAPTER}")
                source = f"{before}.{active}{behind}" if twin else name
                if source not in learns:
                    raise ModelError(
                        "the reference would be a frozen copy of this adapter, but peft creates another adapter from its config, "
                        f"with the new weight {name}. Fix: load model and adapter a second time and pass them as ref_model."
                    )
                if twin:
                    # The shapes can differ, because PiSSA uses fewer ranks in layers narrower than r.
                    if parameter.shape != parameters[source].shape:
                        parameter.data = torch.empty_like(parameters[source])
                    parameter.copy_(parameters[source])
                # peft sets requires_grad for all parameters of the active adapter, so restore the user's settings.
                parameter.requires_grad_(learns[source] and not twin)
        self.adapter = REF_ADAPTER

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        """Yield the model that computes the reference's log-probs inside the context. ``policy`` may be wrapped, e.g. in
        DDP.
        """
        if self.copy is not None:
            yield self.copy
            return
        with use_adapter(self.policy, self.adapter):
            yield policy


def hash_module(module: torch.nn.Module) -> str:
    """Return the SHA-256 hash of the names, shapes, dtypes and bytes of all parameters and buffers, sorted by name."""
    return hash_tensors(module.state_dict())


# Fields of model configs and adapter configs that do not affect the forward pass.
UNREAD = (
    "_name_or_path",
    "transformers_version",
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "auto_mapping",
    "inference_mode",
)


def forward_settings(model: nn.Module) -> dict[str, Any]:
    """Return all settings, apart from weights, that affect the results of a model's forward pass.

    The settings are the model's config and, for a peft model, the configs and scales of its adapters and the names of the
    active adapters.
    """
    bare: Any = unwrapped(model)
    settings: dict[str, Any] = {"config": _fields(config_of(model).to_dict())}
    if _is_peft(bare):
        settings["adapters"] = {name: _fields(config.to_dict()) for name, config in bare.peft_config.items()}
        settings["active"] = list(bare.active_adapters)
        scales = ((name, vars(module).get("scaling")) for name, module in bare.named_modules())
        settings["scales"] = {name: scale for name, scale in scales if isinstance(scale, dict)}
    return settings


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that affect the forward pass. Sets are sorted, because their order differs between
    processes.
    """
    return {
        name: sorted(value) if isinstance(value, set) else value for name, value in config.items() if name not in UNREAD
    }


# Number of weights per sum. The number is so small that a small change of a single weight still changes the float32 sum.
SUMMED = 1 << 14


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 hash of the names, shapes, dtypes and bytes of named tensors, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        value = tensor.detach().cpu()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update((value.float() if value.is_floating_point() else value).contiguous().numpy().tobytes())
    return digest.hexdigest()


def hash_frozen(module: nn.Module) -> str:
    """Return a SHA-256 hash of all frozen parameters and buffers. The hash is computed from sums over blocks of
    `SUMMED` elements.

    Each value is read only once, so hashing takes less time than a forward pass.
    """
    summed = [_sums(values) for _, values in (*frozen_parameters(module), *module.named_buffers())]
    # Concatenate the sums, so that only one transfer from the device is needed.
    return hash_tensors({"sums": torch.cat([sums.to(summed[0].device) for sums in summed])} if summed else {})


def _sums(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1)
    # Quantized weights and 8-bit floats are summed as bytes.
    if flat.element_size() == 1:
        flat = flat.view(torch.uint8)
    whole = len(flat) // SUMMED * SUMMED
    parts = (flat[:whole].view(-1, SUMMED), flat[whole:].view(1, -1))
    return torch.cat([part.sum(-1, dtype=torch.float32) for part in parts])


def hash_vocabulary(tokenizer: Tokenizer) -> str | None:
    """Return the SHA-256 hash of all tokens with their ids, including added tokens. Return None if the tokenizer has no
    vocabulary.
    """
    tokenizer = inner_tokenizer(tokenizer)
    if not hasattr(tokenizer, "get_vocab"):
        return None
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def fingerprint(**settings: Any) -> str:
    """Return a hash of the keyword arguments as 32 hexadecimal characters."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]
