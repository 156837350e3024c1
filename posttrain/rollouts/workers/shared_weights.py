"""Weights for engines in other processes of this machine: one file a version in shared memory, hashed, never rewritten."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from posttrain.errors import ModelError, WeightSyncError
from posttrain.models.heads import adapters_of, causal_lm, learns_prompts, unwrapped
from posttrain.models.parallel import flattens_parameters, gathered, is_partitioned, summoned, whole_tensor
from posttrain.models.reference import use_adapter
from posttrain.rollouts.server.weight_sync import SharedFolder, file_tensors, write_tensors

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
    base = causal_lm(bare)
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
            return whole.clone() if is_partitioned(tensor) else whole

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


def _tokens(layer: nn.Module, prefix: str) -> Iterator[tuple[str, Getter, int]]:
    base = layer.get_base_layer()

    def merged() -> Tensor:
        with gathered(layer.parameters()):
            return whole_tensor(layer.get_merged_weights(layer.active_adapters).detach())

    yield f"{prefix}weight", merged, id(base.weight)


def _layer(layer: nn.Module, prefix: str) -> Iterator[tuple[str, Getter, int]]:
    base = layer.get_base_layer()
    while hasattr(base, "get_base_layer"):
        base = base.get_base_layer()
    for name, parameter in base.named_parameters(recurse=False):
        changed = name == "weight" or _changes_bias(layer)
        yield prefix + name, _merged(layer, base, name) if changed else _itself(parameter), id(parameter)


def _changes_bias(layer: nn.Module) -> bool:
    return any(layer.lora_bias.values()) if isinstance(layer, LoraLayer) else True


def _merged(layer: nn.Module, base: Any, name: str) -> Getter:
    def compute() -> Tensor:
        with gathered(layer.parameters()):
            if plain_lora(layer) and name == "weight":
                return whole_tensor(_plus_delta(layer, base))
            twin = copy.deepcopy(layer)  # peft merges in place: into a copy that is thrown away.
            twin.merge()
            return whole_tensor(getattr(twin.get_base_layer(), name).detach())

    return compute


def plain_lora(layer: nn.Module) -> bool:
    """Whether a layer's adapters are ``scale B A`` and nothing else (no DoRA, no trained bias)."""
    if not isinstance(layer, LoraLayer) or not isinstance(layer.lora_A, nn.ModuleDict):
        return False
    # DoRA and its kin are more than a product of two matrices; some packed layers do not tell theirs.
    more = (layer.use_dora.get(n) or n in layer.lora_variant or layer.lora_bias.get(n) for n in layer.active_adapters)
    return hasattr(layer, "get_delta_weight") and not any(more)


def _plus_delta(layer: nn.Module, base: Any) -> Tensor:
    """``W + sum of scale B A`` of the active adapters, added in float32 and rounded once."""
    from peft.utils.integrations import dequantize_module_weight

    with torch.no_grad():
        weight = dequantize_module_weight(base).detach()
        total = weight.to(torch.float32, copy=True)
        names = [] if layer.disable_adapters else [n for n in layer.active_adapters if n in layer.lora_A]
        for name in names:
            total += _delta(layer, name).to(total)
        return total.to(weight.dtype)


def _delta(layer: nn.Module, name: str) -> Tensor:
    """``scale B A``; peft rounds it to the adapter's dtype, which a sum in float32 has no need of."""
    a, b = layer.lora_A[name], layer.lora_B[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear:
        return layer.get_delta_weight(name)
    delta = layer.scaling[name] * (b.weight.detach().float() @ a.weight.detach().float())
    return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


# Versions: one may be read while the next is written.
VERSIONS_KEPT = 2


class SharedWeights:
    """The trainer's end: writes a version, then the file ``latest.json`` that names it with its hash.

    Satisfies the protocol of weight transfers (``init_weight_transfer``, ``pause``, ``send_weights``, ``resume``,
    ``destroy``): nothing is paused, since workers load a version when they choose to.

    Args:
        folder: None makes one in shared memory, or where there is none in the folder for temporary files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or "")
        self.version = 0
        self._own: SharedFolder | None = None

    def init_weight_transfer(self) -> None:
        """Make the folder."""
        if not self.folder.name:
            self._own = SharedFolder()
            self.folder = self._own.path
        self.folder.mkdir(parents=True, exist_ok=True)

    def pause(self) -> None:
        """Workers go on with what they have."""

    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the next version and make it the latest; reads every tensor, as sharded ones need it.

        Raises:
            WeightSyncError: The file is not what was written (shared memory is full, say).
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
                f"version {version} ({size / 1e6:.0f} MB) could not be written to {self.folder} ({free / 1e6:.0f} MB free): "
                f"{error}. Make room there.",
                phase="bucket", version=version,
            ) from error  # fmt: skip
        draft = self.folder / "latest.draft"
        draft.write_text(json.dumps({"version": version, "file": path.name, "xxh3": digest}), encoding="utf-8")
        draft.replace(self.folder / "latest.json")
        self.version = version
        (self.folder / f"weights-{version - VERSIONS_KEPT}.safetensors").unlink(missing_ok=True)

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """Remove the files; and the folder, where it is our own."""
        if self._own is not None:
            self._own.close()
        elif self.folder.name:
            remove_weights(self.folder)


def remove_weights(folder: Path) -> None:
    """Remove shared weights; and their folder, unless it was given by the user."""
    if folder.name.startswith("posttrain-"):
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in [*folder.glob("weights-*.safetensors"), folder / "latest.json"]:
        path.unlink(missing_ok=True)


def read_weights(folder: str | Path, version: int, timeout: float = 60.0) -> tuple[dict[str, Tensor], int]:
    """The newest weights, at least of ``version``, and which they are.

    Args:
        folder: Of a `SharedWeights`.
        version: Least version that will do.
        timeout: Seconds to wait for it.

    Raises:
        WeightSyncError: It did not come, or its content is not what was written.
    """
    limit, newest = time.monotonic() + timeout, None
    while True:
        try:
            latest = json.loads(Path(folder, "latest.json").read_text(encoding="utf-8"))
            newest = latest["version"]
            if newest >= version:
                return file_tensors(Path(folder, latest["file"]), latest["xxh3"]), newest
        except FileNotFoundError:  # None was written yet, or a newer one has replaced it meanwhile.
            pass
        except ModelError as error:
            raise WeightSyncError(f"{folder}: {error}", phase="end", version=newest) from error
        if time.monotonic() > limit:
            raise WeightSyncError(
                f"weights of version {version} did not appear in {folder} within {timeout:g} s (there: {newest}).",
                phase="end", version=version,
            )  # fmt: skip
        time.sleep(0.05)


@torch.no_grad()
def copy_into(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give a model these weights, every one of them and no other.

    Raises:
        ModelError: Names or shapes differ: it is another architecture.
    """
    own = {name: read() for name, read in merged_weights(model)}
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape]
    if missing or unknown or shapes:
        raise ModelError(
            f"the weights do not belong to the worker's model: {len(missing)} missing ({missing[:3]}), {len(unknown)} unknown "
            f"({unknown[:3]}), {len(shapes)} of another shape ({shapes[:3]})."
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def as_dtype(name: Any) -> torch.dtype | None:
    """A dtype by its name, with or without ``torch.``; None where an engine did not say, or keeps whatever comes.

    >>> as_dtype("torch.bfloat16"), as_dtype("auto")
    (torch.bfloat16, None)
    """
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


class Weights:
    """A model's weights, computed as they are read; every reading gives those of the moment.

    Where parameters are sharded, reading is a collective: all ranks iterate, whoever sends.

    Args:
        model: The trainer's model, wrapped or not, with or without adapters.
        dtype: Floating tensors are cast to it; None leaves them.
        checkpoint_names: Names and layout as ``save_pretrained`` writes them, where the model's own differ (experts).
        adapters: Merged into the weights; False: those of the base model.

    Attributes:
        names: Of what is sent, without reading anything.
        nbytes: Of what was read last.

    Raises:
        ModelError: Adapters on flattened shards.
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
                "adapters on a model under FSDP1 cannot be sent to a rollout engine: its parameters are flattened, and merging "
                "would add to shards. Use FSDP2 (fsdp_version: 2) or DeepSpeed ZeRO."
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
            from transformers.core_model_loading import revert_weight_conversion

            base = causal_lm(bare)
            yield from revert_weight_conversion(base, dict(pairs)).items()


def renamed(model: nn.Module) -> bool:
    """Whether transformers loads this architecture under other names, or in another layout, than its checkpoint's."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    base = causal_lm(model)
    known = getattr(base, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(base, add_legacy=False) if known is None else known)
