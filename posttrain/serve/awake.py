"""The server's own time: that in which it stood still is held against neither its workers nor its trainer."""

from __future__ import annotations

from posttrain.rollouts.workers.worker import AwakeClock

__all__ = ["awake"]

GAP_S = 5.0  # The service looks four times a second: a longer gap is a job that was suspended, or a machine that stood still.

awake = AwakeClock(GAP_S).look
