"""Rollouts of other weights: how far, how old, how many discarded."""

from __future__ import annotations

from posttrain.checks.lag import check_lag


def log(count, **curves):
    return [{"loss": 0.0, "step": i, **{k: f(i) for k, f in curves.items()}} for i in range(1, count + 1)]


def codes(rows):
    return [finding.code for finding in check_lag(rows)]


def test_a_mismatch_that_rises_is_told_with_its_value():
    rows = log(60, **{"sampling/kl": lambda i: 0.003 * i})
    (found,) = check_lag(rows)
    assert found.code == "PT-R024" and found.what == (
        "policy mismatch KL 0.17 nats a token, rising for 50 steps (from 0.046)."
    )
    assert "learning_rate" in found.fix
    assert codes(log(60, **{"sampling/kl": lambda i: 0.02})) == []


def test_a_large_mismatch_is_told_at_once_and_the_distance_to_a_reference_is_none():
    assert codes(log(10, **{"sampling/kl": lambda i: 0.6})) == ["PT-R024"]
    assert codes(log(10, kl=lambda i: 0.6)) == []
    assert codes(log(10, kl=lambda i: 0.6, **{"async/staleness_mean": lambda i: 1.0})) == ["PT-R024"]


def test_discarded_rollouts_are_those_of_the_window_not_of_the_run():
    def early(i):
        return float(min(i, 10) * 90)

    made = {"async/produced": lambda i: i * 100.0}
    assert codes(log(40, **made, **{"async/stale_dropped": early})) == []
    (found,) = check_lag(log(40, **made, **{"async/stale_dropped": lambda i: i * 37.0}))
    assert found.code == "PT-R025" and found.what.startswith("37 % of the rollouts of the last 10 steps")
    assert "max_inflight_tasks" in found.fix and "max_staleness" in found.fix


def test_rollouts_that_are_all_as_old_as_they_may_be_are_told():
    assert codes(log(10, **{"async/at_staleness_bound": lambda i: 0.95})) == ["PT-R026"]
    assert codes(log(10, **{"async/at_staleness_bound": lambda i: 0.3})) == []
