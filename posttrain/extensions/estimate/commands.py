"""The command `estimate`. The modules that implement it are imported when the command runs."""

from __future__ import annotations


def estimate(argv: list[str]) -> int:
    """Estimate the memory of a run and the largest batch. Return 78 if it does not fit."""
    from posttrain.extensions.estimate.estimate import run

    return run(argv)
