"""Resources of this machine: free disk space, usable processors, GPU memory and processes, free ports, file limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.integrations import is_available, require

if TYPE_CHECKING:
    import torch


def free_disk(folder: str | Path) -> int:
    """Return the free bytes on the disk of ``folder``, or of its first existing parent."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def usable_processors() -> int:
    """Return the number of processors this process may run on, from its CPU affinity if the system supports it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to an address of this machine. Port 0 selects a free port.

    Raises:
        OSError: The port is in use, or the address does not belong to this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Otherwise, a recently closed connection would still block the port.
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on ``port`` of an address of this machine. The test socket is closed."""
    try:
        listen(host, port).close()
    except OSError:
        return False
    return True


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    Each connection of a server is a file, and many systems allow 1024.
    """
    try:
        import resource  # This module is missing on Windows, which has no limit of this kind.
    except ImportError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS rejects its own hard limit if this limit is infinite.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def gpu_memory(device: torch.device | str) -> tuple[int, int]:
    """Return the free and total bytes of a CUDA device. Memory that this process has reserved but does not use is free."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def gpu_processes() -> dict[int, list[tuple[int, str, int]]]:
    """Return the other processes on each GPU. The result is empty without NVML, which is optional.

    Returns:
        List of (process id, name, bytes) by NVML's GPU index, which CUDA_VISIBLE_DEVICES does not change.
    """
    by_gpu: dict[int, list[tuple[int, str, int]]] = {}
    if not is_available("pynvml"):
        return by_gpu
    nvml = require("pynvml", "the list of processes on a GPU")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return by_gpu
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            with contextlib.suppress(nvml.NVMLError):
                processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                by_gpu[index] = [
                    (p.pid, _name(p.pid), int(p.usedGpuMemory or 0)) for p in processes if p.pid != os.getpid()
                ]
    finally:
        nvml.nvmlShutdown()
    return by_gpu


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return "?"
