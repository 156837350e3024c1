"""Functions that return whether optional packages are installed. They read package metadata and import no package."""

from __future__ import annotations

import logging
from collections.abc import Callable

from posttrain.checks.machine import NEEDS, base_version, installed_version
from posttrain.integrations import is_available

logger = logging.getLogger(__name__)

# Minimum version of liger-kernel, from the table of requirements. It is the default of `is_liger_kernel_available`.
LIGER_MINIMUM = "0.8.0"


def _at_least(package: str, minimum: str | None) -> bool:
    installed = installed_version(package)
    return minimum is None or (installed is not None and base_version(installed) >= base_version(minimum))


def _check_for(module: str) -> Callable[[], bool]:
    def check() -> bool:
        return is_available(module)

    check.__name__ = check.__qualname__ = f"is_{module}_available"
    check.__doc__ = f"Return whether ``{module.replace('_', '-')}`` is installed."
    return check


is_deepspeed_available = _check_for("deepspeed")
is_fastapi_available = _check_for("fastapi")
is_harbor_available = _check_for("harbor")
is_jmespath_available = _check_for("jmespath")
is_joblib_available = _check_for("joblib")
is_math_verify_available = _check_for("math_verify")
is_mergekit_available = _check_for("mergekit")
is_openreward_available = _check_for("openreward")
is_pydantic_available = _check_for("pydantic")
is_requests_available = _check_for("requests")
is_unsloth_available = _check_for("unsloth")
is_uvicorn_available = _check_for("uvicorn")
is_vllm_ascend_available = _check_for("vllm_ascend")
is_weave_available = _check_for("weave")


def is_liger_kernel_available(min_version: str = LIGER_MINIMUM) -> bool:
    """Return whether ``liger-kernel`` is installed, in ``min_version`` or later."""
    return is_available("liger_kernel") and _at_least("liger-kernel", min_version)


def is_vllm_available(min_version: str | None = None) -> bool:
    """Return whether ``vllm`` is installed, in ``min_version`` or later. Log a warning if the installed version was not
    tested.
    """
    if not is_available("vllm"):
        return False
    installed = installed_version("vllm")
    dependency = next(need for need in NEEDS if need.feature == "vllm")
    works = dependency.requirement.specifier & f"<={dependency.tested}"
    if installed is not None and base_version(installed) not in works:
        logger.warning("vllm %s is installed, but only vllm%s was tested.", installed, works)
    return _at_least("vllm", min_version)
