"""`run_server`: implementation of `posttrain serve`."""

from __future__ import annotations

import logging
import signal
import socket

from posttrain.errors import ConfigError
from posttrain.extensions.serve.config import ServeConfig
from posttrain.extensions.server.tokens import write_token
from posttrain.integrations import require
from posttrain.integrations.machine import listen, raise_file_limit
from posttrain.integrations.network import host_and_port

logger = logging.getLogger(__name__)


# Maximum number of seconds for which a shutdown waits for running requests.
DRAIN_S = 120


def run_server(config: ServeConfig) -> int:
    """Run the server until SIGTERM or SIGINT. Running requests are finished, unless a second SIGINT arrives. Return 0.

    Raises:
        MissingDependencyError: fastapi, uvicorn, pydantic or prometheus_client is not installed.
        ConfigError: An option is invalid.

    >>> run_server(ServeConfig("HuggingFaceTB/SmolLM2-135M-Instruct"))  # doctest: +SKIP
    """
    for package in ("uvicorn", "fastapi", "prometheus_client", "pydantic"):
        require(package, "posttrain serve")
    import uvicorn

    from posttrain.extensions.serve.host import create_app, make_host
    from posttrain.extensions.server.listening import server_config

    raise_file_limit()
    host = make_host(config)
    # uvicorn raises the caught signal again after all requests have ended. Ignore this signal, so that the cleanup below runs.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    listener, token = _listen(config), None
    port = listener.getsockname()[1]
    if config.api_key is None:
        token = write_token(port)
        config.api_key = token.read_text()
    where = "" if token is None else f"; trainers of the same user read the token from {token}"
    logger.info("running on http://%s %s", host_and_port(config.host, port), where)
    try:
        options = {"timeout_graceful_shutdown": DRAIN_S, "backlog": 4096}
        uvicorn.Server(server_config(create_app(host), **options)).run(sockets=[listener])
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    # Stop generation and drop unfinished requests, because the process cannot end before the engine's thread.
    host.served.paused = True
    host.served.engine.interrupt()
    return 0


def _listen(config: ServeConfig) -> socket.socket:
    """Create a socket that listens on the configured address and port.

    Raises:
        ConfigError: The port is in use, or this machine does not have the address.
    """
    try:
        return listen(config.host, config.port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --host {config.host} --port {config.port}: {error}. Fix: use --port 0 for a free port."
        ) from error
