"""What each reward contributes, and whether it says the same twice."""

import logging
import math

import pytest
import torch

from posttrain.errors import ConfigError
from posttrain.rewards.runner import RewardRunner, correlation, describe_shares, variance_shares
from posttrain.types import Advantages
from tests.rewards.test_base import watch_of
from tests.wordings import raises

NAN = float("nan")


def test_shares_are_weighted_variances():
    """Columns 0/1000 and 0/1 with weights 1 and 10: variances 250000 and 0.25 * 100."""
    values = torch.tensor([[0.0, 1.0], [1000.0, 0.0], [0.0, 1.0], [1000.0, 0.0]])
    shares = variance_shares(values, torch.tensor([1.0, 10.0]))
    assert shares.tolist() == pytest.approx([250000 / 250025, 25 / 250025])
    assert variance_shares(torch.ones(3, 2), torch.ones(2)).tolist() == [0.0, 0.0]


def test_a_function_that_did_not_apply_is_left_out_of_its_variance():
    values = torch.tensor([[NAN, 1.0], [2.0, 3.0], [4.0, NAN], [NAN, NAN]])
    # Both known pairs differ by two: variance 1 over 2 rows.
    assert variance_shares(values, torch.ones(2)).tolist() == pytest.approx([0.5, 0.5])


def test_r20_rewards_that_take_back_from_each_other_are_named():
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.0, 0.9]])
    text = describe_shares(["right", "short"], values, torch.ones(2))
    assert "right 5" in text
    assert "right and short (correlation -0.99) mostly cancel" in text
    assert "normalize_then_sum" in text
    # A negative weight turns the second one around.
    assert "cancel" not in describe_shares(["right", "short"], values, torch.tensor([1.0, -1.0]))


def test_correlation_by_hand():
    """x = 0 1 2, y = 0 1 5: cov 5/3 * 3 = 5, norms sqrt(2) and sqrt(14)."""
    assert correlation(torch.tensor([0.0, 1, 2]), torch.tensor([0.0, 1, 5])) == pytest.approx(5 / math.sqrt(28))
    assert correlation(torch.tensor([10.0, 20, 30, 40]), torch.tensor([3.0, 2.0, 1.0, NAN])) == -1.0
    assert correlation(torch.ones(4), torch.arange(4.0)) is None
    assert correlation(torch.tensor([NAN, 1.0]), torch.tensor([1.0, 2.0])) is None


def run(runner, texts, watch=None):
    prompts, groups = [f"p{i // 2}" for i in range(len(texts))], torch.arange(len(texts)) // 2
    table = runner(prompts=prompts, completions=texts, completion_ids=[[1]] * len(texts))
    table = runner.finish(table, groups)
    if watch is not None:
        watch.report(table, Advantages(table.values[:, 0], table.values[:, 0]), groups, None)
    return table


def test_r19_the_share_report_comes_at_generations_1_10_and_100(caplog):
    caplog.set_level(logging.INFO)
    runner = RewardRunner([lambda completions, **_: [len(c) for c in completions], lambda **_: [0.0, 1.0]])
    watch = watch_of(runner)
    for _ in range(100):
        table = run(runner, ["a", "bbb"], watch)
    said = [r.getMessage() for r in caplog.records if "variance share of each reward function" in r.getMessage()]
    assert [m.split("generation ")[1].split(":")[0] for m in said] == ["1", "10", "100"]
    share = table.metrics["rewards/<lambda>/variance_share"]
    assert (float(share.value) / float(share.weight), share.weight) == (pytest.approx(0.8), 2)
    assert "rewards/<lambda>_1/variance_share" in table.metrics


def test_r31_the_table_of_weights_is_shown_at_the_start(caplog):
    caplog.set_level(logging.INFO)

    def right(completions, answer, **_):
        return [0.0]

    def short(completions):
        return [0.0]

    runner = RewardRunner([right, short, lambda **_: [0.0]], [1.0, -0.5, 2.0], transforms=["none", "log1p", None])
    runner.start("cpu")
    shown = [record.getMessage() for record in caplog.records]
    assert shown == [
        "reward right: weight 1, transform none, reads answer",
        "reward short: weight -0.5, transform log1p, reads no column",
        "reward <lambda>: weight 2, transform none, reads any",
    ]


# The same rows twice --------------------------------------------------------------------------------------------------


def test_r26_a_reward_that_changes_its_mind_is_told(caplog):
    state = iter(range(100))
    runner = RewardRunner(
        [lambda completions, **_: [next(state) for _ in completions], lambda **_: [1.0] * 4], score_twice=True
    )
    values = run(runner, ["a", "b", "c", "d"]).values[:, 0].tolist()
    assert values == [0.0, 1.0, 2.0, 3.0]  # What is trained is the first answer.
    assert "<lambda> returned 0 and then 4 for the same completion (4 of 4 rows differ)" in caplog.text
    assert "<lambda>_1 returned" not in caplog.text
    caplog.clear()
    run(runner, ["a", "b", "c", "d"])
    assert "the same completion" not in caplog.text  # The first batch only.


def test_scoring_twice_is_off_by_default_and_never_ends_a_run(caplog):
    calls = []

    def counts(completions, **_):
        calls.append(len(completions))
        if len(completions) < 6:
            raise ValueError("I want six")
        return [0.0] * 6

    run(RewardRunner(counts), list("abcdef"))
    assert calls == [6]
    run(RewardRunner(counts, score_twice=True), list("abcdef"))
    assert calls == [6, 6, 4]
    assert "could not be computed a second time" in caplog.text


# Environments ---------------------------------------------------------------------------------------------------------


def test_rewards_of_environments_have_weight_one_and_may_be_the_only_ones():
    def game(environments, **_):
        return [e if isinstance(e, float) else None for e in environments]

    runner = RewardRunner(lambda **_: [1.0, 2.0, 3.0], [0.5], of_environments=[game])
    assert (runner.names, runner.weights.tolist()) == (["<lambda>", "game"], [0.5, 1.0])
    three = {"prompts": ["p"] * 3, "completions": ["a"] * 3, "completion_ids": [[1]] * 3}
    table = runner(**three, environments=[7.0, object(), 2.0])
    assert table.values[:, 1].tolist()[::2] == [7.0, 2.0]
    assert table.values[:, 1].isnan().tolist() == [False, True, False]
    assert RewardRunner(None, of_environments=[game]).names == ["game"]
    with raises(ConfigError, "reward_funcs"):
        RewardRunner(None)
