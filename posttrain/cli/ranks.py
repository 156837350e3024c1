"""Processes that a launcher starts: what each leaves behind when it fails, so that the command can say which one, and why."""

from __future__ import annotations

import faulthandler
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = ["EXIT_CODES", "Failure", "first_failure", "keep_stderr", "leave_code"]

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
    file = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    faulthandler.enable(file)
    sys.stderr = _Both(sys.stderr, file)  # type: ignore[assignment]


def leave_code(code: int) -> None:
    """In a process that `posttrain` launched: say with which code it fails."""
    folder = os.environ.get(EXIT_CODES)
    if code and folder is not None:
        Path(folder, f"{os.environ.get('RANK', '0')}.code").write_text(str(code), encoding="utf-8")


@dataclass(frozen=True)
class Failure:
    """The process that failed first.

    Attributes:
        rank: Its number.
        code: Its exit code.
        tail: The last lines of its stderr.
    """

    rank: int
    code: int
    tail: str

    def __str__(self) -> str:
        said = f"; the last lines of its stderr:\n{self.tail}" if self.tail else " and wrote nothing to stderr."
        return f"process {self.rank} failed first, with exit code {self.code}{said}"


def first_failure(folder: Path, code: int) -> Failure | None:
    """Which of the launched processes failed first; None where none left a word.

    Args:
        folder: In which they left their codes and their stderr.
        code: Of the launcher, for a process that crashed before it could leave its own.
    """
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
