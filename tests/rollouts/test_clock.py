"""Time in which nobody was there to look is nobody's silence."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.rollouts.workers import worker as clock
from posttrain.rollouts.workers import worker as worker_module
from posttrain.rollouts.workers.worker import WorkerProcess


@pytest.fixture
def jump(monkeypatch):
    """Moves the wall clock on."""
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def by(seconds):
        now[0] += seconds

    return by


def test_a_gap_counts_at_most_so_much_and_looks_in_between_count_in_full(jump):
    awake = clock.AwakeClock(2.0)
    for seconds in (0.5, 1.5, 600.0):
        jump(seconds)
        awake.look()
    assert awake.now == 0.5 + 1.5 + 2.0


def test_a_worker_is_not_blamed_for_an_hour_in_which_the_trainer_stood_still(jump, tmp_path):
    worker = WorkerProcess(0, b"", tmp_path, clock=clock.AwakeClock(3.0))
    worker.process, worker.is_ready = SimpleNamespace(is_alive=lambda: True, pid=0), True
    jump(3600.0)
    assert worker.problem(60.0, 60.0) is None
    for _ in range(60):
        jump(1.0)
        said = worker.problem(60.0, 60.0)
    assert said == "gave no sign of work for 63 s"


def test_nor_for_time_in_which_it_had_no_processor(jump, tmp_path, monkeypatch):
    queued = [0.0]
    monkeypatch.setattr(worker_module, "queued_seconds", lambda pid: queued[0])
    worker = WorkerProcess(0, b"", tmp_path, clock=clock.AwakeClock(3.0))
    worker.process, worker.is_ready = SimpleNamespace(is_alive=lambda: True, pid=7), True
    for _ in range(1000):
        jump(1.0)
        queued[0] += 0.95
        said = worker.problem(60.0, 60.0)
    assert said is None  # It had 50 seconds.
    for _ in range(300):
        jump(1.0)
        queued[0] += 0.95
        said = worker.problem(60.0, 60.0)
    assert said == "gave no sign of work for 65 s"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not say")
def test_a_process_that_competes_for_one_processor_waits_for_it_and_one_that_sleeps_does_not():
    """Three processes on one processor for a second: each has a third of it, and is ready to run all the time."""
    code = "import os, time; os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]}); print('up', flush=True)\n"
    works = ["while True: pass"] * 3 + ["time.sleep(60)"]
    processes = [subprocess.Popen([sys.executable, "-c", code + work], stdout=subprocess.PIPE) for work in works]
    *busy, idle = processes
    try:
        for process in processes:
            process.stdout.readline()
        time.sleep(0.2)
        before = {p.pid: clock.queued_seconds(p.pid) for p in processes}
        time.sleep(1.5)
        waited = {pid: clock.queued_seconds(pid) - seconds for pid, seconds in before.items()}
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert sum(waited[p.pid] for p in busy) > 1.0
    assert waited[idle.pid] < 0.2
    assert clock.queued_seconds(2**22 + 1) == 0.0
