"""Reward transforms against numbers worked out by hand."""

import json
import math

import pytest
import torch

from posttrain.errors import ConfigError
from posttrain.rewards.runner import TRANSFORMS, RewardRunner, parse_transform

ONE_GROUP = torch.zeros(4, dtype=torch.long)
GAME = torch.tensor([4.0, 8.0, 16.0, 2048.0])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("clip:5:20", [5.0, 8.0, 16.0, 20.0]),
        ("log1p", [math.log(5), math.log(9), math.log(17), math.log(2049)]),
        ("tanh:8", [math.tanh(0.5), math.tanh(1.0), math.tanh(2.0), 1.0]),
        ("rank", [0.0, 1 / 3, 2 / 3, 1.0]),
    ],
)
def test_r18_a_transform_of_game_scores(spec, expected):
    assert parse_transform(spec)(GAME, ONE_GROUP).tolist() == pytest.approx(expected)


def test_rank_makes_the_outlier_one_step_and_splits_ties():
    ranks = parse_transform("rank")(torch.tensor([1.0, 1.0, 5.0, 9.0, -2.0]), torch.tensor([0, 0, 0, 1, 1]))
    # Group 0: both ones tie with each other (half of one of two others), 5 beats both. Group 1: 9 beats -2.
    assert ranks.tolist() == pytest.approx([0.25, 0.25, 1.0, 1.0, 0.0])


def test_log1p_keeps_the_sign():
    assert parse_transform("log1p")(torch.tensor([-9.0]), ONE_GROUP[:1]).item() == pytest.approx(-math.log(10))


def test_zscore_has_mean_zero_and_unit_spread():
    scores = parse_transform("zscore")(GAME, ONE_GROUP)
    assert scores.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert scores.std().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("spec", ["clip:0:1", "log1p", "rank", "tanh:2", "zscore", "running"])
def test_every_transform_keeps_nan_and_ignores_it(spec):
    assert {s.split(":")[0] for s in ("none", "clip", "log1p", "rank", "tanh", "zscore", "running")} == set(TRANSFORMS)
    rewards = torch.tensor([0.5, math.nan, 0.25])
    result = parse_transform(spec)(rewards, torch.zeros(3))
    alone = parse_transform(spec)(rewards[[0, 2]], torch.zeros(2))
    assert result.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(result[[0, 2]], alone)


def test_running_divides_by_the_spread_of_all_rewards_so_far():
    """Of 10, 30 | 50, 70: the population standard deviations are 10 and, of all four, sqrt(500)."""
    scale = parse_transform("running")
    for batch, std in ((torch.tensor([10.0, 30.0]), 10.0), (torch.tensor([50.0, math.nan, 70.0]), math.sqrt(500))):
        scale = scale.add(batch)
        assert scale(torch.tensor([-20.0]), ONE_GROUP[:1]).item() == pytest.approx(-20 / std)
    runners = [RewardRunner([lambda **_: [], lambda **_: []], transforms=["running", "rank"]) for _ in range(2)]
    runners[0].transforms[0] = scale
    runners[1].load_transforms(json.loads(json.dumps(runners[0].transforms_state())))
    again = runners[1].transforms[0].add(torch.tensor([90.0]))
    assert again(torch.tensor([1.0]), ONE_GROUP[:1]).item() == pytest.approx(1 / math.sqrt(800))


def test_running_leaves_rewards_that_never_differ_as_they_are():
    scale = parse_transform("running").add(torch.full((4,), 0.1))
    assert scale(torch.tensor([0.1, 0.3]), ONE_GROUP[:2]).tolist() == pytest.approx([0.1, 0.3])


def test_none_is_no_transform():
    assert parse_transform("none") is None
    assert parse_transform(None) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("clipp:0:1", "did you mean 'clip'"),
        ("clip:1", "must have the form 'clip:a:b'"),
        ("clip:a:b", "with 2 finite numbers"),
        ("clip:2:1", "needs a < b"),
        ("tanh:0", "needs s > 0"),
        ("rank:3", "must have the form 'rank'"),
        ("tanh:inf", "with 1 finite numbers"),
    ],
)
def test_a_wrong_transform_says_how_to_write_it(spec, message):
    with pytest.raises(ConfigError, match=message):
        parse_transform(spec)
