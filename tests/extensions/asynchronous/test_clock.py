"""Time in which nobody was there to look is nobody's silence."""

from types import SimpleNamespace

import pytest

from posttrain.extensions.asynchronous import worker as clock
from posttrain.extensions.asynchronous.worker import WorkerProcess


@pytest.fixture
def jump(monkeypatch):
    """Moves the wall clock on."""
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def by(seconds):
        now[0] += seconds

    return by


def test_a_gap_counts_at_most_so_much_and_looks_in_between_count_in_full(jump):
    awake = clock.ActiveClock(2.0)
    for seconds in (0.5, 1.5, 600.0):
        jump(seconds)
        awake.look()
    assert awake.now == 0.5 + 1.5 + 2.0


def test_a_worker_is_not_blamed_for_an_hour_in_which_the_trainer_stood_still(jump, tmp_path):
    worker = WorkerProcess(0, b"", tmp_path, clock=clock.ActiveClock(3.0))
    worker.process, worker.is_ready = SimpleNamespace(is_alive=lambda: True, pid=0), True
    jump(3600.0)
    assert worker.problem(60.0, 60.0) is None
    for _ in range(60):
        jump(1.0)
        said = worker.problem(60.0, 60.0)
    assert said == "made no progress for 63 s"
