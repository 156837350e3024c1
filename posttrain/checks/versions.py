"""What a run assumes of other packages: a version that works, for the features in use; metadata alone, nothing is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.checks.core import Context, finding, probe, register
from posttrain.integrations.versions import (
    FEATURES,
    Requirement,
    base_version,
    installed_version,
    of_features,
    required_version,
)
from posttrain.types import Finding

__all__ = ["check_binaries", "check_python", "check_versions", "features_in_use", "verdict"]

PYTHON = (3, 11)  # `requires-python` of this package.

register(
    "PT-V001", "package-missing", moment="config", title="a package that the config needs is not installed", page="m"
)
register("PT-V002", "package-too-old", moment="config", title="a version older than what works", page="m")
register("PT-V003", "package-untested", moment="config", title="a version newer than the last one tried", page="m")
register("PT-V004", "package-excluded", moment="config", title="a version known not to work", page="m")
register("PT-V005", "package-binaries", moment="config", title="compiled packages made for another torch", page="m")
register("PT-V006", "python-too-old", moment="config", title="an interpreter that is too old", page="m")

SMALL_BITS = ("8bit", "4bit", "bnb", "paged_")


def features_in_use(args: Any, *, peft: bool = False, parts: Mapping[str, Any] | None = None) -> dict[str, bool]:
    """Keys of `FEATURES`, and whether a config asks for them.

    Args:
        args: A trainer's config.
        peft: Whether an adapter is trained.
        parts: What else the trainer was given, by argument name.
    """
    init = getattr(args, "model_init_kwargs", None)
    init = init if isinstance(init, Mapping) else {}
    deepspeed, fsdp = bool(getattr(args, "deepspeed", None)), bool(getattr(args, "fsdp", None))
    server = getattr(args, "vllm_mode", "") == "server"
    vllm = (
        bool(getattr(args, "use_vllm", False)) and not server
    )  # Servers are asked over HTTP: vLLM is installed there.
    reports = getattr(args, "report_to", None) or ()
    optimiser = str(getattr(getattr(args, "optim", ""), "value", getattr(args, "optim", "")))
    return {
        "core": True,
        "peft": peft,
        "liger": bool(getattr(args, "use_liger_kernel", False)),
        "bitsandbytes": any(part in optimiser for part in SMALL_BITS) or "quantization_config" in init,
        "deepspeed": deepspeed,
        "deepspeed-zero3-generation": deepspeed and hasattr(args, "num_generations") and _zero_stage(args) == 3,
        "fsdp2": fsdp and _fsdp(args, "version") == 2,
        "fsdp2-ram-efficient": fsdp and _fsdp(args, "version") == 2 and bool(_fsdp(args, "cpu_ram_efficient_loading")),
        "sequence-parallel": _parallel(args, "sp_size") > 1,
        "context-parallel": _parallel(args, "cp_size") > 1,
        "vllm": vllm,
        "vllm-sleep": vllm and bool(getattr(args, "vllm_enable_sleep_mode", False)),
        "paged": bool(getattr(args, "use_transformers_continuous_batching", False)),
        "environments": bool((parts or {}).get("environment_factory")),
        "flash-attention-2": init.get("attn_implementation") == "flash_attention_2",
        **{name: name in reports for name in ("wandb", "trackio", "tensorboard")},
    }


def _zero_stage(args: Any) -> int:
    config = args.deepspeed if isinstance(args.deepspeed, Mapping) else {}
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    return stage if isinstance(stage, int) else 0


def _fsdp(args: Any, name: str) -> Any:
    config = getattr(args, "fsdp_config", None) or {}
    return config.get(name, config.get(f"fsdp_{name}"))


def _parallel(args: Any, name: str) -> int:
    return int(getattr(getattr(args, "parallelism_config", None), name, 1) or 1)


def check_versions(features: Mapping[str, bool], installed: Mapping[str, str | None] | None = None) -> list[Finding]:
    """Findings about every package that the features in use need.

    Args:
        features: See `features_in_use`.
        installed: Versions by package name; None asks the packages' metadata.
    """
    found = []
    for line in of_features(features):
        version = installed_version(line.package) if installed is None else installed.get(line.package)
        finding_of_line = _missing(line) if version is None else _compared(line, version)
        if finding_of_line is not None:
            found.append(finding_of_line)
    return found


def _range(line: Requirement) -> str:
    if line.minimum and line.tested:
        return f"{line.package} {line.minimum}" + (f" to {line.tested}" if line.tested != line.minimum else "")
    return f"{line.package} {line.minimum} or later" if line.minimum else line.package


def _install(line: Requirement) -> str:
    pinned = f"=={line.tested}" if line.tested else f">={line.minimum}" if line.minimum else ""
    return f"pip install '{line.package}{pinned}'"


def _missing(line: Requirement) -> Finding:
    return finding(
        "PT-V001",
        "error",
        f"{FEATURES[line.feature]} needs {_range(line)}, which is not installed.",
        line.package,
        "the run would stop where the package is first used, after data and model were loaded.",
        f"{_install(line)}, or leave {FEATURES[line.feature]} out.",
    )


def _compared(line: Requirement, version: str) -> Finding | None:
    have = base_version(version)
    for first, last, reason in line.excluded:
        if base_version(first) <= have <= base_version(last):
            span = first if first == last else f"{first} to {last}"
            return finding(
                "PT-V004",
                "error",
                f"{FEATURES[line.feature]} does not work with {line.package} {span}; found {version}.",
                line.package,
                f"{reason}.",
                f"pip install '{line.package}>{last}'.",
            )
    if line.minimum and have < base_version(line.minimum):
        return finding(
            "PT-V002",
            "error",
            f"{FEATURES[line.feature]} needs {_range(line)}; found {version}.",
            line.package,
            f"older versions lack what it uses{f': {line.reason}' if line.reason else ''}.",
            f"{_install(line)}. Set preflight='warn' to try anyway.",
        )
    if line.tested and have > base_version(line.tested):
        return finding(
            "PT-V003",
            "warning",
            f"{FEATURES[line.feature]} was tested with {_range(line)}; found {version}.",
            line.package,
            "a newer version may have changed names or results; a comparison of log-probs on the first batch is the proof.",
            f"{_install(line)}, or compare a few steps with a version that was tested.",
        )
    return None


def check_binaries(
    features: Mapping[str, bool],
    *,
    torch: str | None,
    vllm_torch: str | None,
    vllm: str | None = None,
    bitsandbytes: bool = False,
) -> list[Finding]:
    """Compiled packages that meet in one process.

    Args:
        features: See `features_in_use`.
        torch: Its installed version, with the build's suffix (``2.9.1+cu128``).
        vllm_torch: The version that vLLM was built for; None where it is unknown.
        vllm: Its installed version, with the build's suffix.
        bitsandbytes: Whether bitsandbytes is used in vLLM's process.
    """
    found = []
    if features.get("vllm") and torch and vllm_torch and base_version(torch) != base_version(vllm_torch):
        found.append(
            finding(
                "PT-V005",
                "error",
                f"vllm was built for torch {vllm_torch}, and torch {torch} is installed.",
                "vllm",
                "its kernels are compiled against that torch: importing it fails, or worse, it computes garbage.",
                f"pip install 'torch=={vllm_torch}', or a vllm that was built for torch {base_version(torch)}.",
            )
        )
    ours, theirs = _cuda(torch), _cuda(vllm)
    if features.get("vllm") and ours and theirs and ours != theirs:
        found.append(
            finding(
                "PT-V005",
                "error",
                f"vllm {vllm} was built for CUDA {theirs}, and torch {torch} for CUDA {ours}.",
                "vllm",
                "libraries of two major versions of CUDA do not work in one process.",
                f"install builds of one: torch from the index of CUDA {theirs}, or a vllm of CUDA {ours}.",
            )
        )
    if features.get("vllm") and bitsandbytes:
        found.append(
            finding(
                "PT-V005",
                "warning",
                "bitsandbytes and vLLM are used in one process.",
                "bitsandbytes",
                "vLLM is known to fail in a process that imported bitsandbytes (vllm#32793).",
                "run vLLM as a server (vllm_mode='server'), or train without 8-bit and 4-bit parts.",
            )
        )
    return found


def _cuda(version: str | None) -> int | None:
    """Major version of the CUDA that a build names in its suffix.

    >>> _cuda("2.9.1+cu128"), _cuda("0.25.1"), _cuda("2.9.1+cpu")
    (12, None, None)
    """
    match = re.search(r"\+cu(\d+)\d$", version or "")
    return int(match[1]) if match else None


def check_python(version: tuple[int, ...]) -> Finding | None:
    """An interpreter older than what the package was written for.

    Args:
        version: Major and minor number first.
    """
    if version[:2] >= PYTHON:
        return None
    needed = ".".join(map(str, PYTHON))
    return finding(
        "PT-V006",
        "error",
        f"posttrain needs Python {needed} or later; this is {'.'.join(map(str, version[:2]))}.",
        "python",
        "it uses syntax and libraries that older ones lack.",
        f"make an environment with Python {needed}.",
    )


@probe("config", "PT-V001", "PT-V002", "PT-V003", "PT-V004", "PT-V005", "PT-V006")
def versions(context: Context) -> Iterable[Finding | None]:
    """Versions of everything that the config asks for."""
    features = features_in_use(context.args, peft=context.peft_config is not None, parts=context.parts)
    return [
        check_python(sys.version_info[:3]),
        *check_versions(features),
        *check_binaries(
            features,
            torch=installed_version("torch"),
            vllm_torch=required_version("vllm", "torch"),
            vllm=installed_version("vllm"),
            bitsandbytes=features["bitsandbytes"],
        ),
    ]


def verdict() -> list[str]:
    """A line for every installed package that could make trouble, whatever feature would need it; empty: all fit."""
    there = dict.fromkeys(FEATURES, True)
    found = [item for item in check_versions(there) if item.code != "PT-V001"]
    found += check_binaries(
        {"vllm": True}, torch=installed_version("torch"), vllm_torch=required_version("vllm", "torch")
    )
    return [f"{item.code} ({item.severity}): {item.what} {item.fix}" for item in found]
