"""`posttrain env`: what a bug report needs, ready to paste; no token and no secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from posttrain import __version__

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
)
CORE = {
    "Transformers": "transformers",
    "Accelerate": "accelerate",
    "Datasets": "datasets",
    "PEFT": "peft",
    "HF Hub": "huggingface_hub",
}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _accelerator() -> list[str]:
    import torch

    if torch.cuda.is_available():
        lines = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            lines.append(f"{torch.cuda.get_device_name(index)} ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)")
        return lines
    return ["MPS" if torch.backends.mps.is_available() else "cpu"]


def _accelerate_config() -> str:
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    if not path.is_file():
        return "not found"
    return "".join(f"\n  - {line}" for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def report() -> str:
    """The whole report as text."""
    import torch

    from posttrain.models.load import bf16_is_faster

    rows = {
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "posttrain version": __version__,
        "PyTorch version": torch.__version__,
        "CUDA version": torch.version.cuda or "none",
        "Accelerator": "; ".join(_accelerator()),
        "CPU cores / torch threads": f"{os.cpu_count()} / {torch.get_num_threads()}",
        "bf16 used by default": "yes" if bf16_is_faster() else "no",
        "Visible devices": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
        **{f"{label} version": _version(name) for label, name in CORE.items()},
        "Accelerate config": _accelerate_config(),
        **{f"{name} version": _version(name) for name in OPTIONAL},
    }
    return "\n".join(f"- {key}: {value}" for key, value in rows.items())
