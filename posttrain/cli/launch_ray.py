"""`RayArguments`: options of ``--launcher ray``. `posttrain.extensions.ray` has the launcher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.cli.parser import PosttrainArgumentParser, load_config, split_config
from posttrain.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, check_fields, option

# Environment variable that the launcher sets for the trainer, so that the trainer does not start a launcher again.
STARTED = "POSTTRAIN_STARTED_BY_RAY"


@dataclass
class RayArguments:
    """Options of ``--launcher ray``, on the command line or in the config file together with the training options."""

    launcher: Literal["ray"] = option("ray", "ray: start servers and trainer on a Ray cluster.")
    ray_address: str = option(
        "auto", "host:port of a cluster; auto: $RAY_ADDRESS or this machine; local: a new cluster for this run only."
    )
    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = option(
        "PACK",
        "Ray's placement strategy. 'PACK': few machines. 'SPREAD': many machines. 'STRICT_PACK': one machine. "
        "'STRICT_SPREAD': one machine per command.",
    )
    ray_timeout: PositiveFloat = option(900.0, "Seconds to wait for resources that are in use.")
    rollout_servers: NonNegativeInt = option(1, "Number of rollout servers. 0: the trainer itself generates.")
    rollout_server_args: str = option("", "Additional options of the servers as one string: '--max_num_seqs 128'.")
    rollout_server_cpus: NonNegativeFloat = option(1.0, "CPU cores of each server.")
    rollout_server_gpus: NonNegativeFloat | None = option(
        None, "Number of GPUs per server. None: 1, or 0 on machines without GPUs."
    )
    trainer_cpus: NonNegativeFloat = option(1.0, "CPU cores of the trainer, for all its processes together.")
    trainer_gpus: NonNegativeFloat | None = option(
        None, "Number of GPUs of the trainer. None: value of --num_processes, or 1 if it is not set, or 0 without GPUs."
    )

    def __post_init__(self) -> None:
        check_fields(self, beside=object)


def is_wanted(argv: Sequence[str]) -> bool:
    """Return whether the command line or config file names a launcher, and this process is not the trainer that the
    launcher started.
    """
    rest, path = split_config(argv)
    named = any(token.split("=")[0] == "--launcher" for token in rest)
    return STARTED not in os.environ and (named or (path is not None and "launcher" in load_config(path)))


def other_options(tokens: Sequence[str]) -> list[str]:
    """Return the command-line tokens that are not options of the launcher, in order."""
    return PosttrainArgumentParser(RayArguments).parse_args_and_config(tokens, return_remaining_strings=True)[1]
