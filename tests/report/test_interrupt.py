"""The end that loses nothing, on several ranks; that of one process is tested with the trainers."""

import pytest

from tests.ranks import run_ranks


@pytest.mark.distributed
def test_ranks_end_after_the_same_step_although_one_alone_was_told(tmp_path):
    found = run_ranks("tests.report.interrupt_worker", tmp_path / "run", processes=2, folder=tmp_path, timeout=100)
    assert found == {"step": 2, "requested": True}
    assert (tmp_path / "run" / "checkpoint-2" / "COMPLETE").is_file()
