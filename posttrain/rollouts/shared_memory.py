"""Tensors in files in shared memory. One process writes a file, and other processes read it and verify its hash. A file is
removed when the process that owns it ends.
"""

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
    """Return the 128-bit xxh3 hash of bytes, as hexadecimal digits.

    >>> checksum(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128(data).hexdigest()


def write_tensors(tensors: Iterable[tuple[str, Tensor]], path: Path) -> str:
    """Write tensors to a safetensors file, and return the `checksum` of the file.

    Raises:
        OSError: The file cannot be written, for example because shared memory is full (64 MB in many containers).
    """
    whole, seen = {}, set[int]()
    for name, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        # Copy a weight that shares memory with an earlier tensor. This happens in layers that peft repeats
        # (layer_replication).
        whole[name] = tensor.clone() if memory in seen else tensor
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
    """Return the tensors of a safetensors file after a check of its checksum. The tensors share the file's memory. Copy a
    tensor if you need it after the file is closed.

    Raises:
        ModelError: The file's checksum differs from the announced checksum, or the file is not a safetensors file.
    """
    got = _file_checksum(path)
    if got != announced:
        raise ModelError(
            f"the weights have the checksum {got}, but {announced} was announced: their bytes changed in transit."
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"the weights are not in the safetensors format: {error!r}") from error


def shared_path(path: str) -> Path:
    """Check the path of a file with weights or an adapter, and return it. The path must be ``posttrain-*/*.safetensors``
    below `shared_root`, or one folder deeper.

    Raises:
        ConfigError: The path has another form, or is not a regular file. The error is also raised if another user account
            owns the file or its folder, or can write to the folder.
    """
    file, root = Path(path), shared_root()
    valid = any(file.match(f"{root}/posttrain-*/{below}*.safetensors") for below in ("", "*/"))
    if not valid or file.resolve() != file or not file.is_file():
        raise ConfigError(
            f"path={path!r} is not a regular file {root}/posttrain-*/*.safetensors. Only such files are read."
        )
    # Accept files that root owns, because root can replace any file. Accept a private folder, because no other account can
    # write to it.
    folder = root / file.relative_to(root).parts[0]
    owners = {file.stat().st_uid, folder.stat().st_uid} - {os.geteuid(), 0}
    if owners or folder.stat().st_mode & 0o022:
        raise ConfigError(
            f"path={path!r}: another account could replace the weights. {folder} has the mode "
            f"{folder.stat().st_mode & 0o777:o} and the owner {folder.stat().st_uid}, the file has the owner "
            f"{file.stat().st_uid}, and the server runs as user {os.geteuid()}. Fix: run the server and the trainer "
            "as the same user."
        )
    return file


def shared_root() -> Path:
    """Return the folder in which processes of this machine share weights: shared memory if available, else the temporary
    folder.
    """
    return SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else Path(tempfile.gettempdir()).resolve()


def hold(folder: Path) -> int | None:
    """Lock a folder until this process ends. Return None if another process has locked or removed the folder."""
    import fcntl  # Systems without fcntl do not use shared memory.

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
    """Remove folders of weights whose process has ended. A running process holds the lock of its folder (`hold`).

    The lock is tested instead of the process id, because process ids are reused and differ between containers.
    """
    for path in (shared_root() if root is None else root).glob("posttrain-[0-9]*-*/"):
        lock = hold(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


class SharedFolder:
    """Folder in shared memory that this process owns. The folder is removed when the last reference to this object is
    deleted.

    If the process is killed, another process removes the folder later (`remove_orphans`).
    """

    def __init__(self) -> None:
        remove_orphans()
        lock = None
        # Try again if another process removed the folder before it was locked. An unlocked folder looks like the folder of a
        # process that has ended.
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=f"posttrain-{os.getpid()}-", dir=shared_root()))
            lock = hold(self.path)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder."""
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    os.close(lock)
    # A forked child process must not remove its parent's folder.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
