"""`rows`: the table of TRL's names that are not simply names here, by release, with what does their job.

The table is the file `trl_names.tsv`. `tools/trl_names.py` lists the names of TRL's wheels that it lacks and corrects its
releases. It is read when a name is looked for, and never on ``import posttrain``.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".tsv")
NAME = re.compile(r"^([\w.]+)(?:(>?=)(.+))?$")
ANY = object()  # A value that is not known.


class TRLName(NamedTuple):
    """A name of TRL.

    Attributes:
        name: As TRL writes it; of a method with its trainer, ``DPOTrainer.dpo_loss``. An option may have a condition on its
            value, ``Config.warmup_ratio>=1``.
        kind: ``method`` of a trainer (or a property), ``import`` (a class or function of the package), ``option`` of a config,
            ``argument`` of a trainer, or ``value`` of an option that still exists, ``SFTConfig.packing_strategy='ffd'`` or
            any value of ``CPOConfig.max_completion_length``.
        releases: First and last release line that has it, ``0.7-1.16``. Options that TRL's configs inherit from transformers have
            its versions, ``transformers 4``.
        action: ``call``: ours is called alike. ``refuse``: the error names ``replacement``; options that are None or False are
            ignored. ``ignore``: accepted without effect. ``rename``: another name. Options and arguments also have ``convert``
            (another option with a value), ``keep`` (stays on the config) and ``loss`` (the weight of one more loss of
            ``loss_type``).
        replacement: What does its job, or for ignored options the reason. Renamed options may go into a mapping,
            ``model_init_kwargs.dtype``.
    """

    name: str
    kind: str
    releases: str
    action: str
    replacement: str

    @property
    def plain(self) -> str:
        """The name without its condition."""
        return NAME.split(self.name)[1]

    def holds(self, value: object) -> bool:
        """Return whether the row's condition holds for a value of the option."""
        _, _, sign, literal, _ = NAME.split(self.name)
        if sign is None:
            return True
        if value is ANY:
            return False
        limit = ast.literal_eval(literal)
        return value == limit if sign == "=" else isinstance(value, int | float) and value >= limit


COLUMNS = TRLName._fields


@functools.cache
def rows() -> tuple[TRLName, ...]:
    """All rows of the table."""
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    return tuple(TRLName(*line.split("\t")) for line in lines[1:])


@functools.cache
def imports() -> dict[str, TRLName]:
    """Rows of imports by name."""
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
    """Return the row of an old value of an option of a config; None for other values."""
    owners = {base.__name__ for base in cls.__mro__} | {"Config"}
    found = (row for row in values().get(name, ()) if row.plain.partition(".")[0] in owners)
    return next((row for row in found if row.holds(value)), None)


@functools.cache
def refused(kind: str) -> dict[str, str]:
    """Replacements by name, of the names of a kind that are refused."""
    return {row.name: row.replacement for row in rows() if row.kind == kind and row.action == "refuse"}


@functools.cache
def renamed_arguments() -> dict[str, str]:
    """Present names of the arguments of trainers that were renamed."""
    return {row.name: row.replacement for row in rows() if row.kind == "argument" and row.action == "rename"}
