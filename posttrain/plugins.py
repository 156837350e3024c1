"""Entry points of installed packages (`entries`, `load`, `call`), and imports of posttrain's own extensions (`module`).

A package registers an object under an entry point group (see `docs/extend.md`). posttrain's own extensions use the same
groups. `module` imports a module of `posttrain.extensions` by name, without an entry point. Modules outside of
`posttrain.extensions` import extensions only through this file.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Literal

from posttrain.errors import MissingDependencyError, raised_at

Group = Literal["commands", "methods", "engines", "checks"]


@functools.cache
def entries(group: Group) -> dict[str, EntryPoint]:
    """Return the entry points of the group ``posttrain.GROUP`` by name, without importing their objects."""
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


def call(entry: EntryPoint, *arguments: Any) -> Any:
    """Import the function of an entry point and call it."""
    return load(entry)(*arguments)


def module(path: str) -> ModuleType:
    """Import the module ``posttrain.PATH``.

    Raises:
        MissingDependencyError: The module belongs to an extension that is not part of this installation.
    """
    try:
        return importlib.import_module(f"posttrain.{path}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("posttrain.extensions"):
            raise
        raise MissingDependencyError(
            f"the extension {path.split('.')[1]!r} is not installed: there is no module 'posttrain.{path}'. Fix: install "
            "posttrain with its folder posttrain/extensions."
        ) from error
