"""Optional packages: `require` imports a package or raises a clear error, and `is_available` checks whether a package can be
imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from posttrain.errors import MissingDependencyError

__all__ = ["is_available", "require"]

# Map from the import name of a package to the extra of posttrain that installs the package.
EXTRAS = {
    "bitsandbytes": "quantization",
    "deepspeed": "deepspeed",
    "fastapi": "serve",
    "libcst": "migrate",
    "liger_kernel": "liger",
    "math_verify": "math",
    "openenv": "openenv",
    "pebble": "math",
    "PIL": "vision",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "ray": "ray",
    "reasoning_gym": "reasoning-gym",
    "sklearn": "bco",
    "trackio": "trackio",
    "uvicorn": "serve",
    "verifiers": "verifiers",
    "vllm": "vllm",
    "wandb": "wandb",
    "xgrammar": "guided",
}


def is_available(name: str) -> bool:
    """Return whether the package ``name`` can be imported. The package is not imported."""
    return importlib.util.find_spec(name) is not None


def require(name: str, purpose: str) -> ModuleType:
    """Import an optional package. If the package is not installed, raise an error with its purpose and the install command.

    Args:
        name: Import name of the package or of a submodule.
        purpose: Feature that needs the package, as the subject of a sentence: ``"the curves of the run record"``.

    Raises:
        MissingDependencyError: The package is not installed. This error is also an `ImportError`.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        root = name.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != root:
            # The package is installed, but one of its dependencies is missing. Keep Python's error message.
            raise
        extra = EXTRAS.get(root)
        command = f'pip install "posttrain[{extra}]"' if extra else f"pip install {root.replace('_', '-')}"
        raise MissingDependencyError(
            f"{purpose} needs the package {root!r}, which is not installed. Install it: {command}", name=root
        ) from error
