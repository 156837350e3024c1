"""Single tensors out of saved checkpoints, without loading the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["checkpoint_tensors"]

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # Each may be an index of shards.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def checkpoint_tensors(
    source: str, wanted: set[str] | None = None, *, adapter: bool = False
) -> Iterable[tuple[str, Tensor]]:
    """Tensors of a checkpoint, sharded or not, read one by one.

    Args:
        source: Folder or hub id.
        wanted: Names; None is all.
        adapter: Of the adapter in it, not of the model.
    """
    names = ADAPTER_WEIGHTS if adapter else WEIGHTS
    for name in names:
        index = _find(source, f"{name}.index.json")
        if index is not None:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted({place for key, place in places.items() if wanted is None or key in wanted})
            files = [path for shard in shards if (path := _find(source, shard)) is not None]
        else:
            path = _find(source, name)
            files = [] if path is None else [path]
        for file in files:
            for key, tensor in _read(file):
                if wanted is None or key in wanted:
                    yield key, tensor


def _find(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _read(file: Path) -> Iterable[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping.
                yield key, opened.get_tensor(key)
    else:
        yield from torch.load(file, map_location="cpu", weights_only=True).items()
