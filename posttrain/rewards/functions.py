"""What users pass as reward functions, as callables with names of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError

__all__ = ["as_callable", "one_each", "reward_name", "unique"]


def reward_name(function: Any) -> str:
    """``__name__``, through partials; the last part of a model's id; the class name of an instance."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    if isinstance(function, torch.nn.Module):
        config = getattr(function, "config", None)
        return str(getattr(config, "_name_or_path", "") or type(function).__name__).split("/")[-1]
    return getattr(function, "__name__", None) or type(function).__name__


def unique(names: list[str]) -> list[str]:
    """Equal names get ``_1``, ``_2``: their metrics must not merge."""
    result: list[str] = []
    for name in names:
        count, candidate = 0, name
        while candidate in result:
            count += 1
            candidate = f"{name}_{count}"
        result.append(candidate)
    return result


def one_each(name: str, given: Any, count: int) -> list[Any]:
    """A list with one entry a function; None stands for all."""
    if given is None:
        return [None] * count
    entries = list(given) if isinstance(given, list | tuple | Tensor) else [given]
    if len(entries) != count:
        raise ConfigError(f"{name} has {len(entries)} entries for {count} reward functions. Give one each.")
    return entries


def as_callable(function: Any, tokenizer: Any, options: dict[str, Any]) -> Callable:
    """The function itself, or a model wrapped as one.

    Raises:
        ConfigError: Neither.
    """
    if isinstance(function, str | torch.nn.Module):
        from posttrain.rewards.model import ModelReward

        return ModelReward(function, tokenizer, **options)
    if not callable(function):
        raise ConfigError(
            f"reward_funcs holds {function!r} ({type(function).__name__}), which is neither callable nor a model."
        )
    return function
