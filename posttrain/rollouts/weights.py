"""What a trainer's model sends to an engine that holds a copy of it: whole tensors, cast, in buckets of one dtype."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, ModelError
from posttrain.models.heads import unwrapped
from posttrain.models.merged import adapter_weights, merged_weights
from posttrain.models.parallel import flattens_parameters, summoned
from posttrain.rollouts.wire import SHARED_FOLDER

__all__ = [
    "Bucket",
    "SharedFile",
    "Weights",
    "as_dtype",
    "buckets",
    "named_weights",
    "safetensors_bytes",
]

SHARED_NAME = re.compile(r"posttrain-(\d+)-\d+\.safetensors")

# How the safetensors format calls its dtypes: https://github.com/huggingface/safetensors#format
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

Bucket = list[tuple[str, Tensor]]


def as_dtype(name: Any) -> torch.dtype | None:
    """A dtype by its name, with or without ``torch.``; None where an engine did not say, or keeps whatever comes.

    >>> as_dtype("torch.bfloat16"), as_dtype("auto")
    (torch.bfloat16, None)
    """
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


class Weights:
    """A model's weights, computed as they are read; every reading gives those of the moment.

    Where parameters are sharded, reading is a collective: all ranks iterate, whoever sends.

    Args:
        model: The trainer's model, wrapped or not, with or without adapters.
        dtype: Floating tensors are cast to it; None leaves them.
        checkpoint_names: Names and layout as ``save_pretrained`` writes them, where the model's own differ (experts).
        adapter_only: Send the adapter's tensors, for an engine that applies them itself.

    Attributes:
        names: Of what is sent, without reading anything.
        adapter: ``{r, alpha, target_modules}`` with ``adapter_only``, else None.

    Raises:
        ModelError: Adapters on flattened shards; an adapter that cannot be sent alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        checkpoint_names: bool = False,
        adapter_only: bool = False,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.adapter: dict[str, Any] | None = None
        bare: Any = unwrapped(model)
        if flattens_parameters(model) and hasattr(bare, "peft_config"):
            raise ModelError(
                "adapters on a model under FSDP1 cannot be sent to a rollout engine: its parameters are flattened, and merging "
                "would add to shards. Use FSDP2 (fsdp_version: 2) or DeepSpeed ZeRO."
            )
        self.checkpoint_names = checkpoint_names and _renamed(bare)
        if adapter_only:
            found = adapter_weights(model)
            if found is None:
                raise ModelError(
                    "this adapter is more than LoRA on linear layers: send it merged (vllm_lora_sync='merge')."
                )
            self.adapter = found[0]
            self.names = list(found[1])
        else:
            self.names = [name for name, _ in merged_weights(model)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        pairs = self._adapter() if self.adapter is not None else self._whole()
        for name, tensor in pairs:
            yield name, tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def _adapter(self) -> Iterator[tuple[str, Tensor]]:
        found = adapter_weights(self.model)
        assert found is not None
        yield from found[1].items()

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad(), summoned(self.model):
            pairs = ((name, read()) for name, read in merged_weights(self.model))
            if not self.checkpoint_names:
                yield from pairs
                return
            from transformers.core_model_loading import revert_weight_conversion

            bare: Any = unwrapped(self.model)
            base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
            yield from revert_weight_conversion(base, dict(pairs)).items()


def _renamed(model: Any) -> bool:
    """Whether transformers loads this architecture under other names, or in another layout, than its checkpoint's."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = getattr(base, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(base, add_legacy=False) if known is None else known)


def named_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Weights:
    """A model's weights for `posttrain.rollouts.base.RolloutEngine.load_weights`, adapters merged into copies."""
    return Weights(model, dtype=dtype)


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Tensors in their order, together up to ``limit`` bytes and one dtype; a larger tensor goes alone.

    >>> pairs = [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(9)), ("d", torch.zeros(1).half())]
    >>> [[name for name, _ in bucket] for bucket in buckets(pairs, 16)]
    [['a', 'b'], ['c'], ['d']]
    """
    if limit < 1:
        raise ConfigError(f"a bucket of {limit} bytes holds nothing. Set vllm_weight_bucket_mb to at least 1.")
    bucket: Bucket = []
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (held + size > limit or bucket[0][1].dtype != tensor.dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield bucket


def _header(bucket: Bucket) -> tuple[bytes, int]:
    """The safetensors header with its length, and the bytes behind it."""
    table, end = {}, 0
    for name, tensor in bucket:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Readers want the data aligned.
    return len(text).to_bytes(8, "little") + text, end


def _write(bucket: Bucket, target: Any) -> None:
    """A bucket in the safetensors format, without a copy in between."""
    header, _ = _header(bucket)
    target[: len(header)] = header
    offset = len(header)
    for _, tensor in bucket:
        size = tensor.numel() * tensor.element_size()
        if size:
            whole = torch.frombuffer(target, dtype=torch.uint8, count=size, offset=offset)
            whole.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        offset += size


def safetensors_bytes(bucket: Bucket) -> bytearray:
    """A bucket as a safetensors file in memory."""
    header, size = _header(bucket)
    body = bytearray(len(header) + size)
    _write(bucket, body)
    return body


class SharedFile:
    """A file in shared memory that is written again and again, so that its pages are there from the second time on.

    Attributes:
        path: ``/dev/shm/posttrain-<process>-<number>.safetensors``.
    """

    _count = 0

    def __init__(self) -> None:
        _remove_orphans()
        SharedFile._count += 1
        self.path = SHARED_FOLDER / f"posttrain-{os.getpid()}-{SharedFile._count}.safetensors"
        self._file = open(self.path, "w+b")  # noqa: SIM115 - held until `close`.
        os.chmod(self.path, 0o600)
        self._map: mmap.mmap | None = None

    def write(self, bucket: Bucket) -> memoryview:
        """Replace the content; the view is of the whole file."""
        header, size = _header(bucket)
        total = len(header) + size
        self._file.truncate(total)  # Readers want no byte behind the last tensor.
        if self._map is None or len(self._map) < total:
            self._unmap()
            self._map = mmap.mmap(self._file.fileno(), total)  # A smaller bucket leaves it as it is.
        _write(bucket, self._map)
        return memoryview(self._map)[:total]

    def _unmap(self) -> None:
        self._map = None  # Tensors over it may still be collected: the map goes with the last of them.

    def close(self) -> None:
        """Remove the file."""
        self._unmap()
        self._file.close()
        self.path.unlink(missing_ok=True)


def _remove_orphans() -> None:
    """Files of processes that are no more."""
    for path in SHARED_FOLDER.glob("posttrain-*.safetensors"):
        match = SHARED_NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists() and Path("/proc/self").exists():
            path.unlink(missing_ok=True)
