"""Completions from a function of the user's: called, checked entry by entry, and turned into rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.errors import ArgumentTypeError, RolloutError
from posttrain.given import given_truth, listed, scalar, token_ids, token_logps
from posttrain.types import Rollout

__all__ = ["custom_rollouts"]

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
OPTIONAL = ("logprobs", "env_mask", "logprob_token_ids")
RESERVED = ("prompt_ids", "completion_ids", *OPTIONAL)


def custom_rollouts(
    function: Callable,
    prompts: Sequence[Any],
    trainer: Any,
    *,
    stop_ids: Sequence[int],
    vocabulary: int | None = None,
    most: int | None = None,
) -> tuple[list[Rollout], dict[str, list[Any]]]:
    """Call ``function(prompts, trainer)`` and read what it returns.

    Args:
        function: Returns a dict: ``prompt_ids``, ``completion_ids`` and ``logprobs`` (may be None), one entry a prompt; perhaps
            ``env_mask`` (1 the model's token, 0 another's); anything else is a column for the reward functions.
        prompts: n prompts, each repeated as often as completions of it are wanted.
        trainer: Passed on.
        stop_ids: A completion that does not end with one of these counts as truncated.
        vocabulary: V; ids lie in [0, V). None: only negative ones are refused.
        most: ``max_completion_length``; None is no bound.

    Returns:
        n rollouts, and the further columns with n values each.

    Raises:
        ArgumentTypeError: The function did not return a dict.
        RolloutError: A key is missing, or an entry cannot be used: names the key, the row, the position and the value.
    """
    given = function(prompts=list(prompts), trainer=trainer) if _takes_names(function) else function(prompts, trainer)
    if not isinstance(given, dict):
        raise ArgumentTypeError(f"rollout_func must return a dict, and it returned {type(given).__name__}.")
    missing = [key for key in REQUIRED if key not in given]
    if missing:
        raise _Bad(
            f"rollout_func returned no {missing} (required: {', '.join(REQUIRED)}; it returned {sorted(given)})."
        )
    n = len(prompts)
    tokens: dict[str, list[Any]] = {}
    for key in RESERVED:
        if given.get(key) is None and key in OPTIONAL:
            continue
        tokens[key] = listed(given[key], f"rollout_func: {key!r}")
        if len(tokens[key]) != n:
            raise _Bad(
                f"rollout_func returned {len(tokens[key])} entries in {key!r} for {n} prompts. The prompts it gets are already "
                "repeated once a completion: return one entry for each."
            )
    ends = frozenset(stop_ids)
    rollouts = [_rollout(tokens, i, ends, vocabulary, most) for i in range(n)]
    return rollouts, {k: _column(k, v, n) for k, v in given.items() if k not in RESERVED}


class _Bad(RolloutError, ValueError):
    """What a rollout function returned cannot be used."""


def _takes_names(function: Callable) -> bool:
    import inspect

    try:
        return {"prompts", "trainer"} <= set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False


def _at(key: str, row: int) -> str:
    return f"rollout_func: {key!r}, row {row},"


def _rollout(
    given: dict[str, Any], row: int, ends: frozenset[int], vocabulary: int | None, most: int | None
) -> Rollout:
    prompt, ids = [token_ids(given[key][row], _at(key, row), vocabulary) for key in ("prompt_ids", "completion_ids")]
    if most is not None and len(ids) > most:
        raise _Bad(
            f"{_at('completion_ids', row)} has {len(ids)} tokens, and max_completion_length={most}. Fix: end completions there, "
            "or raise max_completion_length."
        )
    mask, logp = None, []
    if "env_mask" in given:
        flags = _listed_alike(given, "env_mask", row, ids)
        mask = [int(given_truth(x, f"{_at('env_mask', row)} position {t},")) for t, x in enumerate(flags)]
    if "logprobs" in given:
        values = _listed_alike(given, "logprobs", row, ids)
        model = mask or [1] * len(ids)
        chosen = [_chosen(given, row, t, x, ids[t]) if model[t] else None for t, x in enumerate(values)]
        logp = token_logps(chosen, model, _at("logprobs", row))
    return Rollout(prompt, ids, logp, "stop" if ids[-1] in ends else "length", 0, mask)


def _listed_alike(given: dict[str, Any], key: str, row: int, ids: list[int]) -> list[Any]:
    """One value a token of the completion."""
    values = listed(given[key][row], _at(key, row))
    if len(values) != len(ids):
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for row {row}, whose completion has {len(ids)} tokens."
        )
    return values


def _chosen(given: dict[str, Any], row: int, position: int, value: Any, token: int) -> Any:
    """The log-prob of the token that was drawn, out of a number or a list of candidates."""
    if not isinstance(value, list | tuple):
        return value
    if "logprob_token_ids" not in given:
        return value[0] if value else None  # Engines list the drawn token first.
    names = listed(given["logprob_token_ids"][row], _at("logprob_token_ids", row))
    candidates = listed(
        names[position] if position < len(names) else None, f"{_at('logprob_token_ids', row)} position {position},"
    )
    if token not in candidates or len(candidates) != len(value):
        raise _Bad(
            f"rollout_func: row {row}, token {position}: 'logprob_token_ids' {candidates} do not hold the token {token}, or are "
            f"not as many as its {len(value)} log-probs."
        )
    return value[candidates.index(token)]


def _column(key: str, values: Any, n: int) -> list[Any]:
    values = scalar(values) if not getattr(values, "shape", (1,)) else values
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        return [values] * n
    if len(values) != n:
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for {n} prompts. Give one each, or one scalar."
        )
    return list(values)
