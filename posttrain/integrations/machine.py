"""Resources of this machine: disk space, processors, GPU memory and processes, ports, and the limit of open files."""

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
    """Return the number of free bytes on the disk of ``folder``. If the folder does not exist, the disk of its closest
    existing parent is used.
    """
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def usable_processors() -> int:
    """Return the number of processors on which this process may run, according to its CPU affinity. On systems without CPU
    affinity, return the number of all processors.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to an address of this machine. Port 0 selects a free port.

    Raises:
        OSError: The port is in use, or the address does not belong to this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without SO_REUSEADDR, a recently closed connection would still block the port.
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on ``port`` of this machine. The test binds a socket and closes it."""
    try:
        listen(host, port).close()
    except OSError:
        return False
    return True


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    Each connection of a server needs an open file, and many systems allow only 1024.
    """
    try:
        import resource  # Windows has neither this module nor such a limit.
    except ImportError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS rejects an infinite soft limit, although it reports an infinite hard limit.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def gpu_memory(device: torch.device | str) -> tuple[int, int]:
    """Return the free and the total number of bytes of a CUDA device. Free memory includes memory that this process has
    reserved but does not use.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def gpu_processes() -> dict[int, list[tuple[int, str, int]]]:
    """Return the processes on each GPU, except this process. Without the optional package pynvml, the result is empty.

    Returns:
        Map from NVML's index of each GPU to a list of (process id, name, bytes). CUDA_VISIBLE_DEVICES does not affect this
        index.
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
