"""Use OpenEnv clients as environments of trainers."""

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
    """Return a function that creates an environment from an OpenEnv client. The reward of an episode is the sum of the
    rewards of its steps.

    Args:
        client: Function that creates a client, e.g. ``lambda: EchoEnv(base_url=url)``. For an asynchronous client, its
            ``sync()`` wrapper is used.
        action: Function that converts the model's text to an action of the client.
        observe: Function that converts an observation to text for the model.
        actions: Description of the argument of ``step``. It is part of the tool schema that the model receives.
        name: Name of the environment class and of the reward column.

    Raises:
        MissingDependencyError: openenv-core is not installed.
    """
    require("openenv", "openenv_environment")

    def make() -> Any:
        connection = client()
        return connection.sync() if callable(getattr(connection, "sync", None)) else connection

    return step_environment(make, action=action, observe=observe, actions=actions, name=name)
