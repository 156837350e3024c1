"""Environments that judge themselves: one reward column for each of their classes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from posttrain.errors import RewardError

__all__ = ["EnvironmentReward", "environment_rewards"]


class EnvironmentReward:
    """What ``get_reward()`` of every environment of one class says; None on the rows of other classes.

    Args:
        kind: The class; its subclasses have a column of their own.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.__name__ = kind.__name__

    async def __call__(self, environments: Sequence[Any], **_: Any) -> list[float | None]:
        """One number (or None) a row; ``get_reward`` may be asynchronous.

        Raises:
            RewardError: It raised; names the class and the row.
        """
        rewards: list[float | None] = []
        for row, environment in enumerate(environments):
            if type(environment) is not self.kind:
                rewards.append(None)
                continue
            try:
                reward = environment.get_reward()
                rewards.append(await reward if inspect.isawaitable(reward) else reward)
            except Exception as error:
                raise RewardError(
                    f"{self.__name__}.get_reward() raised {type(error).__name__}: {error} (row {row}). It must give a "
                    "number, or None for 'does not apply', however the episode went."
                ) from error
        return rewards


def environment_rewards(probes: Sequence[Any]) -> list[EnvironmentReward]:
    """One reward function for each class (exact type, once) of the environments that have ``get_reward``.

    Args:
        probes: One instance of each environment.

    >>> class Game:
    ...     def get_reward(self):
    ...         return 1.0
    >>> [reward.__name__ for reward in environment_rewards([Game(), Game(), object()])]
    ['Game']
    """
    kinds = dict.fromkeys(type(probe) for probe in probes if callable(getattr(probe, "get_reward", None)))
    return [EnvironmentReward(kind) for kind in kinds]
