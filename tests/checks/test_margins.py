"""Margins on second sight and a reward model's opinion: flipped labels make a second hill, sound ones do not."""

from __future__ import annotations

import random
import statistics

import pytest

from posttrain.checks.pairs import SecondSight, check_agreement, check_second_sight


def hills(count, flipped, noise, seed=0):
    """Margins around +1, a share of them around -1."""
    rng = random.Random(seed)
    return [(-1 if rng.random() < flipped else 1) + rng.gauss(0, noise) for _ in range(count)]


@pytest.mark.parametrize("flipped", [0.05, 0.1, 0.2, 0.4])
def test_a_second_hill_is_told_with_the_share_of_labels_that_look_flipped(flipped):
    margins = hills(1000, flipped, 0.3)
    found = check_second_sight(margins)
    assert found.code == "PT-P008" and found.severity == "warning"
    low = sum(margin < -0.5 * statistics.pstdev(margins) for margin in margins)
    assert f"{low} of 1000 pairs" in found.what and abs(low / 1000 - flipped) < 0.03
    assert f"label_smoothing={low / 1000:.2f}" in found.fix and "suspect_pairs" in found.fix


@pytest.mark.parametrize("seed", range(5))
def test_one_hill_of_any_place_and_shape_says_nothing(seed):
    rng = random.Random(seed)
    for place in (0.0, 0.3, 1.0):
        assert check_second_sight([place + rng.gauss(0, 1) for _ in range(1000)]) is None
        assert check_second_sight([place + rng.uniform(-1, 1) for _ in range(1000)]) is None
        assert check_second_sight([place + rng.expovariate(1) - 1 for _ in range(1000)]) is None
    assert check_second_sight([rng.gauss(2 * (i % 2), 0.5) for i in range(1000)]) is None  # Half was learned so far.
    assert check_second_sight([0.0] * 100) is None
    assert check_second_sight(hills(49, 0.3, 0.1)) is None


def test_a_pair_is_met_again_at_a_later_step_only_and_after_a_tenth_of_the_run():
    sight = SecondSight()
    sight.see(0, [0, 1], [0.1, -0.1], progress=0.0)
    sight.see(0, [0], [0.5], progress=0.0)  # The same step once more, after memory ran out.
    assert sight.margins == {}
    sight.see(3, [0, 2], [0.7, 0.2], progress=0.05)
    assert sight.margins == {}
    sight.see(9, [0, 1, 2], [1.0, -1.0, 1.0], progress=0.2)
    assert sight.margins == {0: 1.0, 1: -1.0, 2: 1.0} and sight.suspects() == [1]
    sight.see(20, [1], [2.0], progress=0.5)
    assert sight.suspects() == [] and not sight.due()


def test_margins_are_looked_at_again_when_a_tenth_more_came():
    sight = SecondSight()
    for step in (0, 50):
        sight.see(step, range(60), [1.0] * 60, progress=0.5)
    assert sight.due() and not sight.due()
    for step in (1, 51):
        sight.see(step, range(100, 106), [1.0] * 6, progress=0.5)
    assert sight.due()


@pytest.mark.parametrize(("agree", "severity", "said"), [
    (80, "info", "agrees with the labels"), (52, "warning", "noisy"), (46, "warning", "noisy"), (20, "warning", "inverted"),
])  # fmt: skip
def test_agreement_of_a_reward_model_is_judged_by_that_of_people(agree, severity, said):
    found = check_agreement({i: (1.0, 0.0) if i < agree else (0.0, 1.0) for i in range(100)}, "judge")
    assert (found.code, found.severity) == ("PT-D036", severity) and said in found.why
    assert f"judge prefers the chosen answer in {agree} of 100 pairs ({agree} %)" in found.what
    assert check_agreement({}, "judge") is None
