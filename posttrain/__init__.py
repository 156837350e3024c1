"""Post-training of transformer language models, with nothing silently wrong and no token computed twice.

Every public name is importable from here, and is loaded when it is first used: ``import posttrain`` imports no torch.
"""

from __future__ import annotations

import ast
import importlib.abc
import os
import sys
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

# Before torch is loaded: its threads would spin for milliseconds while they wait for each other, which takes the processors from
# whoever they wait for as soon as a machine has other work (a step of 350 s in the place of 75 s). To sleep at once costs a quiet
# machine a tenth of a step of 135M parameters, and two fifths of a tiny model's: GNU's library, which pip's torch has, spins for
# some ten microseconds.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Before torch takes its first megabytes: large tensors in pages of 2 MB, as Linux gives them to who asks. Each is taken from the
# system anew, and in pages of 4 kB that was up to a fifth of a step on a virtual machine.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# The names by module, as type checkers read them too.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_PUBLIC = {
    alias.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        if not name.startswith("_"):
            found = importlib.import_module("posttrain.compat.paths").older_name("posttrain", name)
            if found is not None:
                return found
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    value = getattr(importlib.import_module("posttrain.plugins").module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


class _TRLPaths(importlib.abc.MetaPathFinder):
    """Finder of TRL's module paths (``posttrain.trainer`` and similar), which have no files."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        """Return the spec of one of TRL's module paths. Return None for every other name."""
        if not fullname.startswith("posttrain."):
            return None
        return importlib.import_module("posttrain.compat.paths").spec_of(fullname)


# Python asks it last: only for modules that no file holds.
sys.meta_path.append(_TRLPaths())
