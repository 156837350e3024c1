"""The guard of rollout servers, their token's file, and connections that send nothing."""

import asyncio
import json
import os
import socket
import time

import httpx2
import pytest

from posttrain.errors import ConfigError, RolloutServerError
from posttrain.extensions.server import listening
from posttrain.extensions.server.client import VLLMClient
from posttrain.extensions.server.guard import Guard, LoopbackGuard, guard_for
from posttrain.extensions.server.replies import API_KEY_VARIABLE
from posttrain.extensions.server.tokens import find_token, token_pattern, write_token
from tests.extensions.serve.support import serving

TOKEN = {"authorization": "Bearer open sesame", "content-type": "application/json"}


def status(guard=LoopbackGuard, path="/pause", method="POST", kind="http", **headers):
    """Status of one request; None where the application is asked."""
    sent = []

    async def app(scope, receive, send):
        sent.append(None)

    async def send(message):
        sent.append(message.get("status", message.get("code")))

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "headers": pairs, "server": ("127.0.0.1", 8000)}
    scope |= {"method": method} if kind == "http" else {}
    asyncio.run(guard(app, "open sesame")(scope, receive, send))
    return sent[0]


def with_token(**more):
    return {name.replace("-", "_"): value for name, value in (TOKEN | more).items()}


@pytest.mark.parametrize(
    "wanted, request_of",
    [
        (None, with_token()),
        (None, with_token(host="localhost:8000", origin="http://localhost:8000")),
        (None, with_token(host="[::1]:8000")),
        (None, {"path": "/health", "method": "GET"}),
        (None, with_token(guard=Guard, host="node7:8000")),
        (403, with_token(host="attacker.example:8000")),
        (403, with_token(host="127.0.0.1:8000", origin="http://attacker.example")),
        (403, with_token(host="127.0.0.1:8000", origin="null")),
        (403, {"path": "/health", "method": "GET", "host": "attacker.example"}),
        (403, with_token(guard=Guard, host="node7:8000", origin="http://attacker.example")),
        (401, {"content_type": "application/json"}),
        (401, with_token(authorization="Bearer open sesam")),
        (401, {"path": "/health/../pause"}),
        (415, {"authorization": TOKEN["authorization"]}),
        (415, with_token(**{"content-type": "text/plain"})),
        (413, with_token(content_length=str(2**40))),
        (1008, {"kind": "websocket", "path": "/v1/realtime"}),
        (
            1008,
            {"kind": "websocket", "path": "/v1/realtime", "host": "attacker.example"} | with_token(host="a.example"),
        ),
        (None, {"kind": "websocket", "path": "/v1/realtime", "authorization": TOKEN["authorization"]}),
    ],
)
def test_what_a_request_needs(wanted, request_of):
    assert status(**request_of) == wanted


def test_a_guard_without_a_token_does_not_stand_open(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=API_KEY_VARIABLE):
        Guard(None)
    assert guard_for("::1") is LoopbackGuard and guard_for("10.0.0.5") is Guard


def test_the_token_is_in_a_file_that_only_its_user_reads_and_another_account_cannot_plant_one():
    older = write_token(1)
    path = write_token(1)
    try:
        assert path.stat().st_mode & 0o777 == 0o600 and not older.exists()
        assert find_token(1) == path.read_text() and len(path.read_text()) > 30
        planted = token_pattern(1).parent / "posttrain-token-1-zzz"
        planted.write_text("mine")
        try:
            planted.chmod(0o644)
            os.utime(planted, (time.time() + 60,) * 2)
            assert find_token(1) == path.read_text(), "one that others can read is none"
        finally:
            planted.unlink()
    finally:
        path.unlink()
    assert find_token(1) is None


def test_a_trainer_of_the_same_user_needs_no_setting_and_reads_the_token_anew_for_each_request(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with serving() as server:
        port = int(server.url.rsplit(":", 1)[1])
        client = VLLMClient(server.url)
        client.pause()
        client.resume()
        assert client.generate([[1, 2]], max_tokens=2)["completion_ids"]
        assert httpx2.get(server.url + "/v1/models", trust_env=False).status_code == 401
        # A restarted server writes another token, which the same client sends: this server has the old one.
        newer = write_token(port)
        with pytest.raises(RolloutServerError, match="401"):
            client.resume()
        newer.unlink()
        client.close()


def test_connections_that_send_nothing_or_half_of_their_headers_are_closed(monkeypatch):
    monkeypatch.setattr(listening, "HEADER_S", 0.2)
    with serving() as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        whole = f"GET /health HTTP/1.1\r\nHost: {address[0]}\r\n\r\n".encode()
        for first in (b"", b"GET /health HT", whole):
            with socket.create_connection(address, timeout=5) as line:
                line.sendall(first)
                if first == whole:
                    assert b"200" in line.recv(4096)
                    line.sendall(b"GET /hea")
                begun = time.monotonic()
                with pytest.raises((ConnectionError, AssertionError)):
                    assert line.recv(4096)
                assert time.monotonic() - begun < 3
        assert server.get("/health").status_code == 200


def test_a_refusal_is_json_in_the_form_of_all_errors():
    with serving() as server:
        answer = httpx2.post(server.url + "/pause", json={}, trust_env=False)
        assert answer.status_code == 401 and "posttrain-token-" in json.loads(answer.text)["error"]["message"]
        assert answer.headers["connection"] == "close"
