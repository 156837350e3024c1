"""Processes that a launcher starts: what each leaves behind when it fails, so that the command can say which one, and why."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

EXIT_CODES = "POSTTRAIN_EXIT_CODES"  # A folder in which a process that fails leaves its code: launchers make 1 of it.
LINES = 30  # Of stderr that are shown.
CRASH = "Fatal Python error"  # As `faulthandler` writes it.


class _Both:
    """A stderr that is kept in a file too; for everything but writing it is the one it stands for."""

    def __init__(self, shown: TextIO, file: TextIO) -> None:
        self._shown, self._file = shown, file

    def write(self, text: str) -> int:
        self._file.write(text)
        return self._shown.write(text)

    def flush(self) -> None:
        self._file.flush()
        self._shown.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


def keep_stderr() -> None:
    """In a process that `posttrain` launched: keep a copy of what it writes to stderr, the trace of a crash included."""
    folder = os.environ.get(EXIT_CODES)
    if folder is None or isinstance(sys.stderr, _Both):
        return
    path = Path(folder, f"{os.environ.get('RANK', '0')}.stderr")
    path.with_suffix(".code").unlink(missing_ok=True)  # Of this rank before the launcher started it again.
    file = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    faulthandler.enable(file)
    sys.stderr = _Both(sys.stderr, file)  # type: ignore[assignment]


def leave_code(code: int) -> None:
    """In a process that `posttrain` launched: say with which code it fails."""
    folder = os.environ.get(EXIT_CODES)
    if code and folder is not None:
        Path(folder, f"{os.environ.get('RANK', '0')}.code").write_text(str(code), encoding="utf-8")


def launch() -> None:
    """``accelerate launch``; leaves a word for each process that a signal ended, which could leave none itself."""
    from accelerate.commands.launch import main
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        main()
    except SignalException as told:
        # The processes have saved and said so; a traceback would stand below their words.
        sys.exit(128 + int(told.sigval))
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if (
                failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
            ):  # That one is the launcher's, to the others.
                Path(os.environ[EXIT_CODES], f"{rank}.signal").write_text(str(-failure.exitcode), encoding="utf-8")
        raise


@dataclass(frozen=True)
class Failure:
    """The process that failed first.

    Attributes:
        rank: Its number.
        code: Its exit code; 128 and the signal's number where one ended it.
        tail: The last lines of its stderr.
    """

    rank: int
    code: int
    tail: str

    def __str__(self) -> str:
        said = f"; the last lines of its stderr:\n{self.tail}" if self.tail else " and wrote nothing to stderr."
        return f"process {self.rank} failed first, with exit code {self.code}{_signal_name(self.code)}{said}"


def _signal_name(code: int) -> str:
    if code == 128 + signal.SIGKILL:
        return " (SIGKILL: someone killed it, often the kernel for want of memory)"
    known = code - 128 in set(signal.Signals)
    return f" ({signal.Signals(code - 128).name})" if known else ""


def first_failure(folder: Path, code: int) -> Failure | None:
    """Which of the launched processes failed first; None where none left a word.

    Args:
        folder: In which they left their codes and their stderr.
        code: Of the launcher, for a process that crashed before it could leave its own.
    """
    # One that was killed comes first: the others fail when it no longer answers.
    for path in sorted(folder.glob("*.signal")):
        return Failure(int(path.stem), 128 + int(path.read_text(encoding="utf-8")), _tail(path.with_suffix(".stderr")))
    codes = sorted(folder.glob("*.code"), key=lambda path: path.stat().st_mtime_ns)
    if codes:
        return Failure(
            int(codes[0].stem), int(codes[0].read_text(encoding="utf-8")), _tail(codes[0].with_suffix(".stderr"))
        )
    for path in sorted(folder.glob("*.stderr")):
        if CRASH in path.read_text(encoding="utf-8", errors="replace"):
            return Failure(int(path.stem), code, _tail(path))
    return None


def _tail(path: Path) -> str:
    text = path.read_bytes().decode("utf-8", "replace") if path.is_file() else ""
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]  # Of a progress bar its last state.
    return "\n".join([line for line in lines if line.strip()][-LINES:])


if __name__ == "__main__":
    launch()
