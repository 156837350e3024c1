"""Harnesses on two gloo processes: live episodes end together, and recorded ones are one step on one process and on two."""

import pytest

from posttrain.extensions.agents.session import read_sessions
from tests.ranks import assert_same_step, run_ranks


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
def test_episodes_with_forks_are_the_same_step_on_one_process_and_on_two(tmp_path):
    # A group is on both processes: the file deals it out once.
    worker, record = "tests.extensions.agents.harness_rank_worker", tmp_path / "episodes.jsonl"
    live = run_ranks(worker, tmp_path / "live", record, 4, "live", processes=2, folder=tmp_path / "a")
    assert live["logs"]["harness/answered"] == 5 and live["logs"]["harness/failed_episodes"] == 0
    drawn = [tuple(one.session.calls[0].completions[0].token_ids) for one in read_sessions(record)]
    assert len(drawn) == len(set(drawn)) == 8, "one group: what one process draws, the other must not draw again"
    found = [
        run_ranks(worker, tmp_path / f"{n}", record, 8 // n, "again", processes=n, folder=tmp_path / f"r{n}")
        for n in (1, 2)
    ]
    assert_same_step(*found)
