"""Everything that touches a model: loading, masks, forward, log-probs, references, sharding."""

from typing import Any

import posttrain


def __getattr__(name: str) -> Any:
    """TRL keeps public helpers in its package of this name: they are the public names of ``posttrain``."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(posttrain, name)
