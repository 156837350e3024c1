"""The end that loses nothing, on several ranks; that of one process is tested with the trainers."""

import signal
import time

import pytest

from tests.forks import PIPE, Forked
from tests.ranks import run_ranks


@pytest.mark.distributed
def test_ranks_end_after_the_same_step_although_one_alone_was_told(tmp_path):
    found = run_ranks("tests.report.interrupt_worker", tmp_path / "run", processes=2, folder=tmp_path, timeout=100)
    assert found == {"step": 2, "requested": True}
    assert (tmp_path / "run" / "checkpoint-2" / "COMPLETE").is_file()


@pytest.mark.parametrize("kind", ["waiting", "swallowing"])
def test_the_second_signal_ends_a_process_that_would_swallow_it(kind, tmp_path):
    with Forked(["-m", "tests.report.stuck_worker", tmp_path / "run", kind], stdout=PIPE, stderr=PIPE) as child:
        try:
            assert child.stdout.readline().strip() == "stuck"
            child.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert child.poll() is None  # The first one waits for the step.
            child.send_signal(signal.SIGTERM)
            _, errors = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 128 + signal.SIGTERM
    assert "stuck_worker.py" in errors  # Where it was.
