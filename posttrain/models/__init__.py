"""Models: loading, attention and masks, the forward pass, log-probs, reference models, and sharding."""

from importlib.util import find_spec
from typing import Any

import posttrain


def __getattr__(name: str) -> Any:
    """Return a public name of ``posttrain``. TRL exports helpers from its package `models`. With this function, imports of
    these helpers from `posttrain.models` work too.
    """
    # If this package has a module of that name, raise an AttributeError. The import statement then imports the module.
    if name.startswith("__") or find_spec(f"{__name__}.{name}"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(posttrain, name)
