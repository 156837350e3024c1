"""``python -m posttrain.integrations.leash COMMAND``: a command that ends when the process that asked for it is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

__all__ = ["hold"]

GRACE_S = 10.0  # From being asked to end until being ended.
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def hold(command: list[str]) -> int:
    """Run ``command`` until it ends, or until our standard input is closed, which a process does however it dies.

    Signals are passed on. What the command started in its own process group ends with it.

    Args:
        command: Program and arguments.

    Returns:
        Its exit code; 128 and the signal's number where a signal ended it, as a shell says it.
    """
    children: list[subprocess.Popen] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)  # Before the start: what is ignored here would be ignored there.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # Ray blocks Ctrl-C in all it starts.
    children.append(
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent)
    )
    child = children[0]
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    code = child.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # Workers that it did not take along.
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    """On Linux, the kernel sends SIGTERM when we are killed ourselves, as Ray does with the children of its workers."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _watch(child: subprocess.Popen) -> None:
    while os.read(0, 1024):
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)


if __name__ == "__main__":
    sys.exit(hold(sys.argv[1:]))
