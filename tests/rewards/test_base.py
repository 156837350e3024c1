"""The reward contract: what functions get, and a named error for each way to break it."""

import functools
import math

import numpy as np
import pytest
import torch

from posttrain.errors import ConfigError, RewardError
from posttrain.rewards.base import RewardRunner

TWO = {"prompts": ["p0", "p1"], "completions": ["a", "bb"], "completion_ids": [[1], [2, 3]]}


def run(*functions, **kwargs):
    return RewardRunner(list(functions), kwargs.pop("weights", None))(**(TWO | kwargs))


def length(completions, **_):
    return [len(c) for c in completions]


def test_columns_arrive_as_keyword_arguments():
    seen = {}

    def spy(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
        seen.update(locals())
        return [0.0, 1.0]

    table = run(spy, columns={"answer": [7, 8]}, trainer_state="state")
    assert (seen["answer"], seen["trainer_state"], seen["completion_ids"]) == ([7, 8], "state", [[1], [2, 3]])
    assert table.values.tolist() == [[0.0], [1.0]]


def test_none_means_not_applicable_and_bool_tensor_and_numpy_are_numbers():
    table = run(lambda **_: [None, True], lambda **_: torch.tensor([1.0, 2.0]), lambda **_: [np.float32(3), np.int64(4)])
    assert math.isnan(table.values[0, 0])
    assert table.values[1].tolist() == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (0.5, "returned 0.5 .float.; it must return a list of 2 numbers"),
        ("no", "it must return a list of 2 numbers"),
        ([1.0, "high"], "returned 'high' .str. for row 1"),
        ([float("inf"), 0], "returned inf for row 0"),
        (None, "returned None"),
    ],
)
def test_a_wrong_return_names_function_and_row(returned, message):
    def broken(**_):
        return returned

    with pytest.raises(RewardError, match=message) as caught:
        run(broken)
    assert "'broken'" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_an_exception_names_function_row_and_prompt_and_keeps_its_cause():
    def parse(completions, **_):
        return [int(c) for c in completions]

    with pytest.raises(RewardError, match=r"'parse' raised ValueError.*row 1 \(prompt: 'p1'\)") as caught:
        run(parse, completions=["1", "one"])
    assert isinstance(caught.value.__cause__, ValueError)


def test_nan_is_an_error_in_the_dry_run_and_counted_later():
    def nan(completions, **_):
        return [float("nan")] * len(completions)

    runner = RewardRunner(nan)
    with pytest.raises(RewardError, match="returned nan for row 0"):
        runner.dry_run([{"prompt": "q"}], conversational=False)
    table = runner(**TWO)
    assert table.values.isnan().all()
    assert "rewards/nan/nan" in table.metrics


def test_the_dry_run_catches_one_number_for_the_whole_batch():
    with pytest.raises(RewardError, match="returned 1 rewards for 2"):
        RewardRunner(lambda **_: [1.0]).dry_run([{"prompt": "q", "answer": 1}], conversational=True)


def test_async_functions_are_awaited_and_mixed_with_sync_ones():
    class Judge:
        async def __call__(self, completions, **_):
            return [2.0 * len(c) for c in completions]

    async def one(completions, **_):
        return [1.0] * len(completions)

    table = run(one, length, Judge())
    assert table.names == ["one", "length", "Judge"]
    assert table.values.tolist() == [[1.0, 1.0, 2.0], [1.0, 2.0, 4.0]]


def test_an_async_failure_names_its_function():
    async def fail(**_):
        raise RuntimeError("judge is down")

    with pytest.raises(RewardError, match="'fail' raised RuntimeError: judge is down"):
        run(fail)


def test_equal_names_are_told_apart_and_partials_keep_theirs():
    runner = RewardRunner([length, functools.partial(length), length])
    assert runner.names == ["length", "length_1", "length_2"]


def test_a_function_cannot_change_what_the_next_one_sees():
    def vandal(completions, **_):
        completions[0] = "changed"
        return [0, 0]

    assert run(vandal, length).values[:, 1].tolist() == [1.0, 2.0]


def test_weights_must_be_one_a_function():
    with pytest.raises(ConfigError, match="reward_weights has 1 entries for 2 reward functions"):
        RewardRunner([length, length], [1.0])
    with pytest.raises(ConfigError, match="at least one reward"):
        RewardRunner([])


def test_all_none_is_warned_once(caplog):
    runner = RewardRunner(lambda **_: [None, None])
    runner(**TWO)
    runner(**TWO)
    assert caplog.text.count("All reward functions returned None") == 1


def test_extra_columns_and_metrics_are_logged_and_clashes_prefixed():
    def a(log_extra, log_metric, **_):
        log_extra("gold", ["x", "y"])
        log_metric("parsed", 0.5)
        return [0, 0]

    def b(log_extra, **_):
        log_extra("gold", [1, 2])
        return [0, 0]

    table = run(a, b)
    assert table.extra_columns == {"gold": ["x", "y"], "b/gold": [1, 2]}
    assert "parsed" in table.metrics
