"""`Guard` and `LoopbackGuard`: ASGI middleware that rejects unauthorized and invalid requests before their bodies are
read.

`guard_for` selects one of the two classes by the server's address. `bounded` limits the size of a body without a
Content-Length header. The docstring of `Guard` lists the reasons for rejection.
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

# Maximum size of a request body in bytes, for prompts without images and for prompts with images.
MOST_BYTES, MOST_BYTES_WITH_IMAGES = 8 * 2**20, 64 * 2**20
# Before a request is rejected, its body is read and discarded, up to DRAIN_BYTES bytes and for up to DRAIN_S seconds.
DRAIN_BYTES, DRAIN_S = 2**20, 1.0
# Path prefixes of the endpoints that receive prompts. All other endpoints have small request bodies.
GENERATION_PATHS = ("/v1/", "/inference/")


class Guard:
    """ASGI middleware that checks a request before its body is read. It rejects a request with one of these statuses:

    - **401**: the header ``Authorization: Bearer TOKEN`` is missing or wrong. All requests require the
      header, except requests to ``/health``. The token is compared in constant time.
    - **403**: a web page from another origin sent the request, according to the ``Origin`` header.
    - **415**: the content type is not ``application/json``. Web pages can send some other types without a preflight request.
    - **413**: the body is too large.

    vLLM's own token protects only ``/v1``. That token does not protect the endpoints that replace weights, so
    `posttrain vllm-serve` adds this guard.

    Args:
        app: ASGI application to protect.
        api_key: Bearer token. None (default) uses ``$POSTTRAIN_API_KEY``.
        images: Whether prompts may contain images.

    Raises:
        ConfigError: There is no token.
    """

    # Host names that are allowed in the Host header of a request. None: all names are allowed.
    hosts: tuple[str, ...] | None = None

    def __init__(self, app: Any, api_key: str | None = None, images: bool = True) -> None:
        key = api_key or os.environ.get(API_KEY_VARIABLE)
        if not key:
            raise ConfigError(f"the rollout server has no token. Fix: set {API_KEY_VARIABLE}.")
        self.app, self.images, self.expected = app, images, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Reject the request, or pass it to the application."""
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
        """Return a status and a message if the caller is not authorized to use the server, else None."""
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if self.hosts is not None and host and _name(f"//{host}") not in self.hosts:
            return 403, f"the server accepts only requests to this machine, but this one is for host {host[:100]!r}."
        if origin and origin.partition("://")[2] != host:
            return 403, f"web pages of {origin[:100]!r} are not allowed to use this server."
        if scope["path"].rstrip("/") == "/health":
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return 401, (
                "the token is missing or wrong. Fix: send the header 'Authorization: Bearer TOKEN'; clients use the variable "
                f"{API_KEY_VARIABLE}. If the server has no such variable, it writes its token to the file "
                f"{token_pattern((scope.get('server') or ('', 'PORT'))[1])}, which only its own user can read."
            )
        return None

    def _refusal_of_body(self, scope: Any, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Return a status and a message if the body's type or size is not accepted, else None."""
        if scope.get("method", "GET") in ("GET", "HEAD", "OPTIONS"):
            return None
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if kind != "application/json":
            return 415, f"Content-Type {kind[:100]!r} is not accepted. Fix: send application/json, also without a body."
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit(scope):
            return (
                413,
                f"the body has {int(length)} bytes, but the limit is {self._limit(scope)}. Fix: send fewer prompts at a time.",
            )
        return None

    def _limit(self, scope: Any) -> int:
        pictured = self.images and scope["path"].startswith(GENERATION_PATHS)
        return MOST_BYTES_WITH_IMAGES if pictured else MOST_BYTES


class LoopbackGuard(Guard):
    """`Guard` for a server that listens on a loopback address.

    The ``Host`` header of a request must be a loopback name, otherwise the status is 403. This check protects against DNS
    rebinding, which lets a web page reach the server under the page's own host name.
    """

    hosts = LOOPBACK


def guard_for(host: str) -> type[Guard]:
    """Return `LoopbackGuard` if ``host`` is a loopback address, else `Guard`."""
    return LoopbackGuard if host in LOOPBACK else Guard


def _name(address: str) -> str | None:
    with contextlib.suppress(ValueError):
        return urlsplit(address).hostname
    return None


def bounded(receive: Any, limit: int) -> Any:
    """Wrap ``receive`` so that it raises an `HTTPException` with status 413 after more than ``limit`` bytes."""
    read = 0

    async def receive_some() -> Any:
        nonlocal read
        message = await receive()
        read += len(message.get("body") or b"")
        if read > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes. Fix: send fewer prompts at a time.")
        return message

    return receive_some


async def _skip(receive: Any) -> None:
    """Read and discard a body, up to its end or to `DRAIN_BYTES`."""
    read, more = 0, True
    while more and read < DRAIN_BYTES:
        message = await receive()
        read, more = read + len(message.get("body") or b""), message.get("more_body", False)


async def _answer(receive: Any, send: Any, status: int, message: str) -> None:
    """Send an error response and close the connection, so that an unauthorized caller cannot keep it open.

    A short body is read first. If a connection with an unread body is closed, the connection is reset, and the client may
    not receive the response.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_skip(receive), DRAIN_S)
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
