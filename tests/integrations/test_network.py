"""A request that fails is told what is the matter where it failed: by real failures of real sockets."""

import socket
import threading
from contextlib import contextmanager

import httpx2
import pytest

from posttrain.integrations.network import network_advice

SECONDS = 0.3


@contextmanager
def listening(answer=None):
    """A server that says ``answer`` to each connection and closes it; None: it never says anything."""
    held = []

    def serve(listener):
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            if answer is None:
                held.append(line)
                continue
            line.recv(65536)
            line.sendall(answer)
            line.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for line in held:
        line.close()


def advice(url, **options):
    with httpx2.Client(trust_env=False, timeout=SECONDS, **options) as client:
        with pytest.raises(httpx2.TransportError) as caught:
            client.get(url)
    return network_advice(caught.value, url)


def test_each_failure_has_its_own_advice(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    assert advice(f"http://127.0.0.1:{closed}/v1").startswith(f"Nothing listens on port {closed} of 127.0.0.1:")
    with listening() as port:
        assert advice(f"http://127.0.0.1:{port}").startswith("The server is slow:")
    with listening(b"") as port:
        assert advice(f"http://127.0.0.1:{port}").startswith("The server closed the connection without a response:")
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert advice(f"https://127.0.0.1:{port}").startswith("For a server without TLS use http://.")
    with listening(b"HTTP/1.1 403 Forbidden\r\n\r\n") as port:
        said = advice("https://judge.example/v1", proxy=f"http://127.0.0.1:{port}")
        assert "HTTPS_PROXY" in said and "add judge.example to NO_PROXY" in said
    assert "raise the timeout" not in network_advice(httpx2.ConnectTimeout("x"), "http://10.0.0.5:1")

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert advice("http://jugde.example:8000/v1").startswith("The name 'jugde.example' cannot be resolved:")


def test_what_failed_otherwise_is_asked_about():
    assert "running and reachable" in network_advice(OSError("cable"), "http://a")
