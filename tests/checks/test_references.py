"""References that no answer can be compared with."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import datasets

from posttrain.checks.registry import Context
from posttrain.checks.rewards import check_references, reference_column, references_of_rewards
from posttrain.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    reasoning_accuracy_reward,
)


def test_rewards_of_the_package_say_which_column_they_compare_with():
    for function in (accuracy_reward, reasoning_accuracy_reward, get_cosine_scaled_reward(100)):
        assert reference_column(function) == "solution"
    assert reference_column(functools.partial(accuracy_reward, lenient=True)) == "solution"
    assert reference_column(lambda completions, solution: [0.0]) is None


def test_more_than_a_twentieth_is_told_and_all_of_them_are_an_error():
    golds = ["42"] * 19 + [r"\boxed{}"]
    assert check_references("accuracy_reward", "solution", golds) is None
    found = check_references("accuracy_reward", "solution", ["A", None, " ", *golds])
    assert (found.code, found.severity) == ("PT-R030", "warning")
    assert found.what.startswith(
        "3 of 23 references in `solution` cannot be parsed by accuracy_reward (row 1: None, row 2: ' '"
    )
    assert check_references("accuracy_reward", "solution", ["", None]).severity == "error"


def test_the_column_of_a_training_set_is_read_once_a_reward():
    rewards = SimpleNamespace(names=["a", "b"], functions=[accuracy_reward, lambda completions: [0.0]])
    rows = datasets.Dataset.from_list([{"prompt": str(i), "solution": "" if i % 2 else "1"} for i in range(10)])
    context = Context(trainer="grpo", args=None, train_dataset=rows, parts={"rewards": rewards})
    (found,) = references_of_rewards(context)
    assert "5 of 10 references in `solution` cannot be parsed by a " in found.what
    context.train_dataset = rows.to_iterable_dataset()
    assert list(references_of_rewards(context)) == []
