"""Table of TRL's names that are different in this library, with their releases and replacements. `rows` returns its
rows.

The table is in the file `trl_names.tsv`. `tools/trl_names.py` lists names in TRL's wheels that the table lacks, and
corrects the table's releases. The table is read when a name is looked up, and not on ``import posttrain``.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".tsv")
NAME = re.compile(r"^([\w.]+)(?:(>?=)(.+))?$")
ANY = object()  # Marks a value that is unknown.


class TRLName(NamedTuple):
    """A name of TRL.

    Attributes:
        name: Name in TRL. For a method, the name includes the trainer, as in ``DPOTrainer.dpo_loss``. An option may
            have a condition on its value, as in ``Config.warmup_ratio>=1``.
        kind: ``method`` of a trainer (or a property), ``import`` (a class or function of the package), ``option`` of a config,
            ``argument`` of a trainer, or ``value`` of an option that still exists, ``SFTConfig.packing_strategy='ffd'`` or any
            value of ``CPOConfig.max_completion_length``. ``default``: an option whose default was another value.
        releases: First and last release with this name, ``0.7-1.16``. Options that TRL's configs inherit from
            transformers have its versions, ``transformers 4``.
        action: ``call``: ours has the same signature. ``refuse``: an error that contains ``replacement``; options that
            are None or False are ignored. ``ignore``: accepted without effect. ``rename``: another name. Options and
            arguments also have ``convert`` (another option with a value), ``keep`` (stays on the config) and ``loss``
            (the weight of an additional loss in ``loss_type``). ``set``: the action of every ``default``.
        replacement: What to use instead, or the reason for ignored options. Renamed options may be keys of a mapping,
            ``model_init_kwargs.dtype``. For a ``default``: the older value.
    """

    name: str
    kind: str
    releases: str
    action: str
    replacement: str

    @property
    def plain(self) -> str:
        """Name without its condition."""
        return NAME.split(self.name)[1]

    def holds(self, value: object) -> bool:
        """Return whether the row applies to a value of the option, according to the row's condition."""
        _, _, sign, literal, _ = NAME.split(self.name)
        if sign is None:
            return True
        if value is ANY:
            return False
        limit = ast.literal_eval(literal)
        return value == limit if sign == "=" else isinstance(value, int | float) and value >= limit


def advice(replacement: str) -> str:
    """Return "use X" for a replacement, or "leave it out: ..." for a replacement that begins with "nothing: "."""
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
    """Return the rows of old values by the name of their option."""
    found: dict[str, list[TRLName]] = {}
    for row in rows():
        if row.kind == "value":
            found.setdefault(row.plain.partition(".")[2], []).append(row)
    return found


def value_row(cls: type, name: str, value: object) -> TRLName | None:
    """Return the table's row for a value of older releases of a config's option. Return None for other values."""
    owners = {base.__name__ for base in cls.__mro__} | {"Config"}
    found = (row for row in values().get(name, ()) if row.plain.partition(".")[0] in owners)
    return next((row for row in found if row.holds(value)), None)


@functools.cache
def refused(kind: str) -> dict[str, str]:
    """Return the names of one kind that raise an error. Each is mapped to its replacement."""
    return {row.name: row.replacement for row in rows() if row.kind == kind and row.action == "refuse"}


@functools.cache
def renamed_arguments() -> dict[str, str]:
    """Map the old names of renamed trainer arguments to their current names."""
    return {row.name: row.replacement for row in rows() if row.kind == "argument" and row.action == "rename"}
