"""`estimate`: the command `posttrain estimate`. Its modules are imported only when it runs."""

from __future__ import annotations


def estimate(argv: list[str]) -> int:
    """Estimate the memory of a run, and the largest batch. Return 78 if the run does not fit."""
    from posttrain.extensions.estimate.estimate import run

    return run(argv)
