"""`entries`: objects that installed packages register for posttrain. `load`: import one of them.

A package registers an object under an entry point group (see `docs/extend.md`). Our own extensions use the same groups.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from posttrain.errors import MissingDependencyError, raised_at

Group = Literal["commands", "methods", "engines", "checks"]


@functools.cache
def entries(group: Group) -> dict[str, EntryPoint]:
    """Return the entry points of the group ``posttrain.GROUP`` by name. Nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=f"posttrain.{group}")}


def load(entry: EntryPoint) -> Any:
    """Import the object of an entry point.

    Raises:
        MissingDependencyError: The import fails. The message names the package.
    """
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name
        raise MissingDependencyError(
            f"the entry point {entry.name!r} ({entry.group}) of the package {package!r} cannot be loaded: importing "
            f"{entry.value!r} raised {error!r} ({raised_at(error)}). Fix: install a version of {package!r} that works with "
            "this version of posttrain, or uninstall it."
        ) from error
