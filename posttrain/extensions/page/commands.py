"""Commands `inspect` and `report`. The modules that implement a command are imported when the command runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def inspect(argv: list[str]) -> int:
    """Show the rows of a training command with text, masks, lengths and findings."""
    from posttrain.extensions.page.inspect_command import run

    return run(argv)


def report(argv: list[str]) -> int:
    """Write one HTML file about recorded runs: curves, findings, completions and a comparison.

    Returns:
        0.

    Raises:
        DataError: A folder contains no run record.
    """
    from posttrain.extensions.page.build import write_page
    from posttrain.extensions.page.run import read_runs

    parser = argparse.ArgumentParser(
        prog="posttrain report",
        description="Write one HTML file about recorded runs: curves, findings, completions, data, manifest, comparison. "
        "The file does not need a network. The command also works while a run is training.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output_dir of a run. Several runs are shown in the same charts"
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
