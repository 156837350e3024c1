"""The command `serve`. The modules that implement it are imported when the command runs."""

from __future__ import annotations

import logging


def serve(argv: list[str]) -> int:
    """Start a rollout server that receives weights from a trainer, without vLLM.

    Returns:
        0 after a normal shutdown.
    """
    from posttrain.cli.parser import PosttrainArgumentParser
    from posttrain.extensions.serve.config import ServeConfig
    from posttrain.extensions.serve.server import run_server

    (config,) = PosttrainArgumentParser(ServeConfig, prog="posttrain serve").parse_args_and_config(argv)
    logging.getLogger("posttrain").setLevel(logging.INFO)
    return run_server(config)
