"""Errors name the closest choice; metrics keep the reduction they were emitted with."""

import doctest
from collections.abc import MutableMapping

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


def test_a_buffer_reads_as_the_dict_of_lists_that_it_stands_for():
    buffer = MetricBuffer()
    buffer.add({"entropy": mean(torch.tensor([1.0, 3.0]))})
    buffer["mine"].append(1.0)
    buffer["mine"] += [torch.tensor(2.0), 6]
    assert isinstance(buffer, MutableMapping)
    assert "entropy" in buffer and "loss" not in buffer and buffer.get("loss") is None
    assert list(buffer) == sorted(buffer) == ["entropy", "mine"] and len(buffer) == 2
    means = {name: sum(values) / len(values) for name, values in buffer.items()}
    assert means == {"entropy": 2.0, "mine": 3.0}
    assert (len(buffer["mine"]), buffer["mine"][-1], buffer["mine"]) == (3, 6.0, [1.0, 2.0, 6.0])
    assert not buffer["loss"] and "loss" not in buffer
    buffer["entropy"].append(5.0)  # Two of three.
    assert buffer["entropy"][-1] == pytest.approx(3.0) and len(buffer["entropy"]) == 1
    buffer["mine"] = [4.0]
    assert buffer.pop("mine") == [4.0] and "mine" not in buffer
    with pytest.raises(KeyError):
        buffer.pop("mine")
    with pytest.raises(IndexError):
        buffer["mine"][-1]
    buffer.clear()
    assert not buffer and buffer.compute() == {}


def test_what_a_pass_emitted_that_failed_is_forgotten_and_the_rest_is_read_as_before():
    buffer = MetricBuffer()
    buffer["mine"].append(1.0)
    before = buffer.snapshot()
    buffer["mine"].append(2.0)
    buffer.add({"loss": mean(7.0)})
    buffer.restore(before)
    assert buffer["mine"] == [1.0] and "loss" not in buffer
    buffer["mine"].append(4.0)
    assert buffer["mine"] == [1.0, 4.0] and buffer.compute() == {"mine": 2.5}


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


def test_a_misspelt_argument_of_a_config_or_a_trainer_is_an_error_with_the_right_one(tmp_path):
    from posttrain import GRPOTrainer, SFTConfig, SFTTrainer
    from posttrain.errors import ArgumentTypeError

    with raises(ArgumentTypeError, "'learnig_rate'", "'learning_rate'"):
        SFTConfig(str(tmp_path), learnig_rate=1e-5)
    with raises(ArgumentTypeError, "'train_datset'", "'train_dataset'"):
        SFTTrainer("model", train_datset=[])
    with raises(ArgumentTypeError, "'reward_func'", "'reward_funcs'"):
        GRPOTrainer("model", reward_func=len)

    class Mine(SFTTrainer):
        def __init__(self, *args, extra, **kwargs):
            raise RuntimeError(extra)

    with raises(RuntimeError, "mine"):  # Its own arguments are its own.
        Mine("model", extra="mine")


def test_a_config_shows_what_differs_from_its_defaults_as_it_would_be_written(tmp_path):
    from posttrain import SFTConfig

    config = SFTConfig(str(tmp_path), max_steps=3, hub_token="secret")
    assert repr(config) == f"SFTConfig({str(tmp_path)!r}, max_steps=3)"
    assert eval(repr(config), {"SFTConfig": SFTConfig}).max_steps == 3
