"""`ServeConfig`: options of `posttrain serve`."""

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
    revision: str | None = option(None, "Branch, tag or commit of the model on the Hub. None: the default branch.")
    host: str = option(
        "127.0.0.1", f"Address to listen on. Addresses other than loopback need a token in ${API_KEY_VARIABLE}."
    )
    port: Port = option(8000, "Port to listen on. 0 selects a free port.")
    engine: Literal["native", "hf"] = option(
        "native",
        "Generation engine. 'native': fast, supports most text models. 'hf': transformers' generate, for models that 'native' "
        "does not support.",
    )
    dtype: str = option("auto", "Precision of the weights, such as 'bfloat16'. 'auto' uses the checkpoint's precision.")
    max_model_len: PositiveInt | None = option(
        None, "Maximum number of tokens of prompt and completion. None: the model's context length."
    )
    max_num_seqs: PositiveInt | None = option(
        None, "Maximum number of concurrent completions of the native engine. None: 64 on a CPU, 256 on a GPU."
    )
    trust_remote_code: bool = option(
        False, "Allow Python code from the model's repository to run. Enable it only for repositories that you trust."
    )
    api_key: str | None = option(
        None,
        f"Bearer token that every request must send. None: the environment variable ${API_KEY_VARIABLE}, or, on loopback "
        "addresses, a new token that is written to a file.",
    )

    def __post_init__(self) -> None:
        self.api_key = self.api_key or os.environ.get(API_KEY_VARIABLE) or None
        check_fields(self, beside=object)
        if self.engine == "hf" and self.max_num_seqs is not None:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} does not work with engine='hf', which samples all waiting requests in "
                "one call. Fix: remove max_num_seqs."
            )
        check_token(self.host, self.api_key)
