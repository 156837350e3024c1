"""Every finding of a log that goes wrong, and none of one that does not."""

import math

import pytest

from posttrain.checks.rewards import check_no_signal, check_reward_values, histogram
from posttrain.checks.rules import RULES, check_log, window

HEALTHY = {
    "loss": 0.0,
    "grad_norm": 0.4,
    "reward": 0.5,
    "reward_std": 0.3,
    "frac_reward_zero_std": 0.2,
    "kl": 0.01,
    "entropy": 0.8,
    "ratio/max": 1.4,
    "clip_ratio/region_mean": 0.02,
    "completions/mean_length": 50.0,
    "completions/max_length": 90.0,
    "completions/clipped_ratio": 0.1,
    "completions/duplicate_ratio": 0.0,
    "rewards/right/mean": 0.4,
    "rewards/right/std": 0.5,
    "rewards/right/applicable": 1.0,
    "rewards/right/seconds": 0.1,
    "rewards/right/variance_share": 0.7,
    "rewards/form/mean": 0.1,
    "rewards/form/std": 0.3,
    "rewards/form/applicable": 1.0,
    "rewards/form/seconds": 0.1,
    "rewards/form/variance_share": 0.3,
    "rollouts/seconds": 1.0,
    "step_time": 4.0,
}


def log(count, every=1, **changes):
    """A log of ``count`` rows; a change is a number, or a function of the row's index. ``__`` stands for ``/``."""
    rows = []
    for i in range(count):
        row = HEALTHY | {"step": (i + 1) * every, "reward": 0.5 + 0.002 * i}
        for key, value in changes.items():
            row[key.replace("__", "/")] = value(i) if callable(value) else value
        rows.append({k: v for k, v in row.items() if v is not None})
        rows.append({"eval_reward": 0.0, "step": (i + 1) * every})
    return rows[:-1]


def codes(rows, **kwargs):
    return [finding.code for finding in check_log(rows, **kwargs)]


def test_a_healthy_log_says_nothing():
    for count, every in ((1, 1), (10, 1), (120, 1), (12, 10), (3, 100)):
        rows = log(count, every)
        assert all(codes(rows[: 2 * i + 1]) == [] for i in range(count))


BROKEN = [
    ("PT-R002", 10, {"frac_reward_zero_std": 0.9, "reward": 0.0}),
    ("PT-R003", 100, {"completions__mean_length": lambda i: 50 + i, "reward": 0.5}),
    ("PT-R004", 50, {"kl": lambda i: 0.001 * 1.2**i}),
    ("PT-R007", 20, {"entropy": lambda i: 0.8 if i < 10 else 0.02}),
    ("PT-R008", 10, {"completions__clipped_ratio": 0.6}),
    ("PT-R008", 1, {"completions__clipped_ratio": 0.95}),
    ("PT-R009", 1, {"completions__duplicate_ratio": 0.9}),
    ("PT-R012", 20, {"grad_norm": 0.0}),
    ("PT-R005", 1, {"ratio__max": 11.0}),
    ("PT-R006", 10, {"clip_ratio__region_mean": 0.4}),
    ("PT-R006", 10, {"cispo_clip_ratio": 0.4}),
    ("PT-R014", 10, {"rewards__form__applicable": 0.0}),
    ("PT-R033", 20, {"rewards__form__mean": 0.0, "rewards__form__std": 0.0}),
    ("PT-R033", 20, {"rewards__form__mean": 1.0, "rewards__form__std": 0.0}),
    ("PT-R016", 1, {"rewards__form__nan": 3.0}),
    ("PT-R017", 10, {"rewards__right__seconds": 2.0}),
]


@pytest.mark.parametrize(("code", "steps", "changes"), BROKEN, ids=[f"{c}-{n}" for c, n, _ in BROKEN])
def test_each_fault_is_found_alone_and_not_before_its_time(code, steps, changes):
    assert codes(log(steps, **changes)) == [code]
    if steps > 1:
        assert codes(log(steps - 1, **changes)) == []


def test_a_reward_function_that_never_pays_is_a_warning_and_one_at_its_maximum_is_not():
    silent = {"rewards__form__mean": 0.0, "rewards__form__std": 0.0}
    (never,) = check_log(log(20, **silent))
    assert (never.severity, never.where) == ("warning", "rewards/form/std")
    assert never.what == "form was never above 0: its reward was 0 for every completion of the last 20 steps."
    (solved,) = check_log(log(20, **silent | {"rewards__form__mean": 1.0}))
    assert (solved.severity, solved.what.split(":")[0]) == ("info", "form is constant")
    # One value per generation, or no function that varies, are other problems.
    assert codes(log(20, **silent | {"rewards__form__mean": lambda i: float(i % 2)})) == []
    assert codes(log(20, **silent, rewards__right__std=0.0)) == []


def test_rows_that_speak_of_ten_steps_count_ten():
    assert codes(log(1, 10, completions__clipped_ratio=0.6)) == ["PT-R008"]
    assert codes(log(2, 10, grad_norm=0.0)) == ["PT-R012"]
    assert window(log(3, 10), "kl", 25) == [0.01] * 3
    assert window(log(3, 10), "kl", 31) is None
    assert window(log(3, 10, kl=lambda i: None if i == 1 else 1.0), "kl", 20) is None


def test_r25_a_length_that_grows_with_the_reward_is_no_fault():
    growing = {"completions__mean_length": lambda i: 50 + i}
    assert codes(log(100, **growing, reward=lambda i: 0.1 + 0.005 * i)) == []
    assert codes(log(100, completions__mean_length=lambda i: 50 + 0.2 * i, reward=0.5)) == []


def test_r27_the_time_of_a_reward_counts_by_generation():
    slow = log(10, rewards__right__seconds=2.0)
    assert codes(slow, generations_per_step=0.25) == []  # Two of sixteen seconds.
    assert codes(log(10, rewards__right__seconds=0.5), generations_per_step=4.0) == ["PT-R017"]


def test_findings_say_what_to_do():
    (found,) = check_log(log(10, frac_reward_zero_std=0.9))
    assert found.what == "90 % of the groups of the last 10 steps have equal rewards."
    assert "temperature" in found.fix


# One generation -------------------------------------------------------------------------------------------------------

NAN = math.nan


def test_r18_an_outlier_is_named_with_its_size():
    """Row 4 of the table of advantages: 4, 8, 16 and 2048 (median 12, so 170 times)."""
    (found,) = check_reward_values({"game": [4.0, 8.0, 16.0, 2048.0], "form": [0.0, 1.0, 1.0, NAN]}, scaled=True)
    assert (found.code, found.where) == ("PT-R019", "rewards/game")
    assert found.what == "game is 2048 for one completion, and about 12 for the other completions."


def test_rare_successes_are_no_outliers():
    assert list(check_reward_values({"right": [0.0] * 63 + [1.0], "none": [NAN] * 4}, scaled=True)) == []


def test_large_rewards_matter_only_where_nothing_divides_them():
    column = {"points": [300.0, 320.0, 280.0, 350.0]}
    assert list(check_reward_values(column, scaled=True)) == []
    assert [f.code for f in check_reward_values(column, scaled=False)] == ["PT-R020"]


def test_no_signal_for_twenty_generations_shows_the_histogram():
    assert check_no_signal(19, [0.0] * 76) is None
    found = check_no_signal(20, [0.0] * 76 + [1.0] * 4)
    assert found.severity == "warning"
    assert "0: 76, 1: 4" in found.what
    assert check_no_signal(1, [NAN] * 4).code == "PT-R022"


def test_a_histogram_of_many_values_has_ranges_that_hold_all_of_them():
    text = histogram([i / 10 for i in range(41)] + [NAN])
    assert text.startswith("0 to 0.5: 5, 0.5 to 1: 5")
    assert sum(int(part.rsplit(" ", 1)[1]) for part in text.split(", ")) == 41
    assert histogram([NAN]) == "no reward at all"


def test_a_line_of_a_long_log_costs_as_much_as_one_of_a_short_log():
    """Rules read the whole log at each line, and the page asks them at every line: 20,000 took a minute."""
    read = 0

    class Log(list):
        def __iter__(self):
            return self.counted(super().__iter__())

        def __reversed__(self):
            return self.counted(super().__reversed__())

        def counted(self, rows):
            nonlocal read
            for row in rows:
                read += 1
                yield row

    names = {name for rule in RULES for name in rule.metrics} | {"rewards/rejected", "rewards/a/nan"}
    rows = [dict.fromkeys(names, 0.5) | {"loss": 1.0, "step": step} for step in range(1, 20_001)]
    assert list(check_log(Log(rows), "R"))
    list(check_log(Log(rows), "P"))
    assert read < len(rows)
