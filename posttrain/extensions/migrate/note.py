"""`Note`: a place in a file that must be changed or checked manually."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    """Place in a file that must be changed or checked manually.

    Attributes:
        line: Line number in the file, or in the cell of a notebook. The first line is 1.
        text: Description of what must be changed or checked.
        cell: Number of the cell in a notebook. The first cell is 1. 0 for other files.
        check: Whether the code runs without changes, but behaves differently than in older releases.
    """

    line: int
    text: str
    cell: int = 0
    check: bool = False

    def at(self, path: Path) -> str:
        """Return a line for the terminal with the file, the line number and the text."""
        return f"{path}:{f'cell {self.cell}:' if self.cell else ''}{self.line}: {self.text}"
