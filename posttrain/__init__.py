"""Post-training of transformer language models.

All public names can be imported from this package. Public names are loaded on first use, so ``import posttrain`` does not
import torch.
"""

from __future__ import annotations

import ast
import importlib.abc
import os
import sys
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

# OMP_WAIT_POLICY and GOMP_SPINCOUNT must be set before torch is loaded. By default, torch's threads spin while they wait for
# each other. Spinning slows down other processes on a busy machine (350 s instead of 75 s per step). On an idle machine,
# passive waiting makes a step 10 % slower for a model with 135M parameters, and 40 % slower for a tiny model. With this spin
# count, GNU's OpenMP, which torch from PyPI contains, spins for about ten microseconds.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# THP_MEM_ALLOC_ENABLE must be set before torch allocates memory. With this variable, torch uses 2 MB pages for large
# tensors. The operating system provides new memory for each tensor. With 4 kB pages, this took up to 20 % of the time of a
# step on a virtual machine.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Public names, grouped by module. Python code and type checkers read the names from the same stub file.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_PUBLIC = {
    alias.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        if not name.startswith("_"):
            resolved = importlib.import_module("posttrain.compat.paths").older_name("posttrain", name)
            if resolved is not None:
                return resolved
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    value = getattr(importlib.import_module("posttrain.plugins").module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


class _TRLPaths(importlib.abc.MetaPathFinder):
    """Import finder for TRL's module paths (``posttrain.trainer`` and similar), for which this package has no files."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        """Return the module spec if ``fullname`` is one of TRL's module paths. Return None for every other name."""
        if not fullname.startswith("posttrain."):
            return None
        return importlib.import_module("posttrain.compat.paths").spec_of(fullname)


# The finder is added last, so that Python uses it only for modules that have no file.
sys.meta_path.append(_TRLPaths())
