"""`posttrain report RUN [RUN...]`: one HTML file with everything a run recorded, and runs side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """The command itself; what it wrote is its output.

    Returns:
        0.

    Raises:
        DataError: A folder that holds no record.
    """
    arguments = _parser().parse_args(argv)
    from posttrain.report.page import read_runs, write_page

    runs = read_runs(arguments.runs)
    target = Path(arguments.out) if arguments.out else runs[0].folder / "report.html"
    written = write_page(runs, target)
    for entry in runs:
        for note in entry.notes:
            sys.stderr.write(f"{entry.name}: {note}\n")
    sys.stdout.write(f"{written} ({written.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="posttrain report",
        description="Make one HTML file of what runs recorded: curves, findings, completions, data, manifest, comparison. "
        "It needs no network and works while a run is training.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run; several are laid over each other")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: report.html in the first folder)")
    return parser
