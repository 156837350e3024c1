"""What a run assumes of the machine it starts on: room on the disk, memory of the GPU, free ports, a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from posttrain.checks.core import Context, Severity, finding, probe, register
from posttrain.integrations.machine import port_is_free
from posttrain.types import Finding

__all__ = ["check_disk_space", "check_gpu_memory", "check_ports", "check_strangers", "ports_of_servers", "size"]

GIB, MIB = 2**30, 2**20
CHECKPOINTS = 2  # A new one is written before an old one is removed.
SHOWN = 5
HERE = ("localhost", "127.0.0.1", "0.0.0.0", "::1")

register(
    "PT-L001", "folder-of-another-run", moment="config", title="checkpoints of another run in output_dir", page="k"
)
register("PT-L002", "disk-nearly-full", moment="config", title="no room for two checkpoints", page="k")
register(
    "PT-L003", "gpu-in-use", moment="config", title="less free GPU memory than the optimiser alone needs", page="k"
)
register("PT-L004", "port-in-use", moment="config", title="a port that the run needs is taken", page="k")


def size(count: float) -> str:
    """Bytes in words.

    >>> size(3 * 2**29), size(5 * 2**20)
    ('1.5 GiB', '5 MiB')
    """
    if count < MIB:
        return f"{count / 1024:.0f} KiB"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def check_strangers(names: Sequence[str], *, folder: str, resumed: bool) -> Finding | None:
    """Checkpoints of another run where this one begins afresh.

    Args:
        names: Of those checkpoints.
        folder: ``output_dir``.
        resumed: Whether the run goes on from a checkpoint.
    """
    if not names or resumed:
        return None
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return finding(
        "PT-L001",
        "warning",
        f"output_dir={folder!r} holds {len(names)} checkpoint{'s' if len(names) > 1 else ''} of another run ({shown}), and this "
        "run begins at step 0.",
        "output_dir",
        "they stay: save_total_limit never removes them, and one of the same step is moved aside. But two runs in one folder are "
        "hard to tell apart later.",
        "pass resume_from_checkpoint=True to go on from the last one, or choose another output_dir.",
    )


def check_disk_space(free: int, checkpoint: int, *, folder: str, limit: int | None = None) -> Finding | None:
    """Room for two checkpoints: a new one is whole before an old one goes.

    Args:
        free: Bytes that can be written.
        checkpoint: Bytes of one, about.
        folder: ``output_dir``.
        limit: ``save_total_limit``, for the advice.
    """
    if free >= CHECKPOINTS * checkpoint:
        return None
    advice = "" if limit else "set save_total_limit=2, "
    return finding(
        "PT-L002",
        "error" if free < checkpoint else "warning",
        f"{size(free)} are free in {folder!r}, and a checkpoint needs about {size(checkpoint)}.",
        "output_dir",
        "the run would stop at its first checkpoint, and what it learned by then would be lost."
        if free < checkpoint
        else "a new checkpoint is written before an old one is removed: the second one would not fit.",
        f"free some space, {advice}set save_only_model=True (smaller, but a run cannot be resumed exactly), or choose another "
        "output_dir.",
    )


def check_gpu_memory(
    free: int,
    total: int,
    needed: int,
    *,
    device: str,
    others: Mapping[int, Sequence[tuple[int, str, int]]] | None = None,
) -> Finding | None:
    """Free memory of a GPU against what gradients and optimiser take for certain, activations aside.

    Args:
        free: Bytes.
        total: Bytes of the device.
        needed: Bytes that are allocated whatever the batch.
        device: Its name.
        others: Other processes by index of the GPU: number, name, bytes.
    """
    if free >= needed:
        return None
    listed = [
        f"GPU {index}: pid {pid} ({name}, {size(held)})"
        for index, rows in (others or {}).items()
        for pid, name, held in rows
    ]
    return finding(
        "PT-L003",
        "warning",
        f"{device}: {size(total - free)} of {size(total)} are in use, {size(free)} are free, and gradients and optimiser alone "
        f"need {size(needed)}." + (f" Other processes: {', '.join(listed)}." if listed else ""),
        device,
        "the first optimiser step would run out of memory.",
        "stop the other process, choose another GPU with CUDA_VISIBLE_DEVICES, train an adapter, or use an 8-bit optimiser.",
    )


def check_ports(ports: Mapping[str, int], taken: Sequence[int], *, severity: Severity = "error") -> list[Finding]:
    """Ports that a run will listen on and that a bind found taken.

    Args:
        ports: By what they are for, such as ``{"vllm_group_port": 51216}``.
        taken: Those on which nothing could be bound.
        severity: ``warning`` where the port may not be needed.
    """
    return [
        finding(
            "PT-L004",
            severity,
            f"{name}={port} is in use by another process.",
            name,
            "the run could not listen there, or, worse, would talk to another run's server.",
            f"stop that process (`ss -ltnp 'sport = :{port}'` names it), or set {name} to a free port.",
        )
        for name, port in ports.items()
        if port in taken
    ]


@probe("config", "PT-L004")
def ports_of_servers(context: Context) -> list[Finding]:
    """The port on which trainer and server of this machine meet to pass weights; a second run would meet the first."""
    args = context.args
    if not getattr(args, "use_vllm", False) or getattr(args, "vllm_mode", None) != "server":
        return []
    url = getattr(args, "vllm_server_base_url", None)
    host = urlsplit(url).hostname if isinstance(url, str) else getattr(args, "vllm_server_host", None)
    port = getattr(args, "vllm_group_port", 0)
    if host not in HERE or not port or port_is_free(port):
        return []
    return check_ports({"vllm_group_port": port}, [port], severity="warning")  # Weights may go another way.
