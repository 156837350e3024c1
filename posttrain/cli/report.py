"""`posttrain report`: write one HTML file about recorded runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from posttrain.report.page.build import write_page
from posttrain.report.page.run import read_runs


def run(argv: list[str]) -> int:
    """Write one HTML file about the recorded runs in ``argv``, and print its path.

    Returns:
        0.

    Raises:
        DataError: A folder contains no run record.
    """
    parser = argparse.ArgumentParser(
        prog="posttrain report",
        description="Write one HTML file about recorded runs: curves, findings, completions, data, manifest, comparison. "
        "Needs no network and works while a run is training.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output_dir of a run; several runs share the same charts"
    )
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
