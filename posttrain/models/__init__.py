"""Models: loading, attention and masks, the forward pass, log-probs, reference models, and sharding."""

from importlib.util import find_spec
from typing import Any

import posttrain


def __getattr__(name: str) -> Any:
    """Return a public name of ``posttrain``. TRL has public helpers in its package `models`, so old imports work."""
    # If a module has this name, the import statement then imports the module.
    if name.startswith("__") or find_spec(f"{__name__}.{name}"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(posttrain, name)
