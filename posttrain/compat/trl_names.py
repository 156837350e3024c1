"""`rows`: the table of TRL's names that are not simply names here, by release, with what does their job.

The table is the file `trl_names.tsv`, which `tools/trl_names.py` fills from wheels of TRL. It is read when a name is looked
for, and never on ``import posttrain``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".tsv")


class TRLName(NamedTuple):
    """A name of TRL.

    Attributes:
        name: As TRL writes it; of a method with its trainer, ``DPOTrainer.dpo_loss``.
        kind: ``method`` of a trainer (or a property), ``import`` (a class or function of the package), ``option`` of a config, or
            ``argument`` of a trainer.
        releases: First and last release line that has it, ``0.7-1.16``.
        action: ``call``: ours is called alike. ``refuse``: the error names ``replacement``. ``ignore``: accepted without effect.
            Options and arguments also have ``rename``, ``convert`` (another option with a value) and ``keep`` (stays on the
            config).
        replacement: What does its job, or for ignored options the reason.
    """

    name: str
    kind: str
    releases: str
    action: str
    replacement: str


COLUMNS = TRLName._fields


@functools.cache
def rows() -> tuple[TRLName, ...]:
    """All rows of the table."""
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    return tuple(TRLName(*line.split("\t")) for line in lines[1:])


@functools.cache
def refused(kind: str) -> dict[str, str]:
    """Replacements by name, of the names of a kind that are refused."""
    return {row.name: row.replacement for row in rows() if row.kind == kind and row.action == "refuse"}
