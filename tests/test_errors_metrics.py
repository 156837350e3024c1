"""Errors name the closest choice; metrics keep the reduction they were emitted with."""

import doctest

import pytest
import torch

import posttrain.errors
import posttrain.losses.advantages
import posttrain.losses.reduce
import posttrain.metrics
import posttrain.rewards.format
import posttrain.rollouts.base
from posttrain.errors import ConfigError, MissingDependencyError, check_choice, exact_div
from posttrain.integrations import require
from posttrain.metrics import MetricBuffer, maximum, mean, minimum, total
from tests.wordings import raises


@pytest.mark.parametrize(
    "module",
    [
        posttrain.errors,
        posttrain.metrics,
        posttrain.losses.advantages,
        posttrain.losses.reduce,
        posttrain.rollouts.base,
        posttrain.rewards.format,
        posttrain.rewards.format,
        posttrain.rewards.format,
    ],
)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_an_unknown_choice_names_the_closest_and_all():
    with raises(ConfigError, "loss_type='gpro'", "'grpo'", "'dapo'"):
        check_choice("loss_type", "gpro", ["grpo", "dapo"])
    assert issubclass(ConfigError, ValueError)


def test_a_missing_package_says_for_what_and_how():
    with raises(MissingDependencyError, "'no_such_package'"):
        require("no_such_package", "the judge")
    assert issubclass(MissingDependencyError, ImportError)


def test_means_weigh_by_count_and_extremes_stay_extremes():
    buffer = MetricBuffer()
    for values in ([1.0, 2.0, 3.0], [10.0]):
        x = torch.tensor(values)
        buffer.add({"mean": mean(x), "min": minimum(x), "max": maximum(x), "sum": total(x)})
    assert buffer.compute() == {"mean": 4.0, "min": 1.0, "max": 10.0, "sum": 16.0}
    assert buffer.compute() == {}


def test_masked_entries_do_not_count_even_when_not_a_number():
    x, mask = torch.tensor([1.0, float("nan")]), torch.tensor([True, False])
    buffer = MetricBuffer()
    buffer.add({"m": mean(x, mask), "none": mean(x, torch.zeros(2, dtype=torch.bool)), "empty": minimum(x[:0])})
    assert buffer.compute() == {"m": 1.0}


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_extremes_look_where_the_mask_does_and_merge_as_they_are(number):
    buffer = MetricBuffer()
    x, mask = torch.tensor([1.0, float("nan"), 5.0]), torch.tensor([True, False, True])
    buffer.add({"min": minimum(x, mask), "max": maximum(x, mask), "none": maximum(x, torch.zeros(3, dtype=torch.bool))})
    buffer.add({"min": minimum(number(2.0)), "max": maximum(number(7.0))})
    assert buffer.compute() == {"min": 1.0, "max": 7.0}


def test_ranks_may_hold_different_names():
    buffer = MetricBuffer()
    buffer.add({"here": mean(1.0)})
    other = [("there", "sum", 2.0, 1.0), ("here", "mean", 3.0, 1.0)]
    assert buffer.compute(lambda rows: rows + other) == {"here": 2.0, "there": 2.0}


def test_exact_div_refuses_a_remainder_and_says_why():
    assert exact_div(12, 4) == 3
    with raises(ConfigError, "7", "2"):
        exact_div(7, 2, "batch must be even")
    with raises(ValueError, "1", "0"):
        exact_div(1, 0)
