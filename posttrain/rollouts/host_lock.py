"""A lease on something that keeps none itself: a lock file of this machine, which goes with the process that holds it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["HostLock"]


class HostLock:
    """A lock file keyed by a name.

    Args:
        name: Of what is locked: an address, say.
    """

    def __init__(self, name: str) -> None:
        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self.path = Path(tempfile.gettempdir()) / f"posttrain-lease-{digest}.lock"
        self._file: Any = None

    def acquire(self, holder: str) -> str | None:
        """Take it; where another process has it, that one's name. Taking it twice does nothing."""
        if self._file is not None:
            return None
        file = open(self.path, "a+")  # noqa: SIM115 - held until `release`.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            other = file.read().strip() or "another trainer"
            file.close()
            return other
        file.truncate(0)
        file.write(f"{holder} (process {os.getpid()})")
        file.flush()
        self._file = file
        return None

    def release(self) -> None:
        """Give it back."""
        if self._file is not None:
            self._file.close()
            self._file = None
