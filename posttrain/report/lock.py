"""The lock of a run's folder: one run writes it."""

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


# Names the process for error texts.
LOCK = ".posttrain.lock"


# What the system locks; it lets go when the process dies.
GUARD = f"{LOCK}.guard"


# Seconds: another process that only asks whether the folder is free holds it for an instant.
LOCK_WAIT = 1.0


def check_writable(output_dir: str | None) -> None:
    """Refuse an ``output_dir`` that cannot be written or is in use by another run, before anything is computed.

    Raises:
        ConfigError: It is a file, or the system refuses to write there (its reason is given), or a live process
            trains into it, or its name is not text in the encoding of the locale.
    """
    if not output_dir:
        raise ConfigError("output_dir is empty. Give a folder for checkpoints and the run record.")
    folder = Path(output_dir).expanduser()
    try:
        os.fsencode(folder)
        str(folder).encode("utf-8")  # Python keeps bytes that it cannot decode as surrogates.
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"output_dir={output_dir!r} is not text in the encoding of this locale ({sys.getfilesystemencoding()}), so the first "
            "checkpoint could not be written. Fix: run with a UTF-8 locale (LC_ALL=C.UTF-8) or PYTHONUTF8=1, or choose a folder "
            "whose name is valid there."
        ) from error
    probe = folder / f".posttrain-write-test-{os.getpid()}"  # One a process: ranks check at the same time.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"output_dir={output_dir!r} cannot be written: {error.strerror or error}. Choose another folder, or change "
            "its permissions."
        ) from error
    FolderLock(folder).check()


class FolderLock:
    """The lock of a run's folder; trainers of one process, and ranks of one distributed run, share it.

    Args:
        folder: The run's folder.

    Attributes:
        path: The file that names the owner.
        run: Id of the run, eight hexadecimal digits; a resumed run takes that of its checkpoint.
        held: Whether this object has the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser() / LOCK
        self.run = secrets.token_hex(4)
        self.held = False
        self._me = (os.getpid(), socket.gethostname())
        # Where a file system has no locks, filelock falls back to a file that is removed once its process is gone.
        self._lock = filelock.FileLock(self.path.with_name(GUARD), thread_local=False, is_singleton=True)

    def check(self) -> None:
        """Refuse a folder that a live process of another run holds.

        Raises:
            ConfigError: Names the process, its machine, and since when.
        """
        owner = self._owner()
        # Ranks of one run share the folder.
        if owner is not None and (_launcher() is None or owner.get("launcher") != _launcher()):
            self._lock_system(timeout=0)
            self._lock.release()

    def acquire(self) -> None:
        """Take the folder; of several processes that try at the same moment, one gets it.

        Raises:
            ConfigError: Another live run holds it.
        """
        self._lock_system(timeout=LOCK_WAIT)
        owner = self._owner()
        if owner is not None and (owner["pid"], owner["host"]) != self._me:
            logger.warning(
                "%s was held by process %s on %s, which is gone: taking it over.",
                self.path.parent, owner["pid"], owner["host"],
            )  # fmt: skip
        owner = {"pid": self._me[0], "host": self._me[1], "since": time.strftime("%Y-%m-%d %H:%M:%S"), "run": self.run}
        with whole_file(self.path) as part:
            part.write_text(json.dumps(owner | {"launcher": _launcher()}), encoding="utf-8")
        if self.held:
            self._lock.release()  # Counted once.
        self.held = True

    def assert_held(self) -> None:
        """Refuse to go on in a folder whose lock was removed by hand and taken by another run.

        Raises:
            CheckpointError: Names the run that has it now.
        """
        owner = self._owner() if self.held else None
        if owner is not None and (owner["pid"], owner["host"]) != self._me:
            raise CheckpointError(
                f"this run lost {str(self.path.parent)!r} to process {owner['pid']} on {owner['host']}, which took it over at "
                f"{owner['since']}: the lock of this run was removed. It stops before anything is overwritten; its "
                "checkpoints are intact. Fix: resume in another output_dir."
            )

    def release(self) -> None:
        """Give the folder back, if it is still ours; safe to call twice."""
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
                f"output_dir={str(self.path.parent)!r} is in use by process {owner['pid']} on {owner['host']} since "
                f"{owner['since']}{run}. Two runs in one folder would overwrite each other. Choose another output_dir, or "
                "stop it."
            ) from error

    def _owner(self) -> dict[str, Any] | None:
        """What the file says; None when there is none, or it was cut off by a crash."""
        owner = read_json(self.path)
        return owner if {"pid", "host", "since"} <= set(owner) else None


def _launcher() -> list[Any] | None:
    """What the processes of one distributed run have in common; None for a run of one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    return [os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
