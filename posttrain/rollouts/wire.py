"""What a rollout server and its clients agree on: names of headers and fields, limits of time, and how bytes are checked."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import xxhash

from posttrain.errors import ConfigError

__all__ = [
    "ADAPTER_FIELDS",
    "API_KEY_VARIABLE",
    "CHECKSUM_HEADER",
    "DRAIN_TIMEOUT_S",
    "LEASE_HEADER",
    "LEASE_TTL_S",
    "LONGEST_LEASE_S",
    "LOOPBACK",
    "RENDEZVOUS_S",
    "SAFETENSORS",
    "SHARED_FOLDER",
    "UPDATE_TIMEOUT_S",
    "VERSION_HEADER",
    "WEIGHTS_GROUP",
    "checked_adapter",
    "checksum",
    "hold",
    "remove_orphans",
    "shared_path",
    "shared_root",
]

LEASE_HEADER = "X-Lease"
VERSION_HEADER = "X-Version"
CHECKSUM_HEADER = "X-Checksum"
SAFETENSORS = "application/x-safetensors"
API_KEY_VARIABLE = "POSTTRAIN_API_KEY"  # The token in the environment, where no list of processes shows it.

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # Addresses of this machine, whose memory can be shared.

LEASE_TTL_S = 90.0  # A trainer that is silent for so long has ended: its server resumes and is free again.
LONGEST_LEASE_S = 3600.0  # However long it was asked for: its holder renews it.
DRAIN_TIMEOUT_S = 120.0  # Longest wait of an update for requests that are running.
UPDATE_TIMEOUT_S = 720.0  # Longest silence between two parts of an update.
RENDEZVOUS_S = 120.0  # Until all have joined a weight-update group.
WEIGHTS_GROUP = "posttrain-weights"  # Prefix of its keys.

SHARED_FOLDER = Path("/dev/shm")
SHARED_NAME = re.compile(r"posttrain-[A-Za-z0-9_.-]{1,200}\.safetensors")
SHARED_PATTERNS = ("posttrain-[0-9]*-[0-9]*.safetensors", "posttrain-async-[0-9]*-*")  # Held while their process lives.
ADAPTER_FIELDS = ("r", "alpha", "target_modules")


def shared_root() -> Path:
    """Where weights lie for processes of this machine: shared memory, or where there is none the folder for temporary files."""
    return SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else Path(tempfile.gettempdir())


def checksum(data: Any) -> str:
    """The 128-bit xxh3 of bytes, as hexadecimal digits.

    >>> checksum(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128(data).hexdigest()


def hold(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Open and lock a file or folder for as long as this process lives; None where another holds it, or has removed it."""
    import fcntl  # Where there is none, nothing that asks for shared memory runs.

    try:
        held = os.open(path, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)
    except OSError:
        os.close(held)
        return None
    return held


def remove_orphans(root: Path | None = None) -> None:
    """Remove shared weights that no process holds (see `hold`): theirs was killed.

    The lock of the system tells it, since numbers of processes are used again, and mean others in another container.
    """
    root = shared_root() if root is None else root
    for path in (path for pattern in SHARED_PATTERNS for path in root.glob(pattern)):
        held = hold(path)
        if held is None:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # Another user's.
                path.unlink()
        os.close(held)


def shared_path(path: str) -> Path:
    """The file that a bucket in shared memory may stand in: directly under ``/dev/shm``, called ``posttrain-*.safetensors``.

    Raises:
        ConfigError: Any other path, a link, or no file.
    """
    found = Path(path)
    if found.parent != SHARED_FOLDER or not SHARED_NAME.fullmatch(found.name):
        raise ConfigError(
            f"path={path!r} is not {SHARED_FOLDER}/posttrain-*.safetensors, the only files that are read."
        )
    if found.is_symlink() or not found.is_file():
        raise ConfigError(f"path={path!r} is no regular file on the server's machine.")
    return found


def shape_of(text: Any) -> dict[str, Any]:
    """What a server says of a model's shape, and a trainer compares with its own.

    Args:
        text: Config of the language model; heads of keys and values that it does not name are None.
    """
    return {
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None),
    }


def checked_adapter(adapter: Any) -> dict[str, Any] | None:
    """The description of an adapter whose tensors are pushed: ``{r, alpha, target_modules}``.

    Raises:
        ConfigError: Other fields, or values that cannot be.

    >>> checked_adapter({"r": 8, "alpha": 16, "target_modules": ["q_proj"]})["r"]
    8
    """
    if adapter is None:
        return None
    if not isinstance(adapter, dict) or set(adapter) != set(ADAPTER_FIELDS):
        raise ConfigError(f"adapter={adapter!r} must hold exactly {', '.join(ADAPTER_FIELDS)}.")
    r, alpha, modules = (adapter[name] for name in ADAPTER_FIELDS)
    if not isinstance(r, int) or r < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ConfigError(f"adapter: r={r!r} must be a whole number above 0, and alpha={alpha!r} a number above 0.")
    named = isinstance(modules, list) and all(isinstance(name, str) for name in modules)
    if not modules or not (named or isinstance(modules, str)):
        raise ConfigError(f"adapter: target_modules={modules!r} must be names of modules, or one pattern.")
    return adapter
