"""Options of ``--launcher ray`` (`RayArguments`). The launcher itself is in `posttrain.extensions.ray`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.cli.parser import PosttrainArgumentParser, load_config, split_config
from posttrain.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, check_fields, option

# Environment variable that the launcher sets for the trainer process. The variable prevents the trainer process from
# starting a second launcher.
STARTED = "POSTTRAIN_STARTED_BY_RAY"


@dataclass
class RayArguments:
    """Options of ``--launcher ray``, on the command line or in the config file together with the training options."""

    launcher: Literal["ray"] = option("ray", "ray: start servers and trainer on a Ray cluster.")
    ray_address: str = option(
        "auto",
        "Ray cluster to use. 'host:port': an existing cluster. 'auto': the cluster in $RAY_ADDRESS, or this machine. "
        "'local': a new cluster only for this run.",
    )
    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = option(
        "PACK",
        "Ray's placement strategy. 'PACK': use few machines. 'SPREAD': use many machines. 'STRICT_PACK': use one machine. "
        "'STRICT_SPREAD': use a separate machine for each server and for the trainer.",
    )
    ray_timeout: PositiveFloat = option(900.0, "Maximum time in seconds to wait for resources that other jobs use.")
    rollout_servers: NonNegativeInt = option(
        1, "Number of rollout servers. 0: no servers are started, and the trainer samples completions itself."
    )
    rollout_server_args: str = option(
        "", "Additional options of the servers as one string, for example '--max_num_seqs 128'."
    )
    rollout_server_cpus: NonNegativeFloat = option(1.0, "Number of CPU cores per server.")
    rollout_server_gpus: NonNegativeFloat | None = option(
        None, "Number of GPUs per server. None: 1, or 0 on machines without GPUs."
    )
    trainer_cpus: NonNegativeFloat = option(1.0, "Number of CPU cores that all processes of the trainer use together.")
    trainer_gpus: NonNegativeFloat | None = option(
        None,
        "Number of GPUs of the trainer. None: the value of --num_processes, or 1 if it is not set. On machines without "
        "GPUs, it is 0.",
    )

    def __post_init__(self) -> None:
        check_fields(self, beside=object)


def is_wanted(argv: Sequence[str]) -> bool:
    """Return whether this process must start a launcher. A launcher is needed if the command line or config file sets
    ``launcher``, unless a launcher has started this process.
    """
    rest, path = split_config(argv)
    named = any(token.split("=")[0] == "--launcher" for token in rest)
    return STARTED not in os.environ and (named or (path is not None and "launcher" in load_config(path)))


def other_options(tokens: Sequence[str]) -> list[str]:
    """Return the command-line tokens without the options of the Ray launcher."""
    return PosttrainArgumentParser(RayArguments).parse_args_and_config(tokens, return_remaining_strings=True)[1]
