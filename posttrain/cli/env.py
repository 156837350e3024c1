"""`posttrain env`: what a bug report needs, ready to paste; no token and no secret."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

from posttrain import __version__
from posttrain.checks.machine import installed_version
from posttrain.integrations.machine import free_disk, port_is_free

__all__ = ["report"]

OPTIONAL = (
    "bitsandbytes",
    "deepspeed",
    "liger-kernel",
    "vllm",
    "flash-attn",
    "kernels",
    "math-verify",
    "fastapi",
    "uvicorn",
    "aiohttp",
    "tensorboard",
    "wandb",
    "trackio",
)
CORE = {
    "Transformers": "transformers",
    "Accelerate": "accelerate",
    "Datasets": "datasets",
    "PEFT": "peft",
    "HF Hub": "huggingface_hub",
}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
PORTS = {8000: "rollout server", 51216: "weight updates"}


def _version(name: str) -> str:
    return installed_version(name) or "not installed"


def _accelerator() -> list[str]:
    import torch

    if torch.cuda.is_available():
        lines = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            lines.append(f"{torch.cuda.get_device_name(index)} ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)")
        return lines
    if getattr(torch, "xpu", None) is not None and torch.xpu.is_available():
        return [torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())]
    return ["MPS" if torch.backends.mps.is_available() else "cpu"]


def _accelerate_config() -> str:
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    if not path.is_file():
        return "not found"
    return "".join(f"\n  - {line}" for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def _commit() -> str:
    """Seven digits of the checkout that this package is imported from; nothing where it was installed."""
    git = Path(__file__).parents[2] / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return f" ({head[:7]})"
        return f" ({_reference(git, head[5:])[:7]})"
    except (OSError, LookupError):
        return ""


def _reference(git: Path, name: str) -> str:
    loose = git / name
    if loose.is_file():
        return loose.read_text(encoding="utf-8").strip()
    lines = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "") or "unknown"


def _cuda() -> dict[str, str]:
    """Versions that a GPU run depends on; where there is none, only what torch was built for."""
    import torch

    rows = {"CUDA version": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        rows["Driver"] = _driver()
        rows["NCCL version"] = (
            ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        )
    return rows


def _driver() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), "unknown")


def _compatibility() -> str:
    from posttrain.checks.machine import verdict

    lines = verdict()
    return "all installed packages fit" if not lines else "".join(f"\n  - {line}" for line in lines)


def _ports(is_free: Callable[[int], bool] = port_is_free) -> str:
    return ", ".join(f"{port} ({use}) {'free' if is_free(port) else 'in use'}" for port, use in PORTS.items())


def report() -> str:
    """The whole report as text."""
    import torch

    from posttrain.models.load import bf16_is_faster

    visible = [f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ]
    rows = {
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "posttrain version": f"{__version__}{_commit()}",
        "PyTorch version": torch.__version__,
        **_cuda(),
        "Accelerator": "; ".join(_accelerator()),
        "CPU cores / torch threads": f"{os.cpu_count()} / {torch.get_num_threads()}",
        "bf16 used by default": "yes" if bf16_is_faster() else "no",
        "Visible devices": ", ".join(visible) or "all",
        **{f"{label} version": _version(name) for label, name in CORE.items()},
        "Accelerate config": _accelerate_config(),
        **{f"{name} version": _version(name) for name in OPTIONAL},
        "Ports": _ports(),
        "Free disk here": f"{free_disk('.') / 2**30:.1f} GiB",
        "Compatibility": _compatibility(),
    }
    return "\n".join(f"- {key}: {value}" for key, value in rows.items())
