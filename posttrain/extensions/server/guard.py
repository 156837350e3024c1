"""`Guard` and `LoopbackGuard`: ASGI middleware that rejects requests before their bodies are read.

`guard_for` selects one of them by the server's address. `bounded` limits a body without an announced length.

`Guard` describes the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException

from posttrain.errors import ConfigError
from posttrain.extensions.server.replies import API_KEY_VARIABLE, LOOPBACK, error_body
from posttrain.extensions.server.tokens import token_pattern

# Maximum size of a body in bytes, without and with images.
MOST_BYTES, MOST_BYTES_WITH_IMAGES = 8 * 2**20, 64 * 2**20
# Maximum bytes and seconds for reading and dropping the body of a rejected request.
DRAIN_BYTES, DRAIN_S = 2**20, 1.0
# Paths of endpoints that receive prompts. The bodies of other endpoints are small.
GENERATION_PATHS = ("/v1/", "/inference/")


class Guard:
    """ASGI middleware that rejects a request before its body is read.

    - **401**: every path except ``/health`` needs ``Authorization: Bearer TOKEN``, compared in constant time. Websockets too.
    - **403**: the ``Origin`` of a web page is not the server itself.
    - **415**: a body that is not ``application/json``. A web page can send any other type without asking the server first.
    - **413**: a body that is too large.

    vLLM's own token protects only ``/v1``, and not the endpoints that replace weights. `posttrain vllm-serve` adds this
    guard.

    Args:
        app: The application.
        api_key: Bearer token. ``None`` (default): the value of ``$POSTTRAIN_API_KEY``.
        images: Whether prompts may contain images.

    Raises:
        ConfigError: There is no token.
    """

    # Allowed host names of requests. None: any.
    hosts: tuple[str, ...] | None = None

    def __init__(self, app: Any, api_key: str | None = None, images: bool = True) -> None:
        key = api_key or os.environ.get(API_KEY_VARIABLE)
        if not key:
            raise ConfigError(f"the rollout server has no token. Fix: set {API_KEY_VARIABLE}.")
        self.app, self.images, self.expected = app, images, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Reject a request or pass it to the application."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = dict(scope.get("headers") or ())
        refusal = self._refusal(scope, headers) or self._refusal_of_body(scope, headers)
        if refusal is None:
            await self.app(scope, bounded(receive, self._limit(scope)), send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(receive, send, *refusal)

    def _refusal(self, scope: Any, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Return status and message for a request from a caller that must not use the server, or None."""
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if self.hosts is not None and host and _name(f"//{host}") not in self.hosts:
            return 403, f"the server listens only on this machine, but the request is for the host {host[:100]!r}."
        if origin and origin.partition("://")[2] != host:
            return 403, f"web pages of {origin[:100]!r} must not use this server."
        if scope["path"].rstrip("/") == "/health":
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return 401, (
                "send the server's token: 'Authorization: Bearer TOKEN'. Fix: set the variable "
                f"{API_KEY_VARIABLE} of the client to the server's. A server without one writes its token to the file "
                f"{token_pattern((scope.get('server') or ('', 'PORT'))[1])}, which its own user can read."
            )
        return None

    def _refusal_of_body(self, scope: Any, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Return status and message for a body that is not accepted, or None."""
        if scope.get("method", "GET") in ("GET", "HEAD", "OPTIONS"):
            return None
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if kind != "application/json":
            return 415, f"Content-Type {kind[:100]!r}: send application/json, also without a body."
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit(scope):
            return (
                413,
                f"the body has {int(length)} bytes; the limit is {self._limit(scope)}. Fix: send fewer prompts at once.",
            )
        return None

    def _limit(self, scope: Any) -> int:
        pictured = self.images and scope["path"].startswith(GENERATION_PATHS)
        return MOST_BYTES_WITH_IMAGES if pictured else MOST_BYTES


class LoopbackGuard(Guard):
    """`Guard` of a server that listens on loopback.

    The ``Host`` of a request must be loopback too (403), which protects against DNS rebinding by web pages.
    """

    hosts = LOOPBACK


def guard_for(host: str) -> type[Guard]:
    """Return the guard of a server that listens on ``host``."""
    return LoopbackGuard if host in LOOPBACK else Guard


def _name(address: str) -> str | None:
    with contextlib.suppress(ValueError):
        return urlsplit(address).hostname
    return None


def bounded(receive: Any, limit: int) -> Any:
    """Return ``receive`` with a limit in bytes; a longer body is an `HTTPException` with status 413."""
    read = 0

    async def receive_some() -> Any:
        nonlocal read
        message = await receive()
        read += len(message.get("body") or b"")
        if read > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes. Fix: send fewer prompts at once.")
        return message

    return receive_some


async def _skip(receive: Any) -> None:
    """Read a body up to its end or `DRAIN_BYTES`."""
    read, more = 0, True
    while more and read < DRAIN_BYTES:
        message = await receive()
        read, more = read + len(message.get("body") or b""), message.get("more_body", False)


async def _answer(receive: Any, send: Any, status: int, message: str) -> None:
    """Send an error and close the connection, so that unauthorized callers cannot keep it open.

    A short body is read first. Closing a connection with an unread body would reset it, and the client could lose the
    response.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_skip(receive), DRAIN_S)
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
