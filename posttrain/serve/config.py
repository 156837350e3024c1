"""What `posttrain serve` is told."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.errors import ConfigError
from posttrain.rollouts.server.replies import API_KEY_VARIABLE, DRAIN_TIMEOUT_S, LOOPBACK

__all__ = ["ServeConfig"]


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ServeConfig:
    """Options of the rollout server; the first block has the names of TRL's ``vllm-serve``.

    >>> ServeConfig(model="m").is_loopback
    True
    """

    model: str = field(metadata={"help": "Hub id or folder of the model to serve."})
    revision: str | None = _help("Branch, tag or commit on the hub.", None)
    tensor_parallel_size: int = _help("GPUs that one copy of the model is spread over (vllm only).", 1)
    data_parallel_size: int = _help("Copies of the model, one worker process each.", 1)
    host: str = _help("Address to listen on; others than loopback let the network replace the weights.", "127.0.0.1")
    port: int = _help("Port to listen on; 0 takes a free one.", 8000)
    gpu_memory_utilization: float = _help("Share of GPU memory that vllm takes.", 0.9)
    dtype: str = _help("Precision of the weights; 'auto' follows the checkpoint.", "auto")
    kv_cache_dtype: str = _help("Precision of vllm's keys and values.", "auto")
    max_model_len: int | None = _help("Most tokens of prompt and completion; None: the model's context.", None)
    enable_prefix_caching: bool | None = _help("Keep keys and values of prompts; None: as the engine does.", None)
    enforce_eager: bool = _help("Run vllm without CUDA graphs.", False)
    vllm_model_impl: Literal["vllm", "transformers"] = _help("Whose model code vllm runs.", "vllm")
    trust_remote_code: bool = _help("Run code that comes with the model.", False)
    log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = _help("Of the HTTP server.", "info")
    distributed_executor_backend: str | None = _help("vllm's executor: mp or ray.", None)
    speculative_config: str | None = _help("vllm's speculative decoding, as JSON.", None)

    engine: str = _help("auto, vllm, native or hf; auto: vllm where it is installed, else native.", "auto")
    api_key: str | None = _help(f"Bearer token that every request must bring; or ${API_KEY_VARIABLE}.", None)
    seed: int | None = _help("Of requests that bring none; None: another at every start.", None)
    max_num_seqs: int | None = _help(
        "Completions written at once on each worker; None: 64 on a CPU, 256 on a GPU.", None
    )
    max_lora_rank: int = _help("Largest rank of an adapter that is pushed alone.", 64)
    max_logprobs: int = _help("Most likely tokens that a request may ask for at every position.", 128)
    max_prompts: int = _help("Prompts of one request.", 4096)
    max_queue: int = _help("Requests that may wait or run; more are answered 429.", 4096)
    max_body_mb: float = _help("MiB of one JSON body.", 64.0)
    max_bucket_mb: float = _help("MiB of one bucket of weights.", 4096.0)
    request_timeout: float = _help("Seconds that one request may take; longer is answered 504.", 600.0)
    drain_timeout: float = _help("Seconds that an update or a shutdown waits for running requests.", DRAIN_TIMEOUT_S)
    restart_workers: bool = _help("Start a worker that died anew, from the checkpoint, instead of ending.", False)
    allow_sleep: bool = _help("Offer /sleep/ and /wake_up/.", True)

    def __post_init__(self) -> None:
        self.api_key = self.api_key or os.environ.get(API_KEY_VARIABLE) or None
        least = {
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "max_prompts": 1,
            "max_queue": 1,
            "max_logprobs": 0,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {bound}.")
        for name in ("max_model_len", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        for name in ("max_body_mb", "max_bucket_mb", "request_timeout", "drain_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} must be 0 (a free one) to 65535.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1.")
        self._check_speculation()

    def _check_speculation(self) -> None:
        if self.speculative_config is None:
            return
        try:
            found = json.loads(self.speculative_config)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative_config={self.speculative_config!r} is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise ConfigError(f"speculative_config={self.speculative_config!r} must be a JSON object.")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK
