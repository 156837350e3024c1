"""One run a folder: a lock file that names the process, refused while that process lives and taken over afterwards."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError

__all__ = ["FolderLock", "check_writable"]

logger = logging.getLogger(__name__)

NAME = ".posttrain.lock"
BEAT = 30.0  # Seconds between two signs of life.
SILENCE = 15 * 60.0  # Seconds after which a run on another machine, whose process we cannot see, counts as gone.


def check_writable(output_dir: str | None) -> None:
    """Refuse an ``output_dir`` that cannot be written or is in use by another run, before anything is computed.

    Raises:
        ConfigError: It is a file, or the system refuses to write there (its reason is given), or a live process
            trains into it.
    """
    if not output_dir:
        raise ConfigError("output_dir is empty. Give a folder for checkpoints and the run record.")
    folder = Path(output_dir).expanduser()
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
    """A file that says which process trains into a folder.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser() / NAME
        self.held = False
        self._beat = 0.0

    def check(self) -> None:
        """Refuse a folder that a live process of another run holds.

        Raises:
            ConfigError: Names the process, its machine, and since when.
        """
        owner = self._owner()
        if owner is None or not _is_foreign(owner) or not self._is_alive(owner):
            return
        raise ConfigError(
            f"output_dir={str(self.path.parent)!r} is in use by process {owner['pid']} on {owner['host']} since "
            f"{owner['since']}. Two runs in one folder would overwrite each other. Choose another output_dir, or stop "
            "it."
        )

    def acquire(self) -> None:
        """Take the folder.

        Raises:
            ConfigError: Another live run holds it.
        """
        if self._create():
            return
        self.check()
        owner = self._owner()
        if owner is not None and _is_foreign(owner):
            logger.warning(
                "%s was held by process %s on %s, which is gone: taking it over.",
                self.path.parent,
                owner["pid"],
                owner["host"],
            )
        part = self.path.with_name(f"{NAME}.{os.getpid()}")
        part.write_text(_me(), encoding="utf-8")
        os.replace(part, self.path)
        self.held = True

    def _create(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_me())
        self.held = True
        return True

    def beat(self) -> None:
        """Show a sign of life, at most every 30 seconds."""
        if self.held and time.monotonic() - self._beat > BEAT:
            self._beat = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        """Give the folder back, if it is still ours; safe to call twice."""
        owner = self._owner() if self.held else None
        if owner is not None and not _is_foreign(owner):
            self.path.unlink(missing_ok=True)
        self.held = False

    def _owner(self) -> dict[str, Any] | None:
        """What the file says; None when there is none, or it was cut off by a crash."""
        try:
            owner = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return owner if isinstance(owner, dict) and {"pid", "host", "since"} <= set(owner) else None

    def _is_alive(self, owner: dict[str, Any]) -> bool:
        if owner["host"] != socket.gethostname():
            with contextlib.suppress(OSError):
                return time.time() - self.path.stat().st_mtime < SILENCE
            return False
        born = _born(owner["pid"])
        # A process that began later only has the number of the one that wrote the file.
        return born is not None and (owner.get("born") is None or abs(born - owner["born"]) < 2.0)


def _born(pid: int) -> float | None:
    """When a process of this machine began, in seconds since 1970; None when there is no such process."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return time.time()  # It is there, and belongs to somebody else.


def _me() -> str:
    return json.dumps(
        {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "born": _born(os.getpid()),
            "launcher": _launcher(),
        }
    )


def _launcher() -> list[Any] | None:
    """What the processes of one distributed run have in common; None for a run of one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    return [os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]


def _is_foreign(owner: dict[str, Any]) -> bool:
    """Neither this process nor another rank of its run."""
    if owner["host"] == socket.gethostname() and owner["pid"] == os.getpid():
        return False
    return _launcher() is None or owner.get("launcher") != _launcher()
