"""`estimate`: the command, which imports its modules when it runs."""

from __future__ import annotations


def estimate(argv: list[str]) -> int:
    """Estimate memory by component and the largest batch; exit status 78: it does not fit."""
    from posttrain.extensions.estimate.estimate import run

    return run(argv)
