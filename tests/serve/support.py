"""A server inside the test: workers are threads, HTTP is real."""

import asyncio
import contextlib
import multiprocessing
import os
import socket
import threading
import time

import requests
import uvicorn

from posttrain.serve.app import create_app
from posttrain.serve.config import ServeConfig
from posttrain.serve.engines import create_backend
from posttrain.serve.jobs import Answer
from posttrain.serve.service import RolloutService
from posttrain.serve.worker import Rank, Worker, _scoring_heeds_temperature


class ThreadProcess:
    """A thread that looks like a process: its sentinel is readable when it has ended."""

    def __init__(self, target):
        self.sentinel, self._end = multiprocessing.Pipe()
        self.exitcode = None
        self.thread = threading.Thread(target=self._run, args=(target,), daemon=True)
        self.thread.start()

    def _run(self, target):
        with contextlib.suppress(BaseException):
            target()
        self.exitcode = 1
        self._end.close()

    def join(self, timeout=None):
        self.thread.join(timeout)

    def is_alive(self):
        return self.thread.is_alive()

    def kill(self):
        pass


class ThreadRank(Rank):
    backends = {}

    def launch(self, connection):
        def work():
            backend = create_backend(self.name, self.config, self.rank)
            ThreadRank.backends[self.config.port, self.rank] = backend
            info = backend.info() | {"pid": os.getpid(), "beats": backend.beats, "sleeps": backend.sleeps}
            info["scoring_heeds_temperature"] = _scoring_heeds_temperature(backend)
            connection.send(Answer(0, info))
            try:
                Worker(connection, backend, self.rank, leave=lambda _: None).loop()
            finally:
                connection.close()

        return ThreadProcess(work)


class Running:
    """A server and how to ask it."""

    def __init__(self, url, service, server, thread):
        self.url, self.service, self.server, self.thread = url, service, server, thread
        self.session = requests.Session()
        self.session.trust_env = False

    def get(self, path, **kwargs):
        return self.session.get(self.url + path, timeout=30, **kwargs)

    def post(self, path, body=None, **kwargs):
        return requests.post(
            self.url + path, json={} if body is None else body, timeout=30, proxies={"http": None}, **kwargs
        )

    def delete(self, path, **kwargs):
        return self.session.delete(self.url + path, timeout=30, **kwargs)

    def backend(self, rank=0):
        return ThreadRank.backends[self.service.config.port, rank]

    def close(self):
        self.server.should_exit = True
        self.thread.join(20)


def running(engine="tests.serve.engines:create", tokenizer=None, stops=(), **options):
    """Start a server on a free port of this machine; close it afterwards."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    config = ServeConfig("echo", port=port, **options)
    fatal = []
    service = RolloutService(config, engine, tokenizer, stops, fatal.append, kind=ThreadRank)
    service.fatal = fatal
    app = create_app(service)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", backlog=2048))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    return Running(f"http://127.0.0.1:{port}", service, server, thread)


@contextlib.contextmanager
def serving(*args, **kwargs):
    server = running(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()
