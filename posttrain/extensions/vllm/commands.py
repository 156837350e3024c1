"""The command `posttrain vllm-serve` as the function `vllm_serve`. The modules that implement it are imported when it
runs.
"""

from __future__ import annotations

import logging


def vllm_serve(argv: list[str]) -> int:
    """Start vLLM's server with the options that training needs.

    First check that a trainer can push weights to the installed version of vLLM. Then the server replaces this process.
    """
    from posttrain.checks.machine import check_versions
    from posttrain.checks.registry import describe
    from posttrain.errors import MissingDependencyError
    from posttrain.extensions.vllm.engine import run_server

    starts = bool(argv) and not {"-h", "--help"} & set(argv)
    for finding in check_versions({"vllm-serve": starts}):
        if finding.severity == "error":
            raise MissingDependencyError(describe(finding))
        logging.getLogger("posttrain").warning("%s", describe(finding))
    return run_server(argv)
