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
    """Return a factory of environments for OpenEnv clients. The reward is the sum over steps.

    Args:
        client: Function that creates a client, e.g. ``lambda: EchoEnv(base_url=url)``. Asynchronous clients are used
            through ``sync()``.
        action: Function that converts the model's text to an action of the client.
        observe: Function that converts an observation to text for the model.
        actions: Description of the argument of ``step``, which the model reads.
        name: Name of the class and of its reward column.

    Raises:
        MissingDependencyError: openenv-core is not installed.
    """
    require("openenv", "openenv_environment")

    def make() -> Any:
        connection = client()
        return connection.sync() if callable(getattr(connection, "sync", None)) else connection

    return step_environment(make, action=action, observe=observe, actions=actions, name=name)
