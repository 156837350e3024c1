"""The page of runs that still train, served on this machine alone: rendered again when the record has changed."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from posttrain.errors import ConfigError
from posttrain.report.page.build import content, render
from posttrain.report.page.run import read_runs, version

__all__ = ["LivePage", "serve"]

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LEAST_SECONDS = 3.0  # Between two renderings.
OURS = {"127.0.0.1", "localhost"}


class LivePage:
    """The page and its news, made at most every few seconds and only of a record that changed.

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
        self._answers: dict[str, tuple[str, str, bytes]] = {}

    def answer(self, path: str) -> tuple[str, str, bytes] | None:
        """Type, ETag and body for a path; None for one that does not exist."""
        with self._lock:
            state = [version(folder) for folder in self.folders]
            due = time.monotonic() - self._made >= self.least_seconds
            if not self._answers or (due and state != self._state):
                self._answers = self._render()
                self._made, self._state = time.monotonic(), state
            return self._answers.get(path)

    def _render(self) -> dict[str, tuple[str, str, bytes]]:
        self.renderings += 1
        runs = read_runs(self.folders)
        news = json.dumps(content(runs), allow_nan=False).encode()
        bodies = {
            "/": ("text/html; charset=utf-8", render(runs, live=True).encode()),
            "/live.json": ("application/json", news),
        }
        return {
            path: (kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"', body) for path, (kind, body) in bodies.items()
        }


def serve(folders: Sequence[str | Path], port: int = 0) -> ThreadingHTTPServer:
    """A server bound to 127.0.0.1; the caller runs ``serve_forever`` and closes it.

    Args:
        folders: Of the runs.
        port: 0 takes any free one.

    Raises:
        ConfigError: The port is taken.
    """
    page = LivePage(folders)
    page.answer("/")  # A folder that is none, or a missing package, is said now and not to the browser.

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
    server_version, sys_version = "posttrain", ""

    def do_GET(self) -> None:
        """Answer with the page, its news, or 304 where the browser has them."""
        # A name that another site points at this machine must not let that site read the run.
        host = urlsplit("//" + self.headers.get("Host", "")).hostname
        if host not in OURS:
            self.send_error(HTTPStatus.FORBIDDEN, "only for this machine")
            return
        try:
            found = self.live.answer(urlsplit(self.path).path)
        except Exception as error:  # A record in any state must not take the server down.
            logger.warning("the page could not be made: %s: %s", type(error).__name__, error)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the page could not be made")
            return
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, tag, body = found
        same = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        if not same:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not same and self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Requests are no news."""
        logger.debug(format, *args)
