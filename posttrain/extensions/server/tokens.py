"""API tokens for rollout servers that were started without a token.

`write_token` writes a new token to a file, and `find_token` reads the file. Only the same user on the same machine can read
it. `token_pattern` returns the location of token files. `LocalToken` adds the token to each request.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx2

from posttrain.rollouts.shared_memory import shared_root


def token_pattern(port: object) -> Path:
    """Return a glob pattern for the paths of all token files of servers on ``port``."""
    return shared_root() / f"posttrain-token-{port}-*"


def _own_tokens(port: int) -> Iterator[Path]:
    """Yield this user's token files for ``port``. A file is skipped if another user owns it or can read it."""
    pattern = token_pattern(port)
    for path in pattern.parent.glob(pattern.name):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                yield path


def write_token(port: int) -> Path:
    """Write a new token for the server on a port to a file that only this user can read (mode 0600).

    The file is in shared memory, which is cleared when the machine restarts. The file name contains random characters, so
    other users cannot create the file in advance. Tokens of earlier servers on this port are removed.
    """
    for path in list(_own_tokens(port)):
        path.unlink(missing_ok=True)
    pattern = token_pattern(port)
    handle, name = tempfile.mkstemp(prefix=pattern.name[:-1], dir=pattern.parent)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32))
    return Path(name)


def find_token(port: int) -> str | None:
    """Return the token of the last server that this user started on a port of this machine. Return None if there is no
    token file.
    """
    with contextlib.suppress(OSError):
        newest = max(_own_tokens(port), key=lambda path: path.stat().st_mtime_ns, default=None)
        return None if newest is None else newest.read_text() or None
    return None


class LocalToken(httpx2.Auth):
    """Authentication with the token file of a server on this machine. The file is read for each request, because a
    restarted server has a new token.

    Args:
        port: Port of the server.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Add the header ``Authorization`` to a request if there is a token file."""
        token = find_token(self.port)
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"
        yield request
