"""`posttrain serve`, from options to an exit code."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.errors import ConfigError, check_choice
from posttrain.integrations import require
from posttrain.rollouts.server.replies import API_KEY_VARIABLE, check_token
from posttrain.types import option

# Seconds. Clients keep connections between steps of training; closed ones would cost them a retry.
KEEP_ALIVE_S = 120
# Seconds that a shutdown waits for running requests.
DRAIN_S = 120


def _help(text: str, default: Any) -> Any:
    return option(default, text)


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
    trust_remote_code: bool = _help("Run code that comes with the model.", False)
    api_key: str | None = _help(f"Bearer token that every request must bring; or ${API_KEY_VARIABLE}.", None)

    def __post_init__(self) -> None:
        self.api_key = self.api_key or os.environ.get(API_KEY_VARIABLE) or None
        check_choice("engine", self.engine, ("native", "hf"))
        for name in ("max_model_len", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be above 0.")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} must be 0 (a free one) to 65535.")
        check_token(self.host, self.api_key)


def run_server(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT, which let running requests end; a second one does not. Returns 0.

    Raises:
        MissingDependencyError: fastapi, uvicorn, pydantic or prometheus_client is not installed.
        ConfigError: Options that cannot work.

    >>> run_server(ServeConfig("HuggingFaceTB/SmolLM2-135M-Instruct"))  # doctest: +SKIP
    """
    uvicorn = require("uvicorn", "posttrain serve")
    for package in ("fastapi", "prometheus_client", "pydantic"):
        require(package, "posttrain serve")
    from posttrain.serve.host import create_app, make_host

    # uvicorn raises the signal that ended it once more, when the requests have ended.
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)
    seconds = {"timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": DRAIN_S}
    app = create_app(make_host(config))
    uvicorn.run(app, host=config.host, port=config.port, access_log=False, backlog=4096, **seconds)
    return 0
