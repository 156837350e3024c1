"""Weights for engines in other processes of this machine: one file a version in shared memory, hashed, never rewritten."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError, WeightSyncError
from posttrain.models.merged import merged_weights
from posttrain.rollouts.buckets import MappedFile, SharedFile
from posttrain.rollouts.wire import hold, remove_orphans, shared_root

__all__ = ["SharedWeights", "copy_into", "read_weights", "remove_weights"]

OWN = "posttrain-async-"  # Begins the names of folders that we made.
KEPT = 2  # Versions: one may be read while the next is written.


class SharedWeights:
    """The trainer's end: writes a version, then the file ``latest.json`` that names it with its hash.

    Satisfies the protocol of weight transfers (``init_weight_transfer``, ``pause``, ``send_weights``, ``resume``,
    ``destroy``): nothing is paused, since workers load a version when they choose to.

    Args:
        folder: None makes one in shared memory, or where there is none in the folder for temporary files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.given = None if folder is None else Path(folder)
        self.folder = self.given or Path()
        self.version = 0
        self._held: int | None = None

    def init_weight_transfer(self) -> None:
        """Make the folder."""
        if self.given is not None:
            self.given.mkdir(parents=True, exist_ok=True)
        elif not self.folder.name:
            remove_orphans()
            while self._held is None:  # Another process may take it for an orphan before it is held.
                self.folder = Path(tempfile.mkdtemp(prefix=f"{OWN}{os.getpid()}-", dir=shared_root()))
                self._held = hold(self.folder)

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
        file = SharedFile(path)
        try:
            written, digest = file.write(whole)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            size = sum(tensor.nbytes for _, tensor in whole)
            file.close()
            raise WeightSyncError(
                f"version {version} ({size / 1e6:.0f} MB) could not be written to {self.folder} ({free / 1e6:.0f} MB free): "
                f"{error}. Make room there.",
                phase="bucket", version=version,
            ) from error  # fmt: skip
        marker = {"version": version, "file": file.leave().name, "bytes": written, "xxh3": digest}
        draft = self.folder / "latest.draft"
        draft.write_text(json.dumps(marker), encoding="utf-8")
        draft.replace(self.folder / "latest.json")
        self.version = version
        (self.folder / f"weights-{version - KEPT}.safetensors").unlink(missing_ok=True)

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """Remove the files; and the folder, where it is our own."""
        if self.folder.name:
            remove_weights(self.folder)
        if self._held is not None:
            os.close(self._held)
            self._held = None


def remove_weights(folder: Path) -> None:
    """Remove shared weights; and their folder, unless it was given by the user."""
    if folder.name.startswith(OWN):
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in [*folder.glob("weights-*.safetensors"), folder / "latest.json"]:
        path.unlink(missing_ok=True)


def latest(folder: str | Path) -> dict[str, Any] | None:
    """What the newest version is; None before the first."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(Path(folder, "latest.json").read_text(encoding="utf-8"))
    return None


def read_weights(folder: str | Path, version: int, timeout: float = 60.0) -> tuple[dict[str, Tensor], int]:
    """The newest weights, at least of ``version``, and which they are.

    Args:
        folder: Of a `SharedWeights`.
        version: Least version that will do.
        timeout: Seconds to wait for it.

    Raises:
        WeightSyncError: It did not come, or its content is not what was written.
    """
    limit = time.monotonic() + timeout
    while True:
        marker = latest(folder)
        if marker is not None and marker["version"] >= version:
            with contextlib.suppress(FileNotFoundError):  # A newer one has replaced it meanwhile.
                return _checked(Path(folder, marker["file"]), marker), marker["version"]
        if time.monotonic() > limit:
            found = None if marker is None else marker["version"]
            raise WeightSyncError(
                f"weights of version {version} did not appear in {folder} within {timeout:g} s (there: {found}).",
                phase="end", version=version,
            )  # fmt: skip
        time.sleep(0.05)


def _checked(path: Path, marker: dict[str, Any]) -> dict[str, Tensor]:
    file = MappedFile(path)
    size, digest = len(file.data), file.checksum()
    if size != marker["bytes"] or digest != marker["xxh3"]:
        raise WeightSyncError(
            f"{path} holds {size} bytes with hash {digest}; written were {marker['bytes']} with {marker['xxh3']}.",
            phase="end", version=marker["version"],
        )  # fmt: skip
    return dict(file.tensors())


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


def tensors_of(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """For engines that take weights themselves."""
    yield from weights.items()
