"""What identifies a run: versions, machine, command and settings, without secrets."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["describe_run", "hide_secrets", "template_hash"]

PACKAGES = ("posttrain", "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")
# Names whose values are secrets; `eos_token` and the like are not. A hub token is recognised wherever it stands.
SECRET_NAME = re.compile(
    r"^(hub_token|push_to_hub_token|token|use_auth_token|auth_token|access_token)$|api_key|password|secret"
)
SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{16,}")
HIDDEN = "<hidden>"


def hide_secrets(value: Any) -> Any:
    """A copy of nested mappings and lists without entries whose name says secret, and with hub tokens blanked.

    >>> hide_secrets({"hub_token": "x", "eos_token": "</s>", "kwargs": {"token": "y", "revision": "main"}})
    {'eos_token': '</s>', 'kwargs': {'revision': 'main'}}
    """
    if isinstance(value, Mapping):
        return {k: hide_secrets(v) for k, v in value.items() if not SECRET_NAME.search(str(k).lower())}
    if isinstance(value, list | tuple):
        return [hide_secrets(item) for item in value]
    return SECRET_VALUE.sub(HIDDEN, value) if isinstance(value, str) else value


def describe_run() -> dict[str, Any]:
    """When, where, with what and how this process was started."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": _command(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hardware": _hardware(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
    }


def template_hash(tokenizer: Any) -> str | None:
    """SHA-256 of a tokenizer's chat template; None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest() if template else None


def _command(arguments: list[str]) -> list[str]:
    """The command line, the values of secret flags blanked."""
    shown = [Path(arguments[0]).name] if arguments else []
    secret = False
    for argument in arguments[1:]:
        flag, equals, _ = argument.partition("=")
        named = flag.startswith("--") and SECRET_NAME.search(flag.lstrip("-").replace("-", "_").lower()) is not None
        if secret and not argument.startswith("--"):
            argument = HIDDEN
        elif named and equals:
            argument = f"{flag}={HIDDEN}"
        shown.append(str(hide_secrets(argument)))
        secret = named and not equals
    return shown


def _hardware() -> dict[str, Any]:
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # Not on every system.
        usable = os.cpu_count() or 1
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": usable,
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(name), "__version__", None)


def _git_commit() -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
        return out.stdout.strip() or None
    return None
