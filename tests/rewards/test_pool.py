"""Rewards in processes: a row that hangs is killed, the rest is judged, and nothing is lost on the way."""

import importlib
import pickle
import subprocess
import sys

import pytest

from posttrain.errors import ConfigError, RewardError
from posttrain.rewards import pool
from posttrain.rewards.pool import pooled
from posttrain.rewards.runner import RewardRunner
from tests.wordings import raises

pytest.importorskip("pebble")
functions = importlib.import_module("tests.rewards.pooled_functions")


@pytest.fixture(autouse=True, scope="module")
def _close():
    yield
    for reward in (functions.slow, functions.crash, functions.hungry):
        reward.close()


def judged(function, texts, **columns):
    runner = RewardRunner(function)
    return runner(prompts=["p"] * len(texts), completions=texts, completion_ids=[[1]] * len(texts), columns=columns)


def test_a_row_that_hangs_is_killed_and_the_others_are_judged():
    table = judged(functions.slow, ["a", "bb", "ccc", "dddd"], seconds=[0.0, 60.0, 0.0, 0.0])
    assert table.values[:, 0].tolist() == [1.0, -1.0, 3.0, 4.0]
    extra = table.extra_columns["process"]
    assert extra[1] is None
    assert len({extra[i] for i in (0, 2, 3)}) >= 1
    assert float(table.metrics["rewards/slow/timed_out"].value) == 0.25
    assert float(table.metrics["slow/calls"].value) == 1.0
    # The killed process was replaced.
    assert judged(functions.slow, ["a", "bb"], seconds=[0.0, 0.0]).values[:, 0].tolist() == [1.0, 2.0]


def test_a_pooled_function_keeps_the_contract():
    assert judged(functions.crash, ["x", "none"], answer=["x", "x"]).values[0, 0] == 1.0
    with raises(RewardError, "'crash'", "row 1", "'y'"):
        judged(functions.crash, ["x", "raise"], answer=["x", "y"])
    with raises(RewardError, "row 0", "3"):
        judged(functions.crash, ["die"], answer=["x"])
    with raises(RewardError):
        judged(functions.crash, ["two"], answer=["x"])
    with raises(RewardError, "'answer'"):
        judged(functions.crash, ["x"], answr=["x"])
    assert judged(functions.crash, ["x"], answer=["x"]).values.tolist() == [[1.0]]


def test_memory_is_bounded_by_process():
    with raises(RewardError):
        judged(functions.hungry, [str(2**34)])
    assert judged(functions.hungry, ["64"]).values.tolist() == [[64.0]]


def test_it_can_be_sent_on_itself():
    again = pickle.loads(pickle.dumps(functions.crash))
    assert (again.__name__, again.settings, again.function) == (
        "crash",
        functions.crash.settings,
        functions.crash.function,
    )


def test_what_cannot_be_sent_is_told_before_it_runs():
    inner = pooled(lambda completions, **_: [0.0], workers=1)
    with raises(ConfigError):
        inner(completions=["x"])

    async def waits(completions):
        return [0.0]

    with raises(ConfigError, "'waits'"):
        pooled(waits)
    with raises(ConfigError, "timeout=0"):
        pooled(timeout=0)


def test_a_time_out_of_the_function_itself_is_an_error_and_not_taken_for_that_of_the_pool(monkeypatch):
    def waits(completions):
        raise TimeoutError("server")

    monkeypatch.setattr(pool, "_functions", [waits])
    with raises(RewardError):
        pool._score_row({"completions": ["x"]})


def test_a_process_that_runs_a_pooled_function_starts_without_torch():
    code = "import sys; from posttrain.rewards import pooled; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
