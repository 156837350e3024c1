"""Every fault is noticed in time and costs nothing; of healthy runs nothing is said."""

import logging

import pytest

from tests.faults.scene import play, rank
from tests.faults.table import END, FAULTS, HEALTHY, PAGE

FAST = (
    "wrong column name", "half of the conversations empty", "eos never trained", "ids of another tokenizer",
    "more tokens than embedding rows", "20 % of the pairs flipped", "reward of the wrong length", "infinite reward",
    "scores of a 2048 game", "frozen model", "NaN gradient", "stale log-probs of the reference",
    "disk fills up at a checkpoint", "checkpoint cut after it was written", "checkpoints of another run in the folder",
    "transformers too old",
)  # fmt: skip
FAST_HEALTHY = ("DPO on strings", "GRPO with a reward that varies")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Warnings of the cases are what is tested, not what is shown."""
    monkeypatch.setattr(logging.getLogger("posttrain"), "propagate", False)


def cases(table, fast):
    return [pytest.param(case, marks=() if case.title in fast else pytest.mark.slow, id=case.title) for case in table]


@pytest.mark.parametrize("case", cases(FAULTS, FAST))
def test_a_fault_is_noticed_in_time_and_nothing_is_lost(case):
    result = play(case)
    said = [(notice.moment, notice.code, notice.text[:200]) for notice in result.notices]
    assert result.detection is not None, said or result.crashed
    assert result.in_time, said
    assert result.lost == "nothing"


@pytest.mark.parametrize("case", cases(HEALTHY, FAST_HEALTHY))
def test_of_a_healthy_run_nothing_is_said(case):
    result = play(case)
    assert [(notice.moment, notice.code, notice.text[:200]) for notice in result.notices] == []
    assert result.lost == "nothing"


def test_there_are_at_least_thirty_faults_and_ten_healthy_runs_and_each_fault_has_a_place():
    assert len(FAULTS) >= 30 and len(HEALTHY) == 10
    titles = [case.title for case in (*FAULTS, *HEALTHY)]
    assert len(set(titles)) == len(titles)
    assert set(FAST) | set(FAST_HEALTHY) <= set(titles)
    assert all(case.expect and rank(case.by) >= 0 for case in FAULTS)


def test_the_page_shows_every_fault():
    page = PAGE.read_text(encoding="utf-8")
    shown = page.partition(END)[0]
    assert [case.title for case in FAULTS if f"| {case.title} |" not in shown] == []
