"""A server that stood still (a suspended job) blames nobody for it; one that was there does."""

import asyncio

import pytest

from posttrain.rollouts.workers import worker as clock
from posttrain.serve.config import ServeConfig
from posttrain.serve.state import State, awake
from posttrain.serve.worker import STUCK_S, Rank


@pytest.fixture
def passes(monkeypatch):
    """Lets seconds pass: in looks as the service makes them, or in one gap."""
    now = [clock.time.monotonic()]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])

    def go(seconds, state, *, asleep=False):
        for _ in range(1 if asleep else int(4 * seconds)):
            now[0] += seconds if asleep else 0.25
            awake()  # As the service's watch does.
            lapsed = state.lapsed()
            if lapsed is not None:
                return lapsed
        return None

    return go


def test_a_lease_outlives_a_suspended_server_and_not_a_silent_trainer(passes):
    state = State(8)
    state.acquire("trainer", 90.0)
    assert passes(3600.0, state, asleep=True) is None
    assert passes(80.0, state) is None
    assert passes(20.0, state).holder == "trainer"


def test_a_worker_is_stuck_when_it_is_silent_while_the_server_looks(passes):
    async def busy():
        rank = Rank("native", ServeConfig("m"), 0, lambda _: None)
        rank.loop = asyncio.get_running_loop()
        rank.send("generate")
        return rank

    rank, state = asyncio.run(busy()), State(8)
    assert passes(3600.0, state, asleep=True) is None
    assert rank.stuck() is None
    passes(STUCK_S, state)
    assert "worker 0 has work and has been silent for 65 s" in rank.stuck()  # 5 s are what of a gap may count.
