"""Models: loading, attention and masks, the forward pass, log-probs, reference models, and sharding."""

from importlib.util import find_spec
from typing import Any

import posttrain


def __getattr__(name: str) -> Any:
    """Return a public name of ``posttrain``. TRL's package `models` exports helpers, and imports of them from this
    package work too.
    """
    # If a module of this package has this name, raise an error. The import statement then imports the module.
    if name.startswith("__") or find_spec(f"{__name__}.{name}"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(posttrain, name)
