"""`posttrain serve`, from options to an exit code."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType
from typing import Any

from posttrain.errors import ConfigError, ModelError, RolloutServerError
from posttrain.integrations import require
from posttrain.serve.config import ServeConfig

__all__ = ["run_server"]

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120  # Clients keep connections between steps of training; closed ones would cost them a retry.


def run_server(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT, which let running requests end; a second one does not.

    Args:
        config: See `ServeConfig`.

    Returns:
        0 after a shutdown that was asked for, 1 after a worker died.

    Raises:
        MissingDependencyError: fastapi, uvicorn or pydantic is not installed.
        ConfigError: Options that cannot work, or a port that is taken.
        ModelError: A worker could not load its engine; ends with its traceback.

    >>> run_server(ServeConfig("HuggingFaceTB/SmolLM2-135M-Instruct"))  # doctest: +SKIP
    """
    for package in ("fastapi", "pydantic", "uvicorn"):
        require(package, "posttrain serve")
    from posttrain.serve.engines import engine_name

    name = engine_name(config)
    listening = _bind(config)
    if not config.is_loopback and config.api_key is None:
        logger.warning(
            "--host %s without --api_key: whoever reaches port %d can replace the weights.",
            config.host,
            _port(listening),
        )
    try:
        return asyncio.run(_serve(config, name, listening))
    finally:
        listening.close()


def _bind(config: ServeConfig) -> socket.socket:
    """A socket on the port, taken before minutes are spent on loading a model; nobody can connect before it listens."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # By the protocol asyncio knows that it may send small pieces at once (TCP_NODELAY): else the body of each answer waits
    # for the client to acknowledge its headers, which a client puts off for 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--host {config.host} --port {config.port}: {error.strerror or error}. Choose another --port, or 0 for a free one."
        ) from error
    return bound


def _port(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


async def _serve(config: ServeConfig, name: str, listening: socket.socket) -> int:
    import uvicorn

    from posttrain.serve.app import create_app
    from posttrain.serve.service import RolloutService

    tokenizer, stops = await asyncio.to_thread(_tokenizer, config)
    codes: list[int] = []

    def fatal(reason: str) -> None:
        logger.critical("posttrain serve ends: %s", reason)
        codes.append(1)
        server.should_exit = server.force_exit = True

    service = RolloutService(config, name, tokenizer, stops, fatal)
    options = uvicorn.Config(
        create_app(service, start=False),
        log_level=config.log_level,
        access_log=config.log_level in ("debug", "trace"),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        backlog=4096,
        lifespan="off",
    )
    server: Any = _draining_server(uvicorn.Server)(options)
    server.service = service
    try:
        await service.start()
        await server.serve(sockets=[listening])
    except RolloutServerError as error:
        if codes:
            return 1
        failure = getattr(error, "failure", None)
        tail = failure.extra.get("log_tail", "") if failure is not None else ""
        # Not the error of a server that was lost: starting this one again would end alike.
        raise ModelError(f"the {name} engine could not be started: {error}\n{tail}".rstrip()) from error
    finally:
        await service.close()
    return codes[0] if codes else 0


def _tokenizer(config: ServeConfig) -> tuple[Any, tuple[int, ...]]:
    """The model's tokenizer and the token ids that end its answers."""
    from transformers import GenerationConfig

    from posttrain.data.chat import terminal_token_ids
    from posttrain.models.load import load_tokenizer

    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code, revision=config.revision)
    extra = {"revision": config.revision} if config.revision else {}
    try:
        # For its end tokens alone: sampling is what the request says, never what the checkpoint says.
        generation = GenerationConfig.from_pretrained(config.model, **extra)
    except OSError:
        generation = None
    return tokenizer, tuple(terminal_token_ids(tokenizer, generation))


def _draining_server(base: type) -> type:
    """A uvicorn server whose first signal lets requests end."""

    class DrainingServer(base):  # type: ignore[misc]
        service: Any = None
        signals = 0

        async def serve(self, sockets: Any = None) -> None:
            self.loop = asyncio.get_running_loop()
            await super().serve(sockets)

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if sockets:
                logger.info("ready on http://%s:%d", *sockets[0].getsockname()[:2])

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.signals += 1
            if self.signals == 1:
                self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.drain()))
            else:
                self.should_exit = self.force_exit = True

        async def drain(self) -> None:
            state = self.service.state
            state.draining = True
            logger.info("shutting down: %d requests run.", state.running)
            await state.tell()
            if not await state.drained(self.service.config.drain_timeout):
                logger.warning("%d requests are given up.", state.running)
                self.force_exit = True
            self.should_exit = True

    return DrainingServer
