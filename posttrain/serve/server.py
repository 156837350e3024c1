"""`posttrain serve`, from options to an exit code."""

from __future__ import annotations

import signal

from posttrain.integrations import require
from posttrain.serve.config import ServeConfig

# Seconds. Clients keep connections between steps of training; closed ones would cost them a retry.
KEEP_ALIVE_S = 120
# Seconds that a shutdown waits for running requests.
DRAIN_S = 120


def run_server(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT, which let running requests end; a second SIGINT does not. Returns 0.

    Raises:
        MissingDependencyError: fastapi, uvicorn, pydantic or prometheus_client is not installed.
        ConfigError: Options that cannot work.

    >>> run_server(ServeConfig("HuggingFaceTB/SmolLM2-135M-Instruct"))  # doctest: +SKIP
    """
    uvicorn = require("uvicorn", "posttrain serve")
    for package in ("fastapi", "prometheus_client", "pydantic"):
        require(package, "posttrain serve")
    from posttrain.serve.host import create_app, make_host

    host = make_host(config)
    # uvicorn raises the signal that ended it once more, when the requests have ended. One that comes before ends the loading.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    seconds = {"timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": DRAIN_S}
    uvicorn.run(create_app(host), host=config.host, port=config.port, access_log=False, backlog=4096, **seconds)
    # The process ends when the engine's thread does: what the shutdown has not waited for is given up.
    host.served.paused = True
    host.served.engine.interrupt()
    return 0
