"""HTTP connections: limits (`CONNECTIONS`), `host_and_port` of a URL, and `network_advice` for failed requests."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2

# uvicorn and vLLM close a connection after five idle seconds. A request sent at that moment is lost.
CONNECTIONS = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)


def host_and_port(host: str, port: int) -> str:
    """Return host and port in the format of a URL.

    >>> host_and_port("::1", 8000), host_and_port("localhost", 8000)
    ('[::1]:8000', 'localhost:8000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def network_advice(error: BaseException, url: str) -> str:
    """Return one sentence on a failed request to ``url``: the likely cause and the fix.

    >>> network_advice(ConnectionRefusedError(), "http://10.0.0.5:8000/v1")
    'Nothing listens on port 8000 of 10.0.0.5: start the server there, or correct the port.'
    """
    parts = urlsplit(url)
    host, secure = parts.hostname or url, parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    failures = list(_chain(error))
    advice: tuple[tuple[type[BaseException], str], ...] = (
        (socket.gaierror, f"The name {host!r} is not known here: check its spelling, the DNS and the VPN."),
        (
            ConnectionRefusedError,
            f"Nothing listens on port {port} of {host}: start the server there, or correct the port.",
        ),
        (
            ssl.SSLError,
            "A server without TLS is asked by http://; one with a certificate of its own wants SSL_CERT_FILE to name it."
            if secure
            else "A server with TLS is asked by https://.",
        ),
        (
            httpx2.ProxyError,
            f"The proxy of HTTPS_PROXY or HTTP_PROXY refuses: correct it, or let NO_PROXY name {host}.",
        ),
        (httpx2.ConnectTimeout, f"{host} does not answer at all: check the address, the firewall and the VPN."),
        (httpx2.TimeoutException, "The server took the request and is slow: raise the timeout, or ask less at a time."),
        (
            httpx2.RemoteProtocolError,
            "The server ended the connection without an answer: its log says why (a crash, a restart, a proxy before it).",
        ),
    )
    for kind, said in advice:
        if any(isinstance(failure, kind) for failure in failures):
            return said
    return "Is the server running and reachable from here? Start it, or correct its address."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
