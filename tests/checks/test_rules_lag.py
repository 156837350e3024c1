"""Rollouts of other weights: how far, how old, how many discarded."""

from __future__ import annotations

import json

import pytest
import torch

from posttrain.checks.rules import check_log
from posttrain.models.forward import sequence_logps
from posttrain.types import Row
from tests.extensions.asynchronous.helpers import sample
from tests.extensions.asynchronous.helpers import trainer as async_trainer


def log(count, **curves):
    return [{"loss": 0.0, "step": i, **{k: f(i) for k, f in curves.items()}} for i in range(1, count + 1)]


def codes(rows):
    return [finding.code for finding in check_log(rows)]


def test_a_mismatch_that_rises_is_told_with_its_value():
    rows = log(60, **{"sampling/kl": lambda i: 0.003 * i})
    (found,) = check_log(rows)
    assert found.code == "PT-R024" and found.what == (
        "the policy mismatch KL is 0.17 nats per token, rising for 50 steps (from 0.046)."
    )
    assert "learning_rate" in found.fix
    assert codes(log(60, **{"sampling/kl": lambda i: 0.02})) == []


def test_a_large_mismatch_is_told_at_once_and_the_distance_to_a_reference_is_none():
    assert codes(log(10, **{"sampling/kl": lambda i: 0.6})) == ["PT-R024"]
    assert codes(log(10, kl=lambda i: 0.6)) == []
    assert codes(log(10, kl=lambda i: 0.6, **{"sample/staleness_mean": lambda i: 1.0})) == ["PT-R024"]


def test_discarded_rollouts_are_those_of_the_window_not_of_the_run():
    def early(i):
        return float(min(i, 10) * 90)

    made = {"async/produced": lambda i: i * 100.0}
    assert codes(log(40, **made, **{"async/stale_dropped": early})) == []
    (found,) = check_log(log(40, **made, **{"async/stale_dropped": lambda i: i * 37.0}))
    assert found.code == "PT-R025" and found.what.startswith("37 % of the rollouts of the last 10 steps")
    assert "max_inflight_tasks" in found.fix and "max_staleness" in found.fix


def test_rollouts_that_are_all_as_old_as_they_may_be_are_told():
    assert codes(log(10, **{"async/at_staleness_bound": lambda i: 0.95})) == ["PT-R026"]
    assert codes(log(10, **{"async/at_staleness_bound": lambda i: 0.3})) == []


# In real runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tiny_tokenizer, tmp_path):
    """An asynchronous trainer whose worker hands over what ``make(number, version)`` gives, log-probs of the policy filled in."""

    def start(make, **options):
        def honest(number, version):
            rollout = make(number, version)
            if (
                rollout.old_log_probs[-1] == -2.0
            ):  # The helper's own: what the weights that are trained say is put there.
                start = rollout.start
                row = Row(
                    rollout.input_ids[:start], [rollout.input_ids[start:]], [[1] * (len(rollout.input_ids) - start)]
                )
                with torch.no_grad():
                    rollout.old_log_probs[start:] = sequence_logps(trainer.model, [row])[0].tolist()
            return rollout

        settings = {"max_steps": 12, "learning_rate": 1e-4, "max_staleness": 1, "max_staleness_hard": 2} | options
        trainer = async_trainer(tmp_path, tiny_tokenizer, honest, **settings)
        trainer.train()
        lines = (tmp_path / "findings.jsonl").read_text().splitlines() if (tmp_path / "findings.jsonl").exists() else []
        return {line["code"]: line for line in map(json.loads, lines)}

    return start


def alternate(number, version, **options):
    """Groups of two, one better than the other."""
    return sample(number // 2, version, advantage=1.0 if number % 2 else -1.0, **options)


def test_a_healthy_asynchronous_run_hears_nothing_of_lag(run):
    assert not {"PT-R024", "PT-R025", "PT-R026"} & set(run(alternate))


def test_an_engine_whose_log_probs_are_not_the_policys_is_told_while_it_trains(run):
    """Every token was sampled with e^-9 as the engine says; the policy says otherwise."""
    found = run(lambda number, version: alternate(number, version, logp=-9.0))["PT-R024"]
    assert found["step"] == 10 and "nats per token over 10 steps" in found["what"] and "temperature" in found["fix"]


def test_rollouts_that_arrive_too_old_are_told_by_their_share(run):
    found = run(lambda number, version: alternate(number, version - 3 * (number // 4 % 2)))["PT-R025"]
    assert "of the rollouts of the last 10 steps" in found["what"] and "max_inflight_tasks" in found["fix"]
    assert float(found["what"].split(" %")[0]) > 30


def test_rollouts_that_are_all_as_old_as_they_may_be_are_told_while_training(run):
    found = run(lambda number, version: alternate(number, version - 2))["PT-R026"]
    assert "100 % of the rollouts" in found["what"] and "staleness_policy" in found["fix"]
