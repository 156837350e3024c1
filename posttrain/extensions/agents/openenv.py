"""OpenEnv's clients as environments, for ``environment_factory``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.integrations import require
from posttrain.rollouts.episodes.environments import step_environment


def openenv_environment(
    client: Callable[[], Any],
    *,
    action: Callable[[str], Any],
    observe: Callable[[Any], str] = str,
    actions: str = "What to do.",
    name: str = "OpenEnv",
) -> Callable[[], Any]:
    """A factory of environments around clients of OpenEnv, for ``environment_factory``; the reward is the sum over steps.

    Args:
        client: Makes a client (``lambda: EchoEnv(base_url=url)``); asynchronous ones are used through their ``sync()``.
        action: From the model's text to the client's action.
        observe: From an observation to the text that the model reads.
        actions: Describes the argument of ``step`` to the model.
        name: Of the class, and so of its reward column.

    Raises:
        MissingDependencyError: openenv-core is not installed.
    """
    require("openenv", "openenv_environment")

    def make() -> Any:
        connection = client()
        return connection.sync() if callable(getattr(connection, "sync", None)) else connection

    return step_environment(make, action=action, observe=observe, actions=actions, name=name)
