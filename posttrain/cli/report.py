"""`posttrain report`: what runs recorded, as one HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from posttrain.report.page.build import write_page
from posttrain.report.page.run import read_runs


def run(argv: list[str]) -> int:
    """`posttrain report RUN [RUN...]`: write one HTML file with all that runs recorded; prints its path.

    Returns:
        0.

    Raises:
        DataError: A folder that holds no record.
    """
    parser = argparse.ArgumentParser(
        prog="posttrain report",
        description="Make one HTML file of what runs recorded: curves, findings, completions, data, manifest, comparison. "
        "It needs no network and works while a run is training.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run; several are laid over each other")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: report.html in the first folder)")
    arguments = parser.parse_args(argv)
    runs = read_runs(arguments.runs)
    target = Path(arguments.out) if arguments.out else runs[0].folder / "report.html"
    written = write_page(runs, target)
    for entry in runs:
        for note in entry.notes:
            sys.stderr.write(f"{entry.name}: {note}\n")
    sys.stdout.write(f"{written} ({written.stat().st_size / 1e6:.1f} MB)\n")
    return 0
