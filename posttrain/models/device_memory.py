"""How much memory a device has left for this process, and the most that the process took of it."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

__all__ = ["Available", "available_memory", "in_use", "peak_in_use", "reset_peak"]

# Limit, use and statistics of a control group: of version 2, then of version 1.
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


@dataclass(frozen=True)
class Available:
    """Bytes.

    Attributes:
        free: What this process can have, including what it holds already.
        total: Of the device, or of the limit that applies.
        where: The device or limit, for messages.
    """

    free: int
    total: int
    where: str


def available_memory(device: Any, limit: int | None = None) -> Available:
    """Free memory and what this process holds now; never more than ``limit``.

    On a GPU what the driver calls free; on a CPU the memory that is available, or what a control group (a container) leaves
    where that is less.

    Args:
        device: ``torch.device`` or its type.
        limit: Bytes that the user allows; None: all.
    """
    kind = str(getattr(device, "type", device))
    found = _of_gpu(device) if kind == "cuda" else _of_host()
    if limit is not None and limit < found.free:
        return Available(int(limit), int(limit), "memory_limit_gib")
    return found


def _of_gpu(device: Any) -> Available:
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return Available(free + held, total, "the GPU")


def _of_host() -> Available:
    machine, mine = psutil.virtual_memory(), in_use("cpu")
    found = Available(machine.available + mine, machine.total, "this machine")
    for limit, use, stat in CGROUPS:
        bound = _read(limit).strip()
        if bound.isdigit() and int(bound) < machine.total:
            used = int(_read(use).strip() or 0) - _inactive(_read(stat))
            inside = Available(max(int(bound) - used, 0) + mine, int(bound), "the control group of this process")
            return min(found, inside, key=lambda a: a.free)
    return found


def _inactive(statistics: str) -> int:
    """File pages that the kernel would give back."""
    for line in statistics.splitlines():
        if line.startswith(("inactive_file ", "total_inactive_file ")):
            return int(line.split()[1])
    return 0


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8")
    return ""


def in_use(device: Any) -> int:
    """Bytes that this process holds now."""
    if str(getattr(device, "type", device)) == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def peak_in_use(device: Any) -> int:
    """Most bytes that this process held since `reset_peak`, or ever."""
    if str(getattr(device, "type", device)) == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    # Linux counts kilobytes here, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: Any) -> bool:
    """Start a new peak; False where the system does not allow it (the peak is then that of the whole process)."""
    if str(getattr(device, "type", device)) == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True
