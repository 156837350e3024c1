"""Models: loading, masks, forward pass, log-probs, references, sharding."""

from typing import Any

import posttrain


def __getattr__(name: str) -> Any:
    """Return a public name of ``posttrain``, because TRL keeps public helpers in its package of this name."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(posttrain, name)
