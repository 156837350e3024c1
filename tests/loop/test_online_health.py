"""Runs that are broken on purpose say so, and a healthy one is silent."""

import json
import logging

import pytest
import torch

from posttrain import RewardError, ScriptedEngine
from tests.methods.helpers import grpo, weights
from tests.wordings import raises


def said(caplog):
    return [record.getMessage().split(":")[0] for record in caplog.records if "PT-R" in record.getMessage()]


def test_a_healthy_run_is_silent(tiny_tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    grpo(tmp_path, tiny_tokenizer, max_steps=12, learning_rate=1e-4, num_train_epochs=20).train()
    assert said(caplog) == []


@pytest.mark.parametrize("reward", [0.5, None])
def test_r15_equal_rewards_are_told_with_their_histogram_and_the_run_goes_on(reward, tiny_tokenizer, tmp_path, caplog):
    trainer = grpo(
        tmp_path, tiny_tokenizer, rewards=lambda completions, **_: [reward for _ in completions], max_steps=22,
        num_train_epochs=50,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 22
    known = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    found = [line for line in known if line["code"] == "PT-R022"]
    assert found and found[0]["severity"] == "warning"
    assert ("0.5: 160" if reward else "no reward at all") in found[0]["what"]


def test_r15_equal_rewards_end_the_run_where_the_user_says_so(tiny_tokenizer, tmp_path):
    trainer = grpo(
        tmp_path, tiny_tokenizer, rewards=lambda completions, **_: [0.5 for _ in completions], max_steps=9,
        num_train_epochs=50, stop_without_signal=5, preflight="off",
    )  # fmt: skip
    with raises(RewardError, "PT-R022", "5", "stop_without_signal=5"):
        trainer.train()
    assert trainer.state.global_step == 4


def test_one_generation_with_a_signal_starts_the_count_again(tiny_tokenizer, tmp_path):
    calls = []

    def sometimes(completions, **_):
        calls.append(0)
        return [float(i) if len(calls) % 15 == 0 else 0.0 for i, _ in enumerate(completions)]

    trainer = grpo(tmp_path, tiny_tokenizer, rewards=sometimes, max_steps=44, num_train_epochs=50, logging_steps=50)
    trainer.train()
    assert trainer.state.global_step == 44


def test_r9_copies_are_told_once_not_at_every_step(tiny_tokenizer, tmp_path, caplog):
    copies = ScriptedEngine(lambda prompt_ids, index: [5, 6, 2])
    trainer = grpo(
        tmp_path, tiny_tokenizer, engine=copies, rewards=lambda completions, **_: list(range(len(completions))),
        max_steps=8, num_train_epochs=9,
    )  # fmt: skip
    trainer.train()
    assert said(caplog).count("PT-R009") == 1
    assert all(row["completions/duplicate_ratio"] == 1.0 for row in trainer.state.log_history if "loss" in row)


def test_r7_completions_without_an_end_are_told_at_the_first_generation(tiny_tokenizer, tmp_path, caplog):
    endless = ScriptedEngine(lambda prompt_ids, index: [5 + index] * 30)
    grpo(tmp_path, tiny_tokenizer, engine=endless, max_steps=1).train()
    assert "PT-R008" in said(caplog)


def test_r25_the_length_correlation_is_that_of_all_completions(tiny_tokenizer, tmp_path):
    def by_length(completion_ids, **_):
        return [-2.0 * len(ids) for ids in completion_ids]

    trainer = grpo(tmp_path, tiny_tokenizer, rewards=by_length, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/length_corr"] == -1.0
    assert "rewards/by_length/variance_share" not in trainer.state.log_history[0]  # One function has it all.


def test_r18_r19_an_outlier_and_a_reward_that_drowns_are_told(tiny_tokenizer, tmp_path, caplog):
    def game(completions, **_):
        return [2048.0 if i == 0 else 4.0 + i % 3 for i, _ in enumerate(completions)]

    def form(completions, **_):
        return [float(i % 2) for i, _ in enumerate(completions)]

    trainer = grpo(tmp_path, tiny_tokenizer, rewards=[game, form], max_steps=10, num_train_epochs=20)
    trainer.train()
    assert {"PT-R019", "PT-R027"} <= set(said(caplog))
    assert trainer.state.log_history[0]["rewards/game/variance_share"] > 0.999


def test_r30_a_punishment_that_no_completion_reaches_is_told_at_the_start(tiny_tokenizer, tmp_path, caplog):
    from posttrain.rewards import get_soft_overlong_punishment

    grpo(tmp_path / "a", tiny_tokenizer, rewards=get_soft_overlong_punishment(8, 4))
    assert said(caplog) == []
    grpo(tmp_path / "b", tiny_tokenizer, rewards=get_soft_overlong_punishment(20, 4))
    assert said(caplog) == ["PT-R021"]
    assert "no completion gets a penalty" in caplog.text


@pytest.mark.parametrize("masked", ["truncated", "flat"])
def test_steps_whose_completions_are_all_masked_do_not_end_the_run(tiny_tokenizer, tmp_path, masked):
    """With one prompt a generation this happens by chance; twenty flat generations end a run, and not three."""
    endless = ScriptedEngine(lambda prompt_ids, index: [5 + index] * 30)
    calls = []

    def at_last(completions, **_):
        calls.append(0)
        return [float(i % 2) if len(calls) > 6 else 1.0 for i, _ in enumerate(completions)]

    settings = (
        {"engine": endless, "mask_truncated_completions": True}
        if masked == "truncated"
        else {"rewards": at_last, "mask_zero_variance_groups": True, "check_rewards": False}
    )
    trainer = grpo(tmp_path, tiny_tokenizer, max_steps=7, num_train_epochs=9, **settings)
    before = weights(trainer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    empty = [row["trained_tokens"] == 0 for row in rows]
    assert empty == [True] * 6 + [masked == "truncated"]
    assert [row["loss"] for row in rows[:6]] == [0.0] * 6
    assert torch.equal(before, weights(trainer)) == (masked == "truncated")
