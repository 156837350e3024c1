"""Checks of preference pairs: each is broken on purpose and must say so, and sound pairs say nothing."""

import random

import pytest

from posttrain.checks.pairs import check_pairs, reference_mismatch
from posttrain.checks.rules import check_log
from posttrain.types import Row


def pair(chosen, rejected, prompt=(1, 2)):
    return Row(list(prompt), [list(chosen), list(rejected)], [[1] * len(chosen), [1] * len(rejected)])


def sound(count=60):
    rng = random.Random(0)

    def draw():
        return [*(rng.randrange(10, 99) for _ in range(rng.randrange(2, 9))), 3]

    return [pair(draw(), draw(), (1, i)) for i in range(count)]


def codes(rows, **options):
    return [finding.code for finding in check_pairs(rows, **options)]


def test_sound_pairs_say_nothing():
    assert codes(sound(), limit=64, stops=[3]) == []


@pytest.mark.parametrize(("flip", "side"), [(False, "chosen"), (True, "rejected")])
def test_length_that_predicts_the_label_is_told(flip, side):
    rows = []
    for i in range(40):
        long, short = [10 + i, 11, 12, 13, 3], [20 + i, 3]
        rows.append(pair(short, long, (i,)) if flip else pair(long, short, (i,)))
    (finding,) = check_pairs(rows)
    assert finding.code == "PT-D022"
    assert finding.what.startswith(f"the {side} answer is the longer one in 100%")


def test_answers_cut_or_ended_on_one_side_alone_are_told():
    rows = sound(40)
    for row in rows[:6]:
        row.completions[0] = list(range(20, 28))  # Full at a limit of 10, and without its end.
    assert "PT-D023" in codes(rows, limit=10, stops=[3])
    for row in rows:
        row.completions[1] = [*row.completions[1][:-1], 9]
        row.completions[0] = [*row.completions[0][:3], 3]
    assert "PT-D024" in codes(rows, stops=[3])


def health(entries):
    rows = [{"step": step, "loss": 1.0, **entry} for step, entry in enumerate(entries, 1)]
    return sorted({finding.code for end in range(len(rows)) for finding in check_log(rows[: end + 1], "P")})


def entry(chosen, rejected, accuracy=0.9):
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": accuracy,
    }


def test_two_sinking_rewards_are_found_and_a_rising_one_is_not():
    sinking = [entry(-0.1 * i, -0.4 * i) for i in range(9)]
    assert health(sinking) == ["PT-P003"]
    assert health([entry(0.1 * i, -0.4 * i) for i in range(1, 9)]) == []


def test_saturated_backward_and_still_runs_are_told():
    assert health([entry(12.0, -3.0)] * 4) == ["PT-P004"]
    assert health([entry(0.1 * i, 0.2, accuracy=0.2) for i in range(1, 12)]) == ["PT-P005"]
    assert health([entry(0.0, 0.0, accuracy=0.0)] * 4) == ["PT-P006"]
    assert health([{}] * 5) == []


def test_a_reference_that_differs_before_the_first_update_is_told_with_the_loss():
    assert reference_mismatch(1e-5, half=False) is None
    assert reference_mismatch(1e-2, half=True) is None
    finding = reference_mismatch(0.05, half=False, loss=0.619)
    assert "0.05 nats per token" in finding.what
    assert "0.6190 instead of ln 2 = 0.6931" in finding.what
