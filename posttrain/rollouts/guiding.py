"""``generation_kwargs`` in the words of transformers and vLLM, as fields of `posttrain.types.Sampling`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from posttrain.errors import ConfigError

__all__ = ["GENERATION_NAMES", "GUIDES", "generation_fields", "structured_guide"]

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


# Of transformers' ``GenerationConfig``, and ``logit_bias`` of vLLM's ``SamplingParams``.
GENERATION_NAMES = (
    "eos_token_id",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "suppress_tokens",
    "stop_strings",
    "logit_bias",
)
# Added to suppressed logits: probability 0 to the last bit, and a number that JSON can carry to a server.
SUPPRESSED = -1e9


def generation_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``given`` says in these words, as fields of `posttrain.types.Sampling`; other keys stay as they are.

    Args:
        given: ``generation_kwargs``; None means not set. ``eos_token_id`` takes the place of the tokenizer's.

    Raises:
        ConfigError: A value of another type; names the key and the value.

    >>> generation_fields({"eos_token_id": 2, "suppress_tokens": [7], "logit_bias": {"5": -1}, "seed": 3})
    {'seed': 3, 'stop_token_ids': (2,), 'logit_bias': ((5, -1.0), (7, -1000000000.0))}
    """
    found = {name: value for name, value in given.items() if name not in GENERATION_NAMES}
    said = {name: given[name] for name in GENERATION_NAMES if given.get(name) is not None}
    if "eos_token_id" in said:
        found["stop_token_ids"] = _ids("eos_token_id", said)
    if "min_new_tokens" in said:
        found["min_new_tokens"] = _count("min_new_tokens", said["min_new_tokens"])
    if "no_repeat_ngram_size" in said:
        found["no_repeat_ngram"] = _count("no_repeat_ngram_size", said["no_repeat_ngram_size"])
    if "stop_strings" in said:
        strings = [said["stop_strings"]] if isinstance(said["stop_strings"], str) else said["stop_strings"]
        if not isinstance(strings, list | tuple) or not all(isinstance(x, str) and x for x in strings):
            raise _wrong("stop_strings", said["stop_strings"], "a text or a list of texts, none of them empty")
        found["stop_strings"] = tuple(strings)
    bias = _bias(said.get("logit_bias", {})) + tuple((i, SUPPRESSED) for i in _ids("suppress_tokens", said))
    return found | ({"logit_bias": bias} if bias else {})


def _wrong(name: str, value: Any, kind: str) -> ConfigError:
    return ConfigError(f"generation_kwargs: {name}={value!r:.80} must be {kind}.")


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(name, value, "a whole number from 0 on")
    return value


def _ids(name: str, said: Mapping[str, Any]) -> tuple[int, ...]:
    value = said.get(name, ())
    return tuple(_count(name, i) for i in (value if isinstance(value, list | tuple) else [value]))


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = value.items() if isinstance(value, Mapping) else [tuple(pair) for pair in value]
        bias = {int(token): float(added) for token, added in pairs}
    except (TypeError, ValueError) as error:
        raise _wrong("logit_bias", value, "a dict of token ids and numbers, or a list of such pairs") from error
    if any(token < 0 or not math.isfinite(added) for token, added in bias.items()):
        raise _wrong("logit_bias", value, "of ids from 0 on and of finite numbers (suppress_tokens forbids tokens)")
    return tuple(bias.items())
