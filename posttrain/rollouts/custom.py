"""Completions from a function of the user's: called, checked entry by entry, and turned into rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.errors import ArgumentTypeError, RolloutError
from posttrain.types import Rollout

__all__ = ["custom_rollouts"]

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
RESERVED = (*REQUIRED, "env_mask", "logprob_token_ids")


def custom_rollouts(
    function: Callable, prompts: Sequence[Any], trainer: Any, *, stop_ids: Sequence[int]
) -> tuple[list[Rollout], dict[str, list[Any]]]:
    """Call ``function(prompts, trainer)`` and read what it returns.

    Args:
        function: Returns a dict: ``prompt_ids``, ``completion_ids`` and ``logprobs`` (may be None), one entry a prompt; perhaps
            ``env_mask`` (1 the model's token, 0 another's); anything else is a column for the reward functions.
        prompts: n prompts, each repeated as often as completions of it are wanted.
        trainer: Passed on.
        stop_ids: A completion that does not end with one of these counts as truncated.

    Returns:
        n rollouts, and the further columns with n values each.

    Raises:
        ArgumentTypeError: The function did not return a dict.
        RolloutError: A key is missing, or an entry is: names the key, the row and both lengths.
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
    for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "logprob_token_ids"):
        if given.get(key) is not None and len(given[key]) != n:
            raise _Bad(
                f"rollout_func returned {len(given[key])} entries in {key!r} for {n} prompts. The prompts it gets are already "
                "repeated once a completion: return one entry for each."
            )
    ends = frozenset(stop_ids)
    rollouts = [_rollout(given, i, ends) for i in range(n)]
    return rollouts, {k: _column(k, v, n) for k, v in given.items() if k not in RESERVED}


class _Bad(RolloutError, ValueError):
    """What a rollout function returned cannot be used."""


def _takes_names(function: Callable) -> bool:
    import inspect

    try:
        return {"prompts", "trainer"} <= set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False


def _rollout(given: dict[str, Any], row: int, ends: frozenset[int]) -> Rollout:
    prompt, ids = [_integers(given[key][row], key, row) for key in ("prompt_ids", "completion_ids")]
    logp: list[float] = []
    if given["logprobs"] is not None:
        listed = given["logprobs"][row]
        _same_length("logprobs", len(listed), len(ids), row)
        logp = [_chosen(given, row, t, token) for t, token in enumerate(ids)]
    mask = None
    if given.get("env_mask") is not None:
        mask = [int(bool(x)) for x in given["env_mask"][row]]
        _same_length("env_mask", len(mask), len(ids), row)
        logp = [x * m for x, m in zip(logp, mask, strict=True)] if logp else logp
    return Rollout(prompt, ids, logp, "stop" if ids[-1] in ends else "length", 0, mask)


def _integers(values: Any, key: str, row: int) -> list[int]:
    ids = [int(token) for token in (values.tolist() if hasattr(values, "tolist") else values)]
    if not ids:
        raise _Bad(f"rollout_func returned no token in {key!r} for row {row}. Give at least one.")
    return ids


def _same_length(key: str, found: int, tokens: int, row: int) -> None:
    if found != tokens:
        raise _Bad(
            f"rollout_func returned {found} values in {key!r} for row {row}, whose completion has {tokens} tokens."
        )


def _chosen(given: dict[str, Any], row: int, position: int, token: int) -> float:
    """The log-prob of the token that was drawn, out of a number or a list of candidates."""
    value = given["logprobs"][row][position]
    if value is None:
        return 0.0
    if not isinstance(value, list | tuple):
        return float(value)
    names = given.get("logprob_token_ids")
    if names is None:
        return float(value[0])  # Engines list the drawn token first.
    candidates = list(names[row][position])
    if token not in candidates:
        raise _Bad(
            f"rollout_func: row {row}, token {position}: 'logprob_token_ids' {candidates} do not hold the token {token}."
        )
    return float(value[candidates.index(token)])


def _column(key: str, values: Any, n: int) -> list[Any]:
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        return [values] * n
    if len(values) != n:
        raise _Bad(
            f"rollout_func returned {len(values)} values in {key!r} for {n} prompts. Give one each, or one scalar."
        )
    return list(values)
