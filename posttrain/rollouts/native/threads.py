"""No more threads than processors this process may use: beyond that, every product waits for a thread that has none."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["bound_threads", "processors"]

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "quota period" in microseconds, or "max period" (Linux cgroup v2).


def processors(quota: Path = QUOTA) -> int:
    """Processors this process may run on, by its affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        most, period = quota.read_text().split()
        return max(1, min(allowed, math.ceil(int(most) / int(period))))
    except (OSError, ValueError):
        return allowed


@contextmanager
def bound_threads(threads: int | None) -> Iterator[None]:
    """Compute with this many threads (None: as torch was told, at most one a processor); the former number is restored."""
    before = torch.get_num_threads()
    wanted = threads or min(before, processors())
    if wanted != before:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
