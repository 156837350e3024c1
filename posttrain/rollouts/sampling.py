"""Functions that create sampling settings from ``generation_kwargs``, from structured outputs, or from a trainer's config."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posttrain.errors import ConfigError
from posttrain.rollouts.native.draws import has_rules
from posttrain.types import NEVER, Sampling

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig


GUIDES = ("regex", "json", "grammar", "choice")


def reshapes(sampling: Sampling) -> bool:
    """Return whether the settings contain penalties, structured outputs or rules that change the sampled distribution.
    Temperature and truncation are ignored.
    """
    return sampling.repetition_penalty != 1.0 or sampling.guide is not None or has_rules(sampling)


def structured_guide(options: object) -> tuple[str, str]:
    r"""Convert structured outputs such as ``{"regex": "[ab]+"}`` to the format of `posttrain.types.Sampling.guide`.

    Args:
        options: Dict with exactly one of ``regex``, ``json`` (a schema), ``grammar`` and ``choice`` (a list of texts).

    Raises:
        ConfigError: The dict does not have this form.

    >>> structured_guide({"choice": ["yes", "no"]}), structured_guide({"json": {"type": "object"}})
    (('choices', 'yes\nno'), ('json', '{"type": "object"}'))
    """
    if not isinstance(options, dict) or len(options) != 1 or next(iter(options)) not in GUIDES:
        raise ConfigError(f"structured_outputs={options!r} must have exactly one of {', '.join(GUIDES)}.")
    kind, value = next(iter(options.items()))
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"structured_outputs: choice={value!r} must be a list of strings.")
        if broken := [v for v in value if "\n" in v]:
            raise ConfigError(
                f"structured_outputs: choice {broken[0]!r} contains a line break. Use a regex or a grammar instead."
            )
        return ("choices", "\n".join(value))
    if not (isinstance(value, str) and value) and not (kind == "json" and isinstance(value, dict | bool)):
        raise ConfigError(
            f"structured_outputs: {kind}={value!r} must be text{' or a schema' if kind == 'json' else ''}."
        )
    return (kind, value if isinstance(value, str) else json.dumps(value))


# Fields of transformers' ``GenerationConfig`` that are converted. ``logit_bias`` is from vLLM's ``SamplingParams``.
GENERATION_NAMES = (
    "eos_token_id",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "suppress_tokens",
    "stop_strings",
    "logit_bias",
)


def generation_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert transformers' ``generation_kwargs`` to fields of `posttrain.types.Sampling`. Other keys are not changed.

    Args:
        options: ``generation_kwargs``. A value of None means that the key is not set. ``eos_token_id`` replaces the
            tokenizer's stop tokens.

    Raises:
        ConfigError: A value has the wrong type. The message contains the key and the value.

    >>> generation_fields({"eos_token_id": 2, "suppress_tokens": [7], "logit_bias": {"5": -1}, "seed": 3})
    {'seed': 3, 'stop_token_ids': (2,), 'logit_bias': ((5, -1.0), (7, -1000000000.0))}
    """
    sampling_fields = {name: value for name, value in options.items() if name not in GENERATION_NAMES}
    chosen = {name: options[name] for name in GENERATION_NAMES if options.get(name) is not None}
    if "eos_token_id" in chosen:
        sampling_fields["stop_token_ids"] = _ids("eos_token_id", chosen)
    if "min_new_tokens" in chosen:
        sampling_fields["min_new_tokens"] = _count("min_new_tokens", chosen["min_new_tokens"])
    if "no_repeat_ngram_size" in chosen:
        sampling_fields["no_repeat_ngram"] = _count("no_repeat_ngram_size", chosen["no_repeat_ngram_size"])
    if "stop_strings" in chosen:
        strings = [chosen["stop_strings"]] if isinstance(chosen["stop_strings"], str) else chosen["stop_strings"]
        if not isinstance(strings, list | tuple) or not all(isinstance(x, str) and x for x in strings):
            raise _wrong("stop_strings", chosen["stop_strings"], "a nonempty text, or a list of nonempty texts")
        sampling_fields["stop_strings"] = tuple(strings)
    bias = _bias(chosen.get("logit_bias", {})) + tuple((i, NEVER) for i in _ids("suppress_tokens", chosen))
    return sampling_fields | ({"logit_bias": bias} if bias else {})


def _wrong(name: str, value: object, kind: str) -> ConfigError:
    return ConfigError(f"generation_kwargs: {name}={value!r:.80} must be {kind}.")


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(name, value, "an integer of at least 0")
    return value


def _ids(name: str, chosen: Mapping[str, Any]) -> tuple[int, ...]:
    value = chosen.get(name, ())
    return tuple(_count(name, i) for i in (value if isinstance(value, list | tuple) else [value]))


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    try:
        pairs = value.items() if isinstance(value, Mapping) else [tuple(pair) for pair in value]
        bias = {int(token): float(added) for token, added in pairs}
    except (TypeError, ValueError) as error:
        raise _wrong("logit_bias", value, "a dict of token ids and numbers, or a list of such pairs") from error
    if any(token < 0 or not math.isfinite(added) for token, added in bias.items()):
        raise _wrong("logit_bias", value, "ids of at least 0 with finite numbers (suppress_tokens forbids tokens)")
    return tuple(bias.items())


def configured_sampling(args: PostTrainingConfig, *, stop_token_ids: tuple[int, ...], seed: int) -> Sampling:
    """Return the sampling settings of an online trainer's config.

    Args:
        args: Config with ``temperature``, ``top_p`` and so on. Values in ``generation_kwargs`` override these fields.
        stop_token_ids: Tokens that end a completion.
        seed: Seed of the call.
    """
    regex = args.vllm_structured_outputs_regex
    settings: dict[str, Any] = {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "stop_token_ids": stop_token_ids,
        "seed": seed,
        "guide": ("regex", regex) if regex else None,
    }
    overrides = generation_fields(args.generation_kwargs or {})
    overrides.pop("do_sample", None)
    return Sampling(**(settings | overrides))


# Upper bound of seeds. Every engine can store seeds below this bound as signed integers.
SEEDS = 2**62


def derived_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of request ``index`` in a call with ``seed``. Every server computes the same seed.

    Multiplier and increment are those of Knuth's MMIX generator, so the seeds of consecutive requests are far apart. If a
    request has several completions, engines add 1, 2, ... to its seed.
    """
    return None if seed is None else (seed * 6364136223846793005 + (index + 1) * 1442695040888963407) % SEEDS
