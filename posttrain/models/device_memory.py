"""How much memory a device has left for this process, and the most that the process took of it."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Available", "available_memory", "in_use", "peak_in_use", "reset_peak"]

CGROUPS = (  # Limit, use, statistics: of version 2, then of version 1.
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
        free: That this process could have, with what it holds already.
        total: Of the device, or of the limit that holds here.
        where: In words.
    """

    free: int
    total: int
    where: str


def available_memory(device: Any, limit: int | None = None) -> Available:
    """What this process could have at most: free memory and what it holds now; never more than ``limit``.

    On a GPU what the driver calls free; on a CPU MemAvailable, or what a control group (a container) leaves, if that is less.

    Args:
        device: ``torch.device`` or its type.
        limit: Bytes, where the user set some.
    """
    kind = str(getattr(device, "type", device))
    found = _of_gpu(device) if kind == "cuda" else _of_host()
    if limit is not None and limit < found.free:
        return Available(int(limit), int(limit), "memory_limit_gib")
    return found


def _of_gpu(device: Any) -> Available:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return Available(free + held, total, "the GPU")


def _of_host() -> Available:
    text = _read("/proc/meminfo")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "MemAvailable" not in lines:  # Not Linux: all that there is.
        import psutil

        machine = psutil.virtual_memory()
        return Available(machine.available + in_use("cpu"), machine.total, "this machine")
    mine = in_use("cpu")
    free, total = (1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    found = Available(free + mine, total, "this machine")
    for limit, use, stat in CGROUPS:
        bound = _read(limit).strip()
        if not bound.isdigit() or int(bound) >= total:
            continue
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


def _status(name: str) -> int | None:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None


def in_use(device: Any) -> int:
    """Bytes that this process holds now."""
    if str(getattr(device, "type", device)) == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    return _status("VmRSS") or peak_in_use("cpu")


def peak_in_use(device: Any) -> int:
    """Most bytes that this process held since `reset_peak`, or ever."""
    if str(getattr(device, "type", device)) == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    known = _status("VmHWM")
    return known if known is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _unit()


def _unit() -> int:
    return 1 if sys.platform == "darwin" else 1024  # Linux counts kilobytes.


def reset_peak(device: Any) -> bool:
    """Begin a new peak; False where the system does not let a process do that, and the peak stays what it ever was."""
    if str(getattr(device, "type", device)) == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True
