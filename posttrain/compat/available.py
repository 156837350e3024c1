"""Whether an optional package is there: found by its module spec, versions read from metadata, nothing imported."""

from __future__ import annotations

import logging

from posttrain.checks.machine import NEEDS, base_version, installed_version
from posttrain.integrations import is_available

__all__ = [
    "is_deepspeed_available",
    "is_fastapi_available",
    "is_harbor_available",
    "is_jmespath_available",
    "is_joblib_available",
    "is_liger_kernel_available",
    "is_math_verify_available",
    "is_mergekit_available",
    "is_openreward_available",
    "is_pydantic_available",
    "is_requests_available",
    "is_unsloth_available",
    "is_uvicorn_available",
    "is_vllm_ascend_available",
    "is_vllm_available",
    "is_weave_available",
]

logger = logging.getLogger(__name__)

LIGER_MINIMUM = "0.8.0"  # The table's, as a default that can be read.


def _at_least(package: str, minimum: str | None) -> bool:
    found = installed_version(package)
    return minimum is None or (found is not None and base_version(found) >= base_version(minimum))


def is_deepspeed_available() -> bool:
    """Whether ``deepspeed`` is installed."""
    return is_available("deepspeed")


def is_fastapi_available() -> bool:
    """Whether ``fastapi`` is installed."""
    return is_available("fastapi")


def is_harbor_available() -> bool:
    """Whether ``harbor`` is installed."""
    return is_available("harbor")


def is_jmespath_available() -> bool:
    """Whether ``jmespath`` is installed."""
    return is_available("jmespath")


def is_joblib_available() -> bool:
    """Whether ``joblib`` is installed."""
    return is_available("joblib")


def is_liger_kernel_available(min_version: str = LIGER_MINIMUM) -> bool:
    """Whether ``liger-kernel`` is installed, in ``min_version`` or later."""
    return is_available("liger_kernel") and _at_least("liger-kernel", min_version)


def is_math_verify_available() -> bool:
    """Whether ``math-verify`` is installed."""
    return is_available("math_verify")


def is_mergekit_available() -> bool:
    """Whether ``mergekit`` is installed."""
    return is_available("mergekit")


def is_openreward_available() -> bool:
    """Whether ``openreward`` is installed."""
    return is_available("openreward")


def is_pydantic_available() -> bool:
    """Whether ``pydantic`` is installed."""
    return is_available("pydantic")


def is_requests_available() -> bool:
    """Whether ``requests`` is installed."""
    return is_available("requests")


def is_unsloth_available() -> bool:
    """Whether ``unsloth`` is installed."""
    return is_available("unsloth")


def is_uvicorn_available() -> bool:
    """Whether ``uvicorn`` is installed."""
    return is_available("uvicorn")


def is_vllm_ascend_available() -> bool:
    """Whether ``vllm-ascend`` is installed."""
    return is_available("vllm_ascend")


def is_vllm_available(min_version: str | None = None) -> bool:
    """Whether ``vllm`` is installed, in ``min_version`` or later; a version outside the tested range only warns."""
    if not is_available("vllm"):
        return False
    found = installed_version("vllm")
    known = next(need for need in NEEDS if need.feature == "vllm")
    works = known.requirement.specifier & f"<={known.tested}"
    if found is not None and base_version(found) not in works:
        logger.warning("vllm %s is installed; vllm%s was tested.", found, works)
    return _at_least("vllm", min_version)


def is_weave_available() -> bool:
    """Whether ``weave`` is installed."""
    return is_available("weave")
