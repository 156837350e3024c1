"""`Note`: a place in a file that must be changed manually."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    """Place in a file that must be changed manually.

    Attributes:
        line: Number of the line in the file, or in the cell of a notebook. The first line is 1.
        text: What must be changed, and how.
        cell: Number of the notebook's cell. The first cell is 1.
    """

    line: int
    text: str
    cell: int = 0

    def at(self, path: Path) -> str:
        """Format the place and the text."""
        return f"{path}:{f'cell {self.cell}:' if self.cell else ''}{self.line}: {self.text}"
