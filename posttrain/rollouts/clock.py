"""Time that may be held against somebody: not that in which nobody looked, nor that in which there was no processor to be had."""

from __future__ import annotations

import threading
import time
from pathlib import Path

__all__ = ["AwakeClock", "queued_seconds"]


class AwakeClock:
    """Seconds, of which the gap between two looks counts at most ``most``.

    A process that was stopped (a suspended job), or got no processor for a while, heard nothing in that time: by a wall clock
    everybody else would seem to have been silent. By this one the deadline moves along.

    Args:
        most: Seconds between two looks that count in full; a multiple of how often it is looked at.

    >>> clock = AwakeClock(0.01)
    >>> time.sleep(0.1); clock.look() < 0.02
    True
    """

    def __init__(self, most: float) -> None:
        self.most, self.now = most, 0.0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def look(self) -> float:
        """Seconds so far, this look included."""
        with self._lock:
            real = time.monotonic()
            self.now += min(real - self._last, self.most)
            self._last = real
            return self.now


def queued_seconds(pid: int) -> float:
    """Seconds for which the first thread of a process could have run and had no processor; 0 where the system does not say.

    The second number of ``/proc/<pid>/schedstat``, nanoseconds on a run queue (Linux, Documentation/scheduler/sched-stats).
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
