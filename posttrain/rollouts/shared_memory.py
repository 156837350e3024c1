"""Tensors in files of shared memory: written once, read by other processes, checked by a hash, removed with their owner."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.errors import ConfigError, ModelError

SHARED_FOLDER = Path("/dev/shm")


def checksum(data: Any) -> str:
    """The 128-bit xxh3 of bytes, as hexadecimal digits.

    >>> checksum(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128(data).hexdigest()


def write_tensors(tensors: Iterable[tuple[str, Tensor]], path: Path) -> str:
    """Write a safetensors file, and return the `checksum` of its bytes.

    Raises:
        OSError: It cannot be written: no room is left in shared memory (a container's is often 64 MB), say.
    """
    whole, seen = {}, set[int]()
    for name, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        whole[name] = tensor.clone() if memory in seen else tensor  # Layers of layer_replication share their weights.
        seen.add(memory)
    try:
        save_file(whole, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return _file_checksum(path)


def _file_checksum(path: Path) -> str:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return checksum(data)


def file_tensors(path: Path, announced: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. They share the file's memory, so copy a tensor to keep it.

    Raises:
        ModelError: Other bytes than were announced by their checksum, or no safetensors file.
    """
    got = _file_checksum(path)
    if got != announced:
        raise ModelError(
            f"the weights' checksum is {got}, and {announced} was announced: their bytes changed on the way."
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"the weights are not in the safetensors format: {error!r}") from error


def shared_path(path: str) -> Path:
    """Return the file of a bucket or an adapter: ``posttrain-*/*.safetensors`` below `shared_root`, or in a folder below.

    Raises:
        ConfigError: Any other path, a link, no file, or a file or folder of another account.
    """
    file, root = Path(path), shared_root()
    known = any(file.match(f"{root}/posttrain-*/{below}*.safetensors") for below in ("", "*/"))
    if not known or file.resolve() != file or not file.is_file():
        raise ConfigError(
            f"path={path!r} is no regular file {root}/posttrain-*/*.safetensors, the only files that are read."
        )
    # Root may replace any file anyway, and no other account enters a folder that is closed to it.
    folder = root / file.relative_to(root).parts[0]
    owners = {file.stat().st_uid, folder.stat().st_uid} - {os.geteuid(), 0}
    if owners or folder.stat().st_mode & 0o022:
        raise ConfigError(
            f"path={path!r}: another account could replace the weights. {folder} has the mode {folder.stat().st_mode & 0o777:o} "
            f"and the owner {folder.stat().st_uid}, the file has the owner {file.stat().st_uid}, and the server runs as user "
            f"{os.geteuid()}. Fix: run the server and the trainer as one user."
        )
    return file


def shared_root() -> Path:
    """Return where weights for processes of this machine are written: shared memory, else the folder for temporary files."""
    return SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else Path(tempfile.gettempdir()).resolve()


def hold(folder: Path) -> int | None:
    """Lock a folder for as long as this process lives; None where another holds it, or has removed it."""
    import fcntl  # Where there is none, nothing that asks for shared memory runs.

    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)
    except OSError:
        os.close(lock)
        return None
    return lock


def remove_orphans(root: Path | None = None) -> None:
    """Remove folders of weights that no process holds (see `hold`): theirs was killed.

    The lock of the system tells it, since numbers of processes are used again, and mean others in another container.
    """
    for path in (shared_root() if root is None else root).glob("posttrain-[0-9]*-*/"):
        lock = hold(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


class SharedFolder:
    """A folder in shared memory that this process holds; it goes with the last reference to this object.

    Where the process is killed, another one removes it (`remove_orphans`).
    """

    def __init__(self) -> None:
        remove_orphans()
        lock = None
        while lock is None:  # Another process may take it for an orphan before it is held.
            self.path = Path(tempfile.mkdtemp(prefix=f"posttrain-{os.getpid()}-", dir=shared_root()))
            lock = hold(self.path)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder."""
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    os.close(lock)
    if os.getpid() == owner:  # Not a fork of it.
        shutil.rmtree(path, ignore_errors=True)
