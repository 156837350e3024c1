"""Ranges of rewards over a run, and the columns that reward functions need."""

from __future__ import annotations

import functools
import statistics

import pytest
import torch

from posttrain.checks.rewards import (
    RewardHistory,
    RunningReward,
    check_reward_columns,
    check_reward_ranges,
    extended,
    findings,
)
from posttrain.errors import RewardError
from posttrain.rewards import RewardTable
from posttrain.types import Advantages


def running(*generations):
    made = RunningReward()
    for values in generations:
        made = made.add(values)
    return made


def test_running_statistics_are_those_of_all_rewards():
    values = [4.0, 18432.0, 7.0, 0.5, 120.0]
    made = running(values[:2], [float("nan")], values[2:])
    assert (made.count, made.missing, made.low, made.high) == (5, 1, 0.5, 18432.0)
    assert made.mean == pytest.approx(statistics.fmean(values))
    assert made.std == pytest.approx(statistics.pstdev(values))
    assert RunningReward().to_dict() == {"count": 0, "missing": 0}


def test_a_score_of_2048_beside_rewards_of_one_is_told_with_both_ranges():
    rewards = {"game_score": running([4.0, 18432.0, 100.0]), "format": running([0.0, 1.0, 1.0])}
    found = check_reward_ranges(rewards, {"game_score": 1.0, "format": 1.0})
    assert (found.code, found.severity) == ("PT-R027", "warning")
    assert found.what.startswith(
        "`game_score` ranges from 4 to 18,432 (other functions: 0 to 1). It has 100 % of the variance of the weighted sum"
    )
    assert "reward_transform='log1p'" in found.fix and "reward_weights" in found.fix


def test_weights_that_level_rewards_silence_it():
    rewards = {"game_score": running([4.0, 18432.0, 100.0]), "format": running([0.0, 1.0, 1.0])}
    assert check_reward_ranges(rewards, {"game_score": 1e-4, "format": 1.0}) is None
    assert check_reward_ranges({"format": running([0.0, 1.0])}, {}) is None
    assert (
        check_reward_ranges({"a": running([0.0, 10.0]), "b": running([1.0, 1.0])}, {}) is None
    )  # A constant is no scale.


def test_findings_follow_from_the_table_and_the_history_and_change_neither():
    table = RewardTable(torch.tensor([[1.0], [1.0]]), ["right"], torch.ones(1))
    made = Advantages(torch.zeros(2), torch.ones(2))
    start = RewardHistory()
    first = extended(start, table, made)
    second = extended(first, table, made)
    assert (start, first.flat, first.flat_rewards) == (RewardHistory(), 1, [[1.0, 1.0]])
    assert (second.flat, second.generations, second.running["right"].count) == (2, 2, 4)
    one, two = ([*findings(table, history, scaled=True, stop_after=2)] for history in (first, second))
    assert one == [None] and two[0].severity == "error"
    assert isinstance(two[1], RewardError) and "stop_without_signal=2" in str(two[1])


def test_a_reward_function_needs_its_columns():
    def right(completions, solution, tolerance=0.1, **kwargs):
        return []

    partial = {"partial": functools.partial(right, solution="x")}
    assert list(check_reward_columns(partial, ["prompt"])) == []
    ours = {"ours": lambda prompts, completions, completion_ids, trainer_state, log_metric: []}
    assert list(check_reward_columns(ours, [])) == []
    (found,) = check_reward_columns({"right": right}, ["prompt", "answer"])
    assert found.severity == "error"
    assert (
        found.what == "reward function `right` needs the column `solution`, but the dataset has ['answer', 'prompt']."
    )
    assert list(check_reward_columns({"right": right}, ["prompt", "solution"])) == []
