"""`Note`: something in a file that needs a person."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    """Something that needs a person.

    Attributes:
        line: Line in the file, from 1; of a notebook in the cell.
        text: What it is, and what to do.
        cell: Number of the notebook's cell, from 1.
    """

    line: int
    text: str
    cell: int = 0

    def at(self, path: Path) -> str:
        """Return the place and the text."""
        return f"{path}:{f'cell {self.cell}:' if self.cell else ''}{self.line}: {self.text}"
