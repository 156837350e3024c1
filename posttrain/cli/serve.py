"""`posttrain serve --model MODEL`: the rollout server."""

from __future__ import annotations

import logging

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """The command itself.

    Returns:
        0 after a shutdown that was asked for, 1 after a worker died.
    """
    from posttrain.cli.parser import PosttrainArgumentParser
    from posttrain.serve.config import ServeConfig
    from posttrain.serve.server import run_server

    (config,) = PosttrainArgumentParser(ServeConfig, prog="posttrain serve").parse_args_and_config(argv)
    level = {"critical": 50, "error": 40, "warning": 30}.get(config.log_level, 20)
    logging.getLogger("posttrain").setLevel(level)
    return run_server(config)
