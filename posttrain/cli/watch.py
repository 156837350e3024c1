"""`posttrain watch RUN`: a run while it trains, on the terminal or as a live page on this machine."""

from __future__ import annotations

import argparse
import sys

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """The command itself.

    Returns:
        0.

    Raises:
        DataError: A folder that holds no record.
        ConfigError: The port is taken.
    """
    arguments = _parser().parse_args(argv)
    if arguments.serve is not None:
        return _serve(arguments.runs, arguments.serve)
    from posttrain.errors import ConfigError
    from posttrain.report.watch import watch

    if len(arguments.runs) > 1:
        raise ConfigError("the terminal shows one run. Name one folder, or add --serve for a page with all of them.")
    watch(arguments.runs[0], once=arguments.once, every=max(arguments.every, 0.1))
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


def _parser() -> argparse.ArgumentParser:
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
