"""One run a folder: a lock file that names the process, refused while that process lives and taken over afterwards."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import CheckpointError, ConfigError

__all__ = ["FolderLock", "check_writable"]

logger = logging.getLogger(__name__)

NAME = ".posttrain.lock"
GUARD = ".posttrain.lock.guard"  # Held for the milliseconds in which the lock changes hands.
BEAT = 30.0  # Seconds between two signs of life.
SILENCE_HERE = (
    3 * 60.0
)  # Seconds without one, after which a process that we cannot find on this machine counts as gone.
SILENCE = 15 * 60.0  # The same for a run on another machine, whose processes we cannot see.


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
    """A file that says which process trains into a folder; while it is held, a thread keeps it fresh.

    Args:
        folder: The run's folder.

    Attributes:
        run: Id of the run, eight hexadecimal digits; a resumed run takes that of its checkpoint.
        held: Whether this process has the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser() / NAME
        self.run = secrets.token_hex(4)
        self.held = False
        self._stop = threading.Event()
        self._lost_to: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse a folder that a live process of another run holds.

        Raises:
            ConfigError: Names the process, its machine, and since when.
        """
        owner = self._owner()
        if owner is None or not _is_foreign(owner) or not self._is_alive(owner):
            return
        run = f" (run {owner['run']})" if owner.get("run") else ""
        raise ConfigError(
            f"output_dir={str(self.path.parent)!r} is in use by process {owner['pid']} on {owner['host']} since "
            f"{owner['since']}{run}. Two runs in one folder would overwrite each other. Choose another output_dir, or stop "
            "it."
        )

    def acquire(self) -> None:
        """Take the folder; of several processes that try at the same moment, one gets it.

        Raises:
            ConfigError: Another live run holds it.
        """
        with self._guard():
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
            part.write_text(self._me(), encoding="utf-8")
            os.replace(part, self.path)
        if not self.held:
            self.held = True
            self._lost_to = None
            self._stop = threading.Event()
            threading.Thread(target=self._keep_fresh, args=(self._stop,), daemon=True, name="posttrain-lock").start()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """One process at a time; the system lets go of it when a process dies."""
        import filelock

        guard = filelock.FileLock(self.path.with_name(GUARD), timeout=30)
        try:
            guard.acquire()
        except filelock.Timeout as error:
            raise ConfigError(
                f"{str(self.path.parent)!r} could not be locked within 30 s: another process starts there just now. Choose "
                "another output_dir, or stop it."
            ) from error
        except (
            NotImplementedError,
            OSError,
        ) as error:  # A file system without locks: two starts in one instant may clash.
            logger.info("%s has no file locks (%s): starts are not serialised there.", self.path.parent, error)
        try:
            yield
        finally:
            guard.release()

    def _keep_fresh(self, stop: threading.Event) -> None:
        while not stop.wait(BEAT):
            self.beat()

    def beat(self) -> None:
        """Show a sign of life; a folder that another run took meanwhile (this machine slept, say) is noticed."""
        owner = self._owner()
        if owner is not None and _is_foreign(owner):
            self._lost_to = owner
            return
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def assert_held(self) -> None:
        """Refuse to go on in a folder that was taken over.

        Raises:
            CheckpointError: Names who has it now.
        """
        owner = self._owner() if self.held else None
        lost = self._lost_to or (owner if owner is not None and _is_foreign(owner) else None)
        if lost is not None:
            raise CheckpointError(
                f"this run lost {str(self.path.parent)!r} to process {lost['pid']} on {lost['host']}, which took it over at "
                f"{lost['since']} because there had been no sign of life (a machine that slept, a clock that jumped). It stops "
                "before anything is overwritten; its checkpoints are intact. Resume in another output_dir."
            )

    def release(self) -> None:
        """Give the folder back, if it is still ours; safe to call twice."""
        self._stop.set()
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
        silence = 0.0
        with contextlib.suppress(OSError):
            silence = time.time() - self.path.stat().st_mtime
        if owner["host"] != socket.gethostname():
            return silence < SILENCE
        if owner.get("space", _space()) != _space():  # A container of the same name: its processes are hidden from us.
            return silence < SILENCE_HERE
        born = _born(owner["pid"])
        # A process that began later only has the number of the one that wrote the file.
        return born is not None and (owner.get("born") is None or abs(born - owner["born"]) < 2.0)

    def _me(self) -> str:
        return json.dumps(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "run": self.run,
                "born": _born(os.getpid()),
                "space": _space(),
                "launcher": _launcher(),
            }
        )


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


def _space() -> str | None:
    """Which table of processes we see: containers of one machine have their own; None where there is only one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _launcher() -> list[Any] | None:
    """What the processes of one distributed run have in common; None for a run of one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    return [os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]


def _is_foreign(owner: dict[str, Any]) -> bool:
    """Neither this process nor another rank of its run."""
    if (
        owner["host"] == socket.gethostname()
        and owner["pid"] == os.getpid()
        and owner.get("space", _space()) == _space()
    ):
        return False
    return _launcher() is None or owner.get("launcher") != _launcher()
