"""A thin host inside the test: HTTP and the engine's thread are real."""

import contextlib
import socket
import threading
import time

import requests
import uvicorn

from posttrain.extensions.serve.config import ServeConfig
from posttrain.extensions.serve.engine import ServedEngine
from posttrain.extensions.serve.host import Host, create_app
from posttrain.extensions.server.listening import server_config
from posttrain.extensions.server.tokens import write_token
from posttrain.rollouts.native.engine import NativeEngine
from tests.conftest import build_model

VOCAB = 37


class Running:
    """A server and how to ask it."""

    def __init__(self, url, host, server, thread):
        self.url, self.host, self.server, self.thread = url, host, server, thread
        self.session = requests.Session()
        self.session.trust_env = False
        self.headers = {"Authorization": f"Bearer {host.config.api_key}"}

    def get(self, path, **kwargs):
        return self.session.get(self.url + path, timeout=30, **{"headers": self.headers} | kwargs)

    def post(self, path, body=None, timeout=30, **kwargs):
        kwargs["headers"] = self.headers | kwargs.get("headers", {})
        return requests.post(
            self.url + path, json={} if body is None else body, timeout=timeout, proxies={"http": None}, **kwargs
        )

    def complete(self, prompt, timeout=30, **body):
        asked = {"prompt": prompt, "logprobs": 0, "ignore_eos": True} | body
        return self.post("/v1/completions", asked, timeout=timeout)

    def close(self):
        self.server.should_exit = True
        self.thread.join(20)
        # Its token's file goes with the newest one of the port.
        write_token(int(self.url.rsplit(":", 1)[1])).unlink()


def native(seed=0, **options):
    """A tiny model on the native engine."""
    return ServedEngine(NativeEngine(build_model(VOCAB, seed=seed), pad_token_id=0, **options))


def running(make=native, context=64, **options):
    """Start a server on a free port of this machine; close it afterwards."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    options.setdefault("api_key", write_token(port).read_text())
    host = Host(make(), ServeConfig("tiny", port=port, **options), context=context)
    server = uvicorn.Server(server_config(create_app(host), log_level="warning", backlog=2048))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    return Running(f"http://127.0.0.1:{port}", host, server, thread)


@contextlib.contextmanager
def serving(*args, **kwargs):
    server = running(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()
