"""What users see: names, signatures, config fields with their defaults, metrics of a run. `python -m tests.surface` rewrites it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path

import posttrain

FILE = Path(__file__).parent / "snapshots" / "public_surface.json"
# What users call on a trainer or override in a subclass; the rest of its methods is nobody's contract.
HOOKS = (
    "objective", "rows", "prepare_datasets", "load_model", "collator", "train", "evaluate", "predict", "log", "save_model",
    "compute_loss", "training_step", "advantages", "score", "generate", "roll_out", "push_to_hub", "create_model_card",
)  # fmt: skip
MODULE = re.compile(r"\b(?:posttrain|transformers|datasets|torch|peft|accelerate)(?:\.\w+)*\.(?=\w)")


def _short(value) -> str:
    """A default or annotation without addresses and module paths, which are nobody's contract."""
    text = value if isinstance(value, str) else repr(value)
    return MODULE.sub("", re.sub(r" at 0x[0-9a-f]+", "", text))


def _signature(value) -> str:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "?"
    found = []
    for p in parameters:
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**", p.KEYWORD_ONLY: "kw:"}.get(p.kind, "")
        found.append(f"{star}{p.name}" + ("" if p.default is p.empty else f"={_short(p.default)}"))
    return ", ".join(found)


def _own(cls) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] == "posttrain"]


def _fields(cls) -> dict[str, str]:
    """Fields declared by us, with their defaults."""
    declared = {name for base in _own(cls) for name in inspect.get_annotations(base)}
    found = {}
    for item in dataclasses.fields(cls):
        if item.name in declared and item.init:
            made = item.default_factory
            default = item.default if made is dataclasses.MISSING else made()
            found[item.name] = "required" if default is dataclasses.MISSING else _short(default)
    return found


def _described(value) -> dict:
    if not inspect.isclass(value):
        return {"signature": _signature(value)}
    if dataclasses.is_dataclass(value):
        return {"fields": dict(sorted(_fields(value).items()))}
    public = {
        name: _signature(member)
        for base in reversed(_own(value))
        for name, member in vars(base).items()
        if not name.startswith("_") and inspect.isfunction(member)
    }
    if issubclass(value, posttrain.PostTrainer):
        public = {name: signature for name, signature in public.items() if name in HOOKS}
    return {"signature": _signature(value), "methods": dict(sorted(public.items()))}


def names() -> dict[str, dict]:
    """Every public name and what can be said of it without running it."""
    return {name: _described(getattr(posttrain, name)) for name in posttrain.__all__}


def metrics() -> dict[str, list[str]]:
    """The keys of all that every trainer logs in the steps and evaluations of `tests.golden`."""
    from tests.golden import CASES, rows

    return {name: sorted({key for row in rows(name) for key in row}) for name in CASES}


def surface() -> dict:
    """Names and metrics."""
    return {"names": names(), "metrics": metrics()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n")
