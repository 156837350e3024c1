"""What this machine has left: room on a disk, memory and processes of a GPU, ports that nobody listens on."""

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
    """Bytes that may still be written below ``folder``, or below the first of its parents that is there."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def usable_processors() -> int:
    """Processors that this process may run on, by its affinity where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to an address of this machine; port 0 takes a free one.

    Raises:
        OSError: The port is in use, or the address is not of this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # As servers do: a connection that was closed a moment ago does not hold the port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on ``port`` of an address of this machine; nothing is left behind."""
    try:
        listen(host, port).close()
    except OSError:
        return False
    return True


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: each connection of a server is a file, and many systems allow 1024."""
    try:
        import resource  # Not on Windows, which has no such limit.
    except ImportError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses its own hard limit where that is infinite.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def gpu_memory(device: torch.device | str) -> tuple[int, int]:
    """Free and total bytes of a CUDA device; what this process has reserved and does not use is free to it."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def gpu_processes() -> dict[int, list[tuple[int, str, int]]]:
    """Other processes on each GPU: number, name, bytes. Empty without NVML, which is optional.

    Returns:
        By index of the GPU as NVML counts them (CUDA_VISIBLE_DEVICES does not change it).
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
