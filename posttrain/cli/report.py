"""`posttrain report` and `posttrain watch`: what runs recorded, as one HTML file, on the terminal, or as a live page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["run", "watch"]


def run(argv: list[str]) -> int:
    """`posttrain report RUN [RUN...]`: write one HTML file with all that runs recorded; prints its path.

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


def watch(argv: list[str]) -> int:
    """`posttrain watch RUN`: a run while it trains, on the terminal or as a live page on this machine.

    Returns:
        0.

    Raises:
        DataError: A folder that holds no record.
        ConfigError: The port is taken.
    """
    arguments = _watch_parser().parse_args(argv)
    if arguments.serve is not None:
        return _serve(arguments.runs, arguments.serve)
    from posttrain.errors import ConfigError
    from posttrain.report.watch import watch as show

    if len(arguments.runs) > 1:
        raise ConfigError("the terminal shows one run. Name one folder, or add --serve for a page with all of them.")
    show(arguments.runs[0], once=arguments.once, every=max(arguments.every, 0.1))
    return 0


def _serve(folders: list[str], port: int) -> int:
    from posttrain.report.page.serve import serve

    server = serve(folders, port)
    sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends)\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    finally:
        server.server_close()
    return 0


def _watch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="posttrain watch",
        description="Show a run while it trains, or as it ended: its main metrics, latest findings and latest completion.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run; several with --serve")
    parser.add_argument("--once", action="store_true", help="show it once and stop")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="how often to look (default: 2)")
    parser.add_argument(
        "--serve", nargs="?", type=int, const=0, metavar="PORT",
        help="serve the page of `posttrain report`, live, on 127.0.0.1 only (default: any free port)",
    )  # fmt: skip
    return parser
