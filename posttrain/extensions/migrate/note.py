"""`Note`: a place in a file that must be changed or checked manually."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    """Place in a file that must be changed or checked manually.

    Attributes:
        line: Number of the line in the file, or in the cell of a notebook. The first line is 1.
        text: What must be changed or checked, and in which way.
        cell: Number of the notebook's cell. The first cell is 1.
        check: Whether the code still runs, but behaves differently than in older releases.
    """

    line: int
    text: str
    cell: int = 0
    check: bool = False

    def at(self, path: Path) -> str:
        """Return the file, the line and the text, formatted for the terminal."""
        return f"{path}:{f'cell {self.cell}:' if self.cell else ''}{self.line}: {self.text}"
