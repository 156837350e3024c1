"""`posttrain report` and `posttrain watch`: what runs recorded, as one HTML file, on the terminal, or as a live page."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from posttrain.errors import ConfigError
from posttrain.report.page.build import content, render, write_page
from posttrain.report.page.run import read_runs, version
from posttrain.report.progress import watch as watch_run

__all__ = ["LivePage", "run", "serve", "watch"]

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LEAST_SECONDS = 3.0  # Between two renderings.


def run(argv: list[str]) -> int:
    """`posttrain report RUN [RUN...]`: write one HTML file with all that runs recorded; prints its path.

    Returns:
        0.

    Raises:
        DataError: A folder that holds no record.
    """
    arguments = _parser().parse_args(argv)
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
    if arguments.serve is None:
        if len(arguments.runs) > 1:
            raise ConfigError(
                "the terminal shows one run. Name one folder, or add --serve for a page with all of them."
            )
        watch_run(arguments.runs[0], once=arguments.once, every=max(arguments.every, 0.1))
        return 0
    with serve(arguments.runs, arguments.serve) as server:
        sys.stdout.write(f"http://{LOOPBACK}:{server.server_address[1]}/ (Ctrl-C ends)\n")
        sys.stdout.flush()
        server.serve_forever()
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


class LivePage:
    """The page and its updates, rendered at most every few seconds and only when the record changed.

    Args:
        folders: Of the runs.
        least_seconds: Between two renderings.
    """

    def __init__(self, folders: Sequence[str | Path], least_seconds: float = LEAST_SECONDS) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.least_seconds = least_seconds
        self.renderings = 0
        self._lock = threading.Lock()
        self._made = -float("inf")
        self._state: object = None
        self._bodies: dict[str, bytes] = {}

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """ETag and body for ``/`` and ``/live.json``; None for another path."""
        with self._lock:
            state = [version(folder) for folder in self.folders]
            due = time.monotonic() - self._made >= self.least_seconds
            if not self._bodies or (due and state != self._state):
                runs = read_runs(self.folders)
                updates = json.dumps(content(runs), allow_nan=False)
                self._bodies = {"/": render(runs, live=True).encode(), "/live.json": updates.encode()}
                self._made, self._state = time.monotonic(), state
                self.renderings += 1
            return (f'"{id(self)}-{self.renderings}"', self._bodies[path]) if path in self._bodies else None


def serve(folders: Sequence[str | Path], port: int = 0) -> ThreadingHTTPServer:
    """A server bound to 127.0.0.1; the caller runs ``serve_forever`` and closes it.

    Args:
        folders: Of the runs.
        port: 0 takes any free one.

    Raises:
        ConfigError: The port is taken.
    """
    page = LivePage(folders)
    page.answer("/")  # A folder that is none is an error now, not in the browser.

    class Handler(_Handler):
        live = page

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"port {port} on {LOOPBACK} cannot be used: {error}. Name another one, or 0 for any."
        ) from error


class _Handler(BaseHTTPRequestHandler):
    live: LivePage

    def do_GET(self) -> None:
        """Answer with the page, its updates, or 304 where the browser has them."""
        # Another site may give its name the address of this machine: it must not read the run.
        if urlsplit("//" + self.headers.get("Host", "")).hostname not in (LOOPBACK, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "only for this machine")
            return
        path = urlsplit(self.path).path
        try:
            found = self.live.answer(path)
        except Exception as error:  # A record in any state must not take the server down.
            logger.warning("the page could not be made: %s: %s", type(error).__name__, error)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the page could not be made")
            return
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        tag, body = found
        same = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Type", "text/html; charset=utf-8" if path == "/" else "application/json")
        self.end_headers()
        self.wfile.write(b"" if same else body)

    def log_message(self, format: str, *args: object) -> None:
        """Log requests at the debug level only."""
        logger.debug(format, *args)
