"""Table of names in TRL that differ in this library. Each row contains a name, the releases with this name, and its
replacement. `rows` returns the rows of the table.

The table is in the file `trl_names.tsv`. `tools/trl_names.py` lists names in TRL's wheels that the table lacks, and corrects
the column of releases. The table is read when a name is looked up for the first time, and not on ``import posttrain``.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".tsv")
NAME = re.compile(r"^([\w.]+)(?:(>?=)(.+))?$")
ANY = object()  # Placeholder for an unknown value.


class TRLName(NamedTuple):
    """Row of the table: a name of TRL and its replacement.

    Attributes:
        name: Name in TRL. For a method, the name includes the trainer, as in ``DPOTrainer.dpo_loss``. An option may
            have a condition on its value, as in ``Config.warmup_ratio>=1``.
        kind: ``method``: method or property of a trainer. ``import``: class or function of the package. ``option``: option of
            a config. ``argument``: argument of a trainer. ``value``: value of an option that still exists, e.g.
            ``SFTConfig.packing_strategy='ffd'`` or any value of ``CPOConfig.max_completion_length``. ``default``: option whose
            default was different.
        releases: First and last release with this name, e.g. ``0.7-1.16``. Options that TRL's configs inherit from
            transformers have transformers' versions, e.g. ``transformers 4``.
        action: ``call``: this library's method has the same signature. ``refuse``: an error with ``replacement`` is raised,
            but options that are None or False are ignored. ``ignore``: the name is accepted without effect. ``rename``: the
            name is replaced with another name. ``convert``: an option or argument is replaced with a value of another option.
            ``keep``: an option is stored on the config. ``loss``: an option is the weight of an additional loss in
            ``loss_type``. ``set``: action of every ``default``.
        replacement: Replacement of the name, or the reason why an option is ignored. The replacement of a renamed option may
            be a key of a mapping, e.g. ``model_init_kwargs.dtype``. For a ``default``, the replacement is the older default
            value.
    """

    name: str
    kind: str
    releases: str
    action: str
    replacement: str

    @property
    def plain(self) -> str:
        """Name without the condition on the value."""
        return NAME.split(self.name)[1]

    def holds(self, value: object) -> bool:
        """Return whether a value of the option satisfies the row's condition."""
        _, _, sign, literal, _ = NAME.split(self.name)
        if sign is None:
            return True
        if value is ANY:
            return False
        limit = ast.literal_eval(literal)
        return value == limit if sign == "=" else isinstance(value, int | float) and value >= limit


def advice(replacement: str) -> str:
    """Convert a replacement to advice: "leave it out: ..." if it begins with "nothing: ", otherwise "use X"."""
    return f"leave it out{replacement[7:]}" if replacement.startswith("nothing: ") else f"use {replacement}"


COLUMNS = TRLName._fields


@functools.cache
def rows() -> tuple[TRLName, ...]:
    """Return all rows of the table."""
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    return tuple(TRLName(*line.split("\t")) for line in lines[1:])


@functools.cache
def imports() -> dict[str, TRLName]:
    """Return the rows of kind ``import`` by name."""
    return {row.name: row for row in rows() if row.kind == "import"}


@functools.cache
def values() -> dict[str, list[TRLName]]:
    """Return the rows of kind ``value`` by the name of their option."""
    by_option: dict[str, list[TRLName]] = {}
    for row in rows():
        if row.kind == "value":
            by_option.setdefault(row.plain.partition(".")[2], []).append(row)
    return by_option


def value_row(cls: type, name: str, value: object) -> TRLName | None:
    """Return the table row of an option value of older releases. Return None for values that are not in the table."""
    owners = {base.__name__ for base in cls.__mro__} | {"Config"}
    candidates = (row for row in values().get(name, ()) if row.plain.partition(".")[0] in owners)
    return next((row for row in candidates if row.holds(value)), None)


@functools.cache
def refused(kind: str) -> dict[str, str]:
    """Return the names of one kind that raise an error, mapped to their replacements."""
    return {row.name: row.replacement for row in rows() if row.kind == kind and row.action == "refuse"}


@functools.cache
def renamed_arguments() -> dict[str, str]:
    """Map the old names of renamed trainer arguments to their current names."""
    return {row.name: row.replacement for row in rows() if row.kind == "argument" and row.action == "rename"}
