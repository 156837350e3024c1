"""HTTP connections: limits (`CONNECTIONS`), URLs (`host_and_port`), and advice for failed requests (`network_advice`)."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2

# Idle connections are closed after two seconds. Servers with uvicorn, such as vLLM, close idle connections after five
# seconds. A request that is sent at that moment would be lost.
CONNECTIONS = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)


def host_and_port(host: str, port: int) -> str:
    """Return host and port in the format of a URL.

    >>> host_and_port("::1", 8000), host_and_port("localhost", 8000)
    ('[::1]:8000', 'localhost:8000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def network_advice(error: BaseException, url: str) -> str:
    """Return a sentence with the likely cause of a failed request to ``url`` and its fix.

    >>> network_advice(ConnectionRefusedError(), "http://10.0.0.5:8000/v1")
    'Nothing listens on port 8000 of 10.0.0.5: start the server there, or correct the port.'
    """
    parts = urlsplit(url)
    host, secure = parts.hostname or url, parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    failures = list(_chain(error))
    advice: tuple[tuple[type[BaseException], str], ...] = (
        (socket.gaierror, f"The name {host!r} cannot be resolved: check its spelling, the DNS and the VPN."),
        (
            ConnectionRefusedError,
            f"Nothing listens on port {port} of {host}: start the server there, or correct the port.",
        ),
        (
            ssl.SSLError,
            "For a server without TLS use http://. For a self-signed certificate set SSL_CERT_FILE to its path."
            if secure
            else "For a server with TLS use https://.",
        ),
        (
            httpx2.ProxyError,
            f"The proxy of HTTPS_PROXY or HTTP_PROXY rejected the request: correct the proxy, or add {host} to NO_PROXY.",
        ),
        (httpx2.ConnectTimeout, f"{host} does not respond: check the address, the firewall and the VPN."),
        (
            httpx2.TimeoutException,
            "The server is slow: raise the timeout, or send fewer requests at a time.",
        ),
        (
            httpx2.RemoteProtocolError,
            "The server closed the connection without a response: see its log for the cause (a crash, a restart, a proxy).",
        ),
    )
    for kind, text in advice:
        if any(isinstance(failure, kind) for failure in failures):
            return text
    return "Is the server running and reachable from here? Start it, or correct its address."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
