"""Weights of a model with merged adapters, and their transfer to other processes on this machine."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from posttrain.errors import ModelError, WeightSyncError
from posttrain.models.heads import adapter_kind, adapters_of, causal_lm, learns_prompts, unwrapped
from posttrain.models.load import ADDS_LAYERS
from posttrain.models.parallel import flattens_parameters, gathered, is_partitioned, summoned, whole_tensor
from posttrain.models.quantised import bits_of, dequantized_weight, is_packed
from posttrain.models.reference import use_adapter
from posttrain.rollouts.shared_memory import SharedFolder, file_tensors, write_tensors

# Prefixes that DDP, FSDP, compilation and checkpointing add to parameter names.
WRAPPERS = ("module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
Getter = Callable[[], Tensor]


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers.

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
    """Yield one pair for each weight in the base model's checkpoint: the weight's name and a function that computes the
    weight.

    The function returns the weight itself. If active adapters change the weight, the function returns a new tensor with the
    adapters merged (``W + scale B A`` for LoRA). Weights that bitsandbytes has quantized are dequantized. Tied weights are
    yielded once, under the name of their source.

    Args:
        model: A transformers or peft model, with or without wrappers.

    Raises:
        ModelError: The adapter cannot be expressed as weights of the base model.
    """
    bare = unwrapped(model)
    kinds = set(map(adapter_kind, adapters_of(bare).values()))
    if learns_prompts(model) or kinds & ADDS_LAYERS.keys():
        raise ModelError(
            f"the virtual tokens or layers of {', '.join(sorted(kinds))} cannot be merged into weights, so another "
            "engine or process would sample from the base model without them. Fix: set rollout_engine='hf', which "
            "runs in the trainer's process, or use LoRA."
        )
    base = causal_lm(bare)
    leaves = [(clean_name(name), getter, parts) for name, getter, parts in _walk(base, "")]
    parts_of = {name: parts for name, _, parts in leaves}
    sources = {clean_name(k): clean_name(v) for k, v in (getattr(base, "all_tied_weights_keys", None) or {}).items()}
    for name, source in sources.items():
        if parts_of.get(name) != parts_of.get(source, parts_of.get(name)):
            raise ModelError(
                f"{name} and {source} are tied in the base model, but the adapter changes only one of them, or changes them "
                "differently. A checkpoint and a rollout engine have one tensor for both, so their policy would differ from "
                "the trained one. Fix: set ensure_weight_tying=True in the peft config, exclude embeddings and output layer "
                "from the adapter, or load a base model that was saved with tie_word_embeddings=False."
            )
    for name, getter, _ in leaves:
        if name not in sources:
            yield name, getter


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Getter, frozenset[int]]]:
    """Yield the name of each weight, a function that computes the weight, and the identities of the tensors from which the
    weight is computed. The submodules of a layer with an adapter are not visited separately.
    """
    special = _adapted(module, prefix)
    if special is not None:
        yield from special
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, _itself(parameter, module), _identities([parameter])
    yield from _below(module, prefix)


def _below(module: nn.Module, prefix: str) -> Iterator[tuple[str, Getter, frozenset[int]]]:
    """Yield the items of `_walk` for the submodules of a module, without the module's own parameters."""
    hidden = module._non_persistent_buffers_set
    for name, buffer in module.named_buffers(recurse=False):
        if name not in hidden:
            yield prefix + name, _itself(buffer), _identities([buffer])
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.")


def _identities(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return the memory addresses of tensors. Tied adapters are transposed views with equal addresses."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return frozenset(tensor.data_ptr() or id(tensor) for tensor in local)


def _itself(tensor: Tensor, layer: nn.Module | None = None) -> Getter:
    """Return a function that returns the whole tensor. If the tensor is the quantized weight of ``layer``, it is
    dequantized.
    """

    def read() -> Tensor:
        if layer is not None and is_packed(tensor):
            return _stored(layer, "weight", dequantized_weight(layer))
        with gathered([tensor]):
            whole = whole_tensor(tensor.detach())
            return whole.clone() if is_partitioned(tensor) else whole

    return read


def _stored(layer: Any, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a layer in the checkpoint's layout. If a quantized layer replaces a ``Conv1D`` (GPT-2), its weight
    is transposed.
    """
    source = getattr(layer, "source_cls", None)
    return tensor.T if name == "weight" and source is not None and source.__name__ == "Conv1D" else tensor


def _adapted(module: Any, prefix: str) -> Iterator[tuple[str, Getter, frozenset[int]]] | None:
    """Return the weights of a layer that peft has replaced, or None for other modules."""
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, TrainableTokensWrapper):
        return _layer(module.token_adapter, prefix)
    if isinstance(module, ModulesToSaveWrapper):
        active = [] if module.disable_adapters else module.active_adapters
        names = [n for n in active if n in module.modules_to_save]
        return _walk(module.modules_to_save[names[0]] if names else module.original_module, prefix)
    return _layer(module, prefix) if isinstance(module, BaseTunerLayer) else None


def _layer(layer: Any, prefix: str) -> Iterator[tuple[str, Getter, frozenset[int]]]:
    """Yield the weights of a layer with an adapter. A weight that an active adapter changes is merged when it is read."""
    base = layer.get_base_layer()
    if not isinstance(layer, ParamWrapper) and any(base.children()):
        raise ModelError(
            f"{prefix.rstrip('.')} is a {type(base).__name__} with inner layers, and peft does not merge an adapter of this "
            "layer into the weights that its forward pass uses. Fix: remove the layer from target_modules, and list linear "
            "layers instead."
        )
    for name, parameter in base.named_parameters(recurse=False):
        tuner = _tuner_of(layer, name)
        adapters = [] if tuner is None else _active_parameters(tuner)
        if tuner is None or not adapters:
            yield prefix + name, _itself(parameter, base), _identities([parameter])
        else:
            yield prefix + name, _merged(layer, tuner, base, name), _identities([parameter, *adapters])
    # The base layer of a ParamWrapper can be any module, for example a router or a sequence mixer.
    yield from _below(base, prefix)


def _tuner_of(layer: Any, name: str) -> Any:
    """Return the tuner layer that changes a weight of the base layer. For expert tensors, peft nests several wrappers, and
    each of them changes one weight.
    """
    while isinstance(layer, ParamWrapper):
        if layer.parameter_name == name:
            return layer
        layer = layer.base_layer
    if isinstance(layer, LoraLayer) and name != "weight":
        return layer if any(layer.lora_bias.get(adapter) for adapter in layer.active_adapters) else None
    return layer if isinstance(layer, BaseTunerLayer) else None


def _active_parameters(tuner: Any) -> list[Tensor]:
    active = set() if tuner.disable_adapters or tuner.merged else set(tuner.active_adapters)
    names = ((set(name.split(".")), parameter) for name, parameter in tuner.named_parameters())
    return [parameter for parts, parameter in names if "base_layer" not in parts and parts & active]


def _merged(layer: Any, tuner: Any, base: Any, name: str) -> Getter:
    def compute() -> Tensor:
        with gathered(layer.parameters()), torch.no_grad():
            if hasattr(tuner, "trainable_tokens_delta"):
                return whole_tensor(tuner.get_merged_weights(tuner.active_adapters).detach())
            try:
                if isinstance(tuner, ParamWrapper) or (plain_lora(tuner) and name == "weight"):
                    merged = _plus_delta(tuner, base, name)
                elif is_packed(getattr(base, "weight", None)):
                    merged = _merged_dequantized(layer, base, name)
                else:
                    # Merge into a temporary copy of the layer, because peft merges in place.
                    twin = copy.deepcopy(layer)
                    twin.merge()
                    merged = getattr(twin.get_base_layer(), name)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                reason = str(error).rstrip(".")
                raise ModelError(
                    f"a {type(tuner).__module__}.{type(tuner).__name__} adapter cannot be merged into the base "
                    f"layer's {name}, which a rollout engine with a copy of the weights needs: {reason}. Fix: set "
                    "rollout_engine='hf', which runs in the trainer's process, or use LoRA without its own bias "
                    "(lora_bias=False)."
                ) from error
            return _stored(base, name, whole_tensor(merged.detach()))

    return compute


def _merged_dequantized(layer: Any, base: Any, name: str) -> Tensor:
    """Return a dequantized weight of a quantized base layer, into which peft has merged the active adapters.

    peft's layers for quantized weights quantize the merged weight again. Therefore, the adapters are merged in a copy of the
    layer with a dequantized base layer. The sum is computed in float32 and rounded once.
    """
    weight = dequantized_weight(base)
    dense = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    dense.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
    if base.bias is not None:
        dense.bias = nn.Parameter(base.bias.detach().to(torch.float32, copy=True), requires_grad=False)
    twin = copy.deepcopy(layer, {id(base): dense}).float()
    twin.quantization_backend, path = None, type(twin).__module__
    if path.endswith(".bnb"):
        # peft's layer for dense weights has the same attributes.
        kind, attributes = sys.modules[path.removesuffix("bnb") + "layer"].Linear, vars(twin)
        twin = kind.__new__(kind)
        vars(twin).update(attributes, fan_in_fan_out=False)
    twin.merge()
    stored = weight if name == "weight" else getattr(base, name)
    return getattr(dense, name).to(stored.dtype)


def check_mergeable(model: nn.Module) -> None:
    """Raise an error if an adapter cannot be merged into the base weights. The test merges one layer of each kind.

    Args:
        model: A transformers or peft model with parameters that are not sharded yet.

    Raises:
        ModelError: The adapter cannot be expressed as weights of the base model, or peft cannot merge one of its
            layers.
    """
    if not adapters_of(model):
        return
    for _ in merged_weights(model):
        # Before its first weight, `merged_weights` raises all errors that do not depend on merging.
        break
    kinds = set()
    for layer in causal_lm(model).modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = layer.get_base_layer()
        kind = (type(layer), type(base), getattr(base, "bias", None) is None)
        if kind not in kinds:
            kinds.add(kind)
            for _, read, _ in _layer(layer, ""):
                read()


def plain_lora(layer: nn.Module) -> bool:
    """Return whether each active adapter of a layer adds only a product ``scale B A``. A and B are linear layers without
    bias, and the adapter does not use DoRA.
    """
    if (
        not isinstance(layer, LoraLayer)
        or not isinstance(layer.lora_A, nn.ModuleDict)
        or isinstance(layer, ParamWrapper)
    ):
        return False
    # Exclude LoRA variants such as DoRA, which change the weight by more than a product ``B A``. Check ``use_dora`` too,
    # because some layers with packed weights do not list DoRA in ``lora_variant``.
    more = (
        layer.use_dora.get(n) or n in layer.lora_variant or layer.lora_bias.get(n) or n in layer.lora_embedding_A
        for n in layer.active_adapters
    )  # fmt: skip
    return hasattr(layer, "get_delta_weight") and not any(more)


def _plus_delta(layer: Any, base: Any, name: str) -> Tensor:
    """Return ``W + sum of scale B A`` of the active adapters. The sum is computed in float32 and rounded once."""
    weight = (dequantized_weight(base) if name == "weight" else getattr(base, name)).detach()
    total = weight.to(torch.float32, copy=True)
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            total += _delta(layer, adapter).to(total)
    return total.to(weight.dtype)


def _delta(layer: Any, name: str) -> Tensor:
    """Return ``scale B A`` in float32. peft's own method would round the result to the adapter's dtype."""
    a, b = layer.lora_A[name], layer.lora_B[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear or isinstance(layer, ParamWrapper):
        return layer.get_delta_weight(name)
    delta = layer.scaling[name] * (b.weight.detach().float() @ a.weight.detach().float())
    return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


# Number of versions whose files are kept. A worker may still read the version before the latest one.
VERSIONS_KEPT = 2


class SharedWeights:
    """Sends weights to other processes on this machine through files. Each version is written to a file. Then
    ``latest.json`` is written, with the version's number and hash.

    This class implements `WeightTransferProtocol`. Generation is not paused, because each worker loads a new version when it
    needs the version.

    Args:
        folder: Folder of the weights. None: a new folder is created, in shared memory if available, else in the temporary
            folder.

    Attributes:
        probe: Token sequences whose log-probs workers compute with the next version. The trainer compares these log-probs
            with its own log-probs. None: log-probs are not compared.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or "")
        self.version = 0
        self.probe: Sequence[Sequence[int]] | None = None
        self._own: SharedFolder | None = None

    def init_weight_transfer(self) -> None:
        """Create the folder of the weights."""
        if not self.folder.name:
            self._own = SharedFolder()
            self.folder = self._own.path
        self.folder.mkdir(parents=True, exist_ok=True)

    def pause(self) -> None:
        """Do nothing. Workers continue with the weights that they have."""

    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the next version, and announce it as the latest. Every tensor is read, because reading sharded tensors is a
        collective operation.

        Raises:
            WeightSyncError: The file could not be written correctly, for example because shared memory is full.
        """
        version = self.version + 1
        whole = [(name, tensor.detach().cpu()) for name, tensor in tensors]
        path = self.folder / f"weights-{version}.safetensors"
        try:
            digest = write_tensors(whole, path)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            size = sum(tensor.nbytes for _, tensor in whole)
            path.unlink(missing_ok=True)
            raise WeightSyncError(
                f"version {version} ({size / 1e6:.0f} MB) could not be written to {self.folder} ({free / 1e6:.0f} MB "
                f"free): {error}. Free space in this folder.",
                phase="bucket", version=version,
            ) from error  # fmt: skip
        draft = self.folder / "latest.draft"
        latest = {"version": version, "file": path.name, "xxh3": digest, "probe": self.probe}
        draft.write_text(json.dumps(latest), encoding="utf-8")
        draft.replace(self.folder / "latest.json")
        self.version = version
        (self.folder / f"weights-{version - VERSIONS_KEPT}.safetensors").unlink(missing_ok=True)

    def resume(self) -> None:
        """Do nothing, because nothing was paused."""

    def destroy(self) -> None:
        """Remove the files of the weights. If this object created the folder of the files, remove the folder too."""
        if self._own is not None:
            self._own.close()
        elif self.folder.name:
            remove_weights(self.folder)


def remove_weights(folder: Path) -> None:
    """Remove the files with shared weights. Remove their folder too, unless a user chose it."""
    if folder.name.startswith("posttrain-"):
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in [*folder.glob("weights-*.safetensors"), folder / "latest.json"]:
        path.unlink(missing_ok=True)


def read_weights(folder: str | Path, version: int, timeout: float = 60.0) -> tuple[dict[str, Tensor], int, Any]:
    """Return the latest weights, their version, and the probe sequences or None. Wait until the version is at least
    ``version``.

    Args:
        folder: Folder of a `SharedWeights`.
        version: Minimum version.
        timeout: Maximum number of seconds to wait.

    Raises:
        WeightSyncError: The version was not written within ``timeout``, or its file is corrupt.
    """
    limit, newest = time.monotonic() + timeout, None
    while True:
        try:
            latest = json.loads(Path(folder, "latest.json").read_text(encoding="utf-8"))
            newest = latest["version"]
            if newest >= version:
                return file_tensors(Path(folder, latest["file"]), latest["xxh3"]), newest, latest["probe"]
        # Either no version has been written yet, or a newer version has replaced this file.
        except FileNotFoundError:
            pass
        except ModelError as error:
            raise WeightSyncError(f"{folder}: {error}", phase="end", version=newest) from error
        if time.monotonic() > limit:
            raise WeightSyncError(
                f"weights of version {version} did not appear in {folder} within {timeout:g} s (latest version: "
                    f"{newest}).",
                phase="end", version=version,
            )  # fmt: skip
        time.sleep(0.05)


@torch.no_grad()
def copy_into(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a model. The names of the weights must be exactly the names of the model's parameters.

    Raises:
        ModelError: Names or shapes differ, so the weights belong to a model with another architecture.
    """
    own = {name: read() for name, read in merged_weights(model)}
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape]
    if missing or unknown or shapes:
        raise ModelError(
            f"the weights do not fit the worker's model: {len(missing)} missing ({missing[:3]}), {len(unknown)} "
            f"unknown ({unknown[:3]}), {len(shapes)} of another shape ({shapes[:3]})."
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def as_dtype(name: Any) -> torch.dtype | None:
    """Return the dtype with this name, with or without the prefix ``torch.``. Return None if there is no such dtype.

    >>> as_dtype("torch.bfloat16"), as_dtype("auto")
    (torch.bfloat16, None)
    """
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


class Weights:
    """Weights of a model, as an iterable of pairs (name, tensor). Each weight is computed when it is read.

    If parameters are sharded, iteration is a collective operation. All ranks must iterate, even if only one rank sends.

    Args:
        model: The trainer's model, with or without wrappers and adapters.
        dtype: Dtype to which floating-point tensors are cast. None: tensors are not cast.
        checkpoint_names: Whether to use the names and the layout that ``save_pretrained`` writes. For some models, e.g.
            models with experts, they differ from the names and the layout of the model's parameters.
        adapters: Whether active adapters are merged into the weights. False: the weights are those of the base model.

    Attributes:
        names: Names of all weights. They are available before weights are computed.
        nbytes: Number of bytes of the tensors that the last iteration yielded.

    Raises:
        ModelError: The model has adapters and its parameters are flattened (FSDP1).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        checkpoint_names: bool = False,
        adapters: bool = True,
    ) -> None:
        self.model, self.dtype, self.adapters, self.nbytes = model, dtype, adapters, 0
        bare: Any = unwrapped(model)
        if flattens_parameters(model) and adapters_of(bare):
            raise ModelError(
                "adapters on a model under FSDP1 cannot be sent to a rollout engine, because FSDP1 flattens parameters and "
                "the adapter cannot be merged into shards. Use FSDP2 (fsdp_version: 2) or DeepSpeed ZeRO."
            )
        self.checkpoint_names = checkpoint_names and renamed(bare)
        self.names = [name for name, _ in merged_weights(model)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.nbytes = 0
        for name, tensor in self._whole():
            sent = tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor
            self.nbytes += sent.nbytes
            yield name, sent

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        bare: Any = unwrapped(self.model)
        adapted = nullcontext() if self.adapters else use_adapter(bare, None)
        with torch.no_grad(), adapted, summoned(self.model):
            pairs = ((name, read()) for name, read in merged_weights(self.model))
            if not self.checkpoint_names:
                yield from pairs
                return
            yield from checkpoint_weights(causal_lm(bare), dict(pairs)).items()


def save_merged(model: nn.Module, folder: str | Path) -> None:
    """Save a transformers checkpoint of the base model with the active adapters merged. The model is not changed.

    Weights that bitsandbytes has quantized are saved as dequantized weights, without ``quantization_config``.

    An error is raised if an adapter changes only one of two tied matrices, because the saved model would then differ from
    the model with the adapter. peft's ``merge_and_unload`` has no such check.

    Args:
        model: A peft model, or any transformers model.
        folder: Folder of the new checkpoint.

    Raises:
        ModelError: The adapter cannot be expressed as weights of the base model, or the weights are quantized with another
            package than bitsandbytes.
    """
    base = causal_lm(model)
    if getattr(base, "_hf_peft_config_loaded", False):
        raise ModelError(
            "a model with an adapter of transformers' add_adapter() cannot be saved as a whole: transformers saves the "
            "adapter only. Fix: use peft.get_peft_model or peft.PeftModel.from_pretrained instead."
        )
    if getattr(base, "hf_quantizer", None) is not None and bits_of(base) is None:
        raise ModelError(
            f"save_merged cannot dequantize weights that are quantized with {base.quantization_method}. It supports "
            "bitsandbytes only. Fix: dequantize the model (model.dequantize()) before the adapter is added or loaded."
        )
    seen: set[int] = set()
    weights = {}
    # Copy tensors that have several names. Layers that peft repeats (layer_replication) share tensors, but a safetensors
    # file does not allow shared tensors.
    for name, tensor in Weights(model):
        weights[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    _without_quantization(base).save_pretrained(folder, state_dict=weights)


def checkpoint_weights(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights from the model's names and layout to those of its checkpoint; see `renamed`."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(_without_quantization(model), weights)


def _without_quantization(model: Any) -> Any:
    """Return a shallow copy of a quantized model. Its attributes describe a checkpoint with dequantized weights. Other
    models are returned unchanged.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return model
    plain = copy.copy(model)
    plain.hf_quantizer, plain.config = None, copy.deepcopy(model.config)
    del plain.config.quantization_config
    if (conversions := getattr(model, "_weight_conversions", None)) is not None:
        plain._weight_conversions = [item for item in conversions if not _unpacks(item)]
    return plain


def _unpacks(conversion: Any) -> bool:
    """Return whether a conversion of transformers unpacks a quantized checkpoint. Such a conversion cannot be reverted."""
    return any(hasattr(operation, "hf_quantizer") for operation in getattr(conversion, "operations", ()))


def renamed(model: nn.Module) -> bool:
    """Return whether names or layout of the model's parameters differ from those in its checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    base = _without_quantization(causal_lm(model))
    conversions = getattr(base, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(base, add_legacy=False) if conversions is None else conversions)
