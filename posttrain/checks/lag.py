"""Rollouts that were sampled by other weights than those they train: how far apart, how old, and how many thrown away."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from posttrain.checks.core import finding, register
from posttrain.checks.curves import History, ends, training_rows, window
from posttrain.types import Finding

__all__ = ["check_lag"]

register("PT-R024", "policy-mismatch", moment="log_step", title="the policy moves away from what samples", page="c")
register("PT-R025", "rollouts-discarded", moment="log_step", title="many rollouts are thrown away as too old", page="c")
register(
    "PT-R026", "rollouts-at-the-bound", moment="log_step", title="most rollouts are as old as they may be", page="c"
)

WINDOW, RISING = 10, 50  # Optimiser steps.
APART, GROWTH, FAR = 0.1, 1.5, 0.5  # Nats a token: where a rise counts, by how much, and where the size alone does.
DISCARDED, BOUND = 0.3, 0.8


def check_lag(history: History) -> Iterator[Finding]:
    """Staleness of rollouts, and what it costs, over the latest steps of a log."""
    yield from _mismatch(history)
    yield from _discarded(history)
    share = window(history, "async/at_staleness_bound", WINDOW)
    if share is not None and statistics.fmean(share) > BOUND:
        yield finding(
            "PT-R026",
            "warning",
            f"{100 * statistics.fmean(share):.0f} % of the rollouts of the last {WINDOW} steps are as old as "
            "max_staleness_hard allows.",
            "async/at_staleness_bound",
            "every step trains on what old weights wrote: more bias for no more speed, and the next delay discards them.",
            "lower max_inflight_tasks, set staleness_policy='pace', or give generation more devices.",
        )


def _mismatch(history: History) -> Iterator[Finding]:
    rows = training_rows(history)
    name = "sampling/kl" if rows and "sampling/kl" in rows[-1] else "kl"
    if name == "kl" and not (rows and "async/staleness_mean" in rows[-1]):
        return  # That is the distance to the reference.
    recent, trend = window(history, name, WINDOW), window(history, name, RISING)
    if recent is None:
        return
    now = statistics.fmean(recent)
    first, last = ends(trend) if trend is not None and len(trend) >= 5 else (now, now)
    rising = last > APART and last > GROWTH * first
    if now <= FAR and not rising:
        return
    trail = f", rising for {RISING} steps (from {first:.2g})" if rising else f" over {WINDOW} steps"
    yield finding(
        "PT-R024",
        "warning",
        f"policy mismatch KL {now:.2g} nats a token{trail}.",
        name,
        "mean(rho - 1 - log rho) of policy to sampler: what is trained was written by another policy, and importance weights "
        "throw more and more of it away.",
        "lower learning_rate, max_staleness, num_iterations or steps_per_generation; push weights more often; check that the "
        "engine really samples from the weights that were pushed, at this temperature.",
    )


def _discarded(history: History) -> Iterator[Finding]:
    dropped, made = (window(history, f"async/{what}", WINDOW) for what in ("stale_dropped", "produced"))
    if dropped is None or made is None or len(dropped) < 2:
        return
    old, new = dropped[-1] - dropped[0], made[-1] - made[0]  # Both count from the start of the run.
    if new <= 0 or old <= DISCARDED * new:
        return
    yield finding(
        "PT-R025",
        "warning",
        f"{100 * old / new:.0f} % of the rollouts of the last {WINDOW} steps ({old:.0f} of {new:.0f}) were discarded as too old.",
        "async/stale_dropped",
        "generation outpaces training: that part of its time is spent on nothing.",
        "lower max_inflight_tasks, raise max_staleness, or raise weight_sync_steps so that versions pass more slowly.",
    )
