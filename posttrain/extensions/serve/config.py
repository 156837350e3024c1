"""Options of the thin rollout server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from posttrain.errors import ConfigError
from posttrain.extensions.server.replies import API_KEY_VARIABLE, check_token
from posttrain.fields import Port, PositiveInt, check_fields, option


@dataclass
class ServeConfig:
    """Options of ``posttrain serve``.

    >>> ServeConfig(model="m").engine
    'native'
    """

    model: str = field(metadata={"help": "Hub id or folder of the model to serve."})
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    host: str = option("127.0.0.1", f"Address to listen on; others than loopback need a token in ${API_KEY_VARIABLE}.")
    port: Port = option(8000, "Port to listen on; 0 takes a free one.")
    engine: Literal["native", "hf"] = option(
        "native", "native, or hf: transformers' generate, for models native cannot run."
    )
    dtype: str = option("auto", "Precision of the weights; 'auto' follows the checkpoint.")
    max_model_len: PositiveInt | None = option(None, "Most tokens of prompt and completion; None: the model's context.")
    max_num_seqs: PositiveInt | None = option(
        None, "Completions that native writes at once; None: 64 on a CPU, 256 on a GPU."
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    api_key: str | None = option(None, f"Bearer token that every request must bring; or ${API_KEY_VARIABLE}.")

    def __post_init__(self) -> None:
        self.api_key = self.api_key or os.environ.get(API_KEY_VARIABLE) or None
        check_fields(self, beside=object)
        if self.engine == "hf" and self.max_num_seqs is not None:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} with engine='hf': it writes all that waits in one call. Fix: leave it out."
            )
        check_token(self.host, self.api_key)
