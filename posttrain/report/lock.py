"""Lock of a run's folder, which ensures that only one run writes to the folder."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import filelock

from posttrain.errors import CheckpointError, ConfigError
from posttrain.report.files import read_json, whole_file

logger = logging.getLogger(__name__)


# Name of the file that describes the process that holds the lock. Error messages quote this file.
LOCK = ".posttrain.lock"


# Name of the locked file. The operating system releases the lock when the process ends.
GUARD = f"{LOCK}.guard"


# Number of seconds to wait for the lock. A process that only checks the folder holds the lock for a moment too.
LOCK_WAIT = 1.0


def check_writable(output_dir: str | None) -> None:
    """Check that ``output_dir`` is writable and not used by another run.

    Raises:
        ConfigError: ``output_dir`` is empty, is a file, is not writable, is in use by a running process, or has a name that
            is not valid in the encoding of the locale.
    """
    if not output_dir:
        raise ConfigError("output_dir is empty. Fix: set it to a folder for checkpoints and the run record.")
    try:
        folder = Path(output_dir).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"output_dir={output_dir!r} names no folder: {error} Fix: write the whole path.") from error
    try:
        os.fsencode(folder)
        # encode() raises an error if the path contains bytes that are invalid in the file system's encoding. Python
        # represents such bytes as surrogates.
        str(folder).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"output_dir={output_dir!r} is not valid in the encoding of this locale ({sys.getfilesystemencoding()}), so no "
            "checkpoint could be written. Fix: use a UTF-8 locale (LC_ALL=C.UTF-8) or PYTHONUTF8=1, or choose a folder with "
            "a valid name."
        ) from error
    # Use a different file name in each process, because ranks check the folder at the same time.
    probe = folder / f".posttrain-write-test-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"output_dir={output_dir!r} cannot be written: {error.strerror or error}. Fix: choose another folder, or change "
            "its permissions."
        ) from error
    FolderLock(folder).check()


class FolderLock:
    """Lock of a run's folder. All trainers of a process, and all ranks of a distributed run, share the lock.

    Args:
        folder: Folder of the run.

    Attributes:
        path: File that describes the process that holds the lock.
        run: Id of the run (eight hexadecimal digits). A resumed run uses the id in its checkpoint.
        held: Whether this object holds the lock.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser() / LOCK
        self.run = secrets.token_hex(4)
        self.held = False
        self._me = (os.getpid(), socket.gethostname())
        # On file systems without locks, filelock uses a lock file. filelock removes this file if the process that created it
        # no longer exists.
        self._lock = filelock.FileLock(self.path.with_name(GUARD), thread_local=False, is_singleton=True)

    def check(self) -> None:
        """Check that no running process of another run holds the lock.

        Raises:
            ConfigError: The folder is in use. The error contains the process, its machine, and the time of its start.
        """
        owner = self._owner()
        # A lock that another rank of the same run holds is not an error. All ranks of a run have the same launcher and use
        # the same folder.
        if owner is not None and (_launcher() is None or owner.get("launcher") != _launcher()):
            self._lock_system(timeout=0)
            self._lock.release()

    def acquire(self) -> None:
        """Acquire the lock. If several processes call this method at the same time, only one of them succeeds.

        Raises:
            ConfigError: Another running process holds the lock.
        """
        self._lock_system(timeout=LOCK_WAIT)
        owner = self._owner()
        if owner is not None and (owner["pid"], owner["host"]) != self._me:
            logger.warning(
                "%s was locked by process %s on %s, which is no longer running. This run now uses the folder.",
                self.path.parent, owner["pid"], owner["host"],
            )  # fmt: skip
        owner = {"pid": self._me[0], "host": self._me[1], "since": time.strftime("%Y-%m-%d %H:%M:%S"), "run": self.run}
        with whole_file(self.path) as part:
            part.write_text(json.dumps(owner | {"launcher": _launcher()}), encoding="utf-8")
        if self.held:
            self._lock.release()  # filelock counts acquisitions and must be released as often, so the lock is acquired only once.
        self.held = True

    def assert_owned(self) -> None:
        """Check that no other run uses the folder, which is possible if the lock file was removed manually.

        Raises:
            CheckpointError: Another run uses the folder. The error contains its process and machine.
        """
        owner = self._owner() if self.held else None
        if owner is not None and (owner["pid"], owner["host"]) != self._me:
            raise CheckpointError(
                f"process {owner['pid']} on {owner['host']} has used {str(self.path.parent)!r} since {owner['since']}, after "
                "this run's lock file was removed. This run stops before it overwrites files. Its checkpoints are intact. Fix: "
                "resume this run in another output_dir."
            )

    def release(self) -> None:
        """Release the lock if this object holds it. Repeated calls have no effect."""
        if not self.held:
            return
        owner = self._owner()
        if owner is not None and (owner["pid"], owner["host"]) == self._me:
            self.path.unlink(missing_ok=True)
        self._lock.release()
        self.held = False

    def _lock_system(self, timeout: float) -> None:
        try:
            self._lock.acquire(timeout=timeout)
        except filelock.Timeout as error:
            owner = self._owner() or {"pid": "unknown", "host": "an unknown machine", "since": "an unknown time"}
            run = f" (run {owner['run']})" if owner.get("run") else ""
            raise ConfigError(
                f"output_dir={str(self.path.parent)!r} has been in use by process {owner['pid']} on {owner['host']} since "
                f"{owner['since']}{run}. Two runs in one folder would overwrite each other. Fix: choose another output_dir, or "
                "stop that run."
            ) from error

    def _owner(self) -> dict[str, Any] | None:
        """Read the description of the lock's owner. Return None if the file is missing or was truncated by a crash."""
        owner = read_json(self.path)
        return owner if {"pid", "host", "since"} <= set(owner) else None


def _launcher() -> list[Any] | None:
    """Return an identifier of a distributed run, which is equal on all ranks. Return None for a run with one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    return [os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
