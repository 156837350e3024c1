"""What completions must match, in the words of vLLM's ``structured_outputs``."""

from __future__ import annotations

import json
from typing import Any

from posttrain.errors import ConfigError

__all__ = ["GUIDES", "structured_guide"]

GUIDES = ("regex", "json", "grammar", "choice")


def structured_guide(given: Any) -> tuple[str, str]:
    r"""``{"regex": "[ab]+"}`` and the like, as `posttrain.types.Sampling.guide`.

    Args:
        given: A dict with one of ``regex``, ``json`` (a schema), ``grammar`` and ``choice`` (a list of texts).

    Raises:
        ConfigError: Anything else.

    >>> structured_guide({"choice": ["yes", "no"]}), structured_guide({"json": {"type": "object"}})
    (('choices', 'yes\nno'), ('json', '{"type": "object"}'))
    """
    if not isinstance(given, dict) or len(given) != 1 or next(iter(given)) not in GUIDES:
        raise ConfigError(f"structured_outputs={given!r} must hold one of {', '.join(GUIDES)}.")
    kind, value = next(iter(given.items()))
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"structured_outputs: choice={value!r} must be a list of strings.")
        if broken := [v for v in value if "\n" in v]:
            raise ConfigError(
                f"structured_outputs: choice {broken[0]!r} has a line break. Write it as a regex or a grammar."
            )
        return ("choices", "\n".join(value))
    if not (isinstance(value, str) and value) and not (kind == "json" and isinstance(value, dict | bool)):
        raise ConfigError(
            f"structured_outputs: {kind}={value!r} must be text{' or a schema' if kind == 'json' else ''}."
        )
    return (kind, value if isinstance(value, str) else json.dumps(value))
