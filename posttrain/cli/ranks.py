"""Storage of the exit codes and stderr of launched processes. With these files, the command can report which process failed
first, and why.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# Environment variable with the path of a folder. A failing process stores its exit code in this folder, because launchers
# always return 1.
EXIT_CODES = "POSTTRAIN_EXIT_CODES"
LINES = 30  # Number of lines at the end of stderr that are shown.
CRASH = "Fatal Python error"  # Text that `faulthandler` writes at the beginning of its report.


class _Both:
    """Replacement of `sys.stderr` that writes to the original stream and to a file. The replacement has all attributes of the
    original stream.
    """

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
    """Copy the stderr of a process that `posttrain` launched to a file, including the trace of a crash."""
    folder = os.environ.get(EXIT_CODES)
    if folder is None or isinstance(sys.stderr, _Both):
        return
    path = Path(folder, f"{os.environ.get('RANK', '0')}.stderr")
    # Remove the exit code that this rank stored before the launcher restarted it.
    path.with_suffix(".code").unlink(missing_ok=True)
    file = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    faulthandler.enable(file)
    sys.stderr = _Both(sys.stderr, file)  # type: ignore[assignment]


def leave_code(code: int) -> None:
    """Store the exit code of a process that `posttrain` launched, unless the code is 0."""
    folder = os.environ.get(EXIT_CODES)
    if code and folder is not None:
        Path(folder, f"{os.environ.get('RANK', '0')}.code").write_text(str(code), encoding="utf-8")


def launch() -> None:
    """Run ``accelerate launch``. A process that was killed by a signal could not store an exit code, so the signal is stored
    for it.
    """
    from accelerate.commands.launch import main
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        main()
    except SignalException as received:
        # Print no traceback, because the processes have already saved a checkpoint and reported the signal.
        sys.exit(128 + int(received.sigval))
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            # Ignore SIGTERM, which the launcher sends to the remaining processes after one process has failed.
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                Path(os.environ[EXIT_CODES], f"{rank}.signal").write_text(str(-failure.exitcode), encoding="utf-8")
        raise


@dataclass(frozen=True)
class Failure:
    """Launched process that failed first.

    Attributes:
        rank: Rank of the process.
        code: Exit code of the process, or 128 plus the signal number if a signal ended the process.
        tail: Last lines of the process's stderr.
    """

    rank: int
    code: int
    tail: str

    def __str__(self) -> str:
        output = f"; the last lines of its stderr:\n{self.tail}" if self.tail else " and wrote nothing to stderr."
        return f"process {self.rank} failed first, with exit code {self.code}{_signal_name(self.code)}{output}"


def _signal_name(code: int) -> str:
    if code == 128 + signal.SIGKILL:
        return " (SIGKILL: killed by a user or, if memory ran out, by the kernel)"
    valid = code - 128 in set(signal.Signals)
    return f" ({signal.Signals(code - 128).name})" if valid else ""


def first_failure(folder: Path, code: int) -> Failure | None:
    """Return the launched process that failed first. Return None if no process stored an exit code.

    Args:
        folder: Folder in which processes stored their codes and stderr.
        code: Exit code of the launcher. The launcher's code is reported for a process that crashed before it could store its
            own exit code.
    """
    # A process that was killed is the first failure, because other processes fail only as a consequence.
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
    # Keep only the last state of a progress bar.
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join([line for line in lines if line.strip()][-LINES:])


if __name__ == "__main__":
    launch()
